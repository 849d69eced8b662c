"""Eight kinds of instructions that IFEval, and so training on ``instructions``, does not have.

They are our own, in the manner of IFBench (Pyatkin et al. 2025, arXiv:2507.02833), which is for evaluation alone.
``sota-grpo eval RUN --task benchmarks/unseen_instructions.py:UnseenInstructions --k 0`` measures how much of what a run
has learned carries over to them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from sota_grpo.rewards.ifeval import answer_text
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.ifeval import texts
from sota_grpo.tasks.procedural import ProceduralTask, is_heldout


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:'\w+)*", text.lower().replace("’", "'"))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _is_numbered(text: str, _: int) -> bool:
    lines = _lines(text)
    return len(lines) > 1 and all(re.match(rf"{number}\.(?!\d)", line) for number, line in enumerate(lines, 1))


#: Name: (sentence, range of n, check of (response, n)).
KINDS: dict[str, tuple[str, range, Callable[[str, int], bool]]] = {
    "numbers": (
        "Include exactly {n} numbers, written in digits.",
        range(2, 5),  # "1,234.5" is one number, "1,2" and "10:30" are two
        lambda text, n: len(re.findall(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", text)) == n,
    ),
    "question": (
        "End your response with a question.",
        range(1),
        lambda text, _: text.rstrip(" \n\t\"'”’)*_").endswith("?"),
    ),
    "exclamations": ("Use exactly {n} exclamation marks.", range(2, 5), lambda text, n: text.count("!") == n),
    "same_word": (
        "Begin and end your response with the same word.",
        range(1),
        lambda text, _: len(words := _words(text)) > 1 and words[0] == words[-1],
    ),
    "numbered": ("Begin every line with its number: 1., 2., and so on, on at least two lines.", range(1), _is_numbered),
    "short_words": (
        "Use no word that has more than {n} letters.",
        range(7, 10),
        lambda text, n: bool(words := _words(text)) and all(len(word.replace("'", "")) <= n for word in words),
    ),
    "brackets": (
        "Put at least {n} remarks in round brackets.",
        range(2, 5),
        lambda text, n: len(re.findall(r"\([^()]*\w[^()]*\)", text)) >= n,
    ),
    "semicolons": ("Use at least {n} semicolons.", range(2, 5), lambda text, n: text.count(";") >= n),
}


class UnseenInstructions(ProceduralTask):
    """A request of ``instructions`` and one instruction of :data:`KINDS`; the reward is 1 if it is followed.

    >>> task = UnseenInstructions()
    >>> example = Example("Write about bees. Use exactly 2 exclamation marks.", "", {"kind": "exclamations", "n": 2})
    >>> task.score("Bees! Bees!", example).success, task.score("Bees!", example).success
    (True, False)
    """

    name = "unseen_instructions"
    default_prompt = ""  # no system turn, as in training

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Return a random example; its request is one that ``instructions`` holds out, or trains on."""
        while True:
            request = (rng.choice(texts()["requests"]), rng.choice(list(texts()["topics"])))
            if is_heldout(request) == heldout:
                break
        kind = rng.choice(list(KINDS))
        sentence, counts, _ = KINDS[kind]
        count = rng.choice(counts)
        parts = [request[0].format(topic=request[1]), sentence.format(n=count)]
        return Example(" ".join(parts if rng.random() < 0.5 else parts[::-1]), "", {"kind": kind, "n": count})

    def score(self, response: str, example: Example) -> Score:
        """Return the term ``correct``: 1 if the instruction is followed, else 0."""
        success = KINDS[example.extra["kind"]][2](answer_text(response), example.extra["n"])
        return Score({"correct": float(success)}, success)

    def counts(self, score: Score, example: Example) -> dict[str, tuple[float, float]]:
        """Return ``{kind: (followed, total)}`` of all kinds; an evaluation needs a problem of each kind."""
        return {kind: (int(score.success), 1) if kind == example.extra["kind"] else (0, 0) for kind in KINDS}
