"""Procedural prompts with instructions that a program can check: a training set for IFEval that needs no data.

A prompt is a request (a form and a topic) and one to three of IFEval's 25 instructions, in words of our own. Requests
belong to one side of the split each, for every seed, so that no held-out request is trained on in other words.

Instructions that contradict each other never meet. Each *decides* some aspects of a response (how it begins, its case,
its layout, ..) and *relies* on others: an end phrase decides the end, and relies on English and on its own letters. Two
may meet where neither decides what the other decides or relies on; words are drawn without repetition.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sota_grpo.rewards.ifeval import read_instructions
from sota_grpo.rl.records import Example
from sota_grpo.tasks import instruction_texts as texts
from sota_grpo.tasks.dataset import Row, normalised, unique_examples
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.tasks.procedural import DrawnExamples, is_heldout

_WHOLE = "start end layout length case language letters markup commas"
_ASPECTS = {  # instruction: what it decides, what it relies on
    "keywords:existence": ("", "language letters"),
    "keywords:frequency": ("", "language letters"),
    "keywords:forbidden_words": ("", "language"),
    "keywords:letter_frequency": ("", "language"),  # letters too, where it asks for few
    "language:response_language": ("language", ""),
    "length_constraints:number_sentences": ("length", "language"),  # layout too, where it asks for few
    "length_constraints:number_paragraphs": ("layout", ""),
    "length_constraints:number_words": ("length", "language"),  # layout too, where it asks for few
    "length_constraints:nth_paragraph_first_word": ("layout start", "language letters"),
    "detectable_content:number_placeholders": ("", "markup"),
    "detectable_content:postscript": ("end", "language letters case"),
    "detectable_format:number_bullet_lists": ("layout", ""),
    "detectable_format:constrained_response": (_WHOLE, ""),
    "detectable_format:number_highlighted_sections": ("", "markup"),
    "detectable_format:multiple_sections": ("layout", "language letters case"),
    "detectable_format:json_format": ("start end layout length case markup", "language commas"),
    "detectable_format:title": ("", "markup"),
    "combination:two_responses": ("layout", "start end length"),
    "combination:repeat_prompt": ("start", "language letters case length commas"),
    "startend:end_checker": ("end", "language letters case"),
    "change_case:capital_word_frequency": ("case", "language"),
    "change_case:english_capital": ("case", "language"),
    "change_case:english_lowercase": ("case", "language"),
    "punctuation:no_comma": ("commas", ""),
    "startend:quotation": ("start end", ""),
}
_DECIDED_BY_FEW = {
    "keywords:letter_frequency": "letters",
    "length_constraints:number_sentences": "layout",
    "length_constraints:number_words": "layout",
}
_CHOICE, _REPEAT = "detectable_format:constrained_response", "combination:repeat_prompt"
_NUM_INSTRUCTIONS = {1: 3, 2: 2, 3: 1}  # with their weights, near to the benchmark's

# Ranges of n: what is asked for fits into a hundred words.
_AT_LEAST = {"word": (2, 4), "letter": (5, 15), "sentence": (3, 6), "words": (30, 80), "capital": (2, 5)}
_LESS_THAN = {"word": (3, 4), "letter": (3, 8), "sentence": (4, 7), "words": (40, 100), "capital": (3, 8)}

Kwargs = dict[str, Any]


class InstructionsTask(IFEvalTask):
    """Prompts of this module, graded as IFEval's are, with the same options; held out are others, or those of a file.

    >>> task = InstructionsTask.load(seed=1, num_train=8, num_heldout=8)
    >>> example = task.train[2]
    >>> sorted(example.extra)
    ['instruction_id_list', 'kwargs']
    >>> set(task.score("", example).terms) == {"instructions", "all"}
    True
    """

    name = "instructions"
    hub_name = None  # its problems are made up

    @classmethod
    def load(  # type: ignore[override]
        cls,
        *,
        seed: int = 0,
        num_train: int = 8192,
        num_heldout: int = 256,
        eval_path: str | None = None,
        **options: Any,
    ) -> InstructionsTask:
        """Draw both splits from the seed; with ``eval_path``, hold out its prompts instead and never train on them.

        Args:
            seed: of the draw; which requests are held out is the same for every seed.
            num_train: length of ``train``.
            num_heldout: length of ``heldout``; not read with ``eval_path``.
            eval_path: a local file or a name on the hub, in the format of IFEval or of RLVR-IFeval.
            options: of the class.

        Raises:
            ValueError: a split without examples.
            DatasetError: rows of ``eval_path`` that cannot be used, with their number.
        """
        task = cls(**options)
        given = [] if eval_path is None else unique_examples(task._read(eval_path))
        taken = frozenset(normalised(example.query) for example in given)
        draw = partial(_draw, taken)
        task.train = DrawnExamples(draw, seed, False, num_train)
        task.heldout = given or DrawnExamples(draw, seed, True, num_heldout)
        task._tell_of_sentences(_ASPECTS)
        return task


def draw_row(rng: random.Random, heldout: bool) -> Row:
    """A row in IFEval's format: ``prompt``, ``instruction_id_list``, and ``kwargs`` with one mapping for each.

    >>> row = draw_row(random.Random(0), heldout=False)
    >>> len(row["instruction_id_list"]) == len(row["kwargs"])
    True
    """
    order = rng.sample(list(_ASPECTS), len(_ASPECTS))
    is_question = order[0] == _CHOICE
    forms = texts.QUESTIONS if is_question else texts.REQUESTS
    while True:
        form, topic = rng.choice(forms), rng.choice(list(texts.TOPICS))
        if is_heldout((form, topic)) == heldout:
            break
    request, words = form.format(topic=topic), rng.sample(texts.TOPICS[topic], len(texts.TOPICS[topic]))
    num_instructions = rng.choices(list(_NUM_INSTRUCTIONS), list(_NUM_INSTRUCTIONS.values()))[0]
    chosen: dict[str, Kwargs] = {}
    for name in order:
        kwargs = _draw_kwargs(rng, name, words, request)
        fits = is_question or name != _CHOICE
        if fits and not any(_clash((name, kwargs), other) for other in chosen.items()):
            chosen[name] = kwargs
        if len(chosen) == num_instructions:
            break
    sentences = [_say(rng, name, kwargs) for name, kwargs in chosen.items()]
    prompt = _arrange(rng, request, sentences, request_first=_REPEAT in chosen)
    return {"prompt": prompt, "instruction_id_list": list(chosen), "kwargs": list(chosen.values())}


def _draw(taken: frozenset[str], rng: random.Random, heldout: bool) -> Example:
    while True:
        row = draw_row(rng, heldout)
        if normalised(row["prompt"]) not in taken:
            ids, kwargs = read_instructions(row)
            return Example(row["prompt"], "", {"instruction_id_list": ids, "kwargs": kwargs})


def _clash(one: tuple[str, Kwargs], other: tuple[str, Kwargs]) -> bool:
    """Whether one decides what the other decides or relies on."""
    (decided, relied), (other_decided, other_relied) = _aspects(*one), _aspects(*other)
    return bool(decided & (other_decided | other_relied) or other_decided & relied)


def _aspects(name: str, kwargs: Kwargs) -> tuple[set[str], set[str]]:
    decided, relied = (set(part.split()) for part in _ASPECTS[name])
    if name in _DECIDED_BY_FEW and "less than" in kwargs.values():
        decided.add(_DECIDED_BY_FEW[name])
    return decided, relied


def _draw_kwargs(rng: random.Random, name: str, words: list[str], request: str) -> Kwargs:
    """The kwargs of an instruction, all of them; ``words`` are the topic's that are left, and those used leave it."""

    def amount(unit: str) -> tuple[str, int]:
        relation = rng.choice(("at least", "less than"))
        return relation, rng.randint(*(_AT_LEAST if relation == "at least" else _LESS_THAN)[unit])

    def take(count: int) -> list[str]:
        return [words.pop() for _ in range(count)]

    match name.partition(":")[2]:
        case "existence":
            return {"keywords": take(rng.randint(1, 3))}
        case "frequency":
            relation, count = amount("word")
            return {"keyword": take(1)[0], "relation": relation, "frequency": count}
        case "forbidden_words":
            return {"forbidden_words": take(rng.randint(1, 2))}
        case "letter_frequency":
            relation, count = amount("letter")
            letters = texts.LETTERS_TO_USE if relation == "at least" else texts.LETTERS_TO_AVOID
            return {"letter": rng.choice(letters), "let_relation": relation, "let_frequency": count}
        case "response_language":
            return {"language": rng.choice(list(texts.LANGUAGES))}
        case "number_sentences":
            relation, count = amount("sentence")
            return {"relation": relation, "num_sentences": count}
        case "number_words":
            relation, count = amount("words")
            return {"relation": relation, "num_words": 5 * (count // 5)}
        case "capital_word_frequency":
            relation, count = amount("capital")
            return {"capital_relation": relation, "capital_frequency": count}
        case "nth_paragraph_first_word":
            count = rng.randint(2, 4)
            nth, word = rng.randint(1, count), rng.choice(texts.FIRST_WORDS)
            return {"num_paragraphs": count, "nth_paragraph": nth, "first_word": word}
        case "number_paragraphs":
            return {"num_paragraphs": rng.randint(2, 4)}
        case "number_placeholders":
            return {"num_placeholders": rng.randint(2, 4)}
        case "number_bullet_lists":
            return {"num_bullets": rng.randint(2, 5)}
        case "number_highlighted_sections":
            return {"num_highlights": rng.randint(2, 4)}
        case "multiple_sections":
            return {"section_spliter": rng.choice(texts.SECTIONS), "num_sections": rng.randint(2, 4)}
        case "postscript":
            return {"postscript_marker": rng.choice(texts.POSTSCRIPTS)}
        case "repeat_prompt":
            return {"prompt_to_repeat": request}
        case "end_checker":
            return {"end_phrase": rng.choice(texts.END_PHRASES)}
    return {}


def _say(rng: random.Random, name: str, kwargs: Mapping[str, Any]) -> str:
    """The instruction in one of its wordings."""
    shown = dict(kwargs)
    for value in kwargs.values():
        if isinstance(value, int):
            shown["n"] = _number(rng, value)
            shown["below"] = _number(rng, value - 1)
        elif isinstance(value, list):
            shown["words"] = _listed([f'"{word}"' for word in value], "and" if "keywords" in kwargs else "or")
        elif value in texts.AMOUNTS:
            shown["amount"] = rng.choice(texts.AMOUNTS[value])
    if "amount" in shown:
        shown["amount"] = shown["amount"].format(**shown)
    if "language" in kwargs:
        shown["name"] = texts.LANGUAGES[kwargs["language"]]
    if "section_spliter" in kwargs:
        shown["headings"] = "{section_spliter} 1 to {section_spliter} {num_sections}".format(**kwargs)
    if "nth_paragraph" in kwargs:
        shown["n"] = _number(rng, kwargs["num_paragraphs"])
        shown["nth"] = texts.ORDINALS[kwargs["nth_paragraph"] - 1]
    return rng.choice(texts.WORDINGS[name]).format(**shown)


def _number(rng: random.Random, value: int) -> str:
    return texts.NUMERALS[value] if value < len(texts.NUMERALS) and rng.random() < 0.5 else str(value)


def _listed(items: Sequence[str], word: str) -> str:
    """
    >>> _listed(["a", "b", "c"], "and"), _listed(["a"], "and")
    ('a, b and c', 'a')
    """
    return f" {word} ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def _arrange(rng: random.Random, request: str, sentences: Sequence[str], request_first: bool) -> str:
    """The request and what is asked of the answer: as one text, by lines, as a list, or the other way round."""
    as_text = f"{request} {' '.join(sentences)}"
    by_lines = "\n".join([request, "", *sentences])
    as_list = "\n".join([request, "", "Keep to these rules:", *(f"- {sentence}" for sentence in sentences)])
    turned_round = f"{' '.join(sentences)}\n\n{request}"
    ways = [as_text, by_lines, *([as_list] if len(sentences) > 1 else []), *([] if request_first else [turned_round])]
    return rng.choice(ways)
