"""IFEval: prompts whose instructions a program can check (Zhou et al. 2023, arXiv:2311.07911)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from sota_grpo.tasks.dataset import ChatTask, DatasetError, is_file, load_named, normalised, two_sides, unique_examples

HUB_NAME, EVAL_HUB_NAME = "allenai/RLVR-IFeval", "google/IFEval"
_MOST_UNREADABLE = 0.05  # of a dataset on the hub, whose rows its user cannot mend

logger = logging.getLogger(__name__)


class IFEvalTask(ChatTask):
    """Prompts with instructions, each of which a response follows or not.

    ``reward = instructions + all_weight * all``: ``instructions`` is the share of instructions
    that are followed strictly, ``all`` is 1 when all are, which is also the success. The share is the default, because
    a group that never follows all instructions of its prompt still has better and worse responses; where there is one
    instruction, the two terms are the same.

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

    >>> task = IFEvalTask()
    >>> ids = ["punctuation:no_comma", "length_constraints:number_words"]
    >>> row = {"instruction_id_list": ids, "kwargs": [{}, {"relation": "less than", "num_words": 3}]}
    >>> score = task.score("Yes, certainly.", task.read_row(row, "demo, row 1"))
    >>> score.terms, score.info["follow_instruction_list_strict"]
    ({'instructions': 0.5, 'all': 0.0}, [False, True])
    """

    name = "ifeval"
    hub_name: str | None = HUB_NAME

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

    @classmethod
    def load(
        cls,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        num_heldout: int | None = None,
        max_samples: int | None = None,
        data_seed: int = 0,
        **options: Any,
    ) -> IFEvalTask:
        """Train on RLVR-IFeval and evaluate on IFEval, both from the hub, or on data of your own in either's format.

        Equal rows are kept once.

        Args:
            path: what to train on: a local file or a name on the hub; None is ``allenai/RLVR-IFeval``.
            eval_path: the same for evaluation; None is ``google/IFEval`` or, where ``path`` is a file, rows of it.
            num_heldout, max_samples, data_seed, options: see :meth:`sota_grpo.tasks.dataset.QuestionTask.load`.

        Raises:
            DatasetError: rows that cannot be used, with their number, or evaluation prompts among the training data.
        """
        task = cls(**options)
        name = path or HUB_NAME
        if name.casefold() == EVAL_HUB_NAME.casefold():
            raise DatasetError(
                f"{name} is what IFEval is evaluated on, so training on it would make the results meaningless; train "
                f"on {HUB_NAME} (env.dataset_path=null) or on a file of your own."
            )
        train, heldout = task._read(name), None
        if eval_path is not None or not is_file(name):
            eval_name = eval_path or EVAL_HUB_NAME
            heldout = task._read(eval_name)
            _refuse_overlap(unique_examples(train), heldout, name, eval_name)
        train, task.heldout = two_sides(train, heldout, num_heldout=num_heldout, data_seed=data_seed, source=name)
        task.train = train[:max_samples]
        task._tell_of_sentences({name for e in [*train, *task.heldout] for name in e.extra["instruction_id_list"]})
        return task

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
        """The benchmark's four accuracies: prompts and instructions that are followed, strictly and loosely.

        >>> task = IFEvalTask()
        >>> ids = ["punctuation:no_comma", "length_constraints:number_words"]
        >>> row = {"instruction_id_list": ids, "kwargs": [{}, {"relation": "less than", "num_words": 3}]}
        >>> example = task.read_row(row, "demo, row 1")
        >>> task.counts(task.score("Yes, certainly.", example), example)["instruction_strict"]
        (1, 2)
        """
        num_instructions = len(example.extra["instruction_id_list"])
        lists = {way: score.info.get(f"follow_instruction_list_{way}", []) for way in ("strict", "loose")}
        # a grader that failed has left no lists, and nothing counts as followed
        prompts = {f"prompt_{way}": (int(sum(followed) == num_instructions), 1) for way, followed in lists.items()}
        return prompts | {f"instruction_{way}": (sum(followed), num_instructions) for way, followed in lists.items()}

    def gold_response(self, example: Example) -> None:
        """None: nobody has written responses that follow the instructions."""

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        """An example of a row of either dataset, whose prompt may be missing.

        IFEval has the columns ``prompt``, ``instruction_id_list`` and ``kwargs``, RLVR-IFeval ``messages`` and
        ``ground_truth``; see :func:`sota_grpo.rewards.ifeval.read_instructions`.

        Raises:
            DatasetError: a column that is missing or of the wrong form, an unknown instruction, kwargs that it cannot
                be checked with.
        """
        try:
            ids, kwargs = read_instructions(row)
            return Example(read_prompt(row), "", {"instruction_id_list": ids, "kwargs": kwargs})
        except ValueError as error:
            raise DatasetError(f"{place}: {error}; mend or remove the row.") from error

    def _read(self, name: str) -> list[Example]:
        """All rows of a file, each of which must be right; of a hub dataset those that are, if they are nearly all."""
        rows, examples, broken = load_named(name), [], []
        for row, place in rows:
            try:
                example = self.read_row(row, place)
                if not example.query.strip():
                    raise DatasetError(f"{place}: there is no prompt; mend or remove the row.")
                examples.append(replace(example, place=place))
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


def _refuse_overlap(train: Sequence[Example], heldout: Sequence[Example], name: str, eval_name: str) -> None:
    taken = {normalised(example.query) for example in heldout}
    shared = [example.query for example in train if normalised(example.query) in taken]
    if shared:
        raise DatasetError(
            f"{len(shared)} of the {len(train)} training prompts of {name} stand in {eval_name} too, so training on "
            f"them would make the evaluation meaningless; remove them from {name}, or evaluate on another file "
            f"(env.eval_path). The first begins with {shared[0][:80]!r}."
        )
