"""IFEval: prompts whose instructions a program can check (Zhou et al. 2023, arXiv:2311.07911).

``ifeval`` trains on RLVR-IFeval, ``instructions`` on generated prompts. A generated prompt is a request (a form and a
topic) and one to three of the 25 instructions, worded by templates of this package (``instructions.yaml``). Each
request belongs to one split, for every seed.

Contradictory instructions are never combined. Each instruction *decides* some aspects of a response (its start, case,
layout, ..) and *relies* on others: an end phrase decides the end, and relies on English and on its letters. Two
instructions can be combined if neither decides an aspect that the other decides or relies on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from sota_grpo.rewards.ifeval import answer_text, checks, follow_lists, read_instructions, read_prompt
from sota_grpo.rewards.ifeval.checks import INSTRUCTIONS, find_punkt
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import (
    HELDOUT_SPLITS,
    DatasetError,
    FileTask,
    Row,
    hash_ordered,
    is_file,
    normalised,
    require_not_negative,
    unique_examples,
)
from sota_grpo.tasks.procedural import DrawnExamples, is_heldout

EVAL_HUB_NAME = "google/IFEval"

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False, kw_only=True)
class IFEvalTask(FileTask):
    """Prompts with checkable instructions; by default trained on RLVR-IFeval and evaluated on IFEval.

    ``reward = instructions + all_weight * all``: ``instructions`` is the fraction of instructions that are strictly
    followed, ``all`` is 1 if all are, which is also the success. By default only the fraction counts, because it gives
    a group different rewards even if no response follows all instructions.

    The text of the last ``<answer>`` block is graded, or without one the whole response except its thinking. Each
    instruction is checked strictly and loosely (:func:`sota_grpo.rewards.ifeval.follow_lists`); ``info`` of the score
    has both lists and the four accuracies of the benchmark. Without NLTK's Punkt data, rules split sentences, with
    nearly the same result.

    Args:
        system_prompt: text of the system turn; None or an empty text is no system turn, as in the benchmark.
        all_weight: weight of ``all`` (ValueError if negative); ``instructions`` has weight 1.
    """

    name = "ifeval"
    hub_name = "allenai/RLVR-IFeval"
    has_test_split = True  # EVAL_HUB_NAME
    max_broken = 0.05

    all_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(all_weight=self.all_weight)
        self.term_weights = {"instructions": 1.0, "all": self.all_weight}

    def _sides(self, name: str, eval_path: str | None) -> tuple[list[Example], list[Example] | None]:
        """Return the training examples and the held-out ones: ``eval_path``, or IFEval for a hub dataset."""
        if name.casefold() == EVAL_HUB_NAME.casefold():
            raise DatasetError(
                f"{name} is the test set of IFEval, so training on it would make the evaluation meaningless; train on "
                f"{self.hub_name} (env.dataset_path=null) or on a file of your own."
            )
        if eval_path is None and not is_file(name):
            eval_path = EVAL_HUB_NAME
        train, heldout = super()._sides(name, eval_path)
        taken, distinct = {normalised(example.query) for example in heldout or ()}, unique_examples(train)
        shared = [example.query for example in distinct if normalised(example.query) in taken]
        if shared:
            raise DatasetError(
                f"{len(shared)} of the {len(distinct)} training prompts of {name} are also in {eval_path}, so "
                f"training on them would make the evaluation meaningless; remove them from {name}, or evaluate on "
                f"another file (env.eval_path). The first begins with {shared[0][:80]!r}."
            )
        self._warn_without_punkt({each for e in (*train, *(heldout or ())) for each in e.extra["instruction_id_list"]})
        return train, heldout

    def prepare(self) -> None:
        """Import the libraries of the checks, so that the first response's time limit does not include that."""
        checks.capital_word_count("One word. Another.", "at least", 1)
        checks.is_language("word", "en")

    def score(self, response: str, example: Example) -> Score:
        ids, kwargs = example.extra["instruction_id_list"], example.extra["kwargs"]
        strict, loose = follow_lists(answer_text(response), ids, kwargs)
        share, everything = sum(strict) / len(strict), float(all(strict))
        info = {
            "follow_instruction_list_strict": strict,
            "follow_instruction_list_loose": loose,
            "prompt_strict": everything,
            "prompt_loose": float(all(loose)),
            "instruction_strict": share,
            "instruction_loose": sum(loose) / len(loose),
        }
        return Score({"instructions": share, "all": everything}, success=all(strict), info=info)

    def counts(self, score: Score, example: Example) -> dict[str, tuple[float, float]]:
        """Return ``{name: (followed, total)}`` of the four accuracies: prompts and instructions, strict and loose."""
        num_instructions = len(example.extra["instruction_id_list"])
        lists = {way: score.info.get(f"follow_instruction_list_{way}", []) for way in ("strict", "loose")}
        # a failed grader gives no lists; then nothing counts as followed
        prompts = {f"prompt_{way}": (int(sum(followed) == num_instructions), 1) for way, followed in lists.items()}
        return prompts | {f"instruction_{way}": (sum(followed), num_instructions) for way, followed in lists.items()}

    def read_row(self, row: Row, location: str) -> Example:
        """Return the example of a row of IFEval or RLVR-IFeval; the prompt may be missing.

        The columns are those of :func:`sota_grpo.rewards.ifeval.read_instructions`; DatasetError for a malformed row.
        """
        try:
            ids, kwargs = read_instructions(row)
            return Example(read_prompt(row), "", {"instruction_id_list": ids, "kwargs": kwargs})
        except ValueError as error:
            raise DatasetError(f"{location}: {error}; mend or remove the row.") from error

    def _problem(self, row: Row, location: str) -> Example:
        example = self.read_row(row, location)
        if not example.query.strip():
            raise DatasetError(f"{location}: there is no prompt; mend or remove the row.")
        return replace(example, place=location)

    def _warn_without_punkt(self, ids: Iterable[str]) -> None:
        if any(INSTRUCTIONS[name].splits_sentences for name in ids) and find_punkt() is None:
            logger.warning(
                "NLTK's Punkt data are not installed, so rules split sentences, with the same result in over 99 of "
                "100 cases; for identical results run python -m nltk.downloader punkt_tab, or set NLTK_DATA to the "
                "folder of NLTK's data."
            )


