"""``python -m sota_grpo.cli`` is ``sota-grpo``."""

from sota_grpo.cli import main

main()
