"""Our checks agree on every text with those of TorchRL, which carry the benchmark's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sota_grpo.rewards.ifeval import INSTRUCTIONS, checks, follow_lists, read_kwargs
from tests.data_files import shared_data

PIECES = [
    *"[]()<>*#-_.,!?'\"`~{}:;",
    *["\n", "\n\n", "  ", "\t", "\r", "\x0b", "\u2028", "\u00a0", "\n \n", " ", " ", " ", " ", " ", " "],
    *["***", "******", "* ", "\n* ", "\n- ", "<<", ">>", "<<a>>", "[x]", "P.S.", "p. s.", "P.P.S", "p.p. s"],
    *["Section 1", "SECTION 2", "Section", "```json\n", "```", "{}", "[1]", "My answer is yes.", "“Hi.”", "…"],
    *["NASA", "USA", "U.S. ", "Dr. ", "e.g. ", "A. ", "1. ", "end.", "Bye", "cat", "Cats", "The", "the ", "is", "It's"],
    *["é", "ß", "İ", "Σ", "ς", "ſ", "漢字。", "हिन्दी", "😀", "𝐀𝐁", "..", ". . .", "!!!", "?!", " ?"],
]
COUNTS = [0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12]  # small, so that both outcomes are common

Draw = Callable[[random.Random], dict[str, Any]]


def counted(name: str, relation: str | None = None, **choices: list[Any]) -> Draw:
    def draw(rng: random.Random) -> dict[str, Any]:
        relations = {} if relation is None else {relation: rng.choice(["less than", "at least"])}
        chosen = {key: rng.choice(values) for key, values in choices.items()}
        return {name: rng.choice(COUNTS), **relations, **chosen}

    return draw


def nth_paragraph(rng: random.Random) -> dict[str, Any]:
    number = rng.choice([1, 1, 2, 3])
    first_word = rng.choice(["the", "The", "cat"])
    return {"num_paragraphs": number, "nth_paragraph": rng.randint(1, number), "first_word": first_word}


SLOW = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
WORDS = ["cat", "NASA", "the", "c.t", "is", "U.S"]
DRAWS: dict[str, Draw] = {
    "keywords:existence": lambda rng: {"keywords": rng.sample(WORDS, rng.randint(1, 2))},
    "keywords:frequency": counted("frequency", "relation", keyword=["cat", "the", "a.", " is "]),
    "keywords:forbidden_words": lambda rng: {"forbidden_words": rng.sample(WORDS, 2)},
    "keywords:letter_frequency": counted("let_frequency", "let_relation", letter=list("aAeS")),
    "language:response_language": lambda rng: {"language": rng.choice(["en", "de", "hi"])},
    "length_constraints:number_sentences": counted("num_sentences", "relation"),
    "length_constraints:number_paragraphs": counted("num_paragraphs"),
    "length_constraints:number_words": counted("num_words", "relation"),
    "length_constraints:nth_paragraph_first_word": nth_paragraph,
    "detectable_content:number_placeholders": counted("num_placeholders"),
    "detectable_content:postscript": lambda rng: {"postscript_marker": rng.choice(["P.S.", "P.P.S", "Bye"])},
    "detectable_format:number_bullet_lists": counted("num_bullets"),
    "detectable_format:number_highlighted_sections": counted("num_highlights"),
    "detectable_format:multiple_sections": counted("num_sections", section_spliter=["Section", "the", "(I)s"]),
    "combination:repeat_prompt": lambda rng: {"prompt_to_repeat": rng.choice(["The", " the", "cat"])},
    "startend:end_checker": lambda rng: {"end_phrase": rng.choice(["Bye", " cat", ".", "?"])},
    "change_case:capital_word_frequency": counted("capital_frequency", "capital_relation"),
}


def random_text(rng: random.Random) -> str:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 40)))
    shapes = [str, str, str, str.upper, str.lower, '"{}"'.format, "the cat {}******{} is".format]
    shape = rng.choice(shapes)
    return shape(text, text[::-1]) if shape is shapes[-1] else shape(text)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any], str], bool]:
    """TorchRL's outcome, its language detection seeded."""
    pytest.importorskip("immutabledict")
    import langdetect
    from torchrl.envs.llm.reward.ifeval._instructions_registry import INSTRUCTION_DICT

    monkeypatch.setattr(langdetect.DetectorFactory, "seed", 0)

    def outcome(name: str, kwargs: dict[str, Any], text: str) -> bool:
        instruction = INSTRUCTION_DICT[name](name)
        instruction.build_description(**kwargs)
        return bool(text.strip() and instruction.check_following(text))

    return outcome


def assert_equal_outcomes(theirs: Callable, names: list[str], num_texts: int) -> None:
    seed = random.randrange(1 << 30)
    rng, outcomes = random.Random(seed), Counter()
    for number in range(num_texts):
        text = random_text(rng)
        for name in names if number % 5 == 0 else [name for name in names if name not in SLOW]:
            kwargs = DRAWS.get(name, lambda rng: {})(rng)
            expected = theirs(name, kwargs, text)
            actual = follow_lists(text, [name], [read_kwargs(name, kwargs)])[0][0]
            assert actual == expected, (seed, name, kwargs, text)
            outcomes[name, actual] += 1
    assert all(outcomes[name, outcome] for name in names for outcome in (True, False)), (seed, outcomes)


def test_checks_without_sentences_equal_torchrls(theirs: Callable) -> None:
    names = [name for name, instruction in INSTRUCTIONS.items() if not instruction.splits_sentences]
    assert len(names) == 23
    assert_equal_outcomes(theirs, names, 400)


@pytest.mark.data
def test_checks_with_sentences_equal_torchrls(theirs: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [str(shared_data("nltk_data"))])
    checks._splitter.cache_clear()
    names = [name for name, instruction in INSTRUCTIONS.items() if instruction.splits_sentences]
    assert_equal_outcomes(theirs, names, 250)
    checks._splitter.cache_clear()
