"""Each instruction at its boundary, by hand, as the benchmark decides it; each kwarg that cannot be used is named."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sota_grpo.rewards.ifeval import INSTRUCTIONS, answer_text, follow_lists, read_kwargs
from sota_grpo.rewards.ifeval.checks import RELATIONS, compare_number_of

LEAST, LESS = "at least", "less than"
CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {  # kwargs, what follows, what does not
    "keywords:existence": [({"keywords": ["sun", "c.t"]}, ["SUNNY cats", "cot sun"], ["sun ct", "cat"])],
    "keywords:frequency": [
        ({"keyword": " art ", "relation": LEAST, "frequency": 2}, ["art party", "ART\nart"], ["art ar t", "a"]),
        ({"keyword": "art", "relation": LESS, "frequency": 1}, ["a rt"], ["party"]),
        ({"keyword": "c++", "relation": "exactly", "frequency": 2}, ["C++ and c++"], ["c++", "c++ c++ c++"]),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["art"]}, ["party", "arts", "art_"], ["Art!", "an art."])],
    "keywords:letter_frequency": [
        ({"letter": "A", "let_relation": LEAST, "let_frequency": 2}, ["aA", "banana"], ["a", "bé"]),
        ({"letter": "#", "let_relation": LESS, "let_frequency": 1}, ["a"], ["#1"]),
    ],
    "language:response_language": [
        ({"language": "de"}, ["Das ist ein Satz, der wohl deutsch ist.", "123"], ["This sentence is an English one."])
    ],
    "length_constraints:number_sentences": [
        ({"relation": LEAST, "num_sentences": 2}, ["One. Two.", "Is it? It is!"], ["Mr. Brown is one.", "One, two"]),
        ({"relation": LESS, "num_sentences": 2}, ["One.", "3.5 is one."], ["One. Two."]),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, ["a\n***\nb", "***a***b***", "a****b"], ["a", "a***b***c", "a***\n***b"]),
        ({"num_paragraphs": 2, "divider": "* * *"}, ["a\n* * *\nb"], ["a\n***\nb"]),
    ],
    "length_constraints:number_words": [
        ({"relation": LEAST, "num_words": 3}, ["it's me", "a b_c d"], ["a b_c", "...", "हिन्दी"]),
        ({"relation": LESS, "num_words": 0}, [], ["...", "a"]),
        ({"relation": "at most", "num_words": 2}, ["a b"], ["a b c"]),
        ({"relation": "around", "num_words": 20}, ["a " * 18, "a " * 22], ["a " * 17, "a " * 23]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Yes"},
            ["No\n\nyes, so", 'No\n\n\'"YES" so', "No\n\n  Yes.No"],
            ["No\n\nyesterday", "Yes\n\nNo", "No\n\nyes\n\nNo", "No\nyes", "No\n\n\n\nyes"],
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "yes"}, [], ["yes", "yes\n\nyes"]),
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[a] [b]", "[[a] []", "x]y[z][w]"], ["[a]", "[a\n] [b]", "[[a]]", "][ ]"])
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["Bye\n\np. s. more", "a P.S.b"], ["PS: more", "p.s"]),
        ({"postscript_marker": "P.P.S"}, ["p.p.s", "P. P.\tS"], ["P.S.", "p.p .s"]),
        ({"postscript_marker": "Note:"}, ["NOTE: it"], ["note it"]),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, ["* a\n- b", "\n\n  *a\n\t-", "*\n* a\n* b"], ["** a\n* b", "a * b\n* c", "* a\n-\n-"])
    ],
    "detectable_format:constrained_response": [
        ({}, ["I think: My answer is maybe."], ["my answer is yes.", "My answer is yes"]),
        ({"options": ["red", "blue"]}, ["It is blue."], ["Blue"]),
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, ["*a* *b*", "**a** **b**", "*a**b*"], ["*a*", "* * *a*", "*a\n* b"])
    ],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Part", "num_sections": 2}, ["Part 1 a Part2 b", "Part\n10Part 3"], ["part 1 Part 2"])
    ],
    "detectable_format:json_format": [
        ({}, ['```json\n{"a": [1, NaN]}\n```', "3"], ["{'a': 1}", "Here: {}", "```python\n{}```", "[" * 100_000])
    ],
    "detectable_format:title": [
        ({}, ["<<a>>", "x <<<a>> b", "<<a\n<<b>>"], ["<<>>", "<<  >>", "<a>", "<<a\nb>>", ">>a<<", "<<>>>"])
    ],
    "combination:two_responses": [
        ({}, ["a******b", "******a******b******"], ["a", "a******a", "a******b******c", "a************b"])
    ],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Say it. "}, [" SAY IT. It"], ["I say it.", "Say  it."])],
    "startend:end_checker": [
        ({"end_phrase": " The End. "}, ["So. the end.\n", 'x THE END."'], ["The end", "The end. x"])
    ],
    "change_case:capital_word_frequency": [
        ({"capital_relation": LEAST, "capital_frequency": 2}, ["NASA and UN", "I am A."], ["NASA and Un", "N2 o"]),
        ({"capital_relation": LESS, "capital_frequency": 2}, ["It's U.S. made"], ["IT'S"]),
    ],
    "change_case:english_capital": [
        ({}, ["THE PEOPLE OF THIS TOWN WALK TO WORK."], ["The people", "DAS IST EIN SATZ, DER WOHL DEUTSCH IST", "1"])
    ],
    "change_case:english_lowercase": [
        ({}, ["the people of this town walk to work."], ["The people", "das ist ein satz, der wohl deutsch ist"])
    ],
    "punctuation:no_comma": [({}, ["a; b"], ["a, b"])],
    "startend:quotation": [({}, ['"a"', ' "a" b"\n'], ['"', '"a', "'a'", "“a”"])],
}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def followed(text: str, name: str, kwargs: dict[str, Any] | None = None) -> list[bool]:
    """Strictly and loosely."""
    return [each[0] for each in follow_lists(text, [name], [read_kwargs(name, kwargs or {})])]


@pytest.mark.parametrize(("name", "kwargs", "follow", "differ"), FLAT, ids=[name for name, *_ in FLAT])
def test_responses_on_both_sides_of_the_boundary(name: str, kwargs: dict, follow: list[str], differ: list[str]) -> None:
    actual = {text: followed(text, name, kwargs)[0] for text in (*follow, *differ)}
    assert actual == dict.fromkeys(follow, True) | dict.fromkeys(differ, False)


def test_every_instruction_has_cases_and_an_empty_response_follows_none() -> None:
    assert (CASES.keys(), len(CASES)) == (INSTRUCTIONS.keys(), 25)
    for name, kwargs, *_ in FLAT:
        for text in ("", "\n \t\n", "\u2003"):
            assert followed(text, name, kwargs) == [False, False], name


@pytest.mark.parametrize(
    ("name", "text", "is_forgiven"),
    [
        ("punctuation:no_comma", "Sure, here you are:\nno comma", True),
        ("punctuation:no_comma", "no comma\nAnything else, sir?", True),
        ("punctuation:no_comma", "Sure, yes:\nno comma\nBye, sir.", True),
        ("startend:quotation", '**"quoted"**', True),
        ("startend:quotation", 'Sure:\n\n*"quoted"*\n\nBye.', True),
        ("detectable_format:json_format", "Here:\n```json\n{}\n```", True),
        ("punctuation:no_comma", "Well, yes\nwell, yes\nno comma\nno comma", False),  # two lines before it
        ("punctuation:no_comma", "Well, yes", False),  # what is left is empty
    ],
)
def test_an_introduction_an_ending_and_asterisks_are_forgiven_loosely(name: str, text: str, is_forgiven: bool) -> None:
    assert followed(text, name) == [False, is_forgiven]


def test_what_is_followed_strictly_is_followed_loosely() -> None:
    texts = [text for _, _, follow, differ in FLAT for text in (*follow, *differ) if len(text) < 1000]
    names, kwargs = [name for name, *_ in FLAT], [read_kwargs(name, values) for name, values, *_ in FLAT]
    for _ in range(12):
        text = "\n".join(random.sample(texts, 3))
        strictly, loosely = follow_lists(text, names, kwargs)
        assert all(b for a, b in zip(strictly, loosely, strict=True) if a), text


@pytest.mark.parametrize("relation", RELATIONS)
def test_counting_no_further_than_needed_decides_the_same(relation: str) -> None:
    for threshold in range(40):
        for count in range(60):
            assert compare_number_of(iter(range(count)), relation, threshold) == RELATIONS[relation](count, threshold)
        taken = iter(range(10**9))
        compare_number_of(taken, relation, threshold)
        assert next(taken) < threshold + 10


def test_what_is_graded_of_a_response() -> None:
    graded = {"  plain \n": "  plain \n", "<answer>a": "<answer>a", "a</answer>": "a</answer>"}
    graded |= {"<think>a</think>\n\nb\n": "b", "<think>never closed": "", "a\n<think>b": "a"}
    graded |= {"x <answer>\na\n</answer> y": "a", "<answer>a</answer><answer> b </answer>": "b"}
    graded |= {"<think><answer>a</answer></think>b": "b"}
    assert {response: answer_text(response) for response in graded} == graded


def test_zero_is_a_value_and_none_nan_and_empty_are_not() -> None:
    kwargs = {"relation": "less than", "num_words": 0, "keyword": None, "frequency": float("nan"), "keywords": []}
    assert read_kwargs("length_constraints:number_words", kwargs) == {"relation": "less than", "num_words": 0}
    kwargs = {"letter": " A ", "let_relation": LEAST, "let_frequency": 3.0}
    assert read_kwargs("keywords:letter_frequency", kwargs) == kwargs | {"letter": "A"}


def test_kwargs_that_cannot_be_used_are_named() -> None:
    letters = {"letter": "ab", "let_relation": LESS, "let_frequency": 1}
    paragraph = {"num_paragraphs": 1, "nth_paragraph": 0, "first_word": "a"}
    for name, kwargs, message in (
        ("length_constraints:number_words", {"relation": "about", "num_words": 3}, "relation='about' must be one of"),
        ("length_constraints:number_words", {"relation": LEAST, "num_words": 2.5}, "must be a whole number from 0"),
        ("length_constraints:number_words", {"relation": LEAST, "num_words": True}, "must be a whole number from 0"),
        ("keywords:letter_frequency", letters, "must be one character"),
        ("keywords:existence", {"keywords": "sun"}, "keywords='sun' must be a list of texts"),
        ("language:response_language", {"language": "klingon"}, "must be the code of a language"),
        ("startend:end_checker", {"end_phrase": 3}, "end_phrase=3 must be a text"),
        ("startend:end_checker", {"end_phrase": "a", "num_words": 3}, "num_words=3 but takes end_phrase"),
        ("length_constraints:nth_paragraph_first_word", paragraph, "nth_paragraph=0 must be a whole number from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            read_kwargs(name, kwargs)
