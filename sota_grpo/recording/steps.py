"""``steps/``: whole turns of a run, to be looked at in a report and computed again by ``sota-grpo replay``.

``steps/step_000020.pt`` is turn 20 (``step`` in ``metrics.jsonl``): every row that the learner was given, what its
weights said of every token before the turn, and the metrics that came of it. Turn 0 is kept and every turn that follows
a checkpoint (``checkpoint_000020.pt`` holds the weights before turn 20). A resumed run drops the turns that it does
again. Reading needs neither the model nor its tokenizer.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_file

STEPS_FOLDER = "steps"
MOST_BYTES = 2 << 30  # of all stored turns; the oldest go first, but for turn 0

_NAME = re.compile(r"step_(\d{6,})\.pt")
_WRITTEN_BY_THE_LEARNER = (keys.LOSS_WEIGHT, keys.PROXIMAL_LOG_PROBS)
_STAND_IN_THE_FULL_TOKENS = (keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS)
_ROW_TEXTS = (keys.QUERY, keys.ANSWER, keys.EXTRA, keys.RESPONSE_TEXT, keys.REWARD_INFO)
_FIELD_TEXTS = ("query", "answer", "prompt", "response")


@dataclass(frozen=True)
class Origin:
    """What a turn was computed by.

    Args:
        device: ``cpu`` or ``cuda``.
        precision: autocast of the learner: ``fp32``, ``bf16`` or ``fp16``.
        num_ranks: processes of the learner; 0: it lived in the process of the loop.
        num_threads: CPU threads of that process.
        rng: its torch generator's state before the update, uint8.
    """

    device: str
    precision: str
    num_ranks: int
    num_threads: int
    rng: Tensor


@dataclass(frozen=True)
class StoredStep:
    """One turn of the loop.

    Args:
        step: counted from 0.
        metrics: its row of ``metrics.jsonl``.
        rows: what the learner was given, one TensorDict per response.
        fields: per row :data:`sota_grpo.recording.run_log.ROLLOUT_FIELDS`.
        pieces: per row the text of each token after the prompt; see :func:`sota_grpo.recording.step_log.text_pieces`.
        measured: per row ``[2, T_i]``, the learner's log-probs and entropies before the turn, in nats, without dropout,
            0 off the assistant mask; None where they were not looked at.
        origin: what computed it.
    """

    step: int
    metrics: Mapping[str, float | None]
    rows: list[TensorDictBase]
    fields: list[dict[str, Any]]
    pieces: list[list[str]]
    measured: list[Tensor] | None
    origin: Origin

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Per row its fields, and lists with one entry per token after the prompt.

        ``pieces`` (str; joined, they are the decoded response, special tokens included), ``assistant`` (bool),
        ``log_probs`` (of the behaviour policy), ``policy_log_probs``, ``ref_log_probs``, ``entropy``: nats, 0 off the
        assistant mask; None, not a list, where there is no such quantity.
        """
        found = []
        for index, (row, fields, pieces) in enumerate(zip(self.rows, self.fields, self.pieces)):
            start = row.get(keys.PROMPT_TOKENS).shape[-1]
            own, entropy = (None, None) if self.measured is None else self.measured[index]
            values = {
                "assistant": row.get(keys.ASSISTANT_MASK),
                "log_probs": row.get(keys.LOG_PROBS),
                "policy_log_probs": own,
                "ref_log_probs": row.get(keys.REF_LOG_PROBS, None),
                "entropy": entropy,
            }
            lists = {name: None if value is None else value[start:].tolist() for name, value in values.items()}
            found.append({**fields, "pieces": pieces, **lists})
        return found


def stored_steps(run_dir: str | os.PathLike[str]) -> list[Path]:
    """The stored turns of a run, the earliest first; none where the folder is missing.

    >>> import tempfile
    >>> stored_steps(tempfile.mkdtemp())
    []
    """
    folder = Path(run_dir) / STEPS_FOLDER
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The turn that a file of ``steps/`` holds.

    >>> step_of(Path("steps/step_000020.pt"))
    20
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a stored turn is: step_000020.pt")
    return int(match[1])


def save_step(run_dir: str | os.PathLike[str], stored: StoredStep, *, most_bytes: int = MOST_BYTES) -> Path:
    """Write a turn under its name once complete, then drop the oldest others above ``most_bytes``, turn 0 last.

    Raises:
        RunFailed: the file system refused.
    """
    path = Path(run_dir) / STEPS_FOLDER / f"step_{stored.step:06d}.pt"
    buffer = io.BytesIO()  # torch's own writer would hide why a disk refuses
    torch.save(_content(stored), buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_bytes(buffer.getbuffer())
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written ({error.strerror}); free space there, or set logging.store_steps=false, then "
            "train.resume=auto continues from the last checkpoint."
        ) from error
    _prune(run_dir, path, most_bytes)
    return path


