"""Replays in a run directory, and in the report of it: all that were made, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import read_replays, save_replay
from tests.report_rigs import HOSTILE, replay_record, write_run
from tests.unit.test_report_page import page_of


def test_the_report_has_the_newest_of_each_question(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    assert page_of(run_dir, out=tmp_path / "report.html")[1]["runs"][0]["replays"] == []
    for step, question in ((12, ["algorithm=grpo,gspo"]), (3, ["algorithm=grpo"]), (12, ["algorithm=grpo,gspo"])):
        save_replay(run_dir, step, question, replay_record())
    newest = replay_record(title="Step 3")
    save_replay(run_dir, 3, ["algorithm=grpo"], newest)
    assert read_replays(run_dir) == ([newest, replay_record()], [])
    assert page_of(run_dir, out=tmp_path / "report.html")[1]["runs"][0]["replays"] == [newest, replay_record()]


def test_hostile_text_is_data(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    save_replay(run_dir, 0, [], replay_record(HOSTILE, title=HOSTILE[0], notes=[*HOSTILE]))
    reader, data = page_of(run_dir, out=tmp_path / "report.html")
    assert len(reader.scripts) == 3
    assert not reader.addresses
    assert not reader.handlers
    assert data["left_out"] == []
    assert data["runs"][0]["replays"][0]["title"] == HOSTILE[0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{broken", "it is not what sota-grpo replay writes"),
        ("[" * 10**4, "it is not what sota-grpo replay writes"),
        (json.dumps(replay_record(title=3)), "it is not what sota-grpo replay writes"),
        (json.dumps(replay_record(notes=[["<b>"]])), "it is not what sota-grpo replay writes"),
        (json.dumps(replay_record(tables=[[]])), "it is not what sota-grpo replay writes"),
        (json.dumps(replay_record(tables=[[["", "a"], ["b"]]])), "it is not what sota-grpo replay writes"),
        (json.dumps(replay_record(tables=[[["", "a"], ["b", 0.5]]])), "it is not what sota-grpo replay writes"),
        (" " * (65 << 10), "it has more than 65536 bytes"),
        (None, "it is a link that leaves the run directory"),
    ],
)
def test_what_is_no_replay_is_named_and_the_others_are_shown(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    odd = save_replay(run_dir, 0, [], replay_record()).with_name("odd\u202e.json")
    if content is None:
        (tmp_path / "secret.json").write_text(json.dumps(replay_record()))
        odd.symlink_to(tmp_path / "secret.json")
    else:
        odd.write_text(content)
    _, data = page_of(run_dir, out=tmp_path / "report.html")
    (said,) = data["left_out"]
    assert sentence in said
    assert "\u202e" not in said
    assert data["runs"][0]["replays"] == [replay_record()]


def test_a_replay_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "replays").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link that leaves the run directory"):
        save_replay(tmp_path / "run", 0, [], replay_record())
    (tmp_path / "run" / "replays").unlink()
    (tmp_path / "run" / "replays").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*the report will not show"):
        save_replay(tmp_path / "run", 0, [], replay_record())
    assert read_replays(tmp_path / "run") == ([], [])
