"""What pytest leaves alone: modules that are only for processes that pretend."""

collect_ignore = ["host.py", "site", "tensor.py"]
