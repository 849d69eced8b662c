"""The house of docs/design.md: imports point down, heavy packages stay at the edge."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sota_grpo"
#: From the lowest to the highest: a room imports from rooms before it, so no two can form a circle.
ROOMS = (
    *("stopping", "text", "errors", "plugins", "http", "files", "untrusted", "orphans", "keys", "loop"),
    *("functional", "assets", "policy", "rl"),
    *("engines", "workers", "rewards", "tasks", "config", "recording", "envs", "source", "training", "assembly"),
    *("migration", "sweeps", "report", "run", "cli"),
)
HEAVY = ("vllm", "ray", "wandb", "datasets", "plotly", "tensorboard", "optuna", "peft", "bitsandbytes")
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, *, top_level_only: bool = False) -> list[str]:
    """Full dotted names that ``path`` imports."""
    tree = tree_of(path)
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    actual = []
    for node in nodes:
        if isinstance(node, ast.Import):
            actual += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            actual += [f"{node.module}.{alias.name}" for alias in node.names]
    return actual


def test_imports_point_down() -> None:
    for path in FILES:
        if (room := room_of(path)) != "__init__":
            assert room in ROOMS, f"{room} has no place; give it one in this test and in docs/design.md"
            others = [name.split(".")[1] for name in imported(path) if name.startswith("sota_grpo.")]
            above = [other for other in others if ROOMS.index(other) > ROOMS.index(room)]
            assert not above, f"{path.relative_to(ROOT)} imports from above"


def test_heavy_packages_are_imported_inside_functions() -> None:
    for path in FILES:
        heavy = [name for name in imported(path, top_level_only=True) if name.split(".")[0] in HEAVY]
        assert not heavy, path.relative_to(ROOT)


def printed_by(code: str) -> list[str]:
    """Lines that a fresh process prints; transformers warns of no package that is not there."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "kernels-community" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_imports_no_heavy_packages() -> None:
    """TorchRL's collectors would import vLLM, and peft bitsandbytes, where those are installed; its warning is off."""
    code = (
        "import sys, sota_grpo.policy, torchrl.objectives; before = set(sys.modules)\n"
        "import sota_grpo.assembly.build, sota_grpo.run.app\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])\n"
        "import peft"
    )
    assert printed_by(code) == ["[]"]


def test_what_is_offered_graders_and_faults_of_a_config_need_nothing_heavy() -> None:
    """And the config and the mathematics, which come last, nothing that is heavier than torch."""
    light = (
        "import sota_grpo; sota_grpo.train, sota_grpo.Result, sota_grpo.UserError",
        "from sota_grpo.rewards.maths import math_equal; math_equal('2\\\\pi', '\\\\sqrt2')",
        "import sota_grpo.rl.tool_schemas",
        "from sota_grpo.tasks.reasoning_gym import task_faults; assert list(task_faults({'codeio': 1}))",
    )
    heavy = ("torch", "ray", "transformers", "datasets", "pandas", "hydra", "sympy", "reasoning_gym")
    named = "print([name for name in {!r} if name in sys.modules])\n"
    code = "import sys\n" + "".join(f"{line}\n{named.format(heavy)}" for line in light)
    code += f"import sota_grpo.config.validators, sota_grpo.functional\n{named.format(HEAVY)}"
    assert printed_by(code) == ["[]"] * (len(light) + 1)
