"""Comparisons in a run directory, and in the report of it: all that were made, whoever wrote them."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.errors import UserError
from sota_grpo.recording.comparisons import read_comparisons, save_comparison
from sota_grpo.report import write_report
from sota_grpo.report.compare import page, section
from tests.report_rigs import HOSTILE, comparison, write_run
from tests.unit.test_report_damaged import ODD
from tests.unit.test_report_page import Reader, page_of


def test_one_is_kept_of_each_question_and_the_newest_of_equal_ones(tmp_path: Path) -> None:
    for found in (
        *(comparison(12), comparison(3), comparison(3, ["grpo", "rloo"]), comparison(3, options=[])),
        *(comparison(3, optimizer_step=1), comparison(12, ess=0.5)),
    ):
        save_comparison(tmp_path, found)
    kept, sentences = read_comparisons(tmp_path)
    assert [(each["step"], each["optimizer_step"]) for each in kept] == [(3, 1), (3, 2), (3, 2), (3, 2), (12, 2)]
    assert kept[-1]["ess"] == 0.5
    assert sentences == []
    assert "run" not in kept[0]  # its path is that of whoever compared


def test_the_report_shows_every_comparison(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    text = write_report([run_dir], tmp_path / "report.html").read_text()
    assert "None yet: <code>sota-grpo compare RUN" in text
    save_comparison(run_dir, comparison(0))
    save_comparison(run_dir, comparison(0, ["sapo", "run", "mine.py:f"]))
    text = write_report([run_dir], tmp_path / "report.html").read_text()
    shown = section([("", read_comparisons(run_dir)[0])], most=10**6)[0]
    assert shown in text  # what the page of one has, too
    body = shown.partition("</summary>")[2].partition("</details>")[0].strip()
    assert body in page(comparison(0)) or body in page(comparison(0, ["sapo", "run", "mine.py:f"]))
    assert text.count('<details class="comparison"') == 2
    for part in (
        "mine.py:f",
        "12.5 %",
        "0.25",
        "A note.",
        "<mark> =</mark>",
        "Step 0, optimizer step 2 of 2: 8 samples",
    ):
        assert part in text
    assert "None yet" not in text


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_comparison(write_run(tmp_path / name, steps=1), comparison(0))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    for name in ("a", "b"):
        assert f"<summary>{name}: step 0, optimizer step 2: grpo, gspo</summary>" in text


def test_hostile_text_is_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    found = comparison(0, HOSTILE, options=[*HOSTILE], notes=[*HOSTILE], checkpoint=HOSTILE[0])
    for token, text in zip(found["tokens"], HOSTILE):
        token |= {"before": text, "text": text, "after": text}
    found["texts"][0]["pieces"] = [*HOSTILE]
    for values in found["algorithms"].values():
        values["losses"] = dict.fromkeys(HOSTILE, 1.0)
    save_comparison(run_dir, found)
    reader, data = page_of(run_dir, out=tmp_path / "report.html")
    assert len(reader.scripts) == 3
    assert not reader.addresses
    assert not reader.handlers
    assert data["left_out"] == []
    written = (tmp_path / "report.html").read_text(encoding="utf-8").partition("</main>")[0]
    assert "<b>bold" not in written
    assert not set("\u202e\u200f\x1b\x00\u2028") & set(written)
    assert "🙂" in written


def places(value: Any) -> list[tuple[Any, Any]]:
    """Everything in a value of JSON: what holds it, and under which key."""
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in inside] + [place for _, each in inside for place in places(each)]


def test_a_damaged_record_costs_a_sentence_or_nothing(tmp_path: Path) -> None:
    """Whatever stands in the place of one value, the page is made, and what it shows is no markup."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    count = len(places(comparison()))
    refused = 0
    for attempt in range(300):
        found = copy.deepcopy(comparison())
        del found["run"]
        holder, key = places(found)[rng.randrange(count - 1)]
        holder[key] = rng.choice([*ODD, float("inf"), "<b>", ["<b>"], {"<b>": 1}, [{}], -(2**60)])
        (tmp_path / "comparisons").mkdir(exist_ok=True)
        (tmp_path / "comparisons" / "any.json").write_text(json.dumps(found))
        kept, sentences = read_comparisons(tmp_path)
        assert len(kept) + len(sentences) == 1
        refused += len(sentences)
        try:
            shown, left_out = section([("run", kept)], most=10**6)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}; random.Random({seed}), attempt {attempt}: {found}")
        assert not left_out
        assert "<b></b>" not in shown
        assert not Reader(shown).scripts
    assert 0 < refused < 300


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{broken", "it is no JSON"),
        ("[" * 10**6, "it is no JSON"),
        ("[]", "it is not what sota-grpo compare writes"),
        (json.dumps(comparison(algorithms={}, cosines={}, tokens=[], texts=[])), "it is not what sota-grpo compare"),
        (json.dumps(comparison(cosines={})), "it is not what sota-grpo compare"),
        (" " * (5 << 20), "it has more than 4194304 bytes"),
        (None, "it is a link that leaves the run directory"),
    ],
    ids=["broken", "deep", "list", "empty", "no cosines", "large", "link"],
)
def test_what_is_no_comparison_is_named_and_the_others_are_shown(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    odd = save_comparison(run_dir, comparison(0)).with_name("odd\u202e.json")
    if content is None:
        (tmp_path / "secret.json").write_text(json.dumps(comparison(0)))
        odd.symlink_to(tmp_path / "secret.json")
    else:
        odd.write_text(content)
    _, data = page_of(run_dir, out=tmp_path / "report.html")
    (said,) = data["left_out"]
    assert sentence in said
    assert "\u202e" not in said
    assert (tmp_path / "report.html").read_text().count('<details class="comparison"') == 1


def test_a_record_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "comparisons").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link that leaves the run directory"):
        save_comparison(tmp_path / "run", comparison(0))
    (tmp_path / "run" / "comparisons").unlink()
    (tmp_path / "run" / "comparisons").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*--out FILE"):
        save_comparison(tmp_path / "run", comparison(0))
    assert read_comparisons(tmp_path / "run") == ([], [])


def test_many_comparisons_stay_within_their_room(tmp_path: Path) -> None:
    whole = section([("run", [comparison(0)])], most=10**6)[0]
    found = [("run", [comparison(step) for step in range(3)])]
    room = len(whole) + len(whole.partition("<h3>Samples")[0]) + 200
    shown, left_out = section(found, most=room)
    assert len(shown.encode()) <= room
    assert shown.count("<details") == 2
    assert shown.count("<h3>Samples") == 1
    assert shown.count("Its samples are left out") == 1
    assert left_out == ["The comparison of step 2, optimizer step 2: grpo, gspo is left out to keep the page small."]
