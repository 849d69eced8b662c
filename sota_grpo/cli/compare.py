"""``sota-grpo compare``: a stored step under several objectives side by side, before anything is trained with them.

All algorithms are given the stored responses and rewards and the weights before one optimizer step: the last of the
training step, or ``--optimizer-step K``; those before it are taken as the run took them. Of each the gradient's norm,
the cosine to every other one's, the shares of clipped and masked tokens; and the tokens that they treat most
differently. Printed, and left in the run for ``sota-grpo report``, which shows it; ``--out`` writes a page instead::

    sota-grpo compare outputs/2026-01-31/10-00-00 --step 20 algorithm=grpo,dapo,gspo train.epochs=2
    sota-grpo compare outputs/2026-01-31/10-00-00 --step 20 algorithm=run,mine.py:sapo
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser, add_trust, tell_trust, whole
from sota_grpo.errors import UserError
from sota_grpo.text import one_line

_WIDTH = 100, 16  # of text that no terminal limits, and more of it for each algorithm
_TERMINAL_TEXT = 40  # characters of a token's text with its neighbours


def add_command(commands: Any) -> None:
    """Add ``compare`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "compare", "a stored step under several objectives side by side", __doc__, run)
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="directory of the run")
    add(
        "overrides",
        metavar="OPTION=VALUE",
        nargs="*",
        help="algorithm=A,B,..: presets, FILE.py:FUNCTION, or run, the run's own; further options hold for all",
    )
    step = whole("the number of a step", least=0)
    add("--step", metavar="N", type=step, help="as in metrics.jsonl; default: the last that can be replayed")
    one = whole("the number of an optimizer step")
    add("--optimizer-step", metavar="K", type=one, help="of the step, counted from 1; default: the last")
    add("--tokens", metavar="T", type=whole("a number of tokens"), default=20, help="tokens shown; default: 20")
    add("--json", action="store_true", help="print everything as JSON")
    add("--out", metavar="FILE", help="a page of its own, and nothing in RUN")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Compare, print what came of it and write it down; 0 once it is computed.

    Raises:
        UserError: the step cannot be replayed, an algorithm cannot be computed on it, or a file cannot be written.
    """
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, algorithms_of, load_config, overrides_under
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir)
    config = load_config(run_dir, trust=options.trust_run, unused=UNUSED_WITHOUT_SAMPLES)
    tell_trust(options, config)
    algorithms, overrides = algorithms_of(options.overrides)
    for name in algorithms:  # what is wrong with the names is told before torch is imported
        load_config(run_dir, overrides_under(name, overrides), trust=True)
    out = Path(options.out) if options.out else None
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}.")
    from sota_grpo.assembly.compare import compared
    from sota_grpo.recording.comparisons import save_comparison
    from sota_grpo.report.compare import write_comparison

    comparison = compared(
        run_dir,
        options.step,
        algorithms,
        overrides,
        optimizer_step=options.optimizer_step,
        num_tokens=options.tokens,
        trust=options.trust_run,
    )
    path = save_comparison(run_dir, comparison) if out is None else write_comparison(comparison, out)
    if options.json:
        print(json.dumps(comparison, indent=1, allow_nan=False))
    else:
        show(comparison)
        later = f"; sota-grpo report {run_dir} shows it" if out is None else ""
        print(f"\n{path} ({path.stat().st_size / 1e3:.0f} kB){later}")
    return 0


def show(comparison: Mapping[str, Any]) -> None:
    """Tables on standard output, plain where it is no terminal."""
    from rich.console import Console

    from sota_grpo.recording.progress import figures
    from sota_grpo.report.compare import COLUMNS, figure, title

    # texts of models stand in the tables: nothing in them is markup
    algorithms = comparison["algorithms"]
    width = None if sys.stdout.isatty() else _WIDTH[0] + _WIDTH[1] * max(4, len(algorithms))
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    console.print(one_line(str(comparison["run"])))
    console.print(title(comparison))
    table = figures("", *(column.title for column in COLUMNS))
    for name, values in algorithms.items():
        table.add_row(one_line(name), *(column.cell(values) for column in COLUMNS))
    console.print(table)
    if len(algorithms) > 1:
        table = figures("cosine", *map(one_line, algorithms))
        for name, row in comparison["cosines"].items():
            table.add_row(one_line(name), *(figure(value, 6) for value in row.values()))
        console.print(table)
    if comparison["tokens"]:
        console.print(_tokens(comparison))
    for note in comparison["notes"]:
        console.print(one_line(note))


def _tokens(comparison: Mapping[str, Any]) -> Any:
    from sota_grpo.recording.progress import figures
    from sota_grpo.report.compare import figure

    table = figures("tokens", "sample", "at", "ratio", *map(one_line, comparison["algorithms"]), "difference")
    for token in comparison["tokens"]:
        before, text, after = (one_line(token[name]) for name in ("before", "text", "after"))
        room = max(0, _TERMINAL_TEXT - len(text)) // 2
        around = f"{before[len(before) - min(room, len(before)) :]}[{text[:_TERMINAL_TEXT]}]{after[:room]}"
        algorithms = token["algorithms"].values()
        own = [figure(one["coefficient"], 3) + ("*" if one["clipped"] else "") for one in algorithms]
        sample = f"{token['group_id']}.{token['sample_id']}"
        table.add_row(
            around, sample, str(token["position"]), figure(token["ratio"], 4), *own, figure(token["difference"], 3)
        )
    return table