class InstructionsTask(IFEvalTask):
    """Generated prompts with instructions, graded like :class:`IFEvalTask` and with the same options."""

    name, hub_name = "instructions", ""  # no dataset

    @classmethod
    def load(  # type: ignore[override]
        cls,
        *,
        seed: int = 0,
        num_train: int = 8192,
        num_heldout: int = 512,
        eval_path: str | None = None,
        **options: Any,
    ) -> InstructionsTask:
        """Return the task with generated splits; ``options`` are keywords of the class.

        Args:
            seed: seed of the prompts; which requests are held out does not depend on it.
            num_train, num_heldout: number of examples of the splits (:class:`~.procedural.DrawnExamples`).
            eval_path: a file or hub dataset in the format of IFEval or RLVR-IFeval (DatasetError if it cannot be used).
                Its prompts are then the held-out split, and never trained on.
        """
        task = cls(**options)
        read = [] if eval_path is None else unique_examples(task.read(eval_path, HELDOUT_SPLITS))
        examples = hash_ordered(read)
        draw = partial(_draw, frozenset(normalised(example.query) for example in examples))
        task.train = DrawnExamples([draw], seed, False, num_train)
        task.heldout = examples or DrawnExamples([draw], seed, True, num_heldout)
        task._warn_without_punkt(INSTRUCTIONS)
        return task


