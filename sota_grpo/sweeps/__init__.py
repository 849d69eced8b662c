"""Sweeps: what the runs below a directory gave, side by side, and how a sweep that was cut off goes on."""

from sota_grpo.sweeps.command import continued, mark_complete, note_command
from sota_grpo.sweeps.tables import (
    SUMMARY,
    RunRow,
    Setting,
    Sweep,
    as_csv,
    as_json,
    as_text,
    default_metric,
    objective,
    read_sweep,
    write_summary,
)

__all__ = [
    "SUMMARY",
    "RunRow",
    "Setting",
    "Sweep",
    "as_csv",
    "as_json",
    "as_text",
    "continued",
    "default_metric",
    "mark_complete",
    "note_command",
    "objective",
    "read_sweep",
    "write_summary",
]
