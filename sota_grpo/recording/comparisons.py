"""The comparisons of objectives that were made of a run's stored steps: ``comparisons/`` in the run directory.

``sota-grpo compare`` writes them and the report shows them. A run directory may be anybody's: what has not the shape of
a comparison is named in a sentence and left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import write_text
from sota_grpo.recording.run_files import COMPARISONS
from sota_grpo.text import json_line, readable
from sota_grpo.untrusted import open_file, require_plain

_MOST_BYTES = 4 << 20  # of a record: three samples of 600 tokens under 23 algorithms are 1.5 MB at most
_MOST = 64  # records that are read, the newest
_COUNT = 1 << 53
_ANY = ""  # stands in a shape for every name
_FIGURES = {"grad_norm": float, "losses": {_ANY: float}, "advantage": float, "clipped": float, "masked": float}
_PLACE = {"group_id": int, "sample_id": int}
_OF_TOKEN = {"coefficient": float, "advantage": float, "clipped": bool}
#: What a record holds; a number may be null, where there is none.
_SHAPE: dict[str, Any] = {
    **{"step": int, "optimizer_step": int, "optimizer_steps": int, "samples": int, "num_tokens": int, "ess": float},
    **{"checkpoint": (str, type(None)), "options": [str], "notes": [str], "largest_difference": float},
    "algorithms": {_ANY: {**_FIGURES, "without_advantage": float, "mean_weight": float, "ess": float}},
    "cosines": {_ANY: {_ANY: float}},
    "tokens": [
        {
            **{**_PLACE, "position": int, "before": str, "text": str, "after": str, "ratio": float},
            **{"difference": float, "algorithms": {_ANY: _OF_TOKEN}},
        }
    ],
    "texts": [
        {**_PLACE, "reward": float, "start": int, "tokens": int, "pieces": [str], "coefficients": {_ANY: [float]}}
    ],
}


def save_comparison(run_dir: Path, comparison: Mapping[str, Any]) -> Path:
    """Write what :func:`sota_grpo.assembly.compare.compared` found; it replaces one of the same step and question.

    Raises:
        UserError: it cannot be written, or ``comparisons`` is a link that leaves the run.
    """
    question = [comparison[name] for name in ("step", "optimizer_step", "options")]
    digest = hashlib.sha256(json.dumps([*question, list(comparison["algorithms"])]).encode()).hexdigest()
    folder = run_dir / COMPARISONS
    path = folder / f"step_{comparison['step']:06d}_{digest[:12]}.json"
    require_plain(folder, run_dir)
    try:
        folder.mkdir(exist_ok=True)
        write_text(path, json_line({name: comparison[name] for name in _SHAPE}, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); --out FILE writes a page of its own elsewhere."
        ) from error
    return path


def read_comparisons(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The comparisons of a run by step, and of each file that is none a sentence.

    >>> read_comparisons(getfixture("tmp_path"))
    ([], [])
    """
    folder, comparisons, sentences = run_dir / COMPARISONS, [], []
    try:
        # no link is followed here: its file is opened below, or refused
        paths = sorted(folder.glob("*.json"), key=lambda path: (path.lstat().st_mtime_ns, path.name))[-_MOST:]
    except OSError:
        return [], []
    for path in paths:
        try:
            with open_file(path, most_bytes=_MOST_BYTES, levels=2) as file:
                record = json.loads(file.read())
            problem = "" if _is_comparison(record) else "it is not what sota-grpo compare writes"
        except OSError as error:
            problem = error.strerror or type(error).__name__
        except (ValueError, RecursionError):
            problem = "it is no JSON"
        if problem:
            sentences.append(readable(f"{path} cannot be shown ({problem}); remove it, or compare again.", keep=""))
        else:
            comparisons.append(record)
    return sorted(comparisons, key=lambda comparison: (comparison["step"], comparison["optimizer_step"])), sentences


def _is_comparison(record: Any) -> bool:
    if not _fits(record, _SHAPE) or not record["algorithms"]:
        return False
    names = list(record["algorithms"])  # rows are printed under heads of this order
    tables = [record["cosines"], *record["cosines"].values(), *(token["algorithms"] for token in record["tokens"])]
    lines = [text["coefficients"] for text in record["texts"]]
    lengths = [
        (len(values), len(text["pieces"])) for text in record["texts"] for values in text["coefficients"].values()
    ]
    return all(list(each) == names for each in (*tables, *lines)) and all(one == other for one, other in lengths)


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value of JSON has a shape: a type, a list of one, a dictionary by name.

    >>> shape = {"step": int, "losses": {"": float}, "notes": [str]}
    >>> _fits({"step": 4, "losses": {"loss/kl": None}, "notes": []}, shape)
    True
    >>> _fits({"step": True, "losses": {}, "notes": []}, shape), _fits({"step": 4, "notes": [3], "losses": {}}, shape)
    (False, False)
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if _ANY in shape:
            return all(_fits(each, shape[_ANY]) for each in value.values())
        return value.keys() >= shape.keys() and all(_fits(value[name], each) for name, each in shape.items())
    if shape is float:  # null where there is none
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value is None or (known and abs(value) <= sys.float_info.max)
    if shape is int:
        return type(value) is int and 0 <= value < _COUNT
    return isinstance(value, shape)
