"""Objectives side by side as HTML without any script, so that nothing that a model wrote can become one.

The report has a section of the comparisons that are in its runs; ``sota-grpo compare --out`` writes one as a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import write_text
from sota_grpo.text import readable

_STYLE = Path(__file__).parent / "assets" / "report.css"
_FULL = 3.0  # coefficient, in root mean squares, from which a token has its full colour


@dataclass(frozen=True)
class Column:
    """A figure of each algorithm."""

    title: str
    says: str  # one sentence
    cell: Callable[[Mapping[str, Any]], str]


def figure(value: float | None, digits: int = 4) -> str:
    """A number for a person to read.

    >>> figure(None), figure(0.0), figure(1 / 3), figure(-1.0, 6)
    ('-', '0', '0.3333', '-1')
    """
    return "-" if value is None else f"{value:.{digits}g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _losses(values: Mapping[str, Any]) -> str:
    parts = [f"{figure(value)} {name.removeprefix('loss/')}" for name, value in values["losses"].items()]
    return ", ".join(parts)


#: Of the table of algorithms.
COLUMNS = (
    Column("gradient norm", "of all trained parameters, before it is clipped", lambda v: figure(v["grad_norm"], 6)),
    Column("loss", "of the optimizer step, by term", _losses),
    Column("|advantage|", "mean over the samples", lambda v: figure(v["advantage"])),
    Column("clipped", "share of the sampled tokens on which the clip acts", lambda v: _share(v["clipped"])),
    Column(
        "masked",
        "share of the tokens that have an advantage, are not clipped and have no gradient: dropped, or weighed with 0",
        lambda v: _share(v["masked"]),
    ),
    Column("no advantage", "share of the tokens whose advantage is 0", lambda v: _share(v["without_advantage"])),
    Column(
        "mean weight",
        "factor on REINFORCE's gradient, mean over tokens with an advantage: a ratio, a bounded ratio, 0 where clipped",
        lambda v: figure(v["mean_weight"]),
    ),
    Column(
        "ess",
        "(sum |c|)^2 / (n sum c^2) of the coefficients c: the share of tokens that the gradient rests on",
        lambda v: figure(v["ess"]),
    ),
)


def title(comparison: Mapping[str, Any]) -> str:
    """What was compared, in one sentence.

    >>> found = {"step": 4, "optimizer_step": 2, "optimizer_steps": 2, "samples": 8, "num_tokens": 60}
    >>> title(found | {"checkpoint": None, "ess": 0.98, "options": []})
    'Step 4, optimizer step 2 of 2: 8 samples, 60 tokens, ess of the ratios 0.98, the initial model after 1 step'
    """
    done = comparison["optimizer_step"] - 1
    weights = comparison["checkpoint"] or "the initial model"
    moved = f" after {done} step{'s' if done > 1 else ''}" if done else ""
    options = f", {' '.join(comparison['options'])}" if comparison["options"] else ""
    return readable(
        f"Step {comparison['step']}, optimizer step {comparison['optimizer_step']} of {comparison['optimizer_steps']}: "
        f"{comparison['samples']} samples, {comparison['num_tokens']} tokens, "
        f"ess of the ratios {figure(comparison['ess'], 6)}, "
        f"{weights}{moved}{options}",
        keep="",
    )


def write_comparison(comparison: Mapping[str, Any], out: Path) -> Path:
    """Write a page of one comparison, complete when it gets its name; an older one of that name is replaced.

    Args:
        comparison: by :func:`sota_grpo.assembly.compare.compared`.
        out: the file; its folder exists.

    Raises:
        UserError: it cannot be written.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file in it, {out / 'compare.html'}.")
    try:
        write_text(out, page(comparison))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another file with --out.") from error
    return out


