"""The page docs/laws.md from the results of all trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.laws.laws import ABSENT, FAILS, HOLDS, LAWS, REFUSES, UNJUDGED
from benchmarks.laws.wheels import LEFT_OUT, PACKAGES

MARKS = {HOLDS: "✓", FAILS: "✗", REFUSES: "refuses", ABSENT: "–", UNJUDGED: "?"}
UNMET = "(✗)"

HEAD = """\
# Laws of RL training, for every trainer

Every trainer computes the same few formulas: a clipped ratio, a KL, advantages of a group, means over tokens and
micro-batches. This page says which laws of these the trainers keep that install from PyPI. Each is called through its
own loss function with the guards of its own training loop, which `benchmarks/laws/adapters` names by file and line.

✓ holds, ✗ does not hold, (✗) does not hold for an input that the trainer's own loop never has, – does not apply, ?
not judged, "refuses": the trainer stops with an error instead. ✗ is no verdict on a trainer: some laws are met by few
users, and for every ✗ there is a sentence below on when it is met and what avoids it. Settings are the trainers'
defaults where a law does not say otherwise. Found an error, or a guard that was missed? Say so in an issue: the
adapter is 100 lines.

The table is written by `python -m benchmarks.laws --write`. It downloads the wheels, without their dependencies, and
runs in three minutes on a laptop's CPU. `--only TRAINER --law LAW` reproduces one cell and prints what was measured.
"""

FOOT = """\
d is log p - log p_ref of a token, A an advantage. A far token is judged by its gradient: without a bound of the ratio
it has 100 % at 30 nats, and still 84 % at 5."""


def title(name: str) -> str:
    return "this repository" if name == "ours" else PACKAGES[name].title


def page(results: Mapping[str, Mapping[str, Any]], date: str) -> str:
    judged = {name: result for name, result in results.items() if "outcomes" in result}
    lines = [
        HEAD,
        f"Of {date}.\n",
        "## The table\n",
        *table(judged),
        "",
        "## The laws\n",
        "| law | sentence |",
        "|---|---|",
    ]
    lines += [f"| `{law}` | {' '.join((check.__doc__ or '').split())} |" for law, check in LAWS.items()]
    lines += ["", FOOT]
    lines += ["", "## Versions\n", "| trainer | package | `--only` |", "|---|---|---|"]
    for name, result in results.items():
        if name != "ours":
            package = f"{PACKAGES[name].name} {result.get('version', PACKAGES[name].version)}"
            missing = f"not installed: {result['reason']}" if "reason" in result else ""
            lines.append(f"| {title(name)} | {missing or package} | `{name}` |")
    lines += [f"| {name} | left out: {reason} | |" for name, reason in LEFT_OUT.items()]
    lines += ["", "## What does not hold, and when it is met\n"]
    for name, result in judged.items():
        lines += failures(name, result)
    lines += ["## What does not apply, or is not judged\n"]
    for name, result in judged.items():
        lines += reasons(name, result)
    return "\n".join(lines).rstrip() + "\n"


def mark(verdict: str, law: str, unmet: Collection[str]) -> str:
    return UNMET if verdict == FAILS and law in unmet else MARKS[verdict]


def table(judged: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| law | " + " | ".join(map(title, judged)) + " |", "|---|" + ":-:|" * len(judged)]
    for law in LAWS:
        marks = [mark(result["outcomes"][law][0], law, result["unmet"]) for result in judged.values()]
        lines.append(f"| `{law}` | " + " | ".join(marks) + " |")
    return lines


def grouped(laws: Mapping[str, str]) -> dict[str, list[str]]:
    """Laws by their text, so that what several have in common is said once."""
    groups: dict[str, list[str]] = {}
    for law, text in laws.items():
        groups.setdefault(text, []).append(law)
    return groups


def failures(name: str, result: Mapping[str, Any]) -> list[str]:
    notes = grouped(result["notes"])
    if not notes:
        return []
    lines = [f"### {title(name)}\n"]
    for note, laws in notes.items():
        measured = "; ".join(f"`{law}`: {result['outcomes'][law][1]}" for law in laws)
        lines.append(f"- {measured}. {note}")
    laws = " ".join(law for group in notes.values() for law in group)
    return [*lines, "", f"  `python -m benchmarks.laws --only {name} --law {laws}`", ""]


def reasons(name: str, result: Mapping[str, Any]) -> list[str]:
    outcomes = result["outcomes"]
    why = grouped({law: text for law, (verdict, text) in outcomes.items() if verdict in (ABSENT, UNJUDGED, REFUSES)})
    if not why:
        return []
    return [
        f"- {title(name)}: "
        + "; ".join(f"{', '.join(f'`{law}`' for law in laws)}: {text}" for text, laws in why.items())
    ]
