"""What pytest leaves alone in a process that does not pretend: what is only for those that do."""

import torch

if torch._C._get_accelerator().type != "cuda":
    collect_ignore = ["host.py", "on_device", "shapes.py", "site", "tensor.py"]
