"""The task reads both tables in every form, never trains on what it evaluates on, and says what was followed."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rewards.ifeval import FUNC_NAMES, INSTRUCTIONS
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.tasks.wrappers import think_again
from tests.data_files import shared_data, write_rows

RNG = random.Random(random.randrange(1 << 30))
ALL_KWARGS = ("num_words", "relation", "keywords", "end_phrase", "num_bullets")
ARGUMENTS = (
    *("N", "quantifier", "end_phrase", "keyword_list", "word", "forbidden_words", "letter", "i", "first_word"),
    *("postscript_marker", "options", "section_splitter", "original_prompt"),
)
UNUSED = dict.fromkeys(ARGUMENTS)  # a constraint names all arguments, null where it has no use for them


def ifeval_row(number: int) -> dict[str, Any]:
    kwargs = {"num_words": RNG.randint(0, 9), "relation": "at least"}
    padded = [dict.fromkeys(ALL_KWARGS), dict.fromkeys(ALL_KWARGS) | kwargs]
    ids = ["punctuation:no_comma", "length_constraints:number_words"]
    return {"key": number, "prompt": f"Prompt {number}, no commas.", "instruction_id_list": ids, "kwargs": padded}


def rlvr_row(number: int, **constraint: Any) -> dict[str, Any]:
    truth = {"func_name": "validate_word_constraint", **UNUSED, "N": 17, "quantifier": "at least", **constraint}
    messages = [{"role": "user", "content": f"Answer with at least 17 words. Question {number}?"}]
    return {"messages": messages, "ground_truth": json.dumps(truth), "dataset": "ifeval", "constraint_type": "Words"}


def of(*instructions: tuple[str, dict[str, Any]], **options: Any) -> tuple[IFEvalTask, Example]:
    ids, kwargs = zip(*instructions, strict=True)
    task = IFEvalTask(**options)
    return task, task.read_row({"instruction_id_list": list(ids), "kwargs": list(kwargs)}, "demo, row 1")


def test_terms_success_and_info_worked_out_by_hand() -> None:
    task, example = of(
        ("punctuation:no_comma", {}),
        ("startend:quotation", {}),
        ("length_constraints:number_words", {"relation": "less than", "num_words": 9}),
        ("detectable_format:title", {}),
        all_weight=0.5,
    )
    assert task.term_weights == {"instructions": 1.0, "all": 0.5}
    lists = {"strict": [False, False, True, False], "loose": [True, True, True, False]}
    info = {f"follow_instruction_list_{how}": followed for how, followed in lists.items()}
    info |= {"prompt_strict": 0.0, "prompt_loose": 0.0, "instruction_strict": 0.25, "instruction_loose": 0.75}
    expected = Score({"instructions": 0.25, "all": 0.0}, success=False, info=info)
    assert task.score('Here, you are:\n"It is it"', example) == expected
    score = task.score('"<<It>> is it"', example)
    assert (score.terms, score.success) == ({"instructions": 1.0, "all": 1.0}, True)
    assert json.loads(json.dumps(score.info)) == score.info
    assert think_again(task).counts(score, example) == task.counts(score, example)
    assert task.score("", example).terms == {"instructions": 0.0, "all": 0.0}
    assert task.gold_response(example) is None


def test_thinking_and_answer_tags_are_not_graded() -> None:
    task, example = of(("punctuation:no_comma", {}))
    assert task.score("<think>Well, yes</think>\nYes", example).success
    assert task.score("Well, <answer>Yes</answer>", example).success
    assert not task.score("<think>Yes</think>\nWell, yes", example).success
    assert not task.score("<think>Yes", example).success


def test_prompts_of_the_evaluation_are_refused_with_their_number(tmp_path: Path) -> None:
    train, evaluation = [rlvr_row(number) for number in range(9)], [ifeval_row(number) for number in range(4)]
    paths = write_rows(tmp_path / "train.jsonl", train), write_rows(tmp_path / "eval.jsonl", evaluation)
    task = IFEvalTask.load(path=paths[0], eval_path=paths[1], num_heldout=10**6)
    assert (len(task.train), len(task.heldout)) == (9, 4)
    shared = [{**evaluation[i], "prompt": f" {evaluation[i]['prompt'].upper()}\n"} for i in (1, 3)]
    path = write_rows(tmp_path / "shared.jsonl", [*train, *shared])
    with pytest.raises(DatasetError, match=r"2 of the 11 training prompts of .*shared.jsonl are also in .*eval.jsonl"):
        IFEvalTask.load(path=path, eval_path=paths[1])
    with pytest.raises(DatasetError, match="4 of the 4 training prompts"):
        IFEvalTask.load(path=paths[1], eval_path=paths[1])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    tables = {
        "allenai/RLVR-IFeval": [rlvr_row(number) for number in range(40)],
        "google/IFEval": [ifeval_row(number) for number in range(7)],
    }
    monkeypatch.setattr("sota_grpo.tasks.dataset.load_rows", lambda name, splits, config: tables[name])
    return tables


def test_the_hub_trains_on_rlvr_and_evaluates_on_ifeval(hub: dict[str, list[dict[str, Any]]]) -> None:
    task = make_task("ifeval", max_samples=30)
    assert [len(task.train), len(task.heldout)] == [30, 7]
    assert min(example.query for example in task.heldout) == "Prompt 0, no commas."
    hub["allenai/RLVR-IFeval"][5]["messages"][0]["content"] = "prompt 3,  no COMMAS."
    with pytest.raises(DatasetError, match=r"1 of the 40 training prompts of allenai/RLVR-IFeval are also in google"):
        make_task("ifeval")
    for name in ("google/IFEval", "google/IFeval"):
        with pytest.raises(DatasetError, match=rf"{name} is the test set of IFEval.*train on allenai/RLVR-IFeval"):
            make_task("ifeval", path=name)


def test_a_few_broken_rows_of_the_hub_are_left_out_and_many_are_refused(
    hub: dict[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    rows = hub["allenai/RLVR-IFeval"]
    rows[3] = rows[3] | {"ground_truth": "{}"}
    with caplog.at_level(logging.WARNING):
        assert len(make_task("ifeval").train) == 39
    assert "1 of 40 rows of allenai/RLVR-IFeval are skipped; the first: allenai/RLVR-IFeval, row 4" in caplog.text
    forged = [{"x\n2026-01-01 00:00:00,000 ERROR sota_grpo: forged": 1}]
    rows[3] = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": forged, "prompt": "No commas."}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_task("ifeval")
    assert "punctuation:no_comma has x\\n2026-01-01" in caplog.records[0].getMessage()
    rows[4:6] = [row | {"ground_truth": "{}"} for row in rows[4:6]]
    with pytest.raises(DatasetError, match=r"3 of 40 rows of allenai/RLVR-IFeval cannot be used; the first: .*row 4"):
        make_task("ifeval")


def test_missing_punkt_data_are_reported_only_where_they_matter(tmp_path, caplog, monkeypatch) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [])
    rows = [ifeval_row(number) for number in range(5)]
    IFEvalTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=1)
    assert "Punkt" not in caplog.text
    rows[2]["instruction_id_list"][0] = "change_case:capital_word_frequency"
    rows[2]["kwargs"][0] |= {"capital_frequency": 0, "capital_relation": "at least"}
    IFEvalTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=1)
    assert "python -m nltk.downloader punkt_tab" in caplog.text


@pytest.mark.data
def test_all_541_prompts_of_the_benchmark_can_be_read(caplog, monkeypatch) -> None:
    import nltk.data

    path = shared_data("ifeval", "input_data.jsonl")
    monkeypatch.setattr(nltk.data, "path", [str(shared_data("nltk_data"))])
    task = IFEvalTask.load(path=str(path), num_heldout=41)
    examples = [*task.train, *task.heldout]
    assert len(examples) == 541
    assert sum(len(example.extra["instruction_id_list"]) for example in examples) == 834
    assert not caplog.records


def test_a_grader_imports_its_libraries_before_its_first_response(tmp_path: Path, typed) -> None:
    """On a busy machine NLTK took longer to import than the deadline of the response that requested it."""
    (tmp_path / "grader.py").write_text(
        "import sys; from sota_grpo.rewards.grading import RewardWorker; from sota_grpo.tasks import make_scorer;"
        "from sota_grpo.tasks.wrappers import think_again;"  # through what is wrapped around it, too
        "task = think_again(make_scorer('ifeval')); worker = RewardWorker(task.score, task.term_weights);"
        "print(sorted({'nltk', 'langdetect'} & set(sys.modules)))"
    )
    done = typed(str(tmp_path / "grader.py"))  # which imports no torch
    assert done.stdout.strip() == "['langdetect', 'nltk']", done.stderr


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


AROUND_10, AT_MOST_1 = {"quantifier": "around", "N": 10}, {"quantifier": "at most", "N": 1}
TWICE, SECOND = {"quantifier": "at least", "N": 2}, {"N": 2, "i": 2, "first_word": "So"}
PART = {"N": 1, "section_splitter": "(Part)"}
REPEATED = {"original_prompt": "Why? First, repeat the request without change"}
RLVR = [  # constraint, its arguments, instruction, what follows, what does not
    ("verify_keywords", {"keyword_list": ["C++", "a.b"]}, "keywords:existence", "c++ a.b", "c++ acb"),
    ("verify_keyword_frequency", {"word": "art", "N": 2}, "keywords:frequency", "Art, art party", "art party"),
    ("validate_forbidden_words", {"forbidden_words": ["art"]}, "keywords:forbidden_words", "party", "art"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "keywords:letter_frequency", "Aa", "aaa"),
    ("verify_paragraph_count", {"N": 2}, "length_constraints:number_paragraphs", "a\n* * *\nb", "a\n***\nb"),
    ("validate_word_constraint", AROUND_10, "length_constraints:number_words", "a " * 11, "a " * 12),
    ("verify_sentence_constraint", AT_MOST_1, "length_constraints:number_sentences", "One.", "One. Two."),
    ("validate_paragraphs", SECOND, "length_constraints:nth_paragraph_first_word", "a\n\nso", "so\n\na"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "detectable_content:postscript", "P.S. a", "PS a"),
    ("validate_placeholders", {"N": 1}, "detectable_content:number_placeholders", "[a]", "(a)"),
    ("verify_bullet_points", {"N": 1}, "detectable_format:number_bullet_lists", "* a", "* a\n* b"),
    ("validate_title", {}, "detectable_format:title", "<<a>>", "<a>"),
    ("validate_choice", {"options": "red, blue"}, "detectable_format:constrained_response", "blue", "Blue"),
    ("validate_choice", {"options": ["a, b"]}, "detectable_format:constrained_response", "a, b", "a b"),
    ("validate_highlighted_sections", {"N": 1}, "detectable_format:number_highlighted_sections", "*a*", "a"),
    ("validate_sections", PART, "detectable_format:multiple_sections", "(Part) 1", "Part 1"),
    ("validate_json_format", {}, "detectable_format:json_format", "[]", "no"),
    ("validate_repeat_prompt", REPEATED, "combination:repeat_prompt", "Why? Because.", "Because."),
    ("validate_two_responses", {}, "combination:two_responses", "a******b", "a"),
    ("validate_uppercase", {}, "change_case:english_capital", "THIS IS ALL THAT THERE IS TO SAY.", "This"),
    ("validate_lowercase", {}, "change_case:english_lowercase", "this is all that there is to say.", "This"),
    ("validate_frequency_capital_words", TWICE, "change_case:capital_word_frequency", "NASA UN", "NASA"),
    ("validate_end", {"end_phrase": "Bye."}, "startend:end_checker", "a bye.", "Bye. a"),
    ("validate_quotation", {}, "startend:quotation", '"a"', "a"),
    ("validate_no_commas", {}, "punctuation:no_comma", "a", "a,"),
    ("validate_response_language", {"language": "de"}, "language:response_language", "1", "This is English."),
]


def test_every_constraint_of_rlvr_becomes_its_instruction() -> None:
    assert {name for name, *_ in RLVR} == set(FUNC_NAMES)
    assert {instruction for *_, instruction, _, _ in RLVR} == set(INSTRUCTIONS)
    task, row = IFEvalTask(), rlvr_row(3, N=None, quantifier=None)
    for name, arguments, instruction, follows, differs in RLVR:
        constraint = UNUSED | {"func_name": name} | arguments
        for truth in (constraint, json.dumps(constraint), [json.dumps(constraint)]):
            example = task.read_row(row | {"ground_truth": truth}, "demo, row 1")
            assert example.query == "Answer with at least 17 words. Question 3?"
            assert example.extra["instruction_id_list"] == [instruction]
            assert task.score(follows, example).success, name
            assert not task.score(differs, example).success, name


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    no_comma, keywords = ["punctuation:no_comma"], {"func_name": "verify_keywords"}
    for row, change, message in (
        (ifeval_row, {"instruction_id_list": [*no_comma, "a:b"]}, "'a:b' is not one of the 25 instructions of IFEval"),
        (ifeval_row, {"instruction_id_list": no_comma}, "'kwargs' does not hold one mapping for each of the 1"),
        (ifeval_row, {"instruction_id_list": []}, r"'instruction_id_list' holds \[\], not a list of instructions"),
        (ifeval_row, {"instruction_id_list": no_comma[0]}, "'punctuation:no_comma' is not valid JSON"),
        (ifeval_row, {"kwargs": [{}, 3]}, "'kwargs' holds int, not a mapping"),
        (ifeval_row, {"kwargs": [{}, {"num_words": 3}]}, "number_words needs relation, .*; mend or remove the row"),
        (ifeval_row, {"prompt": 3}, "'prompt' holds int, not text"),
        (rlvr_row, {"ground_truth": {"func_name": "rhymes"}}, "func_name 'rhymes' is not one of the 25"),
        (rlvr_row, {"ground_truth": "[]"}, "'ground_truth' holds no constraint"),
        (rlvr_row, {"ground_truth": "42"}, "'ground_truth' holds int, not a mapping"),
        (rlvr_row, {"ground_truth": keywords | {"keyword_list": [3]}}, r"keyword_list=\[3\] must be a text"),
        (rlvr_row, {"ground_truth": keywords | {"keyword_list": None}}, "keywords:existence needs keywords"),
        (rlvr_row, {"messages": [{"role": "system", "content": "Hi"}]}, "'messages' must hold one message"),
        (rlvr_row, {"messages": [{"role": "user", "content": 3}]}, "'messages' holds int, not text"),
        (lambda _: {}, {"question": "?"}, "the columns found are 'question'"),
    ):
        with pytest.raises(DatasetError, match=rf"demo, row 7: .*{message}"):
            IFEvalTask().read_row(row(1) | change, "demo, row 7")
    rows = [ifeval_row(number) | ({"prompt": " "} if number == 3 else {}) for number in range(5)]
    with pytest.raises(DatasetError, match=r"rows.jsonl, row 4: there is no prompt; mend or remove the row"):
        IFEvalTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=1)
