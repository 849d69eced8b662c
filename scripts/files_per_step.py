"""How many files of the package one step passes through, from its prompts to its log, in lockstep.

``python scripts/files_per_step.py`` builds a run on questions in GSM8K's form with the embedded policy and the embedded
engine, takes one step to warm up, and lists the files whose functions the second one calls, in all threads;
``--files`` prints their names. OPTION=VALUE are options of the run. Graders' processes are not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import sota_grpo
from sota_grpo.assembly.compose import compose
from sota_grpo.run.app import Run
from sota_grpo.training.runs import open_run

PACKAGE = Path(sota_grpo.__file__).parent
OPTIONS = (
    *("engine=transformers", "device=cpu", "eval.mode=off", "check.mode=off", "env.dataset=gsm8k", "env.num_heldout=4"),
    *("env.num_envs=8", "env.repeats=4", "train.dialog_turns_per_batch=8", "train.optim_batch_size=8"),
    *("train.total_dialog_turns=16", "inference_model.max_tokens=16"),
)


class Traced(Run):
    """Notes whose functions are called from the beginning of its second step to the end of its log."""

    called: set[str]

    def _before(self, step: int) -> None:
        super()._before(step)
        if step == 1:
            self.called = set()
            threading.setprofile(self._note)
            sys.setprofile(self._note)

    def _after(self, turns: int) -> bool:
        sys.setprofile(None)
        threading.setprofile(None)
        return super()._after(turns)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            self.called.add(frame.f_code.co_filename)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the names")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        rows = [{"question": f"What is {n} + {n}?", "answer": f"It is twice {n}.\n#### {2 * n}"} for n in range(40)]
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        config = compose("grpo_cpu", [*OPTIONS, f"env.dataset_path={data}", *options.overrides])
        place = open_run(Path(folder) / "run", asdict(config), None, num_steps=2)
        with place, closing(Traced(config, place)) as run:
            run.train()
    files = sorted(str(Path(name).relative_to(PACKAGE)) for name in run.called if Path(name).is_relative_to(PACKAGE))
    print(*(files if options.files else ()), f"{len(files)} files", sep="\n")


if __name__ == "__main__":
    main()
