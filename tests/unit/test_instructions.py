"""The made-up instructions can all be followed at once, are the seed's, and are none of the benchmark's."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import langdetect
import pytest

from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import Config
from sota_grpo.rewards.ifeval import INSTRUCTIONS, read_kwargs
from sota_grpo.rewards.ifeval.checks import CHOICES
from sota_grpo.rl.records import Example
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.ifeval import InstructionsTask, texts
from tests.data_files import shared_data, write_rows

SEED = random.randrange(1 << 30)
SAMPLE = 3000
WORDS = texts()
CHOSEN = {choice.casefold().rstrip(".") for choice in CHOICES}

# English that langdetect knows, in small pieces: for every letter that may be rare, some have none of it.
ENGLISH = """
We all saw the little sea and the land in the sun | It is the end and there is no other one in the road
There are other things that people like to do here | This is what we had to find out in the end
The house is at the end of the old road | In the end all of us are at home and read
""".replace("\n", "|").split("|")
LENGTH = "length_constraints:number_"
FOREIGN = {
    "de": "Das ist ein kurzer Text über das Meer und das alte Haus auf dem Hügel",
    "hi": "यह समुद्र और पुराने घर के बारे में एक छोटा लेख है",
    "ko": "이것은 바다와 언덕 위의 오래된 집에 대한 짧은 글입니다",
    "ru": "Это короткий текст о море и о старом доме на холме",
}


def drawn(num: int = SAMPLE, seed: int = SEED) -> list[Example]:
    return list(InstructionsTask.load(seed=seed, num_train=num).train)


def given(example: Example) -> dict[str, dict[str, Any]]:
    return dict(zip(example.extra["instruction_id_list"], example.extra["kwargs"], strict=True))


def few(kwargs: dict[str, Any]) -> bool:
    return "less than" in kwargs.values()


def body(asked: dict[str, dict[str, Any]]) -> list[str]:
    """Sentences with the words, letters and lengths that are required, in English or the language."""

    def least(name: str, key: str) -> int:
        kwargs = asked.get(name, {})
        return 0 if few(kwargs) else kwargs.get(key, 0)

    letter = asked.get("keywords:letter_frequency", {})
    language = asked.get("language:response_language")
    pool = [FOREIGN.get(language["language"], "7")] if language else map(str.strip, ENGLISH)  # a 7 is of any language
    pool = [one for one in pool if one and (not few(letter) or letter["letter"] not in one.lower())]
    words = [*asked.get("keywords:existence", {}).get("keywords", [])]
    words += [asked.get("keywords:frequency", {}).get("keyword")] * least("keywords:frequency", "frequency")
    words += ["".join([letter.get("letter", "")] * least("keywords:letter_frequency", "let_frequency"))]
    words += ["NASA"] * least("change_case:capital_word_frequency", "capital_frequency")
    words += ["[7]"] * least("detectable_content:number_placeholders", "num_placeholders")
    said = " ".join(filter(None, words))
    is_short = any(few(asked.get(LENGTH + of, {})) for of in ("words", "sentences"))
    sentences = [f"{pool[0]} {said}"] if is_short else [*pool, *filter(None, [said])]
    num_words, num_sentences = (least(LENGTH + of, f"num_{of}") for of in ("words", "sentences"))
    while len(" ".join(sentences).split()) < num_words or len(sentences) < num_sentences:
        sentences.append(pool[0])
    return sentences


def laid_out(asked: dict[str, dict[str, Any]], text: str) -> str:
    if kwargs := asked.get("length_constraints:number_paragraphs"):
        return "\n***\n".join([text, *["7"] * (kwargs["num_paragraphs"] - 1)])
    if kwargs := asked.get("length_constraints:nth_paragraph_first_word"):
        parts = [text, *["7"] * (kwargs["num_paragraphs"] - 1)]
        parts[kwargs["nth_paragraph"] - 1] = f"{kwargs['first_word']} {parts[kwargs['nth_paragraph'] - 1]}"
        return "\n\n".join(parts)
    if kwargs := asked.get("detectable_format:number_bullet_lists"):
        return "\n- ".join([text, *["7"] * kwargs["num_bullets"]])
    if kwargs := asked.get("detectable_format:multiple_sections"):
        return "\n".join(f"{kwargs['section_spliter']} {i + 1}\n{text}" for i in range(kwargs["num_sections"]))
    return f"{text}\n******\n{text} 7" if "combination:two_responses" in asked else text


def witness(example: Example) -> str:
    """A response that follows every instruction of the prompt."""
    options = given(example)
    if "detectable_format:constrained_response" in options:
        return "My answer is maybe."
    text = ". ".join(body(options)) + "."
    text += " *7*" * options.get("detectable_format:number_highlighted_sections", {}).get("num_highlights", 0)
    text += " <<7>>" if "detectable_format:title" in options else ""
    text = laid_out(options, text)
    if "detectable_format:json_format" in options:
        return json.dumps({"answer": text})
    if kwargs := options.get("combination:repeat_prompt"):
        text = f"{kwargs['prompt_to_repeat']}\n{text}"
    text += options.get("startend:end_checker", {}).get("end_phrase", "")
    if kwargs := options.get("detectable_content:postscript"):
        text += f"\n{kwargs['postscript_marker']} 7"
    text = text.upper() if "change_case:english_capital" in options else text
    text = text.lower() if "change_case:english_lowercase" in options else text
    return f'"{text}"' if "startend:quotation" in options else text


def test_all_25_occur_and_every_prompt_can_be_followed_to_the_letter() -> None:
    task, seen = InstructionsTask(), Counter[str]()
    for example in drawn(1000):
        score = task.score(witness(example), example)
        assert score.success, (SEED, example, witness(example), score.info)
        seen.update(example.extra["instruction_id_list"])
        assert 1 <= len(example.extra["instruction_id_list"]) <= 3
    assert set(seen) == set(INSTRUCTIONS)
    assert min(seen.values()) > 10
    langdetect.detector_factory.init_factory()
    assert {*FOREIGN} < {*WORDS["languages"]} < {*langdetect.detector_factory._factory.get_lang_list()}


def test_kwargs_are_complete_and_every_requirement_is_in_the_prompt() -> None:
    for example in drawn(600):
        for name, kwargs in given(example).items():
            assert read_kwargs(name, kwargs) == kwargs
            assert {one for one, is_needed in INSTRUCTIONS[name].kwargs.items() if is_needed} == set(kwargs)
            for word in chain.from_iterable([value] if isinstance(value, str) else value for value in strings(kwargs)):
                assert word in example.query, (SEED, example)
            for value in kwargs.values():
                if isinstance(value, int) and name != "detectable_format:multiple_sections":
                    spellings = {
                        str(value),
                        *WORDS["numerals"][value : value + 1],
                        *WORDS["ordinals"][value - 1 : value],
                    }
                    spellings |= {str(value - 1), *WORDS["numerals"][value - 1 : value]} if few(kwargs) else set()
                    assert spellings & set(re.findall(r"\w+", example.query)), (SEED, example)


def strings(kwargs: dict[str, Any]) -> Iterator[Any]:
    for name, value in kwargs.items():
        if name == "language":
            yield WORDS["languages"][value]
        elif isinstance(value, (str, list)) and "relation" not in name:
            yield value


def test_words_that_are_required_or_forbidden_come_from_nowhere_else() -> None:
    fixed = [*WORDS["requests"], *WORDS["questions"], *WORDS["end_phrases"], *WORDS["first_words"], *WORDS["sections"]]
    for topic, words in WORDS["topics"].items():
        for word in (words := words.split()):
            assert not any(word in text.lower() for text in [topic, *fixed]), (topic, word)
            assert not any(word in other for other in words if other != word), (topic, word)
        assert len(set(words)) == 6


def test_no_held_out_request_is_trained_on() -> None:
    requests = {
        form.format(topic=topic) for form in (*WORDS["requests"], *WORDS["questions"]) for topic in WORDS["topics"]
    }
    sides = [drawn(), InstructionsTask.load(seed=SEED + 1, num_heldout=SAMPLE).heldout]
    trained, heldout = ({request_of(example, requests) for example in side} for side in sides)
    assert len(trained) > 900
    assert len(heldout) > 150
    assert not trained & heldout


def request_of(example: Example, requests: set[str]) -> str:
    beginnings = {line[: mark.end()] for line in example.query.split("\n") for mark in re.finditer("[.?]", line)}
    (actual,) = beginnings & requests
    return actual


def official_descriptions(examples: Iterable[Example]) -> Iterator[str]:
    registry = importlib.import_module("torchrl.envs.llm.reward.ifeval._instructions_registry").INSTRUCTION_DICT
    for example in examples:
        for name, kwargs in given(example).items():
            description = registry[name](name).build_description(**kwargs)
            for text in (value for value in kwargs.values() if isinstance(value, str)):
                description = description.replace(text, "")  # which is ours
            yield description


def sentences(text: str) -> set[str]:
    """Of four words or more, numbers, marks and letter case aside, but for the three that the checks require."""
    parts = re.split(r"[.!?;:\n]", re.sub(r"\d+", "9", text.casefold()))
    plain = {" ".join(re.findall(r"\w+", part)) for part in parts}
    return {sentence for sentence in plain if len(sentence.split()) >= 4} - CHOSEN


def assert_apart(ours: list[str], official: list[str]) -> None:
    mine, theirs = (set().union(*map(sentences, side)) for side in (ours, official))
    my_text, their_text = (" | ".join(f" {sentence} " for sentence in side) for side in (mine, theirs))
    assert len(theirs) > 30
    assert [one for one in theirs if f" {one} " in my_text] == []
    assert [one for one in mine if f" {one} " in their_text] == []


def test_no_instruction_is_said_in_the_benchmarks_words() -> None:
    examples = drawn(1500)
    assert_apart([example.query for example in examples], list(islice(official_descriptions(examples), 3000)))


@pytest.mark.data
def test_no_prompt_and_no_sentence_of_the_benchmark_is_trained_on() -> None:
    task = InstructionsTask.load(seed=SEED, num_train=SAMPLE, eval_path=str(shared_data("ifeval", "input_data.jsonl")))
    assert len(task.heldout) == 541
    assert_apart([example.query for example in task.train], [example.query for example in task.heldout])


def test_the_prompts_of_a_file_are_held_out_and_never_drawn(tmp_path: Path) -> None:
    examples = drawn(40)
    rows = [{"prompt": f" {example.query.upper()}\n", **example.extra} for example in examples[::2]]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    config = Config(seed=SEED)
    config.env.dataset, config.env.eval_path, config.env.max_samples = "instructions", str(path), 40
    config.reward.all_weight = 0.5
    task = task_of(config)
    assert sorted(example.query for example in task.heldout) == sorted(row["prompt"] for row in rows)
    assert list(task.train)[1::2] == examples[1::2]
    assert not set(map(str.casefold, (e.query for e in task.train))) & {e.query.casefold() for e in examples[::2]}
    path.write_text('{"prompt": "Hi"}')
    assert task_of(config, bare=True).term_weights == {"instructions": 1.0, "all": 0.5}  # reads no data
    with pytest.raises(DatasetError, match="row 1"):
        task_of(config)
