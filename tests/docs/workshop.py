"""Runs the commands of the documents: one desk per document, each command once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.cli import main
from tests.docs.desk import lay, write_program
from tests.docs.markdown import ROOT, Block, Command, blocks, commands
from tests.docs.rules import estimated, is_async, is_of_the_shell, is_tool, is_training, small, small_block, small_tool
from tests.forked import Done, ForkServer

_RUN = ("python grpo.py", "hydra.run.dir")
_SWEEP = ("python grpo.py --multirun optimizer.lr=1e-4,1e-5", "hydra.sweep.dir")
_DATED = "2026-01-31/10-00-00"
#: How the documents call finished runs and sweeps: the command that makes each, and where it is put.
FINISHED = {
    **{name: (*_RUN, name) for name in ("RUN", f"outputs/{_DATED}")},
    "outputs": (*_RUN, f"outputs/{_DATED}"),
    f"multirun/{_DATED}": (*_SWEEP, f"multirun/{_DATED}"),
}
_ENDED = ("train.total_dialog_turns=16", "train.checkpoint_frequency=1")
_LONG_S = 600
_NO_MEMORY = ("optimizer.lr=", "optimizer.weight_decay=", "seed=", "logging.")


class Workshop:
    """Desks, and the fork server that most commands are run in.

    Args:
        folder: new and empty.
    """

    def __init__(self, folder: Path):
        self._folder, self._desks = folder, dict[str, Path]()
        self._done: dict[Command, Done] = {}
        self._program = write_program(folder / "bin", sys.executable)
        path = f"{self._program.parent}{os.pathsep}{os.environ['PATH']}"
        caches = {"HF_HOME": str(folder / "hf"), "HF_DATASETS_CACHE": str(folder / "datasets")}
        self._environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": path}
        self._server = ForkServer(folder, self._environment)
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("datasets.config.HF_DATASETS_CACHE", caches["HF_DATASETS_CACHE"])  # for estimates

    def close(self) -> None:
        """End the fork server."""
        self._patch.undo()
        self._server.close()

    def desk(self, name: str) -> Path:
        """The working directory of that name; made when first requested."""
        if name not in self._desks:
            self._desks[name] = self._folder / "desks" / name
            self._desks[name].mkdir(parents=True)
            lay(self._desks[name])
        return self._desks[name]

    def run(self, command: Command) -> Done:
        """Run a command at the desk of its document, after those above it whose files it may need."""
        for before in _foundations(command.block.document):
            if before.line < command.line:
                self._once(before)
        return self._once(command)

    def _once(self, command: Command) -> Done:
        if command not in self._done:
            self._done[command] = self._run(command)
        return self._done[command]

    def _run(self, command: Command) -> Done:
        desk = self.desk(command.block.document.name)
        self._put_runs(desk, command.text)
        if is_of_the_shell(command):
            kwargs: dict[str, Any] = {"cwd": desk, "env": self._environment, "stdin": subprocess.DEVNULL}
            shell = ["bash", "-e", "-c", command.text]
            done = subprocess.run(shell, capture_output=True, text=True, timeout=_LONG_S, **kwargs)
            return Done(done.returncode, done.stdout, done.stderr)
        if command.words[:2] == ("sota-grpo", "estimate"):
            return _here(list(command.words[1:]), desk)
        if is_tool(command):
            arguments = [str(self._program), *small_tool(command)]
        elif command.words[0] == "sota-grpo":
            arguments = [str(self._program), "train", *(["--async"] if is_async(command) else []), *small(command)]
        else:
            arguments = [str(ROOT / command.words[1]), *small(command)]
        return self._server.run(arguments, cwd=desk, environment=command.environment, timeout_s=_LONG_S)

    def run_python(self, block: Block) -> Done:
        """Run a Python block as a script at the desk of its document; each has to be independent."""
        desk = self.desk(block.document.name)
        script = desk / f"block_{block.line}.py"
        script.write_text(small_block(block.text))
        return self._server.run([str(script)], cwd=desk)

    def estimate(self, command: Command) -> Done:
        """Whether the run would fit on the GPUs of its block, as it is written."""
        foundations = [before for before in _foundations(command.block.document) if is_of_the_shell(before)]
        for before in foundations:
            self._once(before)
        return _here(_question(command), self.desk(command.block.document.name if foundations else "estimates"))

    def _put_runs(self, desk: Path, text: str) -> None:
        """Finished runs and sweeps, of one step each, under the names that ``text`` calls them by."""
        for name in FINISHED.keys() & set(text.replace("=", " ").split()):
            line, option, place = FINISHED[name]
            made = self._folder / option
            if not made.exists():
                command = typed(line)
                arguments = [str(ROOT / "grpo.py"), *small(command), *_ENDED, f"{option}={made}"]
                self._server.run(arguments, cwd=self.desk("finished")).require(line)
            if not (desk / place).exists():
                shutil.copytree(made, desk / place)


def _here(arguments: list[str], desk: Path) -> Done:
    """Run a command that needs no process of its own."""
    code = 0
    with chdir(desk), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def _question(command: Command) -> list[str]:
    """As it is written, without options that no estimate depends on, and of a part of its data: thousands of prompts
    take seconds to tokenize, and show no more."""
    overrides = [word for word in estimated(command) if not word.startswith(_NO_MEMORY)]
    part = [] if any(word.startswith("env.max_samples=") for word in overrides) else ["env.max_samples=256"]
    gpus = [] if command.block.gpus is None else ["--gpus", command.block.gpus]
    return ["estimate", *overrides, *part, "--memory-gb", command.block.gpu_gib, *gpus]


def typed(text: str, name: str = "typed") -> Command:
    """A command that is in no document; ``name`` is that of its desk."""
    return next(commands(Block(Path(name), "bash", text + "\n", 1)))


def run_dir(command: Command) -> str:
    """The directory that the command gives its run, or nothing."""
    return next((word.partition("=")[2] for word in command.words if word.startswith("hydra.run.dir=")), "")


def without_dir(command: Command) -> tuple[Any, ...]:
    """What commands have in common whose runs differ in their directory only."""
    return (*(word for word in command.words if not word.startswith("hydra.run.dir=")), command.environment)


#: What is run for the sake of others.
MADE = [typed(line) for line, *_ in FINISHED.values()]


@cache
def _foundations(document: Path) -> list[Command]:
    """Commands whose files later ones may need: those that write data, and runs in a directory with a name."""
    if not document.is_file():
        return []
    typed = [c for block in blocks(document) if block.language == "bash" for c in commands(block)]
    named = [c for c in typed if is_training(c) and (name := run_dir(c)) and document.read_text().count(name) > 1]
    written = [c for c in typed if is_tool(c) and "--out" in c.words]
    return [c for c in typed if is_of_the_shell(c) or c in named or c in written]
