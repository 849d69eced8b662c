"""How many files of the package one step passes through, from its prompts to its log, synchronous or with workers.

``python scripts/files_per_step.py`` builds a run on questions in GSM8K's form with the embedded policy and the embedded
engine, takes one step to warm up, and lists the files whose functions the next one calls, in this process;
``--workers`` counts an asynchronous run on Ray instead, over two steps, with every process of it: the driver, the
learner, the engine, the graders. ``--files`` prints the names. OPTION=VALUE are options of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType

FOLDER = "FILES_PER_STEP"  # environment variable: where every process writes what it has called
LOOKS_S = 0.01  # how often a process looks whether it is to note
PACKAGE = Path(__file__).resolve().parent.parent / "sota_grpo"
OPTIONS = (
    *("engine=transformers", "device=cpu", "eval.mode=off", "check.mode=off", "env.dataset=gsm8k", "env.num_heldout=4"),
    *("env.num_envs=8", "env.repeats=4", "train.dialog_turns_per_batch=8", "train.optim_batch_size=8"),
    *("train.total_dialog_turns=16", "inference_model.max_tokens=16"),
)
WITH_WORKERS = ("mode=async", "train.total_dialog_turns=32")


class Tracer:
    """Notes the files whose functions this process calls while the file ``on`` is in ``folder``.

    Args:
        folder: shared by all processes of the run.
    """

    def __init__(self, folder: Path):
        self._on = folder / "on"
        self._names = folder / f"{os.getpid()}.txt"
        self._noted: set[str] = set()
        self._looked, self._is_on = 0.0, False

    def install(self) -> None:
        """For this thread, and for those that begin after it."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or name in self._noted or not name.startswith(f"{PACKAGE}/"):
            return
        if frame.f_code.co_name == "<module>":  # an import
            return
        if time.monotonic() - self._looked > LOOKS_S:
            self._looked, self._is_on = time.monotonic(), self._on.exists()
        if self._is_on:
            self._noted.add(name)
            with self._names.open("a") as names:  # a worker may be killed at the end
                print(name, file=names)


def count(folder: Path, overrides: list[str], *, workers: bool) -> list[str]:
    """Train, and give the files that were called from the second step to its log, or to that of the third."""
    from sota_grpo.assembly.compose import compose
    from sota_grpo.run.app import Run
    from sota_grpo.training.runs import open_run

    class Traced(Run):
        def _before(self, step: int) -> None:
            super()._before(step)
            if step == 1:
                (folder / "on").touch()
                time.sleep(2 * LOOKS_S)

        def _after(self, steps: int) -> bool:
            if steps == (3 if workers else 2):
                (folder / "on").unlink()
                time.sleep(2 * LOOKS_S)
            return super()._after(steps)

    data = folder / "train.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is twice {n}.\n#### {2 * n}"} for n in range(40)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = [*OPTIONS, *(WITH_WORKERS if workers else ()), f"env.dataset_path={data}", *overrides]
    config = compose("grpo_cpu", options)
    place = open_run(folder / "run", asdict(config), None, num_steps=4 if workers else 2)
    with place, closing(Traced(config, place)) as run:
        run.train()
    processes = folder.glob("*.txt") if workers else [folder / f"{os.getpid()}.txt"]
    return sorted({name for names in processes for name in names.read_text().split("\n") if name})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", action="store_true", help="an asynchronous run, with all its processes")
    parser.add_argument("--files", action="store_true", help="print the names")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hook = "import os, pathlib, runpy\n"
        hook += f"names = runpy.run_path({str(Path(__file__).resolve())!r}, run_name='tracer')\n"
        hook += f"names['Tracer'](pathlib.Path(os.environ[{FOLDER!r}])).install()\n"
        (folder / "sitecustomize.py").write_text(hook)
        os.environ[FOLDER] = name
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
        Tracer(folder).install()
        files = count(folder, options.overrides, workers=options.workers)
    short = [str(Path(file).relative_to(PACKAGE)) for file in files]
    print(*(short if options.files else ()), f"{len(short)} files", sep="\n")


if __name__ == "__main__":
    main()