def page(comparison: Mapping[str, Any]) -> str:
    """The page of one comparison as text."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Objectives compared</title>\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        '<header class="top"><div><h1>Objectives compared</h1>'
        f'<p class="quiet">{_text(str(comparison["run"]))}</p></div>'
        f"</header>\n<main>\n<h2>{_text(_names(comparison))}</h2>\n{_comparison(comparison)}</main>\n</body>\n</html>\n"
    )


def section(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], most: int) -> tuple[str, list[str]]:
    """What the report has between its titles of comparisons, and a sentence for each thing that had no room.

    Args:
        runs: the name of each, and its comparisons.
        most: bytes; a comparison that would take more goes without its samples, or is left out.
    """
    several = len(runs) > 1
    sections: list[str] = []
    left_out: list[str] = []
    room = most
    for run, comparisons in runs:
        for comparison in comparisons:
            name = f"{run}: " if several else ""
            name += f"step {comparison['step']}, optimizer step {comparison['optimizer_step']}: {_names(comparison)}"
            for shown, missing in (
                (comparison, ""),
                ({**comparison, "texts": []}, "Its samples are left out, for want of room."),
            ):
                folded = _folded(name, shown, missing, is_open=not sections)
                if len(folded.encode()) <= room:
                    sections.append(folded)
                    room -= len(folded.encode())
                    break
            else:
                left_out.append(readable(f"The comparison of {name} is left out to keep the page small.", keep=""))
    return "".join(sections), left_out


def _folded(name: str, comparison: Mapping[str, Any], missing: str, *, is_open: bool) -> str:
    note = f'<p class="quiet">{missing}</p>' if missing else ""
    state = " open" if is_open else ""
    shown = _comparison(comparison)
    return f'<details class="comparison"{state}><summary>{_text(name)}</summary>{shown}{note}</details>\n'


def _names(comparison: Mapping[str, Any]) -> str:
    return ", ".join(comparison["algorithms"])


def _comparison(comparison: Mapping[str, Any]) -> str:
    several = len(comparison["algorithms"]) > 1
    parts = [
        f'<p class="quiet">{_text(title(comparison))}.</p>',
        *(f"<p>{_text(note)}</p>" for note in comparison["notes"]),
        *("<h3>Gradients</h3>", _algorithms(comparison), _legend()),
        *(["<h3>Cosines between gradients</h3>", _cosines(comparison)] if several else []),
        *("<h3>Tokens</h3>", _coefficients_say(comparison), _tokens(comparison)),
        *(["<h3>Samples</h3>", *map(_sample, comparison["texts"])] if comparison["texts"] else []),
    ]
    return "\n".join(parts)


def _text(text: str, keep: str = "") -> str:
    """As it can stand between tags and in quoted attributes; its direction stays its own."""
    return escape(readable(text, keep=keep))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of cells that are HTML already; the first column has names."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows)
    table = f'<table class="figures"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide" tabindex="0">{table}</div>'


def _cell(content: str) -> str:
    return content if content.startswith("<td") else f'<td class="figure">{content}</td>'


def _algorithms(comparison: Mapping[str, Any]) -> str:
    rows = [
        [_text(name), *(_text(column.cell(v)) for column in COLUMNS)] for name, v in comparison["algorithms"].items()
    ]
    return _table(["", *(_text(column.title) for column in COLUMNS)], rows)


def _legend() -> str:
    return f'<p class="quiet">{"; ".join(f"<b>{_text(c.title)}</b>: {_text(c.says)}" for c in COLUMNS)}.</p>'


def _cosines(comparison: Mapping[str, Any]) -> str:
    rows = [
        [_text(name), *(_coloured(value, value, 1.0) for value in row.values())]
        for name, row in comparison["cosines"].items()
    ]
    return _table(["", *map(_text, comparison["cosines"])], rows)


def _coloured(value: float | None, shade: float | None, full: float, mark: str = "") -> str:
    kind = "" if not shade else " up" if shade > 0 else " down"
    share = 0 if shade is None else round(45 * min(1.0, abs(shade) / full))
    return f'<td class="figure{kind}" style="--share:{share}%">{_text(figure(value))}{mark}</td>'


def _coefficients_say(comparison: Mapping[str, Any]) -> str:
    what = "whose coefficients differ most" if len(comparison["algorithms"]) > 1 else "with the largest coefficients"
    return (
        f'<p class="quiet">Tokens {what} (by {figure(comparison["largest_difference"])} at most). '
        "A step moves the policy "
        "along the sum of the coefficients times the gradients of the tokens' log-probs: above 0 the token becomes "
        "more likely, green and underlined; below 0 less, red and overlined. Each algorithm's are in units of their "
        "root mean square; below them the advantage; * where the clip acts. The ratio is to the policy that sampled."
        "</p>"
    )


def _tokens(comparison: Mapping[str, Any]) -> str:
    rows = []
    for token in comparison["tokens"]:
        context = f"{_text(token['before'])}<mark>{_text(token['text'])}</mark>{_text(token['after'])}"
        cells = [
            _coloured(each["coefficient"], each["coefficient"], _FULL, "*" if each["clipped"] else "").replace(
                "</td>", f'<span class="help quiet">{_text(figure(each["advantage"]))}</span></td>'
            )
            for each in token["algorithms"].values()
        ]
        sample = f"group {token['group_id']}, sample {token['sample_id']}, token {token['position']}"
        rows.append(
            [f"<bdi>{context}</bdi>", _text(sample), figure(token["ratio"]), *cells, figure(token["difference"])]
        )
    if not rows:
        return "<p>No token's coefficients differ by more than rounding.</p>"
    return _table(["token", "where", "ratio", *map(_text, comparison["algorithms"]), "difference"], rows)


def _sample(text: Mapping[str, Any]) -> str:
    """One response, a line of text for each algorithm, tokens coloured by their coefficients."""
    shown, tokens = len(text["pieces"]), text["tokens"]
    span = "" if shown == tokens else f", tokens {text['start']} to {text['start'] + shown - 1} of {tokens}"
    name = f"Group {text['group_id']}, sample {text['sample_id']}, reward {figure(text['reward'])}{span}"
    lines = []
    for algorithm, values in text["coefficients"].items():
        pieces = "".join(_piece(piece, value) for piece, value in zip(text["pieces"], values))
        lines.append(f'<h5>{_text(algorithm)}</h5><div class="pieces" dir="auto">{pieces}</div>')
    return f"<h4>{_text(name)}</h4>{''.join(lines)}"


def _piece(piece: str, coefficient: float | None) -> str:
    shown = ""
    if coefficient:
        share = round(60 * min(1.0, abs(coefficient) / _FULL))
        kind = "up" if coefficient > 0 else "down"
        shown = f' class="{kind}" style="--share:{share}%" title="{figure(coefficient, 3)}"'
    return f"<bdi{shown}>{_text(piece, keep=chr(10))}</bdi>"
