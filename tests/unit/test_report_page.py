"""The file itself: one, safe whatever models wrote, replaced whole, and never in the way of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sota_grpo.cli import main
from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import METRICS_FILE, read_replays, save_replay
from sota_grpo.report import MAX_BYTES, report_of, seeds_of_one_config, write_report
from sota_grpo.report.data import read_run
from tests.report_rigs import HOSTILE, replay_record, write_run


class Reader(HTMLParser):
    """The scripts of a page, as a browser would take them apart, its policy, and its attributes that name addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.policy, self.addresses, self.handlers = "", [], []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self._inside = tag == "script"
        self.scripts += [""] if self._inside else []
        self.policy = (attributes.get("content") or "") if attributes.get("http-equiv") else self.policy
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action") and value[:1] != "#"]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def page_of(*runs: Path, out: Path, plotly: bool = False) -> tuple[Reader, dict[str, Any]]:
    """The page as a browser takes it apart, and its data."""
    with nullcontext() if plotly else patch("sota_grpo.report._plotly", return_value=""):
        text = write_report(runs, out).read_text(encoding="utf-8")
    reader = Reader(text)
    return reader, json.loads(reader.scripts[0])


def test_hostile_text_is_data_secrets_are_left_out_and_the_policy_allows_the_pages_own_scripts_only(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path, steps=4, response=lambda step, group, sample: HOSTILE[step])
    (run_dir / "config.yaml").write_text("model: {hub_token: sesame}\nengine: {api_key: sesame}\n")  # another program's
    reader, data = page_of(run_dir, out=tmp_path / "report.html", plotly=True)
    assert "sesame" not in (tmp_path / "report.html").read_text()
    assert (len(reader.scripts), reader.addresses, reader.handlers) == (3, [], [])
    shown = [sample["text"] for group in data["runs"][0]["groups"] for sample in group["samples"]]
    assert set(shown) == set(HOSTILE)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in reader.scripts[1:]]
    rules = dict(rule.split(" ", 1) for rule in reader.policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert sorted(rules["script-src"].split()) == sorted(f"'sha256-{digest}'" for digest in digests)
    assert "connect-src" not in rules


def test_seeds_of_a_run_from_python_are_known_by_what_was_passed(tmp_path: Path) -> None:
    """Their configs name files in each run's own folder."""
    paths = []
    for seed, passed in enumerate(("same", "same", "other")):
        path = tmp_path / str(seed)
        write_run(path, seed=seed, options=[f"env.dataset_path={path}/inputs/train.jsonl"])
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(record | {"passed": {"train": passed}}))
        paths.append(path)
    options = [["optimizer.lr=1"], ["optimizer.lr=2"], ["optimizer.lr=1", "logging.num_examine=2"]]  # changes no result
    paths += [write_run(tmp_path / f"lr{seed}", seed=seed, options=each) for seed, each in enumerate(options)]
    assert seeds_of_one_config([read_run(path) for path in paths]) == [[0, 1], [2], [3, 5], [4]]


def test_a_page_stays_under_ten_megabytes_with_every_step_in_its_curves(tmp_path: Path) -> None:
    """And of the groups what fits: these would fill three megabytes of each run."""
    options = {"steps": 300, "groups": 1, "siblings": 2, "response": lambda *_: "words " * 1600}
    runs = [write_run(tmp_path / str(seed), seed=seed, **options) for seed in range(3)]
    _, data = page_of(*runs, out=tmp_path / "report.html", plotly=True)
    assert (tmp_path / "report.html").stat().st_size <= MAX_BYTES < 10_000_000
    assert data["stride"] == 1
    for run in data["runs"]:
        assert len(run["steps"]) == 301
        assert 100 < len(run["groups"]) < run["record"]["total"] == 300


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


def test_the_command_writes_next_to_the_run_or_to_the_named_file_or_says_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, other = write_run(tmp_path / "sweep" / "0"), write_run(tmp_path / "sweep" / "1", seed=1)
    for paths in ([run_dir], [tmp_path / "sweep"], [run_dir, other]):
        assert told(["report", *map(str, paths)], capsys)[0] == 0
    assert told(["report", str(run_dir), "--out", "mine.html"], capsys)[1].startswith("mine.html (")
    assert all((folder / "report.html").is_file() for folder in (run_dir, tmp_path / "sweep", tmp_path))
    for arguments, sentence in (
        (["nowhere"], "There is no run in"),
        ([run_dir, "--out", tmp_path / "no" / "r.html"], "there is no folder"),
        ([run_dir, "--out", run_dir], "0 is a folder; name a file, for example"),
    ):
        code, message = told(["report", *map(str, arguments)], capsys)
        assert (code, message.count("\n"), sentence in message) == (2, 1, True), message


def test_without_metrics_there_is_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / METRICS_FILE).touch()
    assert report_of(tmp_path) == 0
    assert os.listdir(tmp_path) == [METRICS_FILE]
    assert not caplog.records


def test_the_report_has_the_newest_of_each_question(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    assert page_of(run_dir, out=tmp_path / "report.html")[1]["runs"][0]["replays"] == []
    for step, question in ((12, ["algorithm=grpo,gspo"]), (3, ["algorithm=grpo"]), (12, ["algorithm=grpo,gspo"])):
        save_replay(run_dir, step, question, replay_record())
    newest = replay_record(title="Step 3")
    save_replay(run_dir, 3, ["algorithm=grpo"], newest)
    assert read_replays(run_dir) == ([newest, replay_record()], [])
    assert page_of(run_dir, out=tmp_path / "report.html")[1]["runs"][0]["replays"] == [newest, replay_record()]


ODD_PARTS = ({"notes": [["<b>"]]}, {"tables": [[["", "a"], ["b"]]]}, {"tables": [[["", "a"], ["b", 0.5]]]})
NO_REPLAYS = ("{broken", *(json.dumps(replay_record(**parts)) for parts in ODD_PARTS))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *((text, "it was not written by sota-grpo replay") for text in NO_REPLAYS),
        (" " * (65 << 10), "it has more than 65536 bytes"),
        (None, "it is a link that leaves the run directory"),
    ],
)
def test_what_is_no_replay_is_named_and_others_are_shown(tmp_path: Path, content: str | None, sentence: str) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    odd = save_replay(run_dir, 0, [], replay_record()).with_name("odd\u202e.json")
    if content is None:
        (tmp_path / "secret.json").write_text(json.dumps(replay_record()))
        odd.symlink_to(tmp_path / "secret.json")
    else:
        odd.write_text(content)
    _, data = page_of(run_dir, out=tmp_path / "report.html")
    (reason,) = data["left_out"]
    assert sentence in reason
    assert "\u202e" not in reason
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
