"""What the rows of a training step cost the driver and each rank: ``python -m benchmarks.rows --ranks 8``.

Rows as a source gives them, groups of 8, prompts of 50 to 150 and responses of 100 to 500 tokens. The driver plans the
step and takes each rank's rows; a rank reads its own and pads its micro-batches. Nothing is computed by a model and no
transport is timed. Medians of ``--repeat`` runs in one process, in milliseconds of processor time, which other work
beside it makes longer.

``--plot FILE`` draws the tables of docs/scale.md that begin with "samples" and "engines", and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sota_grpo import keys
from sota_grpo.functional.flops import ModelShape
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.planner import LearnerSettings, Planner, Share
from sota_grpo.rl.table import Key, RowTable
from sota_grpo.training.remote_learner import travelling


def make_rows(count: int) -> RowTable:
    rows, prompt = [], 0
    for index in range(count):
        prompt = prompt if index % 8 else int(torch.randint(50, 150, ()))
        head = torch.full((prompt,), index // 8)
        response = torch.randint(3, 100, (int(torch.randint(100, 500, ())),))
        length = prompt + len(response)
        row: dict[Key, Any] = {
            keys.FULL_TOKENS: torch.cat([head, response]),
            keys.ATTENTION_MASK: torch.ones(length, dtype=torch.bool),
            keys.ASSISTANT_MASK: torch.arange(length) >= prompt,
            keys.LOG_PROBS: torch.randn(length),
            keys.REF_LOG_PROBS: torch.randn(length),
            keys.TOKEN_VERSION: torch.zeros(length, dtype=torch.int64),
            keys.ADVANTAGE: torch.randn(1, 1),
            keys.REWARD: torch.randn(1, 1),
            keys.GROUP_ID: torch.tensor(index // 8),
            keys.SAMPLE_ID: torch.tensor(index % 8),
            keys.POLICY_VERSION: torch.zeros(1, dtype=torch.int64),
            keys.TRUNCATED: torch.tensor([False]),
        }
        rows.append(row | {keys.RESPONSE_TEXT: "text"})
    return RowTable.of(rows)


def pickled(share: Share) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(share, protocol=5, buffer_callback=buffers.append), buffers


def padded(share: Share) -> None:
    rows = share.rows.rows()
    for step in share.steps:
        for one in step:
            batch = pad_rows([rows[place] for place in one.rows], pad_token_id=0)
            weights = torch.tensor(one.weights).unsqueeze(-1)
            batch.set(keys.LOSS_WEIGHT, torch.where(batch.get(keys.ASSISTANT_MASK), weights, 0.0))


def table_of(first: str) -> dict[str, list[float]]:
    """The columns of the table of docs/scale.md whose first heading is ``first``."""
    lines = iter((Path(__file__).parents[1] / "docs" / "scale.md").read_text().splitlines())
    heading = next(line for line in lines if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), itertools.islice(lines, 1, None))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, *rows)]
    names, *values = cells
    return {name: [float(cell.replace(",", "")) for cell in column] for name, column in zip(names, zip(*values))}


def plot(path: Path) -> None:
    """The driver's cost of a step against its samples, and against the engines, before and after."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rows"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    for ax, (first, what) in zip(
        axes, (("samples", "to plan and pack a step, ms"), ("engines", "to receive its groups, s"))
    ):
        columns = table_of(first)
        against = columns.pop(first)
        for name, values in columns.items():
            style = "--" if name.startswith("step") else "o-"
            ax.loglog(against, values, style, label=name)
        ax.set_xlabel(f"{first} per step" if first == "samples" else first)
        ax.set_ylabel(what)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--plot", metavar="FILE", type=Path)
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    torch.manual_seed(0)
    batch = make_rows(args.samples)
    settings = LearnerSettings(lr=1e-6, total_steps=1, optim_batch_size=args.samples // args.steps)
    shape = ModelShape(1_310_000_000, 0, 43_008, 233_000_000)
    planner = Planner(settings, 0, args.ranks, True, True, False, shape)
    spent: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[..., Any], *options: Any) -> Any:
        began = time.process_time()
        measured = work(*options)
        spent.setdefault(what, []).append(1000 * (time.process_time() - began))
        return measured

    for _ in range(args.repeat):
        shares = timed("driver: plan and take", planner.shares, travelling(batch), 0)
        sent = timed("driver: pickle", lambda shares: [pickled(share) for share in shares], shares)
        share = timed("rank: unpickle", lambda sent: pickle.loads(sent[0], buffers=sent[1]), sent[0])
        timed("rank: rows and padding", padded, share)
    medians = {what: statistics.median(times) for what, times in spent.items()}
    for who in ("driver", "rank"):
        medians[f"{who}: all"] = sum(ms for what, ms in medians.items() if what.startswith(who))
    print("\n".join(f"{what:<24}{ms:8.1f} ms" for what, ms in medians.items()))


if __name__ == "__main__":
    main()