@cache
def texts() -> dict[str, Any]:
    """Return the contents of ``instructions.yaml``, with its lists of words as lists; cached: do not modify it."""
    import yaml

    with Path(__file__).with_name("instructions.yaml").open(encoding="utf-8") as file:
        read: dict[str, Any] = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for name in ("first_words", "sections", "postscripts", "numerals", "ordinals"):
        read[name] = read[name].split()
    return read


_SIZES = (3, 2, 1)  # weights of prompts with one, two and three instructions, as in the benchmark
_CHOICE, _REPEAT = "detectable_format:constrained_response", "combination:repeat_prompt"
# Ranges of n are chosen for responses of about a hundred words.
_RELATIONS = {  # kwargs of the relation and of n, ranges of n for "at least" and for "less than"
    "keywords:frequency": ("relation", "frequency", (2, 4), (3, 4)),
    "keywords:letter_frequency": ("let_relation", "let_frequency", (5, 15), (3, 8)),
    "length_constraints:number_sentences": ("relation", "num_sentences", (3, 6), (4, 7)),
    "length_constraints:number_words": ("relation", "num_words", (30, 80), (40, 100)),
    "change_case:capital_word_frequency": ("capital_relation", "capital_frequency", (2, 5), (3, 8)),
}
_COUNTS = {  # kwarg of n, its range
    "length_constraints:number_paragraphs": ("num_paragraphs", 2, 4),
    "detectable_content:number_placeholders": ("num_placeholders", 2, 4),
    "detectable_format:number_bullet_lists": ("num_bullets", 2, 5),
    "detectable_format:number_highlighted_sections": ("num_highlights", 2, 4),
}
Kwargs = dict[str, Any]


def _draw(taken: frozenset[str], rng: random.Random, heldout: bool) -> Example:
    """Return a random example of a split whose prompt is not ``taken``."""
    while True:
        request, chosen = _draw_instructions(rng, heldout)
        sentences = [_say(rng, name, kwargs) for name, kwargs in chosen.items()]
        prompt = _arrange(rng, request, sentences, request_first=_REPEAT in chosen)
        if normalised(prompt) not in taken:
            row = {"instruction_id_list": [*chosen], "kwargs": [*chosen.values()]}
            ids, kwargs = read_instructions(row)
            return Example(prompt, "", {"instruction_id_list": ids, "kwargs": kwargs})


def _draw_instructions(rng: random.Random, heldout: bool) -> tuple[str, dict[str, Kwargs]]:
    """Return a random request of the split and ``{instruction: kwargs}`` that can be combined."""
    words_of, names = texts(), list(texts()["instructions"])
    order = rng.sample(names, len(names))
    is_question = order[0] == _CHOICE
    forms = words_of["questions" if is_question else "requests"]
    while True:
        form, topic = rng.choice(forms), rng.choice(list(words_of["topics"]))
        if is_heldout((form, topic)) == heldout:
            break
    words = words_of["topics"][topic].split()
    request, words = form.format(topic=topic), rng.sample(words, len(words))
    num_instructions = rng.choices(range(1, 4), _SIZES)[0]
    chosen: dict[str, Kwargs] = {}
    for name in order:
        kwargs = _draw_kwargs(rng, name, words, request)
        decided, relied = _aspects(name, kwargs)
        others = [_aspects(*other) for other in chosen.items()]
        clashes = any(decided & (theirs | needed) or theirs & relied for theirs, needed in others)
        if not clashes and (is_question or name != _CHOICE):
            chosen[name] = kwargs
        if len(chosen) == num_instructions:
            break
    return request, chosen


def _aspects(name: str, kwargs: Kwargs) -> tuple[set[str], set[str]]:
    one, requires_few = texts()["instructions"][name], "less than" in kwargs.values()
    decided = {aspect.rstrip("?") for aspect in one["decides"].split() if requires_few or aspect[-1] != "?"}
    return decided, set(one["relies"].split())


