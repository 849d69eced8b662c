"""Both tables, in every form that files give them, become the same instructions; a row that cannot be used is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rewards.ifeval import FUNC_NAMES
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.ifeval import IFEvalTask
from tests.unit.test_ifeval_task import UNUSED, ifeval_row, rlvr_row
from tests.unit.test_tasks import write


def test_every_form_of_the_columns_gives_the_same_example() -> None:
    row, task = ifeval_row(1), IFEvalTask()
    bare = [{key: value for key, value in kwargs.items() if value is not None} for kwargs in row["kwargs"]]
    forms: list[dict[str, Any]] = [
        {"kwargs": bare},
        {"kwargs": json.dumps(row["kwargs"])},
        {"kwargs": [json.dumps(kwargs) for kwargs in row["kwargs"]]},
        {"kwargs": [None, row["kwargs"][1]]},
        {"instruction_id_list": json.dumps(row["instruction_id_list"])},
        {"instruction_id_list": tuple(row["instruction_id_list"])},
    ]
    example = task.read_row(row, "demo, row 1")
    assert example.query == "Prompt 1, no commas."
    assert example.extra == {"instruction_id_list": row["instruction_id_list"], "kwargs": bare}
    assert all(task.read_row(row | form, "demo, row 1") == example for form in forms)
    assert task.read_row({key: row[key] for key in ("instruction_id_list", "kwargs")}, "demo, row 1").query == ""


def test_a_parquet_file_gives_the_examples_of_its_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [ifeval_row(number) for number in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tasks = [
        IFEvalTask.load(path=path, num_heldout=3)
        for path in (str(tmp_path / "rows.parquet"), write(tmp_path / "rows.jsonl", rows))
    ]
    assert tasks[0].train == tasks[1].train
    assert tasks[0].heldout == tasks[1].heldout


RLVR: list[tuple[dict[str, Any], str, str]] = [  # constraint, what follows, what does not
    ({"func_name": "verify_keywords", "keyword_list": ["C++", "a.b"]}, "c++ a.b", "c++ acb"),
    ({"func_name": "verify_keyword_frequency", "word": "art", "N": 2}, "Art, art party", "art party"),
    ({"func_name": "validate_forbidden_words", "forbidden_words": ["art"]}, "party", "art"),
    ({"func_name": "verify_letter_frequency", "letter": "a", "N": 2}, "Aa", "aaa"),
    ({"func_name": "verify_paragraph_count", "N": 2}, "a\n* * *\nb", "a\n***\nb"),
    ({"func_name": "validate_word_constraint", "quantifier": "around", "N": 10}, "a " * 11, "a " * 12),
    ({"func_name": "verify_sentence_constraint", "quantifier": "at most", "N": 1}, "One.", "One. Two."),
    ({"func_name": "validate_paragraphs", "N": 2, "i": 2, "first_word": "So"}, "a\n\nso", "so\n\na"),
    ({"func_name": "verify_postscript", "postscript_marker": "P.S."}, "P.S. a", "PS a"),
    ({"func_name": "validate_placeholders", "N": 1}, "[a]", "(a)"),
    ({"func_name": "verify_bullet_points", "N": 1}, "* a", "* a\n* b"),
    ({"func_name": "validate_title"}, "<<a>>", "<a>"),
    ({"func_name": "validate_choice", "options": "red, blue"}, "blue", "Blue"),
    ({"func_name": "validate_choice", "options": ["a, b"]}, "a, b", "a b"),
    ({"func_name": "validate_highlighted_sections", "N": 1}, "*a*", "a"),
    ({"func_name": "validate_sections", "N": 1, "section_splitter": "(Part)"}, "(Part) 1", "Part 1"),
    ({"func_name": "validate_json_format"}, "[]", "no"),
    (
        {"func_name": "validate_repeat_prompt", "original_prompt": "Why? First, repeat the request without change"},
        "Why? Because.",
        "Because.",
    ),
    ({"func_name": "validate_two_responses"}, "a******b", "a"),
    ({"func_name": "validate_uppercase"}, "THIS IS ALL THAT THERE IS TO SAY.", "This"),
    ({"func_name": "validate_lowercase"}, "this is all that there is to say.", "This"),
    ({"func_name": "validate_frequency_capital_words", "quantifier": "at least", "N": 2}, "NASA UN", "NASA"),
    ({"func_name": "validate_end", "end_phrase": "Bye."}, "a bye.", "Bye. a"),
    ({"func_name": "validate_quotation"}, '"a"', "a"),
    ({"func_name": "validate_no_commas"}, "a", "a,"),
    ({"func_name": "validate_response_language", "language": "de"}, "1", "This is English."),
]


def test_every_constraint_has_a_case() -> None:
    assert {constraint["func_name"] for constraint, *_ in RLVR} == set(FUNC_NAMES)


@pytest.mark.parametrize(("constraint", "follows", "differs"), RLVR, ids=[one["func_name"] for one, *_ in RLVR])
def test_rlvr_constraints_become_instructions(constraint: dict, follows: str, differs: str) -> None:
    task, row = IFEvalTask(), rlvr_row(3, N=None, quantifier=None)
    for truth in (UNUSED | constraint, json.dumps(UNUSED | constraint), [json.dumps(UNUSED | constraint)]):
        example = task.read_row(row | {"ground_truth": truth}, "demo, row 1")
        assert example.query == "Answer with at least 17 words. Question 3?"
        assert task.score(follows, example).success
        assert not task.score(differs, example).success


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_id_list": ["punctuation:no_comma", "a:b"]}, "'a:b' is none of the 25 instructions of IFEval"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "'kwargs' does not hold one mapping for each of the 1"),
        ({"instruction_id_list": []}, r"'instruction_id_list' holds \[\], not a list of instructions"),
        ({"instruction_id_list": "punctuation:no_comma"}, "'punctuation:no_comma' is not valid JSON"),
        ({"kwargs": None}, "'kwargs' does not hold one mapping for each of the 2"),
        ({"kwargs": [{}, 3]}, "'kwargs' holds int, not a mapping"),
        ({"kwargs": [{}, {"num_words": 3}]}, "length_constraints:number_words needs relation"),
        ({"prompt": 3}, "'prompt' holds int, not text"),
        ({"prompt": " "}, "there is no prompt"),
    ],
)
def test_a_broken_row_of_ifeval_is_named(tmp_path: Path, change: dict, message: str) -> None:
    rows = [ifeval_row(number) for number in range(5)]
    rows[3] |= change
    with pytest.raises(DatasetError, match=rf"rows.jsonl, row 4: .*{message}.*mend or remove the row"):
        IFEvalTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ground_truth": json.dumps({"func_name": "verify_rhymes"})}, "func_name 'verify_rhymes' is none of the 25"),
        ({"ground_truth": "[]"}, "'ground_truth' holds no constraint"),
        ({"ground_truth": "42"}, "'ground_truth' holds int, not a mapping"),
        ({"ground_truth": {"func_name": "verify_keywords", "keyword_list": [3]}}, r"keyword_list=\[3\] is no text"),
        ({"ground_truth": {"func_name": "verify_keywords", "keyword_list": None}}, "keywords:existence needs keywords"),
        ({"messages": []}, "'messages' does not hold one turn of the user"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "'messages' does not hold one turn of the user"),
        ({"messages": [{"role": "user", "content": 3}]}, "'messages' holds int, not text"),
    ],
)
def test_a_broken_row_of_rlvr_is_named(change: dict, message: str) -> None:
    with pytest.raises(DatasetError, match=rf"demo, row 7: .*{message}"):
        IFEvalTask().read_row(rlvr_row(1) | change, "demo, row 7")
    with pytest.raises(DatasetError, match="the columns found are 'question'"):
        IFEvalTask().read_row({"question": "?"}, "demo, row 7")
