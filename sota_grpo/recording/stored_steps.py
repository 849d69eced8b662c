"""Store whole training steps of a run in ``steps/``, for reports and ``sota-grpo replay``.

``steps/step_000020.pt`` has the learner's rows, each token's log-prob and entropy before step 20, and the metrics.
Stored are the first step of a start and the first after each checkpoint (``checkpoint_000020.pt`` has the weights
before step 20), unless that takes too much time. Reading a stored step needs neither model nor tokenizer.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError, writing
from sota_grpo.files import atomic_file, drop_leftovers
from sota_grpo.recording.run_files import STEPS_FOLDER, unreadable
from sota_grpo.rl.table import Key, RowTable
from sota_grpo.text import os_reason
from sota_grpo.untrusted import NO_TENSORS, open_file

MOST_BYTES = 2 << 30  # of all stored steps; beyond it the oldest are deleted, except step 0
SHARE, FREE_S = 0.03, 30.0  # fraction of the run's time that storing may take; seconds that it may always take

_NAME = re.compile(r"step_(\d{6,})\.pt")
# not stored: columns that the learner writes; parts of the full tokens
_OF_THE_LEARNER = (keys.LOSS_WEIGHT, keys.PROXIMAL_LOG_PROBS, keys.OBJECTIVE_MASK)
_LEFT_OUT = (*_OF_THE_LEARNER, keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS)
_ROW_TEXTS: tuple[Key, ...] = (keys.QUERY, keys.ANSWER, keys.EXTRA, keys.RESPONSE_TEXT, keys.REWARD_INFO)
_HALF = "\ufffd"  # a decoder's text for an incomplete character
_MOST_HELD = 64  # most tokens of one character


@dataclass(frozen=True)
class Origin:
    """The device, precision and random state that a step was computed with."""

    device: str  # cpu or cuda
    precision: str  # autocast of the learner: fp32, bf16 or fp16
    num_ranks: int  # processes of the learner; 0: the learner ran in the driver process
    num_threads: int  # torch CPU threads of the driver process
    rng: Tensor  # state of the driver's torch generator before the update, uint8


@dataclass(frozen=True)
class StoredStep:
    """A stored training step; ``fields``, ``pieces`` and ``measured`` (or None) have one entry per row of ``rows``."""

    step: int  # counted from 0
    metrics: Mapping[str, float | None]  # the step's row of metrics.jsonl
    rows: RowTable  # the learner's batch
    fields: list[dict[str, Any]]  # sota_grpo.recording.run_log.ROLLOUT_FIELDS
    pieces: list[list[str]]  # the text of each token after the prompt; see text_pieces
    #: ``[2, T_i]``: the learner's log-probs and entropies before the step, in nats, without dropout, 0 outside the
    #: assistant mask; None if they were not computed.
    measured: list[Tensor] | None
    origin: Origin

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Per row a dict of its ``fields`` and of lists with one entry per token after the prompt.

        ``pieces`` (str; joined, the decoded response), ``assistant`` (bool), ``log_probs`` (of the behaviour policy),
        ``policy_log_probs``, ``ref_log_probs``, ``entropy``; in nats, 0 outside the assistant mask. Each of the
        last three is None if unknown.
        """
        samples = []
        measured: Sequence[Any] = self.measured or [(None, None)] * len(self.rows)
        for row, fields, pieces, (probs, entropy) in zip(self.rows, self.fields, self.pieces, measured, strict=True):
            start = len(row[keys.PROMPT_TOKENS])
            values = {
                "assistant": row[keys.ASSISTANT_MASK],
                "log_probs": row[keys.LOG_PROBS],
                "policy_log_probs": probs,
                "ref_log_probs": row.get(keys.REF_LOG_PROBS, None),
                "entropy": entropy,
            }
            lists = {name: None if value is None else value[start:].tolist() for name, value in values.items()}
            samples.append({**fields, "pieces": pieces, **lists})
        return samples