def _draw_kwargs(rng: random.Random, name: str, words: list[str], request: str) -> Kwargs:
    """Return random kwargs of an instruction; the topic's words that it uses are removed from ``words``."""
    if name in _RELATIONS:
        relation_kwarg, count_kwarg, at_least, less_than = _RELATIONS[name]
        relation = rng.choice(("at least", "less than"))
        count = rng.randint(*(at_least if relation == "at least" else less_than))
        kwargs = {relation_kwarg: relation, count_kwarg: 5 * (count // 5) if count_kwarg == "num_words" else count}
        if name == "keywords:frequency":
            return {"keyword": words.pop(), **kwargs}
        if name == "keywords:letter_frequency":
            letters = texts()["letters_to_use" if relation == "at least" else "letters_to_avoid"]
            return {"letter": rng.choice(letters), **kwargs}
        return kwargs
    if name in _COUNTS:
        kwarg, *bounds = _COUNTS[name]
        return {kwarg: rng.randint(*bounds)}
    match name.partition(":")[2]:
        case "existence":
            return {"keywords": [words.pop() for _ in range(rng.randint(1, 3))]}
        case "forbidden_words":
            return {"forbidden_words": [words.pop() for _ in range(rng.randint(1, 2))]}
        case "response_language":
            return {"language": rng.choice(list(texts()["languages"]))}
        case "nth_paragraph_first_word":
            count = rng.randint(2, 4)
            nth, word = rng.randint(1, count), rng.choice(texts()["first_words"])
            return {"num_paragraphs": count, "nth_paragraph": nth, "first_word": word}
        case "multiple_sections":
            return {"section_spliter": rng.choice(texts()["sections"]), "num_sections": rng.randint(2, 4)}
        case "postscript":
            return {"postscript_marker": rng.choice(texts()["postscripts"])}
        case "repeat_prompt":
            return {"prompt_to_repeat": request}
        case "end_checker":
            return {"end_phrase": rng.choice(texts()["end_phrases"])}
    return {}


def _say(rng: random.Random, name: str, kwargs: Kwargs) -> str:
    numerals, amounts = texts()["numerals"], texts()["amounts"]

    def written(number: int) -> str:
        return numerals[number] if number < len(numerals) and rng.random() < 0.5 else str(number)

    shown = dict(kwargs)
    for value in kwargs.values():
        if isinstance(value, int):
            shown["n"] = written(value)
            shown["below"] = written(value - 1)
        elif isinstance(value, list):
            quoted, last = [f'"{word}"' for word in value], "and" if "keywords" in kwargs else "or"
            shown["words"] = f" {last} ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
        elif value in amounts:
            shown["amount"] = rng.choice(amounts[value])
    if "amount" in shown:
        shown["amount"] = shown["amount"].format(**shown)
    if "language" in kwargs:
        shown["name"] = texts()["languages"][kwargs["language"]]
    if "section_spliter" in kwargs:
        shown["headings"] = "{section_spliter} 1 to {section_spliter} {num_sections}".format(**kwargs)
    if "nth_paragraph" in kwargs:
        shown["n"] = written(kwargs["num_paragraphs"])
        shown["nth"] = texts()["ordinals"][kwargs["nth_paragraph"] - 1]
    return rng.choice(texts()["instructions"][name]["ways"]).format(**shown)


def _arrange(rng: random.Random, request: str, sentences: Sequence[str], request_first: bool) -> str:
    """Return a prompt with the request and its instructions: as a paragraph, lines, a list, or in reverse order."""
    as_text = f"{request} {' '.join(sentences)}"
    by_lines = "\n".join([request, "", *sentences])
    as_list = "\n".join([request, "", "Keep to these rules:", *(f"- {sentence}" for sentence in sentences)])
    reverse = f"{' '.join(sentences)}\n\n{request}"
    ways = [as_text, by_lines, *([as_list] if len(sentences) > 1 else []), *([] if request_first else [reverse])]
    return rng.choice(ways)
