"""A task whose responses are programs, graded by unit tests that run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sota_grpo.rewards.extract import last_code_block, without_thinking
from sota_grpo.rewards.sandbox import make_runner, parse_tests, run_tests
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, FileTask, Row, optional_text
from sota_grpo.text import SURROGATE

_TESTS: Mapping[str, float] = {"tests": 1.0}


@dataclass(eq=False, repr=False, kw_only=True)
class CodeTask(FileTask):
    """Prompts whose responses are Python programs, graded by the unit tests of the dataset row.

    ``reward = tests``, the fraction of tests that pass; success means all pass. The program is the last closed code
    block outside the thinking; a response without one has reward 0. The program runs in a sandbox
    (:mod:`sota_grpo.rewards.sandbox`). If the sandbox fails, ``score`` raises OSError, which is a grader error.

    Args:
        train, heldout, system_prompt: see :class:`~sota_grpo.tasks.dataset.BaseTask`.
        sandbox: ``auto`` or ``bwrap`` (UserError if unusable), or a SandboxFusion server's URL, used in ``score``.

    >>> task = CodeTask(sandbox="http://127.0.0.1:8080")
    >>> example = task.read_row({"prompt": "f(x) is x + 1.", "tests": "assert f(1) == 2"}, "demo, row 1")
    >>> task.score("It is x + 1.", example).terms
    {'tests': 0.0}
    """

    name = "code"
    term_weights = _TESTS
    default_prompt = (
        "Write a Python program that does what is asked. End your response with the whole program in one block that "
        "begins with ```python and ends with ```."
    )

    sandbox: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runner = make_runner(self.sandbox)

    def score(self, response: str, example: Example) -> Score:
        """Return the term ``tests``; if there is a program, ``info`` has ``num_tests`` and ``num_passed``."""
        tests = example.extra["tests"]
        program = last_code_block(without_thinking(response))
        if program is None:
            return Score({"tests": 0.0}, success=False)
        passes = run_tests(self._runner, program, tests)
        share = sum(passes) / len(passes)
        return Score({"tests": share}, success=all(passes), info={"num_tests": len(passes), "num_passed": sum(passes)})

    def gold_response(self, example: Example) -> str | None:
        """Return the row's reference program as a code block; None if the row has none."""
        return f"```python\n{example.answer}\n```" if example.answer else None

    def read_row(self, row: Row, location: str) -> Example:
        """Return the example of a row: ``tests``, and optional ``prompt`` and ``answer`` (a reference program).

        ``tests`` is Python code, or a list of such code and ``{"stdin", "stdout"}`` pairs; else DatasetError.
        """
        column = row.get("tests")
        tests = list(column) if isinstance(column, (list, tuple)) else [column]
        for test in tests:
            if not _is_test(test):
                raise DatasetError(
                    f"{location}: tests must be Python code with assertions that run (a function needs a call), or a "
                    f"list of such code and of {{'stdin', 'stdout'}} pairs, without halves of surrogate pairs, found "
                    f"{str(test)[:60]!r}."
                )
        if not tests:
            raise DatasetError(f"{location}: tests is an empty list; give at least one test.")
        copied = [dict(test) if isinstance(test, Mapping) else test for test in tests]
        return Example(optional_text(row, ["prompt"]), optional_text(row, ["answer"]), {"tests": copied})


def _is_test(test: object) -> bool:
    """Return whether a value is a pair, or Python code with at least one test; it is parsed, not executed."""
    if isinstance(test, Mapping):
        return isinstance(test.get("stdout"), str) and not any(SURROGATE.search(str(text)) for text in test.values())
    try:
        return isinstance(test, str) and any(is_test for _, is_test in parse_tests(test))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