def read_step(path: str | os.PathLike[str]) -> StoredStep:
    """Read one file of :func:`stored_steps`; no code in it is run.

    Raises:
        UserError: it cannot be read, or is not a stored turn.
    """
    try:
        archive = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"The stored turn {path} cannot be read: {error.strerror}.") from error
    try:
        return _stored(torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged, or no stored turn of this program ({type(error).__name__}).") from error


def drop_steps(run_dir: str | os.PathLike[str], first_step: int) -> None:
    """Delete the turns from ``first_step`` on, which a resumed run does again, and what a kill left half-written."""
    for path in stored_steps(run_dir):
        if step_of(path) >= first_step:
            path.unlink()
    for leftover in (Path(run_dir) / STEPS_FOLDER).glob(".step_*.tmp"):
        leftover.unlink()


def _prune(run_dir: str | os.PathLike[str], newest: Path, most_bytes: int) -> None:
    paths = stored_steps(run_dir)
    excess = sum(path.stat().st_size for path in paths) - most_bytes
    for path in paths:
        if excess > 0 and path != newest and step_of(path) > 0:
            excess -= path.stat().st_size
            path.unlink()


def _content(stored: StoredStep) -> dict[str, Any]:
    """Tensors, numbers and JSON: what ``torch.load(weights_only=True)`` reads, whatever characters the texts have."""
    texts = _Texts()
    fields = [{**each, **{name: texts.index(each[name]) for name in _FIELD_TEXTS}} for each in stored.fields]
    of_rows = [[_text_of(row, key) for row in stored.rows] for key in _ROW_TEXTS]
    return {
        "step": stored.step,
        "metrics": {name: None if value is None else float(value) for name, value in stored.metrics.items()},
        "columns": _columns(stored.rows),
        "prompt_tokens": torch.tensor([row.get(keys.PROMPT_TOKENS).shape[-1] for row in stored.rows]),
        "row_texts": [[None if text is None else texts.index(text) for text in column] for column in of_rows],
        "fields": json.dumps(fields),
        "pieces": json.dumps(["".join(pieces) for pieces in stored.pieces]),
        "piece_lengths": [torch.tensor([len(piece) for piece in pieces]) for pieces in stored.pieces],
        "measured": None if stored.measured is None else torch.cat(stored.measured, dim=-1),
        "texts": json.dumps(list(texts.found)),
        "origin": asdict(stored.origin),
    }


def _stored(content: Mapping[str, Any]) -> StoredStep:
    texts = json.loads(content["texts"])
    rows = _rows(content["columns"], content["prompt_tokens"].tolist())
    for key, column in zip(_ROW_TEXTS, content["row_texts"], strict=True):
        for row, place in zip(rows, column, strict=True):
            if place is not None:
                row.set(key, NonTensorData(texts[place]))
    fields = json.loads(content["fields"])
    for each in fields:
        each.update({name: texts[each[name]] for name in _FIELD_TEXTS})
    lengths = [row.get(keys.FULL_TOKENS).shape[-1] for row in rows]
    measured = content["measured"]
    return StoredStep(
        step=content["step"],
        metrics=content["metrics"],
        rows=rows,
        fields=fields,
        pieces=[_cut(text, ends) for text, ends in zip(json.loads(content["pieces"]), content["piece_lengths"])],
        measured=None if measured is None else list(measured.split(lengths, dim=-1)),
        origin=Origin(**content["origin"]),
    )


class _Texts:
    """Every text once; siblings share theirs."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self.found.setdefault(text, len(self.found))


def _columns(rows: Sequence[TensorDictBase]) -> list[tuple[list[str], list[int], list[list[int]], Tensor]]:
    """Each tensor entry joined over the rows that have it: its name, those rows, its shape in each, its values."""
    found: dict[tuple[str, ...], dict[int, Tensor]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items(include_nested=True, leaves_only=True):
            path = (name,) if isinstance(name, str) else name
            left_out = name in _WRITTEN_BY_THE_LEARNER or name in _STAND_IN_THE_FULL_TOKENS
            if isinstance(value, Tensor) and not left_out:
                found.setdefault(path, {})[index] = value.detach().cpu()
    return [
        (
            list(path),
            list(values),
            [list(value.shape) for value in values.values()],
            torch.cat([value.reshape(-1) for value in values.values()]),
        )
        for path, values in found.items()
    ]


def _rows(
    columns: Sequence[tuple[list[str], list[int], list[list[int]], Tensor]], prompt_tokens: Sequence[int]
) -> list[TensorDictBase]:
    rows: list[TensorDictBase] = [TensorDict({}, batch_size=[]) for _ in prompt_tokens]
    for path, places, shapes, flat in columns:
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        for index, shape, part in zip(places, shapes, parts, strict=True):
            rows[index].set(tuple(path), part.view(shape))
    for row, length in zip(rows, prompt_tokens):
        full = row.get(keys.FULL_TOKENS)
        row.set(keys.PROMPT_TOKENS, full[:length])
        row.set(keys.RESPONSE_TOKENS, full[length:])
    return rows


def _text_of(row: TensorDictBase, key: str | tuple[str, ...]) -> str | None:
    value = row.get(key, None)
    return value if value is None or isinstance(value, str) else value.data


def _cut(text: str, lengths: Tensor) -> list[str]:
    ends = lengths.cumsum(0).tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends)]
