"""Random options, tables, run directories, chat templates and instructions are taken or refused with a sentence.

Graders (tests/unit/test_hostile_text.py), answers in mathematics (test_math_equal.py) and readers of tool calls
(test_tool_calls.py) have their own random input.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sota_grpo.assembly.compose import compose, load_config
from sota_grpo.config import Config
from sota_grpo.config.spelling import flat
from sota_grpo.config.validators import validate
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.report import report_json
from sota_grpo.report.data import read_runs
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.records import Example
from sota_grpo.sweeps import as_text, read_sweep
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.tasks.questions import GSM8KTask
from sota_grpo.tasks.table import TableTask
from sota_grpo.training.checkpoint import CheckpointStore
from tests.report_rigs import write_run
from tests.unit.test_ifeval_checks import FLAT as INSTRUCTED


def one_of_words(words: str, *, most: int = 12) -> SearchStrategy[str]:
    """Texts joined of words and of anything."""
    return st.lists(st.sampled_from(words.split()) | st.text(max_size=4), max_size=most).map("".join)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
SPECIAL = "<|im_end|> <|im_start|> <|endoftext|> user assistant system tool </s> [INST] {{7*7}} {%raw%} \n \x00 \u202e"


# options -------------------------------------------------------------------------------------------------------------

_VALUES = (
    st.integers().map(str)
    | st.floats().map(str)
    | JSON.map(lambda value: json.dumps(value, ensure_ascii=False))
    | one_of_words("${oc.env:HOME} ${seed} ??? [ ] { } , : = ' \" null true a/b .. -1 1e9 nan sum dapo vllm cpu 0")
)
_NAMES = st.sampled_from(sorted(flat(asdict(Config())))) | st.sampled_from(
    ("algorithm", "mode", "engine", "hydra.run.dir")
)


def check_options(overrides: list[str]) -> None:
    validate(compose("grpo_cpu", overrides))


_OPTIONS = st.lists(
    st.builds("{}{}={}".format, st.sampled_from(("", "", "", "+", "~", "++")), _NAMES | st.text(max_size=8), _VALUES),
    max_size=4,
)

# tables --------------------------------------------------------------------------------------------------------------

_COLUMN = st.sampled_from(("prompt", "question", "answer", "solution", "ground_truth", "reward_model", "data_source"))
_CHAT = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("user", "system", "tool", "")), "content": JSON}), max_size=3
)
_ODD = st.dictionaries(_COLUMN | st.text(max_size=6), JSON | _CHAT | one_of_words(SPECIAL), max_size=5)
_EVEN = st.fixed_dictionaries({"prompt": st.text(min_size=1) | one_of_words(SPECIAL), "answer": SCALARS | JSON})
_ROW = _EVEN | st.builds(lambda even, odd: {**even, **odd}, _EVEN, _ODD) | _ODD
_LINES = (st.lists(_EVEN, min_size=3, max_size=6) | st.lists(_ROW, max_size=4)).map(
    lambda rows: "\n".join(map(json.dumps, rows)).encode()
)
_TABLE = st.tuples(
    st.just(".jsonl") | st.sampled_from((".jsonl", ".json", ".csv", ".parquet", ".txt", "")),
    _LINES | _LINES | st.lists(_ROW, max_size=4).map(lambda rows: json.dumps(rows).encode()) | st.binary(max_size=200),
    st.sampled_from((None, "boxed", "any")),
)


def check_table(drawn: tuple[str, bytes, str | None]) -> None:
    suffix, content, answer_format = drawn
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"table{suffix}")
        path.write_bytes(content)
        task = TableTask.load(path=str(path), num_heldout=1, answer_format=answer_format)
        for example in [*task.train, *task.heldout]:
            for message in task.messages(example):
                assert isinstance(message["content"], str)
            pair = (str(task.gold_response(example)), example)
            (score,) = guarded_scores(task.score, task.term_weights, [pair])
            assert score.error is None


# run directories -----------------------------------------------------------------------------------------------------


@cache
def _a_run() -> Path:
    run = write_run(Path(tempfile.mkdtemp(prefix="fuzz")) / "run", steps=3, groups=2, siblings=2, stored=(0,))
    (run / "gate.json").write_text(json.dumps({"passed": True, "checks": [{"name": "ratio", "passed": True}]}))
    (run / "failure.json").write_text(json.dumps({"reason": "it ended"}))
    CheckpointStore(run / "checkpoints").save(2, {"step": 2, "weights": torch.arange(64.0)})
    CheckpointStore(run / "checkpoints").save(3, {"step": 3, "weights": torch.arange(64.0)})
    return run


def _replaced(content: bytes, change: tuple[str, int, Any]) -> bytes:
    kind, place, value = change
    place %= len(content) + 1
    if kind == "cut":
        return content[:place]
    if kind == "bytes":
        return content[:place] + value.encode("utf-8", "surrogatepass") + content[place + 1 :]
    if kind == "line":
        lines = content.splitlines(keepends=True)
        lines.insert(place % (len(lines) + 1), json.dumps(value).encode() + b"\n")
        return b"".join(lines)
    return json.dumps(value).encode()


_CHANGE = (
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.none())
    | st.tuples(st.just("bytes"), st.integers(0, 10**6), st.text(max_size=6))
    | st.tuples(st.sampled_from(("line", "all")), st.integers(0, 10**6), JSON)
)
_RUN = st.lists(st.tuples(st.integers(0, 100), _CHANGE), min_size=1, max_size=3)


def check_run(changes: list[tuple[int, tuple[str, int, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        shutil.copytree(_a_run(), run)
        files = sorted(path for path in run.rglob("*") if path.is_file())
        for index, change in changes:
            path = files[index % len(files)]
            path.write_bytes(_replaced(path.read_bytes(), change))
        for reader in (
            lambda: report_json(*read_runs([run]), budget=10**6),
            lambda: as_text(read_sweep(Path(folder))),
            lambda: load_config(run),
            lambda: CheckpointStore(run / "checkpoints").latest(),
        ):
            with contextlib.suppress(UserError):
                reader()


# chat templates, what is said through them ---------------------------------------------------------------------------

_TEMPLATE = one_of_words(
    "{%formessageinmessages%} {%endfor%} {{message.content}} {{message['role']}} <|im_start|> <|im_end|> {%if%} "
    "{%endif%} {{bos_token}} {{raise_exception('no')}} {{messages[0].content|trim}} {{message.content.split('x')[-1]}} "
    "{{7/0}} {%ifadd_generation_prompt%} {{undefined.name}} {%setns=namespace(a=1)%}"
).map(lambda text: text.replace("for", "for ").replace("in", " in ").replace("if", "if "))


@cache
def _tokenizer() -> Any:
    return load_tokenizer("tiny")


def check_template(drawn: tuple[str | None, str, str]) -> None:
    template, content, role = drawn
    tokenizer = _tokenizer()
    kept = tokenizer.chat_template
    tokenizer.chat_template = kept if template is None else template
    try:
        turns = TurnTokens(tokenizer)
        with contextlib.suppress(UserError):
            turns.ids([{"role": role, "content": content}], tokenizer.eos_token_id)
        example = Example(content or "?", "1")
        TaskEnv(GSM8KTask([example]), tokenizer).prompt_ids(example)
    finally:
        tokenizer.chat_template = kept


# instructions --------------------------------------------------------------------------------------------------------

_ARGUMENTS = sorted({name for _, given, *_ in INSTRUCTED for name in given})
_KWARGS = st.dictionaries(st.sampled_from(_ARGUMENTS) | st.text(max_size=4), JSON, max_size=2)
_CHECKED = st.builds(  # an instruction with what it can be checked with, and sometimes with something else
    lambda instruction, other, mixed: (instruction[0], {**instruction[1], **other} if mixed else instruction[1]),
    st.sampled_from(INSTRUCTED),
    _KWARGS,
    st.booleans(),
)
_SAID = st.text(max_size=200) | one_of_words('* - <<a>> *** P.S. 1. ... {"a":1} \n\n HELLO ! ? bonjour', most=40)


def check_instructions(drawn: tuple[list[tuple[Any, Any]], list[Any], str]) -> None:
    instructions, more, response = drawn
    ids, kwargs = [name for name, _ in instructions], [values for _, values in instructions]
    task = IFEvalTask()
    example = task.read_row({"prompt": "?", "instruction_id_list": ids, "kwargs": kwargs + more}, "a row")
    assert guarded_scores(task.score, task.term_weights, [(response, example)])[0].error is None


TARGETS: dict[str, tuple[SearchStrategy[Any], Callable[[Any], object]]] = {
    "options": (_OPTIONS, check_options),
    "tables": (_TABLE, check_table),
    "runs": (_RUN, check_run),
    "templates": (
        st.tuples(st.none() | _TEMPLATE, one_of_words(SPECIAL), st.sampled_from(("user", "tool"))),
        check_template,
    ),
    "instructions": (
        st.tuples(st.lists(_CHECKED, max_size=3), st.just([]) | st.lists(JSON, max_size=1), _SAID),
        check_instructions,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_random_input_is_taken_or_refused_with_a_sentence(name: str) -> None:
    """Always the same seeds: what others find is a change of its own."""
    drawn, check = TARGETS[name]
    counts = {"tried": 0, "refused": 0}

    def attempt(value: Any) -> None:
        counts["tried"] += 1
        try:
            check(value)
        except UserError:
            counts["refused"] += 1

    run = settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    for number in range(10):
        seed(number)(run(given(drawn)(attempt)))()
    assert counts["tried"] > counts["refused"]