def stored_steps(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return {step: file} of a run's stored steps (perhaps none), in order; UserError if the folder is unreadable."""
    folder = Path(run_dir) / STEPS_FOLDER
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise unreadable(folder, error) from error
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def save_step(run_dir: str | os.PathLike[str], stored: StoredStep, *, most_bytes: int = MOST_BYTES) -> Path:
    """Write a step to ``steps/`` atomically and return its path; RunFailed if the file cannot be written.

    Then delete the oldest steps, but not step 0 or the new step, while the files have more than ``most_bytes`` in sum.
    """
    path = Path(run_dir) / STEPS_FOLDER / f"step_{stored.step:06d}.pt"
    tensors = [key for key, column in stored.rows.columns.items() if isinstance(column.values, Tensor)]
    saved = stored.rows.only(key for key in tensors if key not in _LEFT_OUT).state_dict()["columns"]
    content = {  # loadable by torch.load(weights_only=True), with any characters in the texts
        "step": stored.step,
        "metrics": {name: None if value is None else float(value) for name, value in stored.metrics.items()},
        "columns": [
            (each["path"], each["rows"].tolist(), each["shapes"].tolist(), each["values"].detach().cpu())
            for each in saved
        ],
        "prompt_tokens": torch.tensor(stored.rows.lengths(keys.PROMPT_TOKENS)),
        "row_texts": json.dumps([[row.get(key) for row in stored.rows] for key in _ROW_TEXTS]),
        "fields": json.dumps(stored.fields),
        "pieces": json.dumps(stored.pieces),
        "measured": None if stored.measured is None else torch.cat(stored.measured, dim=-1),
        "origin": asdict(stored.origin),
    }
    buffer = io.BytesIO()  # torch's own writer would hide the reason of a failed write
    torch.save(content, buffer)
    fix = "free disk space or set logging.store_steps=false, then continue from the last checkpoint with "
    with writing(path, fix + "train.resume=auto", RunFailed):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    others = stored_steps(run_dir)
    excess = sum(other.stat().st_size for other in others.values()) - most_bytes
    for step, other in others.items():
        if excess > 0 and step not in (0, stored.step):
            excess -= other.stat().st_size
            other.unlink()
    return path


class StoredSteps:
    """Stores the first step of a process, and each step after a checkpoint, in ``steps/``.

    The step's batch passes through :meth:`measure`, the collector's ``post_collect_hook`` while a step is due, before
    the learner trains on it; :meth:`write` then stores the step. Storing a step takes an additional forward pass. A
    step is not stored if storing has taken more than ``FREE_S`` seconds and more than ``SHARE`` of the time since this
    object was created.

    ``learner`` may be a proxy over several processes; ``device`` is its own, cpu or cuda. ``enabled`` False stores no
    step.
    """

    def __init__(self, collector: Any, learner: Any, run_dir: Path, tokenizer: Any, *, device: str, enabled: bool):
        self.collector, self.learner, self.run_dir, self.tokenizer = collector, learner, run_dir, tokenizer
        self.device, self.enabled = device, enabled
        self.before: tuple[torch.Tensor, Origin, float] | None = None  # of a step that :meth:`write` is to store
        self._began, self._spent_s = time.monotonic(), 0.0
        self._alone = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
        self.after_checkpoint()

    def after_checkpoint(self) -> None:
        """Store the next step, unless storing has taken too much time; called after a checkpoint."""
        allowed_s = max(FREE_S, SHARE * (time.monotonic() - self._began))
        self.collector.post_collect_hook = self.measure if self.enabled and self._spent_s <= allowed_s else None

    def measure(self, rows: RowTable) -> None:
        """Compute the learner's log-probs of a batch, before it is trained on; only of this batch."""
        self.collector.post_collect_hook = None
        began = time.perf_counter()
        measured = self.learner.measured(rows)
        origin = Origin(
            device=self.device,
            precision=self.learner.settings.precision,
            num_ranks=len(getattr(self.learner, "workers", ())),
            num_threads=torch.get_num_threads(),
            rng=torch.get_rng_state(),
        )
        self.before = measured, origin, time.perf_counter() - began

    def write(
        self, step: int, metrics: Mapping[str, float | None], batch: RowTable, fields: list[dict[str, Any]]
    ) -> float:
        """Store the step whose log-probs were computed ``before`` it; return the seconds of both.

        ``fields``: :func:`sota_grpo.recording.run_log.rollout_rows` of the batch. RunFailed if a write fails.
        """
        assert self.before is not None
        began = time.perf_counter()
        (measured, origin, seconds), self.before = self.before, None

        def decode(ids: Sequence[int]) -> str:
            return self._alone(ids[0]) if len(ids) == 1 else self.tokenizer.decode(ids)

        stored = StoredStep(
            step=step,
            metrics=metrics,
            rows=batch,
            fields=fields,
            pieces=[text_pieces(ids.tolist(), decode) for ids in batch.cells(keys.RESPONSE_TOKENS)],
            measured=list(measured.split(batch.lengths(keys.FULL_TOKENS), dim=-1)),
            origin=origin,
        )
        save_step(self.run_dir, stored)
        seconds += time.perf_counter() - began
        self._spent_s += seconds
        return seconds


def read_step(path: str | os.PathLike[str]) -> StoredStep:
    """Read a file of :func:`stored_steps` without executing code in it; UserError if it is unreadable or damaged."""
    try:
        file = open_file(path, most_bytes=2 * MOST_BYTES, levels=2)
    except OSError as error:
        raise UserError(f"The stored step {path} cannot be read: {os_reason(error)}.") from error
    try:
        with file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        prompt_tokens, measured = content["prompt_tokens"].tolist(), content["measured"]
        names = ("path", "rows", "shapes", "values")
        saved = [dict(zip(names, (path, *map(torch.as_tensor, others)))) for path, *others in content["columns"]]
        rows = RowTable.of_state({"num_rows": len(prompt_tokens), "columns": saved})
        full = list(zip(rows.cells(keys.FULL_TOKENS), prompt_tokens))
        rows.set(keys.PROMPT_TOKENS, [ids[:length] for ids, length in full])
        rows.set(keys.RESPONSE_TOKENS, [ids[length:] for ids, length in full])
        for name, column in zip(_ROW_TEXTS, json.loads(content["row_texts"]), strict=True):
            rows.set(name, column)
        return StoredStep(
            step=content["step"],
            metrics=content["metrics"],
            rows=rows,
            fields=json.loads(content["fields"]),
            pieces=json.loads(content["pieces"]),
            measured=None if measured is None else list(measured.split(rows.lengths(keys.FULL_TOKENS), dim=-1)),
            origin=Origin(**content["origin"]),
        )
    except (OSError, *NO_TENSORS) as error:  # OSError: torch seeks before the beginning of a short file
        raise UserError(f"{path} is damaged or not a stored step ({type(error).__name__}); remove it.") from error


def drop_steps(run_dir: str | os.PathLike[str], first_step: int) -> None:
    """Delete steps from ``first_step`` on and partial files; UserError if ``steps/`` is unreadable, else OSError."""
    for step, path in stored_steps(run_dir).items():
        if step >= first_step:
            path.unlink()
    drop_leftovers(Path(run_dir) / STEPS_FOLDER)


def text_pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text that each token adds to ``decode(ids)``; the concatenated pieces are ``decode(ids)``.

    A character of several tokens belongs to the last one. A leading space that ``decode`` drops from a token
    decoded alone belongs to that token.

    >>> text_pieces([0xE2, 0x82, 0xAC, 0x35], lambda ids: bytes(ids).decode(errors="replace"))
    ['', '', '€', '5']
    """
    whole, at = decode(ids), 0
    pieces: list[str] = []
    held: list[int] = []
    for token in ids:
        held.append(token)
        text, start = decode(held) if len(held) <= _MOST_HELD else _HALF, at
        while not whole.startswith(text, start) and whole.startswith(" ", start):
            start += 1
        is_whole = not text.endswith(_HALF) and whole.startswith(text, start)
        end = start + len(text) if is_whole else at
        pieces.append(whole[at:end])
        if is_whole:
            at, held = end, []
    if pieces:
        pieces[-1] += whole[at:]
    return pieces
