"""How many files and functions one step passes through, from its prompts to its log, synchronous or with workers.

``python scripts/files_per_step.py`` builds a run on questions in GSM8K's form with the embedded policy and the embedded
engine, takes one step to warm up, and counts what the next one calls, in the driver and its graders; ``--workers``
counts an asynchronous run on Ray instead, over two steps, with its learner and engine too. What is called of TorchRL's
collectors, replay buffers and weight sync is named. ``--files`` and ``--functions`` print names. OPTION=VALUE is an
option of the run.
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
    """Notes the functions that this process calls, of the package and TorchRL, while the file ``on`` is in ``folder``.

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
        code = frame.f_code
        file = code.co_filename
        ours = file.startswith(f"{PACKAGE}/")
        if event != "call" or not (ours or "/torchrl/" in file):
            return
        name = f"{file}:{code.co_qualname}"
        if name in self._noted or "<" in code.co_name:  # an import, a lambda or a comprehension is no named function
            return
        if time.monotonic() - self._looked > LOOKS_S:
            self._looked, self._is_on = time.monotonic(), self._on.exists()
        if self._is_on:
            self._noted.add(name)
            with self._names.open("a") as names:  # a worker may be killed at the end
                print(name, file=names)


def count(folder: Path, overrides: list[str], *, workers: bool) -> list[str]:
    """Train, and give ``file:function`` of what was called from the second step to its log, or to that of the third."""
    from sota_grpo.assembly.compose import compose
    from sota_grpo.run.app import Run
    from sota_grpo.training.runs import open_run

    class Traced(Run):
        def _before(self, step: int) -> bool:
            trains = super()._before(step)
            if step == 1:
                (folder / "on").touch()
                time.sleep(2 * LOOKS_S)
            return trains

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
    return sorted({name for names in folder.glob("*.txt") for name in names.read_text().split("\n") if name})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", action="store_true", help="an asynchronous run, with all its processes")
    parser.add_argument("--files", action="store_true", help="print the names of the files")
    parser.add_argument("--functions", action="store_true", help="print the names of the functions")
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
        names = count(folder, options.overrides, workers=options.workers)
    own = [name.removeprefix(f"{PACKAGE}/") for name in names if name.startswith(f"{PACKAGE}/")]
    files = sorted({name.partition(":")[0] for name in own})
    parts = ("/collectors/", "/replay_buffers/", "/weight_update/")
    theirs = sorted(
        {
            name.rpartition(":")[2]
            for name in names
            if any(f"/torchrl{part}" in name or f"/data{part}" in name for part in parts)
        }
    )
    shown = own if options.functions else files if options.files else ()
    print(*shown, f"{len(files)} files, {len(own)} functions", f"of TorchRL: {', '.join(theirs)}", sep="\n")


if __name__ == "__main__":
    main()
