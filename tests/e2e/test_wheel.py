"""The package as it is installed: what is in the wheel, and that it works where no checkout is."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, ROOT, SMALL, metrics

pytestmark = pytest.mark.slow
NOT_SHIPPED = (
    *(".git", ".venv*", "build", "dist", "outputs", "multirun", "*.egg-info", "__pycache__", ".*_cache"),
    ".hypothesis",
)


COMMANDS = ("train", "doctor", "check", "estimate", "eval", "score", "report", "replay", "export", "sweep")


def run(command: list[str], folder: Path, **kwargs: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**ENVIRONMENT, **kwargs},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout has no build folder afterwards."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    build = ["wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run([sys.executable, "-m", "pip", *build], folder / "copy")
    (path,) = folder.glob("sota_grpo-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it depends on is looked up in the environment of the tests."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-m", "pip", *install], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # paths to look in; the .pth files that lie there, and with them a checkout in editable mode, are not read
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return python


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def sources(folder: str) -> set[str]:
    actual = (path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file())
    return {name for name in actual if "__pycache__" not in name}


def test_the_wheel_holds_the_package_and_the_presets_and_nothing_else(wheel: Path) -> None:
    presets = {name.replace("config/", "sota_grpo/presets/", 1) for name in sources("config")}
    assert names(wheel) == sources("sota_grpo") | presets
    needed = ("py.typed", "assets/tiny/model.safetensors", "presets/grpo_cpu.yaml", "presets/algorithm/dapo.yaml")
    assert {f"sota_grpo/{name}" for name in needed} <= names(wheel)


def test_the_program_names_its_commands_and_python_finds_the_presets(python: Path, tmp_path: Path) -> None:
    """What each says of itself: tests/unit/test_first_words.py."""
    program = str(python.parent / "sota-grpo")
    text = run([program, "--help"], tmp_path)
    assert all(f"  {command} " in text for command in COMMANDS), text
    code = (
        "import sota_grpo, sota_grpo.run.entry as entry\n"
        "print(sota_grpo.__version__, sota_grpo.__file__, entry.CONFIG_DIR, sota_grpo.train.__name__)"
    )
    version, file, presets, name = run([str(python), "-c", code], tmp_path).split()
    assert version[0].isdigit()
    assert Path(file).is_relative_to(python.parents[1])
    assert Path(presets) == Path(file).parent / "presets"
    assert name == "train"


def test_it_trains_where_no_checkout_is(python: Path, tmp_path: Path) -> None:
    """With workers, which find the package in processes of their own."""
    options = [*SMALL, "train.total_dialog_turns=32", "engine=transformers", "eval.mode=off", "check.mode=off"]
    program = [str(python.parent / "sota-grpo"), "train", "--async"]
    output = run([*program, "--config-name", "grpo_cpu", *options], tmp_path)
    (run_dir,) = (tmp_path / "outputs").glob("*/*")
    assert len([row for row in metrics(run_dir) if "reward" in row]) == 2
    assert (run_dir / "hf" / "model.safetensors").is_file()
    assert f"Run directory: {run_dir}" in output
