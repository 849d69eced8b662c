"""Programs that tests judge: rows of a prompt and its tests; what the model writes runs in a sandbox only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sota_grpo.rewards.extract import last_code_block, without_thinking
from sota_grpo.rewards.sandbox import make_runner, run_tests
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, FileTask, Row, optional_text

SYSTEM_PROMPT = (
    "Write a Python program that does what is asked. End your response with the whole program in one block that begins "
    "with ```python and ends with ```."
)


class CodeTask(FileTask):
    """Prompts whose responses are Python programs, judged by the unit tests of their rows.

    ``reward = tests``, the share of the tests that pass; the success is that all do. The program is the last closed
    code block outside the thinking; a response without one has 0. It runs in a sandbox
    (:mod:`sota_grpo.rewards.sandbox`); a sandbox that fails is an error of the grader.

    Args:
        train, heldout: examples to train on, and to evaluate on, as :meth:`read_row` makes them.
        sandbox: ``auto`` or ``bwrap``, or the URL of a SandboxFusion server.
        system_prompt: replaces the task's own; an empty text is no system turn.

    >>> task = CodeTask(sandbox="http://127.0.0.1:8080")
    >>> example = task.read_row({"prompt": "f(x) is x + 1.", "tests": "assert f(1) == 2"}, "demo, row 1")
    >>> task.score("It is x + 1.", example).terms
    {'tests': 0.0}
    """

    name = "code"
    term_weights: Mapping[str, float] = {"tests": 1.0}

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        sandbox: str = "auto",
        system_prompt: str | None = None,
    ):
        self.train, self.heldout = train, heldout
        self._runner = make_runner(sandbox)
        self.system_prompt = SYSTEM_PROMPT if system_prompt is None else system_prompt

    def score(self, response: str, example: Example) -> Score:
        """Run the tests; see the class. ``info`` has how many there are and how many pass."""
        tests = example.extra["tests"]
        program = last_code_block(without_thinking(response))
        if program is None:
            return Score({"tests": 0.0}, success=False)
        passed = run_tests(self._runner, program, tests)
        share = sum(passed) / len(passed)
        return Score({"tests": share}, success=all(passed), info={"num_tests": len(passed), "num_passed": sum(passed)})

    def gold_response(self, example: Example) -> str | None:
        """The row's own program, if it has one."""
        return f"```python\n{example.answer}\n```" if example.answer else None

    def read_row(self, row: Row, place: str) -> Example:
        """Of the columns ``tests`` and, where they are there, ``prompt`` and ``answer`` (a right program).

        ``tests`` is Python code, or a list of such code and of ``{"stdin", "stdout"}`` pairs; see
        :func:`sota_grpo.rewards.sandbox.run_tests`.
        """
        column = row.get("tests")
        tests = list(column) if isinstance(column, (list, tuple)) else [column]
        for test in tests:
            pair = isinstance(test, Mapping) and isinstance(test.get("stdout"), str)
            if not pair and not (isinstance(test, str) and _is_code(test)):
                raise DatasetError(
                    f"{place}: tests must be Python code with assertions, or a list of such code and of "
                    f"{{'stdin', 'stdout'}} pairs, found {str(test)[:60]!r}."
                )
        if not tests:
            raise DatasetError(f"{place}: there are no tests; give one at least.")
        kept = [dict(test) if isinstance(test, Mapping) else test for test in tests]
        return Example(optional_text(row, ["prompt"]), optional_text(row, ["answer"]), {"tests": kept})


def _is_code(text: str) -> bool:
    """Whether a text is Python with a statement in it; it is parsed, not run."""
    import ast

    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
