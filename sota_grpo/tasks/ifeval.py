"""IFEval: prompts whose instructions a program can check (Zhou et al. 2023, arXiv:2311.07911)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sota_grpo.rewards.ifeval import (
    INSTRUCTIONS,
    answer_text,
    checks,
    find_punkt,
    follow_lists,
    read_instructions,
    read_prompt,
)
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, FileTask, Row, is_file, load_rows, normalised, unique_examples

EVAL_HUB_NAME = "google/IFEval"
_MOST_UNREADABLE = 0.05  # of a dataset on the hub, whose rows its user cannot mend

logger = logging.getLogger(__name__)


class IFEvalTask(FileTask):
    """Prompts with instructions, each of which a response follows or not; trained on RLVR-IFeval, evaluated on IFEval.

    ``reward = instructions + all_weight * all``: ``instructions`` is the share of instructions
    that are followed strictly, ``all`` is 1 when all are, which is also the success. The share is the default, because
    a group that never follows all instructions of its prompt still has better and worse responses.

    What is graded is the last ``<answer>`` block if there is one, else all that is not thinking. Each instruction is
    checked strictly and loosely (:func:`sota_grpo.rewards.ifeval.follow_lists`); both lists, and the four accuracies of
    the benchmark, are in the score's ``info``.

    Args:
        train, heldout: examples to train on, and to evaluate on, as :meth:`read_row` makes them.
        system_prompt: put before the prompt; None or an empty text is no system turn, as in the benchmark.
        all_weight: weight of all, beside 1 of the share.
        nltk_data: folder of NLTK's data; None searches NLTK's own places. Without Punkt's data sentences are split by
            rules that come near to them.

    Raises:
        ValueError: a negative weight.
        UserError: ``nltk_data`` does not hold Punkt's data.
    """

    name = "ifeval"
    hub_name = "allenai/RLVR-IFeval"

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        system_prompt: str | None = None,
        all_weight: float = 0.0,
        nltk_data: str | None = None,
    ):
        if all_weight < 0:
            raise ValueError(f"all_weight={all_weight} must not be negative.")
        if nltk_data is not None:
            find_punkt(nltk_data)
        self.train, self.heldout = train, heldout
        self.system_prompt, self.nltk_data = system_prompt, nltk_data
        self.term_weights: Mapping[str, float] = {"instructions": 1.0, "all": all_weight}

    def _sides(self, name: str, eval_path: str | None) -> tuple[list[Example], list[Example] | None]:
        """What is trained on, and IFEval or what stands for it; of a file that is alone, rows are held out."""
        if name.casefold() == EVAL_HUB_NAME.casefold():
            raise DatasetError(
                f"{name} is what IFEval is evaluated on, so training on it would make the results meaningless; train "
                f"on {self.hub_name} (env.dataset_path=null) or on a file of your own."
            )
        if eval_path is None and not is_file(name):
            eval_path = EVAL_HUB_NAME
        train, heldout = super()._sides(name, eval_path)
        taken, distinct = {normalised(example.query) for example in heldout or ()}, unique_examples(train)
        shared = [example.query for example in distinct if normalised(example.query) in taken]
        if shared:
            raise DatasetError(
                f"{len(shared)} of the {len(distinct)} training prompts of {name} stand in {eval_path} too, so "
                f"training on them would make the evaluation meaningless; remove them from {name}, or evaluate on "
                f"another file (env.eval_path). The first begins with {shared[0][:80]!r}."
            )
        self._tell_of_sentences({each for e in (*train, *(heldout or ())) for each in e.extra["instruction_id_list"]})
        return train, heldout

    def prepare(self) -> None:
        """Import what splits sentences and tells languages now: no response's deadline should pay for it."""
        checks.capital_word_count("One word. Another.", "at least", 1, self.nltk_data)
        checks.is_language("word", "en")

    def score(self, response: str, example: Example) -> Score:
        """Check each instruction; see the class for the terms and the info."""
        ids, kwargs = example.extra["instruction_id_list"], example.extra["kwargs"]
        strict, loose = follow_lists(answer_text(response), ids, kwargs, self.nltk_data)
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
        """The benchmark's four accuracies: prompts and instructions that are followed, strictly and loosely."""
        num_instructions = len(example.extra["instruction_id_list"])
        lists = {way: score.info.get(f"follow_instruction_list_{way}", []) for way in ("strict", "loose")}
        # a grader that failed has left no lists, and nothing counts as followed
        prompts = {f"prompt_{way}": (int(sum(followed) == num_instructions), 1) for way, followed in lists.items()}
        return prompts | {f"instruction_{way}": (sum(followed), num_instructions) for way, followed in lists.items()}

    def gold_response(self, example: Example) -> None:
        """None: nobody has written responses that follow the instructions."""

    def read_row(self, row: Row, place: str) -> Example:
        """An example of a row of either dataset, whose prompt may be missing.

        IFEval has the columns ``prompt``, ``instruction_id_list`` and ``kwargs``, RLVR-IFeval ``messages`` and
        ``ground_truth``; see :func:`sota_grpo.rewards.ifeval.read_instructions`.
        """
        try:
            ids, kwargs = read_instructions(row)
            return Example(read_prompt(row), "", {"instruction_id_list": ids, "kwargs": kwargs})
        except ValueError as error:
            raise DatasetError(f"{place}: {error}; mend or remove the row.") from error

    def _problem(self, row: Row, place: str) -> Example:
        example = self.read_row(row, place)
        if not example.query.strip():
            raise DatasetError(f"{place}: there is no prompt; mend or remove the row.")
        return replace(example, place=place)

    def _read(self, name: str, split: str = "train") -> list[Example]:
        """All rows of a file, each of which must be right; of a hub dataset those that are, if they are nearly all."""
        rows, examples, broken = load_rows(name, split=split), [], []
        for number, row in enumerate(rows, start=1):
            try:
                examples.append(self._problem(row, f"{name}, row {number}"))
            except DatasetError as error:
                if is_file(name):
                    raise
                broken.append(error)
        if len(broken) > _MOST_UNREADABLE * len(rows):
            raise DatasetError(f"{len(broken)} of {len(rows)} rows of {name} cannot be used; the first: {broken[0]}")
        if broken:
            logger.warning("%d of %d rows of %s are left out; the first: %s", len(broken), len(rows), name, broken[0])
        return examples

    def _tell_of_sentences(self, ids: Iterable[str]) -> None:
        if any(INSTRUCTIONS[name].splits_sentences for name in ids) and find_punkt(self.nltk_data) is None:
            logger.warning(
                "NLTK's Punkt data are not there, so sentences are split by rules with the same outcome in more than "
                "99 of 100 cases; for all of them run python -m nltk.downloader punkt_tab, or set NLTK_DATA."
            )
