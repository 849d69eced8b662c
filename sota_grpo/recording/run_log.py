"""Write the log files of a run: ``metrics.jsonl``, ``rollouts.jsonl``, ``debug_logs/``, ``training.log``, sinks.

:func:`batch_metrics` and :func:`rollout_rows` compute the metrics and rows of a step from its batch.

A step's lines are written at once and flushed, so a killed run loses at most those. A step must be logged before its
checkpoint is saved: then a resumed run finds every step of its checkpoint, drops later steps and logs them again.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import numbers
import os
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from sota_grpo import keys
from sota_grpo.errors import RunFailed, writing
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import declared, info_metric, is_number, responses_trained, term_metric
from sota_grpo.recording.progress import Progress, ZeroAdvantageWatch
from sota_grpo.recording.run_files import DEBUG_FOLDER, METRICS_FILE, ROLLOUTS_FILE, json_line, read_rows, whole_lines
from sota_grpo.recording.sinks import CopySink
from sota_grpo.recording.stored_steps import StoredSteps, drop_steps
from sota_grpo.rl.records import TASK, Example, metric_tasks
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.rl.task import Task
from sota_grpo.text import ReadableFormatter, one_line, os_reason, readable
from sota_grpo.text import json_line as as_json

logger = logging.getLogger(__name__)

TRAINING_LOG = "training.log"
ROLLOUT_FIELDS = (
    *("group_id", "sample_id", "query", "answer", "prompt", "response", "response_tokens", "success"),
    *("reward", "reward_terms", "reward_info", "advantage", "truncated", "policy_version"),
)
#: Fields that only some responses have: the task in a run of several tasks, the turns of a dialog.
SOME_FIELDS = ("task", "dialog")
Fields = Mapping[str, Any]  # a row of rollouts.jsonl
_RULE = "=" * 100
_FIX = "free disk space, then continue from the last checkpoint with train.resume=auto"


class RunLog:
    """Writes the metrics and responses of each step to the run directory, and copies them to ``sinks``.

    The constructor creates missing files and removes an incomplete last line of a killed run; UserError if that fails.
    The owner adds to ``phase_seconds``, the total seconds since this start by phase (``time/..._s``).

    Args:
        sinks: further destinations; :meth:`close`, or the end of a ``with`` block, closes them.
        num_examine: completions per step in a new ``debug_logs/grpo_debug_<UTC time of the first write>.txt``; 0: none.
        term_weights: weights of the reward terms, for the debug log; a term without a weight (a penalty) has 1.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        sinks: Sequence[CopySink] = (),
        num_examine: int = 0,
        term_weights: Mapping[str, float] | None = None,
    ):
        self._run_dir, self._sinks = Path(run_dir), tuple(sinks)
        self._num_examine, self._term_weights = num_examine, dict(term_weights or {})
        self._debug_log: Path | None = None  # until the first write
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            path = _writable(self._run_dir / name)
            end = max((offset + len(line) for _, offset, line in whole_lines(path)), default=0)
            if end < path.stat().st_size:
                os.truncate(path, end)

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append ``{"step": step, **metrics}`` to ``metrics.jsonl`` and the sinks; an evaluation is a separate line.

        None means that the quantity could not be measured. NaN, infinity and undeclared names raise ValueError, a
        failed write RunFailed.
        """
        row: dict[str, float | int | None] = dict(metrics)
        for name, value in metrics.items():
            declared(name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"The metric {name} at step {step} is {value}: pass None if it was not measured.")
            if value is not None:
                row[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self._append(self._run_dir / METRICS_FILE, as_json({"step": step, **row}) + "\n")
        for sink in self._sinks:
            sink.log(step, row)

    def write_rollouts(self, step: int, rows: Sequence[Fields]) -> None:
        """Append each group's best and worst response to ``rollouts.jsonl``, and copy both to the sinks.

        Among equal rewards the smallest ``sample_id`` is chosen; a group whose rewards are all equal gives one row. Up
        to ``num_examine`` of all responses go to the debug log. ``rows`` are all responses of the batch, each with
        ``ROLLOUT_FIELDS`` and optionally ``SOME_FIELDS`` (which sinks do not get). RunFailed if a write fails.
        """
        groups: dict[int, list[Fields]] = {}
        for row in rows:
            groups.setdefault(row["group_id"], []).append(row)
        picked = []
        for siblings in groups.values():
            best, worst = (min(siblings, key=lambda row: (sign * row["reward"], row["sample_id"])) for sign in (-1, 1))
            picked += [best] if best is worst else [best, worst]
        lines, samples = (
            [{"step": step} | {name: row[name] for name in names if name in row} for row in picked]
            for names in ((*ROLLOUT_FIELDS, *SOME_FIELDS), ROLLOUT_FIELDS)
        )
        self._append(self._run_dir / ROLLOUTS_FILE, "".join(as_json(row, allow_nan=False) + "\n" for row in lines))
        for sink in self._sinks:
            sink.log_samples(step, samples)
        if self._num_examine and rows:
            shown = pick(rows, self._num_examine, step)
            name = f"grpo_debug_{datetime.now(UTC):%Y%m%d_%H%M%S}.txt"
            self._debug_log = self._debug_log or self._run_dir / DEBUG_FOLDER / name
            text = "".join(described(step, row, why, self._term_weights) for why, row in shown)
            fix = _FIX.replace("space", "space or set logging.num_examine=0")
            with writing(self._debug_log.parent, fix, RunFailed):
                self._debug_log.parent.mkdir(exist_ok=True)
            self._append(self._debug_log, text, fix)

    def rewind(self, first_step: int) -> int:
        """Delete the lines and stored steps from ``first_step`` on, rewind sinks that can; return the number of lines.

        Call this before writing the first step. Each file is replaced atomically; UserError if a line is invalid,
        RunFailed if a file cannot be read or replaced.
        """
        dropped = 0
        for path in (self._run_dir / METRICS_FILE, self._run_dir / ROLLOUTS_FILE):
            with writing(path, _FIX, RunFailed), path.open("rb") as lines:
                is_kept = [json_line(line, path, number)["step"] < first_step for number, line in enumerate(lines, 1)]
                if not all(is_kept):
                    lines.seek(0)
                    with atomic_file(path, durable=True) as temporary, temporary.open("wb") as file:
                        file.writelines(itertools.compress(lines, is_kept))
            dropped += is_kept.count(False)
        for sink in self._sinks:
            sink.rewind(first_step)
        drop_steps(self._run_dir, first_step)
        return dropped

    def close(self, exit_code: int = 0) -> None:
        """Close the sinks; ``exit_code`` is 0 if the run succeeded. Idempotent."""
        for sink in self._sinks:
            sink.close(exit_code)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0 if kind is None else 1)

    def _append(self, path: Path, text: str, fix: str = _FIX) -> None:
        with writing(path, fix, RunFailed), path.open("ab") as file:
            file.write(text.encode())


class _TrainingLog(logging.FileHandler):
    """The handler of ``training.log``; a second run in the same process replaces it.

    If a write fails, as on a full disk, one warning is shown; later records are tried again.
    """

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            message = f"{self.baseFilename} cannot be written ({os_reason(error)}); records are missing there."
            logging.getLogger("sota_grpo").warning("%s", message)

    def close(self) -> None:
        with suppress(OSError):  # of what is still buffered
            super().close()


def setup_logging(run_dir: str | os.PathLike[str]) -> logging.Handler:
    """Append ``sota_grpo`` logs from INFO on to ``training.log``, no more to an earlier run's; UserError on failure."""
    path = _writable(Path(run_dir) / TRAINING_LOG)
    handler = _TrainingLog(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(ReadableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("sota_grpo")
    for old in [one for one in logger.handlers if one.name == TRAINING_LOG]:
        logger.removeHandler(old)
        old.close()
    handler.name = TRAINING_LOG
    logger.addHandler(handler)
    handler.setLevel(logging.INFO)
    logger.setLevel(logging.INFO)
    return handler


def _writable(path: Path) -> Path:
    """Create the directory of ``path``, check that ``path`` can be opened for appending, and return it."""
    with writing(path, "choose a writable run directory with hydra.run.dir=PATH"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    return path


def system_metrics() -> dict[str, float]:
    """Return the available ``system/`` metrics; CPU use: since the thread's last call (or psutil's import), or 0."""
    values = {
        "system/memory_gib": psutil.Process().memory_info().rss / 2**30,
        "system/host_memory": psutil.virtual_memory().percent / 100,
        "system/cpu": psutil.cpu_percent() / 100,
    }
    if torch.cuda.is_initialized():
        values["system/gpu_memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
    with suppress(Exception):  # a missing NVML package or a driver failure raises many types
        busy = [torch.cuda.utilization(index) / 100 for index in range(torch.cuda.device_count())]
        values |= {"system/gpu": sum(busy) / len(busy)}
    return values


class StepLog:
    """The training loop's ``log``: logs each step and shows the progress line.

    ``dialog_turns`` continues from ``metrics.jsonl`` (UserError if unreadable), so call :meth:`RunLog.rewind` before.
    ``task.messages`` are the prompts of dialogs; ``publish_seconds`` returns the seconds of the last weight sync.
    """

    def __init__(
        self,
        run_log: RunLog,
        progress: Progress,
        stored: StoredSteps,
        tokenizer: Any,
        task: Task,
        publish_seconds: Callable[[], float],
    ) -> None:
        self._run_log, self._progress, self._stored = run_log, progress, stored
        self._tokenizer, self._task, self._publish_seconds = tokenizer, task, publish_seconds
        self._watch = ZeroAdvantageWatch(progress.total)
        self._responses = responses_trained(read_rows(stored.run_dir / METRICS_FILE))
        self.begin()

    def begin(self) -> None:
        """Start timing a step; :meth:`write` logs the time since then."""
        self._began = time.perf_counter()

    def write(self, step: int, batch: RowTable, update: Mapping[str, Any], source: Mapping[str, float]) -> None:
        """Write a step's metrics and responses, and if due the whole step in ``steps/``; update the progress line.

        Steps count from 0; ``update`` and ``source`` are metrics of learner and collector. RunFailed if it fails.
        """
        seconds = time.perf_counter() - self._began
        metrics: dict[str, Any] = {"kl": None, "time/ref_s": 0.0}  # without a reference
        metrics |= batch_metrics(batch, version=step) | dict(source) | dict(update)
        metrics |= {"version": step + 1, "time/publish_s": self._publish_seconds(), "time/step_s": seconds}
        metrics["tokens_per_s"] = metrics["response_tokens/mean"] * len(batch) / seconds
        metrics["groups/trained"] = len(batch.get(keys.GROUP_ID).unique())
        self._responses += len(batch)
        metrics["dialog_turns"] = self._responses
        metrics |= system_metrics()
        for name, value in metrics.items():
            if name.startswith("time/"):
                self._run_log.phase_seconds[name] += value
        self._run_log.write_step(step, metrics)
        rows = rollout_rows(batch, self._tokenizer, self._task.messages)
        self._run_log.write_rollouts(step, rows)
        if self._stored.before is not None:
            self._run_log.phase_seconds["time/store_s"] += self._stored.write(step, metrics, batch, rows)
        self._progress.update(step + 1, metrics)
        self._watch.look(step, metrics, len(batch))


def pick(rows: Sequence[Fields], count: int, step: int) -> list[tuple[str, Fields]]:
    """Return up to ``count`` pairs (reason, row): the best row, the worst row, then random ones.

    Ties are broken at random, too. The random seed is ``step``, so a repeated step gives the same rows.

    >>> rows = [{"sample_id": i, "reward": reward} for i, reward in enumerate([0.5, 1.0, 0.0, 0.5])]
    >>> [(why, row["sample_id"]) for why, row in pick(rows, 2, step=0)]
    [('best of 4', 1), ('worst of 4', 2)]
    """
    rest = random.Random(step).sample(list(rows), len(rows))
    picked: list[tuple[str, Fields]] = []
    for why, choose in (("best", max), ("worst", min)):
        if rest and len(picked) < count:
            row = choose(rest, key=lambda row: row["reward"])
            rest = [other for other in rest if other is not row]
            picked.append((f"{why} of {len(rows)}", row))
    return picked + [(f"random one of {len(rows)}", row) for row in rest[: count - len(picked)]]


def described(step: int, row: Fields, why: str, term_weights: Mapping[str, float]) -> str:
    """Return a completion and its rewards as readable text; ``why``: the reason why the completion is shown.

    Texts are escaped and each of their lines begins with a bar, so they cannot control a terminal or imitate the log.
    """

    def quoted(text: str) -> str:
        return "\n".join(f"  | {line}" for line in readable(text).split("\n"))

    cut = ", cut for length" if row["truncated"] else ""
    success = "yes" if row["success"] else "no"
    facts = [f"advantage {row['advantage']:.4f}", f"success {success}", f"policy version {row['policy_version']}"]
    facts += [one_line(f"grader: {name} = {value}", limit=None) for name, value in row["reward_info"].items()]
    lines = []
    for name, value in row["reward_terms"].items():  # those that apply to the response
        weight = term_weights.get(name, 1.0)
        lines.append(f"{one_line(name, limit=None):<20}  {value:8.4f} x {weight:8.4f} = {weight * value:8.4f}")
    lines.append(f"{'total':<20}  {'':>22}{row['reward']:8.4f}")
    paragraphs = [
        f"{_RULE}\nstep {step}, group {row['group_id']}, sample {row['sample_id']}: {why}\n{_RULE}",
        f"question\n{quoted(row['query'])}",
        f"gold answer\n{quoted(row['answer'])}",
        f"completion, {row['response_tokens']} tokens{cut}\n{quoted(row['response'])}",
        "\n".join(["reward", *lines]),
        "\n".join(facts),
    ]
    return "\n\n".join(paragraphs) + "\n\n\n"


def batch_metrics(batch: RowTable, version: int) -> dict[str, float]:
    """Return a batch's metrics, with ages from ``version`` (before the step); ValueError: see :func:`term_metric`."""
    lengths = batch.sums(keys.ASSISTANT_MASK).float()
    sampled = batch.flat(keys.ASSISTANT_MASK)  # each row begins with its prompt, so no turn crosses a boundary
    begins = sampled[1:] & ~sampled[:-1]
    if keys.PARENTS in batch.columns:  # a turn of another branch may follow one of the policy's in the row
        jumps = torch.cat([_jumps(row) for row in batch.rows(keys.ASSISTANT_MASK, keys.PARENTS)])
        begins = sampled[1:] & (~sampled[:-1] | jumps[1:])
    turns = begins.sum() / len(batch)
    prompts = torch.tensor(batch.lengths(keys.PROMPT_TOKENS)).float()

    def column(key: Any) -> torch.Tensor:
        return batch.get(key).flatten().double()  # a sum may be too large for float32

    reward, success, truncated, versions = map(column, (keys.REWARD, keys.SUCCESS, keys.TRUNCATED, keys.POLICY_VERSION))
    age = version - versions.where(versions != -1, version)  # -1: an agent that made no request
    values = {
        "reward": reward.mean(),
        "reward/std": reward.std(correction=0),
        "success": success.mean(),
        "reward_errors": column(keys.REWARD_ERROR).sum(),
        "reward_timeouts": column(keys.REWARD_TIMEOUT).sum(),
        "advantage": column(keys.ADVANTAGE).abs().mean(),
        "truncated": truncated.mean(),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "prompt_tokens/mean": prompts.mean(),
        "turns/mean": turns,
        "turn_tokens/mean": lengths.mean() / turns.clamp(min=1 / len(batch)),  # 0 without a turn
        "policy_age/mean": age.mean(),
        "policy_age/max": age.max(),
    }
    if keys.SUPPORT_COUNTS in batch.columns:
        values["kept_tokens"] = batch.flat(keys.SUPPORT_COUNTS).sum() / sampled.sum().clamp(min=1)
    means = {name: float(value) for name, value in values.items()}
    for name in sorted(batch.names(keys.REWARD_TERMS)):
        terms = batch.columns[*keys.REWARD_TERMS, name].cells()  # of the responses to which the term applies
        means[term_metric(name)] = statistics.fmean(map(float, terms))
    rows = batch.rows(keys.EXTRA, keys.REWARD_INFO)
    extras = [_extra(row) for row in rows]
    infos: dict[str, list[float]] = {}
    named: dict[str, str] = {}  # the grader's name of each metric
    for row, extra in zip(rows, extras, strict=True):
        for name, value in filter(lambda item: is_number(item[1]), _info(row).items()):
            metric = info_metric(name, extra.get(TASK))
            if (first := named.setdefault(metric, name)) == name:
                infos.setdefault(metric, []).append(float(value))
            else:
                _warn_of_one_name(metric, first, name)
    means |= {name: statistics.fmean(infos[name]) for name in sorted(infos)}
    columns = {"reward": reward, "success": success, "truncated": truncated, "response_tokens": lengths}
    tasks = [metric_tasks(extra) for extra in extras]
    for task in sorted({task for names in tasks for task in names}):
        mask = torch.tensor([task in names for names in tasks])
        means |= {f"task/{task}/{name}": float(column[mask].mean()) for name, column in columns.items()}
        means[f"task/{task}/responses"] = float(mask.sum())
    return means


_parsed = lru_cache(maxsize=1)(json.loads)  # siblings have equal texts


def _extra(row: Row) -> dict[str, Any]:
    return _parsed(row[keys.EXTRA]) if keys.EXTRA in row else {}


def _info(row: Row) -> dict[str, Any]:
    return json.loads(row[keys.REWARD_INFO], parse_constant=str)  # without NaN: the logs are JSON


@lru_cache
def _warn_of_one_name(metric: str, logged: str, name: str) -> None:
    """Log, once per process, that a grader's number ``name`` has no metric, because ``logged`` has its name."""
    logger.warning("%s is the grader's %r; its %r would have that name: rename one to log both.", metric, logged, name)


def _jumps(row: Row) -> torch.Tensor:
    """Return bool ``[T]``: tokens of a tree that do not follow the token before them in the row."""
    line = torch.arange(-1, len(row[keys.ASSISTANT_MASK]) - 1)
    return row[keys.PARENTS] != line if keys.PARENTS in row else torch.zeros_like(line, dtype=torch.bool)


def rollout_rows(
    batch: RowTable, tokenizer: Any, messages: Callable[[Example], Sequence[Mapping[str, str]]] | None = None
) -> list[dict[str, Any]]:
    """Return a row of ``rollouts.jsonl`` per response; ``messages`` (``Task.messages``): of each dialog's prompt."""
    prompts: dict[int, str] = {}
    plain: list[dict[str, Any]] = []
    for row in batch.rows():
        group_id, extra = int(row[keys.GROUP_ID]), _extra(row)
        if group_id not in prompts:
            prompts[group_id] = tokenizer.decode(row[keys.PROMPT_TOKENS])
        response = row[keys.RESPONSE_TOKENS]
        at_one_go = bool(row[keys.ASSISTANT_MASK][len(row[keys.ASSISTANT_MASK]) - len(response) :].all())
        plain.append(
            {
                "group_id": group_id,
                "sample_id": int(row[keys.SAMPLE_ID]),
                "query": row[keys.QUERY],
                "answer": row[keys.ANSWER],
                "prompt": prompts[group_id],
                # the graded text; with user or tool turns, the decoded tokens, special tokens included
                "response": row[keys.RESPONSE_TEXT] if at_one_go else tokenizer.decode(response),
                "response_tokens": int(row[keys.ASSISTANT_MASK].sum()),
                "success": bool(row[keys.SUCCESS]),
                "reward": float(row[keys.REWARD]),
                "reward_terms": {key[-1]: float(term) for key, term in row.items() if key[:-1] == keys.REWARD_TERMS},
                "reward_info": _info(row),
                "advantage": float(row[keys.ADVANTAGE]),
                "truncated": bool(row[keys.TRUNCATED]),
                "policy_version": int(row[keys.POLICY_VERSION]),
            }
        )
        if tasks := metric_tasks(extra):
            plain[-1]["task"] = tasks[-1]
        if not at_one_go or keys.DIALOG in row:
            dialog, example = dialog_of(row, tokenizer), Example(row[keys.QUERY], row[keys.ANSWER], extra)
            plain[-1]["dialog"] = dialog if messages is None else {"prompt": messages(example), **dialog}
    return plain


def dialog_of(row: Row, tokenizer: Any) -> dict[str, Any]:
    """Return the turns of a dialog after its prompt.

    ``turns``, in token order, have ``role``, ``trained`` (sampled from the policy; others are masked out of the loss),
    ``tokens`` (their number), ``text`` (with special tokens) and, for tool calls outside a tree, ``calls``: a list with
    ``name``, ``arguments``, ``reply`` (or None) and ``error`` (whether the call failed). In a tree, only a turn that
    does not follow the turn before it has ``after``: the index (from 0) of the turn that it follows, -1: it follows the
    prompt, -2: it follows nothing.
    With tools or an agent, ``ended`` is why the dialog ended, ``error`` why its environment or agent failed.

    Three tokens of the policy, two of a tool, one of the policy::

        mask    1 1 1 0 0 1
        turns   assistant 3, tool 2, assistant 1
    """
    ids = row[keys.RESPONSE_TOKENS]
    start, before = 0, len(row[keys.ASSISTANT_MASK]) - len(ids)
    sampled, jumps = row[keys.ASSISTANT_MASK][before:], _jumps(row)[before:]
    record = json.loads(row[keys.DIALOG], parse_constant=str) if keys.DIALOG in row else {}
    turns: list[dict[str, Any]] = []
    of_turns = record if keys.PARENTS not in row else {}  # the messages of a tree are those of one branch
    calls_and_replies, replied = iter(_calls(of_turns)), ["user"]  # turns before the policy's first are a user's
    ends: list[int] = []
    for (trained, _), run in itertools.groupby(zip(sampled.tolist(), jumps.cumsum(0).tolist())):
        count = len(list(run))
        text = tokenizer.decode(ids[start : start + count])
        turn = {"role": "assistant", "trained": trained, "tokens": count, "text": text}
        if jumps[start]:
            parent = int(row[keys.PARENTS][before + start])
            turn["after"] = bisect_right(ends, parent - before) if parent >= before else -1 if parent >= 0 else -2
        if trained:
            calls, replied = next(calls_and_replies, ([], []))
            turn |= {"calls": calls} if calls else {}
        else:
            turn["role"] = " and ".join(dict.fromkeys(replied)) or ("context" if keys.PARENTS in row else "unknown")
        turns.append(turn)
        start += count
        ends.append(start)
    ended = {name: record[name] for name in ("ended", "error") if name in record}
    return {"turns": turns, **ended}


def _calls(record: Mapping[str, Any]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Yield (tool calls, roles of the replies) for each turn of the policy."""
    for replies in record.get("replies", ()):
        yield [], [reply["role"] for reply in replies]
    messages, failed = record.get("messages", ()), set(record.get("failed", ()))
    begins = [at for at, message in enumerate(messages) if at == 0 or message["role"] == "assistant"]
    for at, end in itertools.pairwise([*begins, len(messages)]):
        called = [call["function"] for call in messages[at].get("tool_calls", ())]
        answers = [(messages[i]["content"], i in failed) for i in range(at + 1, end)]
        answers += [(None, False)] * (len(called) - len(answers))
        calls = [{**call, "reply": reply, "error": error} for call, (reply, error) in zip(called, answers)]
        yield calls, [message["role"] for message in messages[at + 1 : end]]
