"""What pyproject.toml cannot say: `config/` is shipped as `sota_grpo/presets`, beside the packages that are found."""

from setuptools import find_namespace_packages, setup

ours = find_namespace_packages(include=["sota_grpo", "sota_grpo.*"], exclude=["*.__pycache__"])
presets = [f"sota_grpo.presets.{folder}" for folder in find_namespace_packages("config")]
setup(packages=[*ours, "sota_grpo.presets", *presets])
