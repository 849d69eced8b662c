"""What a training step writes: a row of metrics, the best and worst response of each group, a progress line, perhaps
the whole step."""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch

from sota_grpo import keys
from sota_grpo.recording.machine import system_metrics
from sota_grpo.recording.metrics import info_metric, is_number, term_metric
from sota_grpo.recording.progress import in_notebook, is_terminal
from sota_grpo.recording.run_log import ExamineLog, RunLog
from sota_grpo.recording.stored_steps import Origin, StoredStep, save_step, text_pieces
from sota_grpo.rl.records import VERDICTS, Example, metric_tasks, task_of_example
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.text import Output, duration

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, str]]

_WINDOW = 20  # steps of the moving average: long enough to smooth evaluations, short enough to follow the lengths
SHARE, FREE_S = 0.03, 30.0  # of the run's time that keeping whole steps may take; seconds that are not counted
_PATIENCE = 3  # steps in a row; one alone happens to good runs, and a run may be shorter


class Progress:
    """One line that says how far the run is and how it does.

    On a terminal and in a notebook the line is redrawn in place. Elsewhere (a file, CI) whole lines are printed,
    without any control character: the first, the last, and one every ``every_s`` seconds.

    Args:
        total_steps: steps of the whole run.
        first_step: steps done before this process (resume).
        stream: None is standard output.
        every_s: least seconds between two plain lines.
        by_reward: a success is no more than a reward above a limit, unless a reward function says what it is; so the
            reward alone is shown where none does.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        by_reward: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._by_reward = by_reward
        self.total = total_steps
        self._stream = cast(TextIO, Output(stream))
        self._every_s = every_s
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque([(first_step, clock())], maxlen=_WINDOW + 1)
        self._printed_at = -float("inf")
        self._live: Live | None = None
        if is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
        self._in_notebook, self._cell = in_notebook(stream or sys.stdout), None

    def update(self, done: int, metrics: Mapping[str, float | None]) -> str:
        """Show and return the line after ``done`` steps of the run; what was not measured is left out."""
        now = self._clock()
        self._marks.append((done, now))
        verdicts = (name for name in metrics if name.startswith("grader/") and name.rpartition("/")[2] in VERDICTS)
        hidden = {"success"} if self._by_reward and not any(verdicts) else set()
        parts = [f"step {done}/{self.total}"]
        for name, style in (
            ("reward", "reward {:.2f}"),
            ("success", "success {:.0%}"),
            ("kl", "kl {:.2g}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
        ):
            value = None if name in hidden else metrics.get(name)
            if value is not None:
                parts.append(style.format(value).replace("%", " %"))
        if failed := metrics.get("reward_errors"):
            parts.append(f"{failed:.0f} not graded")
        (first, began), (last, now) = self._marks[0], self._marks[-1]
        if last > first:
            parts.append(f"ETA {duration((self.total - last) * (now - began) / (last - first))}")
        line = "  ".join(parts)
        if self._live is not None:
            from rich.text import Text

            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._in_notebook:  # without widgets, which need a package beside it and are empty in a saved notebook
            import IPython.display

            content = {"text/plain": line}
            if self._cell is None:
                self._cell = IPython.display.display(content, raw=True, display_id=True)
            else:
                self._cell.update(content, raw=True)
        elif done >= self.total or now - self._printed_at >= self._every_s:
            self._printed_at = now
            self._stream.write(line + "\n")
        return line

    def close(self) -> None:
        """Give the terminal back; the last line stays. Idempotent."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ZeroAdvantageWatch:
    """Watches the rewards of a run of ``total`` steps; each warning is given once."""

    def __init__(self, total: int) -> None:
        self._patience = min(_PATIENCE, total)
        self.num_steps = 0  # steps in a row, up to the last, without a group whose rewards differ
        self._told_equal = self._told_failed = False

    def look(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Look at the metrics of a step: ``advantage`` (mean of its size), ``reward``, ``reward_errors``, responses.

        A teacher (``distill/reverse_kl``) has something to say of groups whose rewards are equal, too.
        """
        responses = (metrics.get("dialog_turns") or 0) / (step + 1)
        failed = metrics.get("reward_errors") or 0
        learns = metrics.get("advantage") != 0 or "distill/reverse_kl" in metrics
        self.num_steps = 0 if learns else self.num_steps + 1
        if failed and failed >= responses and not self._told_failed:
            self._told_failed = True
            logger.warning(
                "The grader failed at all %d responses of step %d, and their reward is 0: `sota-grpo check` with the "
                "same options shows its error.",
                *(failed, step + 1),
            )
        elif self.num_steps >= self._patience and not self._told_equal:
            self._told_equal = True
            logger.warning(
                "In %d %s in a row every group's rewards were equal (mean %.2f), so nothing was learned from them: "
                "read the responses (sota-grpo report RUN), then change the reward, the problems or the temperature.",
                *(self.num_steps, "step" if self.num_steps == 1 else "steps", metrics.get("reward") or 0.0),
            )


def batch_metrics(batch: RowTable, version: int) -> dict[str, float]:
    """What the rows of a batch say by themselves; ``version`` is that of the policy that trained on them.

    Means are over responses; ``policy_age`` counts published versions between sampling and training.
    """
    lengths = batch.sums(keys.ASSISTANT_MASK).float()
    said = batch.flat(keys.ASSISTANT_MASK)  # each row begins with its prompt, so no turn goes on from one to the next
    turns = (said[1:] & ~said[:-1]).sum() / len(batch)
    prompts = torch.tensor(batch.lengths(keys.PROMPT_TOKENS)).float()
    reward, success, truncated = (_column(batch, key) for key in (keys.REWARD, keys.SUCCESS, keys.TRUNCATED))
    age = version - _column(batch, keys.POLICY_VERSION)
    values = {
        "reward": reward.mean(),
        "reward/std": reward.std(correction=0),
        "success": success.mean(),
        "reward_errors": _column(batch, keys.REWARD_ERROR).sum(),
        "reward_timeouts": _column(batch, keys.REWARD_TIMEOUT).sum(),
        "advantage": _column(batch, keys.ADVANTAGE).abs().mean(),
        "truncated": truncated.mean(),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "prompt_tokens/mean": prompts.mean(),
        "turns/mean": turns,
        "turn_tokens/mean": lengths.mean() / turns,
        "policy_age/mean": age.mean(),
        "policy_age/max": age.max(),
    }
    if batch.has(keys.KEPT_COUNTS):
        values["kept_tokens"] = batch.flat(keys.KEPT_COUNTS).sum() / said.sum().clamp(min=1)
    means = {name: float(value) for name, value in values.items()}
    rows = batch.rows(
        keys.EXTRA, keys.REWARD_INFO, *((*keys.REWARD_TERMS, name) for name in batch.names(keys.REWARD_TERMS))
    )
    extras = _extras(rows)
    numbers = [
        {info_metric(name, task_of_example(extra)): value for name, value in _info(row).items() if is_number(value)}
        for row, extra in zip(rows, extras, strict=True)
    ]
    means |= {term_metric(name): value for name, value in _means([_terms(row) for row in rows]).items()}
    means |= _means(numbers)
    own = {"reward": reward, "success": success, "truncated": truncated, "response_tokens": lengths}
    tasks = [metric_tasks(extra) for extra in extras]
    for task in sorted({task for each in tasks for task in each}):
        mask = torch.tensor([task in each for each in tasks])
        means |= {f"task/{task}/{name}": float(column[mask].mean()) for name, column in own.items()}
        means[f"task/{task}/responses"] = float(mask.sum())
    return means


def _extras(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """``Example.extra`` of each row; siblings have one text, which is read once."""
    read = lru_cache(maxsize=1)(json.loads)
    return [read(row[keys.EXTRA]) if keys.EXTRA in row else {} for row in rows]


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the entries that have it."""
    values: dict[str, list[float]] = {}
    for entry in entries:
        for name, value in entry.items():
            values.setdefault(name, []).append(float(value))
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _terms(row: Row) -> dict[str, float]:
    """Those that apply."""
    return {key[-1]: float(value) for key, value in row.items() if key[:-1] == keys.REWARD_TERMS}


def _info(row: Row) -> dict[str, Any]:
    return json.loads(row[keys.REWARD_INFO], parse_constant=str)  # strict JSON, which the logs are, has no NaN


def _column(batch: RowTable, key: Any) -> torch.Tensor:
    return batch.get(key).flatten().float()


def rollout_rows(
    batch: RowTable, tokenizer: Any, messages: Callable[[Example], Messages] | None = None
) -> list[dict[str, Any]]:
    """The rows as plain values for ``rollouts.jsonl``; siblings have one prompt, which is decoded once.

    Args:
        messages: the chat of an example (``Task.messages``); None leaves it out of dialogs.
    """
    prompts: dict[int, str] = {}
    plain: list[dict[str, Any]] = []
    rows = batch.rows()
    for row, extra in zip(rows, _extras(rows), strict=True):
        group_id = int(row[keys.GROUP_ID])
        if group_id not in prompts:
            prompts[group_id] = tokenizer.decode(row[keys.PROMPT_TOKENS])
        response = row[keys.RESPONSE_TOKENS]
        at_one_go = bool(row[keys.ASSISTANT_MASK][-len(response) :].all())
        plain.append(
            {
                "group_id": group_id,
                "sample_id": int(row[keys.SAMPLE_ID]),
                "query": row[keys.QUERY],
                "answer": row[keys.ANSWER],
                "prompt": prompts[group_id],
                # as it was graded; where user or tool turns stand in it, all of it with the marks of its turns
                "response": row[keys.RESPONSE_TEXT] if at_one_go else tokenizer.decode(response),
                "response_tokens": int(row[keys.ASSISTANT_MASK].sum()),
                "success": bool(row[keys.SUCCESS]),
                "reward": float(row[keys.REWARD]),
                "reward_terms": _terms(row),
                "reward_info": _info(row),
                "advantage": float(row[keys.ADVANTAGE]),
                "truncated": bool(row[keys.TRUNCATED]),
                "policy_version": int(row[keys.POLICY_VERSION]),
            }
        )
        if tasks := metric_tasks(extra):
            plain[-1]["task"] = tasks[-1]
        dialog = dialog_of(row, tokenizer)
        if dialog is not None:
            example = Example(row[keys.QUERY], row[keys.ANSWER], extra)
            plain[-1]["dialog"] = dialog if messages is None else {"prompt": messages(example), **dialog}
    return plain


@dataclass
class StepLog:
    """The ``log`` of the loop; it also adds up the seconds of each phase for the closing table.

    ``messages`` is that of :func:`rollout_rows`.
    """

    run_log: RunLog
    progress: Progress
    tokenizer: Any
    publish_seconds: Callable[[], float]
    examine: ExamineLog
    stored: StoredSteps
    messages: Callable[[Example], Messages] | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = ZeroAdvantageWatch(self.progress.total)
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The clock of a step starts here."""
        self._began = time.perf_counter()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count ``seconds`` to ``phase`` (``time/..._s``) of the closing table."""
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds

    def write(self, step: int, batch: RowTable, update: Mapping[str, Any], source: Mapping[str, float]) -> None:
        """A row of ``metrics.jsonl``, picks for ``rollouts.jsonl``, a progress line, perhaps the step in ``steps/``."""
        seconds = time.perf_counter() - self._began
        metrics: dict[str, Any] = {"kl": None, "time/ref_s": 0.0}  # as it stands without a reference
        metrics |= batch_metrics(batch, version=step) | dict(source) | dict(update)
        metrics |= {"version": step + 1, "time/publish_s": self.publish_seconds(), "time/step_s": seconds}
        tokens = metrics["response_tokens/mean"] * len(batch)
        metrics["tokens_per_s"] = tokens / seconds
        metrics["groups/trained"] = len(batch.get(keys.GROUP_ID).unique())
        metrics["dialog_turns"] = (step + 1) * len(batch)
        metrics |= system_metrics()
        for name, value in metrics.items():
            if name.startswith("time/"):
                self.add_seconds(name, value)
        self.run_log.write_step(step, metrics)
        rows = rollout_rows(batch, self.tokenizer, self.messages)
        self.run_log.write_rollouts(step, rows)
        self.examine.write(step, rows)
        stored_s = self.stored.write(step, metrics, batch, rows)
        if stored_s:
            self.add_seconds("time/store_s", stored_s)
        self.progress.update(step + 1, metrics)
        self.watch.look(step, metrics)


class StoredSteps:
    """The learner as the loop sees it; every step that follows saved weights is kept whole in ``steps/``.

    Before such a step the learner is asked for the log-probs and entropies of its tokens, which cost one forward pass.
    The first step of a start is one of them: it follows the initial weights, or those of a checkpoint. Where all this
    has come to more than ``SHARE`` of the time since the start (and to more than ``FREE_S``), steps are left out until
    it is less.

    Args:
        learner: a :class:`sota_grpo.training.learner.Learner`, or its facade over several processes.
        run_dir: where ``steps/`` is.
        tokenizer: decodes the tokens.
        device: ``cpu`` or ``cuda``, the learner's.
        enabled: False stores nothing.
    """

    def __init__(self, learner: Any, run_dir: Path, tokenizer: Any, *, device: str, enabled: bool):
        self.learner, self.run_dir, self.tokenizer = learner, run_dir, tokenizer
        self.device, self.enabled = device, enabled
        self.due = enabled
        self._began, self._spent_s = time.monotonic(), 0.0
        self._before: tuple[torch.Tensor, Origin, float] | None = None
        self._alone = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    @property
    def version(self) -> int:
        return self.learner.version

    def update(self, rows: RowTable) -> dict[str, float | None]:
        """The learner's own, after a look at the rows of a step that will be stored."""
        self._before = None
        if self.due:
            began = time.perf_counter()
            measured = self.learner.measured(rows)
            origin = Origin(
                device=self.device,
                precision=self.learner.settings.precision,
                num_ranks=len(getattr(self.learner, "workers", ())),
                num_threads=torch.get_num_threads(),
                rng=torch.get_rng_state(),
            )
            self._before = measured, origin, time.perf_counter() - began
        self.due = False
        return self.learner.update(rows)

    def after_checkpoint(self) -> None:
        """The next step follows saved weights."""
        allowed_s = max(FREE_S, SHARE * (time.monotonic() - self._began))
        self.due = self.enabled and self._spent_s <= allowed_s

    def write(
        self, step: int, metrics: Mapping[str, float | None], batch: RowTable, fields: list[dict[str, Any]]
    ) -> float:
        """Store the step whose update came last, if it is to be stored; the seconds that this took, look included.

        Args:
            fields: :func:`rollout_rows` of the batch.
        """
        if self._before is None:
            return 0.0
        began = time.perf_counter()
        measured, origin, seconds = self._before
        self._before = None

        def decode(ids: Sequence[int]) -> str:
            return self._alone(ids[0]) if len(ids) == 1 else self.tokenizer.decode(ids)

        stored = StoredStep(
            step=step,
            metrics=metrics,
            rows=batch,
            fields=fields,
            pieces=[text_pieces(ids.tolist(), decode) for ids in batch.parts(keys.RESPONSE_TOKENS)],
            measured=list(measured.split(batch.lengths(keys.FULL_TOKENS), dim=-1)),
            origin=origin,
        )
        save_step(self.run_dir, stored)
        seconds += time.perf_counter() - began
        self._spent_s += seconds
        return seconds


def dialog_of(row: Row, tokenizer: Any) -> dict[str, Any] | None:
    """The turns after the prompt; None of a response that the policy wrote at one go, without tools.

    ``turns`` are in the order of the tokens, each with ``role``, ``trained`` (whether the policy wrote it; the others
    are masked out of the loss), ``tokens`` (how many) and ``text`` (decoded, special tokens included). A turn of the
    policy with calls has ``calls``: ``name``, ``arguments``, ``reply`` (None: there was none) and ``error`` (whether
    the call failed). Of a dialog with tools, ``ended`` says how it ended and ``error`` why its environment was lost
    (:class:`sota_grpo.envs.dialogs.ToolEpisode`).

    Three tokens of the policy, two of a tool, one of the policy::

        mask    1 1 1 0 0 1
        turns   assistant 3, tool 2, assistant 1
    """
    ids = row[keys.RESPONSE_TOKENS]
    said = row[keys.ASSISTANT_MASK][-len(ids) :]
    record = json.loads(row[keys.DIALOG], parse_constant=str) if keys.DIALOG in row else None
    if record is None and bool(said.all()):
        return None
    turns, start = [], 0
    told, replied = iter(_told(record or {})), ["user"]  # what stands before the policy's first turn is of a user
    for trained, each in groupby(said.tolist()):
        count = len(list(each))
        text = tokenizer.decode(ids[start : start + count])
        turn = {"role": "assistant", "trained": trained, "tokens": count, "text": text}
        if trained:
            calls, replied = next(told, ([], []))
            turn |= {"calls": calls} if calls else {}
        else:
            turn["role"] = " and ".join(dict.fromkeys(replied)) or "unknown"
        turns.append(turn)
        start += count
    ended = {name: record[name] for name in ("ended", "error") if record and name in record}
    return {"turns": turns, **ended}


def _told(record: Mapping[str, Any]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """For each turn of the policy: its calls, and the roles of those who answered."""
    for replies in record.get("replies", ()):
        yield [], [reply["role"] for reply in replies]
    messages, failed = record.get("messages", ()), set(record.get("failed", ()))
    at = 0
    while at < len(messages):
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        called = [call["function"] for call in messages[at].get("tool_calls", ())]
        answers = [(messages[i]["content"], i in failed) for i in range(at + 1, end)]
        answers += [(None, False)] * (len(called) - len(answers))
        yield (
            [{**call, "reply": reply, "error": error} for call, (reply, error) in zip(called, answers)],
            [message["role"] for message in messages[at + 1 : end]],
        )
        at = end
