"""The report in a real browser, as a person uses it: by pointer and keyboard, in the dark, on a telephone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import note_failure, save_replay
from sota_grpo.report import write_report
from sota_grpo.training.gate import Check, write_gate
from tests.report_rigs import HOSTILE, replay_record, step_metrics, write_run

pytestmark = pytest.mark.browser

STEPS = 24
LINES = """name => document.querySelector(`[data-metric="${name}"] .plot`).data.map(
    trace => ({kind: trace.meta, x: [...trace.x], y: [...trace.y], dash: trace.line.dash, symbol: trace.marker?.symbol,
               said: trace.customdata}))"""
#: The charts within 200 pixels of the window, those that were drawn, and whether one of the former still waits.
CHARTS = """() => {
    const all = [...document.querySelectorAll(".chart")].map(card => {
        const {top, bottom} = card.getBoundingClientRect();
        return {name: card.dataset.metric, near: bottom > -200 && top < innerHeight + 200,
                drawn: card.querySelector(".main-svg") !== null, waits: card.getAttribute("aria-busy") === "true"};
    });
    const names = chosen => all.filter(chosen).map(chart => chart.name);
    return {all: names(() => true), near: names(chart => chart.near), drawn: names(chart => chart.drawn),
            settled: !all.some(chart => chart.near && chart.waits)};
}"""
COUNT = """() => {
    const draw = Plotly.react;
    window.drawings = [];
    Plotly.react = (plot, ...rest) => {
        window.drawings.push(plot.closest(".chart").dataset.metric);
        return draw(plot, ...rest);
    };
}"""


NAMES = [f"task_{number:02}" for number in range(24)]


def by_task(step: int) -> dict[str, float | None]:
    """Task 23 is the best at the end; every second one is in every second step only."""
    there = [number for number in range(24) if number % 2 == 0 or step % 2 == 1]
    return {f"task/{NAMES[number]}/reward": 0.01 * number * step for number in there}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one config and a run of another, the first with stored steps and a gate, the last interrupted."""
    root = tmp_path_factory.mktemp("sweep")
    first = write_run(root / "0", steps=STEPS, stored=[0, 20], metrics=by_task)
    checks = [("gold answers", True, "64 of 64 earn <b>1</b>"), ("ratio is one", False, "it is 1.5")]
    write_gate(first, "warn", [Check(*check, seconds=0.5) for check in checks])
    write_run(root / "1", steps=STEPS, seed=1, metrics=by_task)
    write_run(root / "2", steps=STEPS // 2, num_steps=STEPS, finished=False, options=["optimizer.lr=0.001"])
    return write_report([root], root / "report.html")


def rewards(seed: int = 0, steps: int = STEPS) -> list[float]:
    return [float(f"{step_metrics(step, seed, 3, 4)['reward']:.5g}") for step in range(steps)]


def lines(page: Any, name: str, kind: str = "line") -> list[dict[str, Any]]:
    page.locator(f'[data-metric="{name}"]').scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-metric="{name}"][aria-busy="false"]')
    return [trace for trace in page.evaluate(LINES, name) if trace["kind"] == kind]


def says(page: Any, beginning: str) -> None:
    """Filters take effect a moment after the last key."""
    page.wait_for_selector(f"#groups-say:text-matches('^{beginning}')")


def other_than(before: Any, page: Any, script: str) -> Any:
    """What a script gives as soon as that is something else; the page's policy lets no script wait for itself."""
    deadline = time.monotonic() + 30
    while (now := page.evaluate(script)) == before:
        assert time.monotonic() < deadline, f"it stayed {before}"
        page.wait_for_timeout(50)
    return now


def unsmoothed(page: Any) -> None:
    page.press("#smooth", "Home")


def test_the_tables_of_runs_differences_gate_time_ages_and_config(opened: Callable, three: Path) -> None:
    page = opened(three)
    table = page.locator("#runs-table tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in table] == ["0", "1", "2"]
    assert "finished, 24 steps" in table[0]
    assert "stopped, 12 of 24 steps" in table[2]
    assert table[0].split("\t")[2].startswith("25.0 % ± 2.7 → ")
    differs = page.locator("#differences-table tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in differs] == ["seed", "optimizer.lr"]
    assert differs[1].split("\t")[1:] == ["1e-06", "1e-06", "0.001"]
    assert "A, B are seeds of one config." in page.inner_text("#runs-notes")
    passed = page.locator("#gate-table tbody tr").all_inner_texts()
    assert ["✓ passed" in row for row in passed] == [True, False]
    assert "64 of 64 earn <b>1</b>" in passed[0]
    rows = [row.split("\t") for row in page.locator("#time-table tbody tr").all_inner_texts()]
    times = {row[0]: row[1].strip() for row in rows}
    total = 9 * STEPS + 1.5 * 7
    assert times["generate"].startswith("2 min 00 s")
    assert times["generate"].endswith(f"{100 * 5 * STEPS / total:.1f} %")
    ages = page.locator("#age-table tbody tr").first.inner_text().split()
    assert " ".join(ages[:7]) == "0 versions 60 responses · 50.0 %"  # five responses of each even step
    assert page.locator("#config-table tbody tr").count() == 2
    page.select_option("#config-kind", "all")
    assert page.locator("#config-table tbody tr").count() > 80
    page.fill("#find-option", "kl_coef")
    assert "coefficient of the KL to the reference" in page.inner_text("#config-table")


def test_curves_show_the_metrics_as_they_are_smoothed_and_over_seeds(opened: Callable, three: Path) -> None:
    page = opened(three)
    unsmoothed(page)
    drawn = lines(page, "reward")
    assert [line["y"] for line in drawn] == [rewards(0), rewards(1), rewards(0, STEPS // 2)]
    assert drawn[0]["x"] == list(range(STEPS))
    assert len({(line["dash"], line["symbol"]) for line in drawn}) == 3  # distinguished without colour
    band = lines(page, "reward", "band")[0]
    assert band["y"][0] == pytest.approx(rewards()[0] + 0.4 / math.sqrt(12), abs=1e-5)
    assert band["y"][-1] == pytest.approx(rewards()[0] - 0.4 / math.sqrt(12), abs=1e-5)
    assert lines(page, "eval/accuracy")[0]["x"] == [0, 4, 8, 12, 16, 20, 24]
    assert "reward_errors 0" in " ".join(page.locator(".still").all_inner_texts())

    page.focus("#smooth")  # the mean of the steps around
    assert page.inner_text("#smooth-says") == "none"
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#smooth-says") == "mean of 5 steps"
    drawn, raw = lines(page, "reward")[0], rewards()
    assert drawn["y"][10] == pytest.approx(sum(raw[8:13]) / 5)
    assert drawn["y"][0] == pytest.approx(sum(raw[:3]) / 3)
    assert lines(page, "reward", "raw")[0]["y"] == raw
    band = lines(page, "reward", "band")[0]
    assert band["y"][10] - drawn["y"][10] == pytest.approx(0.4 / math.sqrt(12) / math.sqrt(5), abs=1e-5)
    assert lines(page, "eval/accuracy")[0]["y"][1] == pytest.approx(0.25 + 0.5 * 4 / 24, abs=1e-5)

    unsmoothed(page)
    page.check("#means")  # over seeds, with its standard error
    drawn = lines(page, "reward")
    assert len(drawn) == 2
    assert drawn[0]["y"] == pytest.approx([(a + b) / 2 for a, b in zip(rewards(0), rewards(1))])
    error = abs(rewards(0)[5] - rewards(1)[5]) / 2  # of two numbers
    assert lines(page, "reward", "band")[0]["y"][5] - drawn[0]["y"][5] == pytest.approx(error)
    page.uncheck("#bands")
    assert lines(page, "reward", "band") == []


@pytest.mark.slow
def test_other_axes_runs_and_metrics(opened: Callable, three: Path) -> None:
    page = opened(three)
    unsmoothed(page)
    page.select_option("#axis", "responses")
    assert lines(page, "reward")[0]["x"] == [12 * (step + 1) for step in range(STEPS)]
    page.select_option("#axis", "minutes")
    assert lines(page, "kl")[0]["x"][:2] == pytest.approx([(1.5 + 9) / 60, (1.5 + 18) / 60], rel=1e-4)
    page.uncheck("[data-run='1']")
    assert [line["y"] for line in lines(page, "reward")] == [rewards(0), rewards(0, STEPS // 2)]
    assert page.locator("#key b").all_inner_texts() == ["A", "C"]
    page.uncheck("#all-runs")
    assert lines(page, "reward") == []
    assert "No run that is shown" in page.inner_text("[data-metric='reward'] .says")
    page.check("#all-runs")
    assert len(lines(page, "reward")) == 3
    assert lines(page, "eval/accuracy")[0]["x"][:2] == [0, pytest.approx((1.5 + 4 * 9) / 60, rel=1e-4)]
    drawn = lines(page, "task/*/reward")  # two of the runs have tasks
    assert len(drawn) == 48
    assert {line["dash"] for line in drawn} == {"solid", "dash"}
    first = page.locator("[data-metric='task/*/reward'] [role=option]").first
    assert first.inner_text().split() == [NAMES[23], "A", "0.23", "→", "5.29", "B", "0.23", "→", "5.29"]
    page.check("#log")
    lines(page, "kl")
    assert page.evaluate("document.querySelector(\"[data-metric='kl'] .plot\").layout.yaxis.type") == "log"
    page.fill("#find-metric", "kl grad")
    shown = page.locator(".chart:visible b").all_inner_texts()
    assert "kl" in shown
    assert "grad_norm" in shown
    assert "reward" not in shown


@pytest.mark.slow
def test_a_curve_leads_to_the_groups_of_its_turn(opened: Callable, three: Path) -> None:
    page = opened(three)
    unsmoothed(page)
    lines(page, "reward")
    page.focus("[data-metric='reward']")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 3" in page.inner_text("[data-metric='reward'] .says")
    page.keyboard.press("Enter")
    assert page.inner_text("#group h3").startswith("Step 3, group 9")
    assert page.evaluate("document.activeElement.id") == "group-list"
    place = page.evaluate("""() => {
        const plot = document.querySelector("[data-metric='reward'] .plot");
        const {xaxis: x, yaxis: y} = plot._fullLayout;
        const second = plot.data.filter(trace => trace.meta === "line")[1];
        plot.scrollIntoView({block: "center"});
        const box = plot.getBoundingClientRect();
        return [box.left + x._offset + x.d2p(15), box.top + y._offset + y.d2p(second.y[15])];
    }""")
    page.mouse.move(*place)
    page.mouse.click(*place)
    assert page.inner_text("#group h3").startswith("Step 15, group 45")
    assert "Run B" in page.inner_text("#group")


def test_what_was_zoomed_to_stays_while_the_lines_change_and_goes_with_the_axis(opened: Callable, three: Path) -> None:
    page = opened(three)
    lines(page, "reward")
    shown = "document.querySelector(`[data-metric='reward'] .plot`)._fullLayout.xaxis.range"
    whole = page.evaluate(shown)
    box = page.locator("[data-metric='reward'] .plot .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    zoomed = other_than(whole, page, shown)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    page.check("#means")
    assert len(lines(page, "reward")) == 2
    assert page.evaluate(shown) == zoomed
    page.select_option("#axis", "responses")
    assert other_than(zoomed, page, shown)[1] > 12 * STEPS


def test_groups_are_filtered_and_read_with_the_keyboard(opened: Callable, three: Path) -> None:
    page = opened(three)
    options = page.locator("#group-list [role=option]")
    assert "All samples with their tokens: steps 0, 20." in page.inner_text("#groups-say")
    assert page.inner_text("#group h3").startswith("Step 20, group 61")  # the newest with advantages and tokens
    page.select_option("#group-kind", "zero")
    assert page.inner_text("#groups-say").startswith("24 of the 72 groups")
    assert all("zero-advantage" in text for text in options.all_inner_texts())
    page.select_option("#group-kind", "cut")
    assert page.inner_text("#groups-say").startswith("24 of the 72 groups")
    assert "truncated" in page.inner_text("#group .samples")
    page.select_option("#group-kind", "all")
    page.fill("#step-from", "5")
    page.fill("#step-to", "6")
    says(page, "6 of")
    page.fill("#find-text", "STEP 6, group 1")
    says(page, "1 of")
    page.fill("#find-text", "")
    says(page, "6 of")
    page.press("#group-list", "Home")
    assert page.inner_text("#group h3").startswith("Step 5, group 15")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#group h3").startswith("Step 5, group 16")
    cards = page.locator(".sample").all_inner_texts()
    assert len(cards) == 2
    assert "reward 1" in cards[0]
    assert "advantage +0.5" in cards[0]
    assert "correct\n1" in cards[0]
    assert "1 version old" in cards[0]
    page.select_option("#group-run", "2")
    page.fill("#step-to", "")
    page.fill("#step-from", "")
    says(page, "36 of the 36")
    assert "No stored steps" in page.inner_text("#groups-say")


def test_tokens_are_shaded_and_say_their_numbers(opened: Callable, three: Path) -> None:
    """Token i has entropy i, ratio exp(0.11 i), and a KL that is k3 of 0.11 i - 0.5."""
    page = opened(three)
    tokens = page.locator(".sample").first.locator(".token")
    assert "".join(tokens.all_text_contents()) == "So 2 + 2 = 4\n#### 4"
    shades = lambda: [next((c for c in text.split() if c.startswith("shade")), "") for text in classes()]  # noqa: E731
    classes = lambda: [tokens.nth(i).get_attribute("class") for i in range(9)]  # noqa: E731
    assert shades()[:3] == ["", "shade3", "shade4"]
    page.select_option("#shade", "ratio")
    assert shades() == ["", "shade2", "shade3", "shade3", "shade3", "shade4", "shade4", "shade4", "shade4"]
    tokens.nth(5).hover()
    assert page.inner_text("#tip") == "token 6 · entropy 5 · ratio 1.73 · KL 0.00123 · advantage +0.5"
    page.select_option("#shade", "advantage")
    assert set(shades()) == {"shade2"}
    assert "minus" in page.locator(".sample").last.locator(".token").first.get_attribute("class")
    page.select_option("#shade", "kl")
    page.check("#numbers")
    gap = 0.5
    assert float(tokens.first.get_attribute("data-number")) == pytest.approx(math.exp(gap) - gap - 1, abs=0.005)
    page.select_option("#shade", "none")
    assert set(shades()) == {""}
    page.locator(".tokens").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("token 3 · entropy 2 ")
    page.keyboard.press("Tab")
    assert page.is_hidden("#tip")


@pytest.mark.slow
def test_light_and_dark(opened: Callable, three: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    settled = "[data-metric='reward'][aria-busy='false']"
    ink = "document.querySelector(\"[data-metric='reward'] .plot\").layout.font.color"
    page = opened(three)
    lines(page, "reward")
    light = page.evaluate(ground), page.evaluate(ink)
    page.click("#theme")
    page.wait_for_selector(settled)
    dark = page.evaluate(ground), page.evaluate(ink)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.click("#theme")
    page.wait_for_selector(settled)
    assert (page.evaluate(ground), page.evaluate(ink)) == light
    assert opened(three, scheme="dark").evaluate(ground) == dark[0]


@pytest.mark.slow
def test_a_narrow_window_scrolls_in_one_direction(opened: Callable, three: Path) -> None:
    page = opened(three, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    lines(page, "kl")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_24_tasks_are_one_chart_that_leads_to_the_groups_of_each(opened: Callable, tmp_path: Path) -> None:
    fields = lambda step, group, sample: {"task": NAMES[group]}  # noqa: E731
    run_dir = write_run(tmp_path / "run", steps=6, groups=24, siblings=2, metrics=by_task, fields=fields)
    page = opened(write_report([run_dir], tmp_path / "report.html"))
    chart = page.locator("[data-metric='task/*/reward']")
    drawn = lines(page, "task/*/reward")
    assert len(drawn) == 24
    assert len({(line["dash"], line["symbol"]) for line in drawn}) == 24  # distinguished without colour
    assert drawn[3]["x"] == [1, 3, 5]
    assert chart.locator("figcaption b").inner_text() == "Reward by task"
    names = chart.locator("[role=option] .task")
    assert names.all_inner_texts() == NAMES[::-1]  # the highest first
    assert chart.locator("[role=option] .ends").first.inner_text() == "0.23 → 1.15"
    chart.locator("[role=listbox]").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert chart.locator("[aria-selected=true] .task").inner_text() == NAMES[21]
    assert chart.locator(".says").inner_text() == f"{NAMES[21]} 1.05 step 5"
    widths = page.evaluate(
        "document.querySelector(\"[data-metric='task/*/reward'] .plot\").data.map(t => t.line.width)"
    )
    assert widths == [1.5] * 23 + [3]  # it stands out, and in front
    page.keyboard.press("Enter")
    assert page.inner_text("#group h3").startswith("Step 5, group 141")
    assert page.input_value("#group-task") == NAMES[21]
    assert page.inner_text("#groups-say").startswith("6 of the 144 groups")
    page.fill("#find-metric", "task_07")
    assert page.locator(".chart:visible").evaluate_all("all => all.map(each => each.dataset.metric)") == [
        "task/*/reward"
    ]


def dialog(text: str) -> dict[str, Any]:
    """Three turns of the nine tokens of ``WORDS``, two calls in the first and one in the last."""
    call = {"name": "add", "arguments": {"x": text}, "reply": text, "error": False}
    turns = [
        {"role": "assistant", "trained": True, "tokens": 3, "text": text, "calls": [call, {**call, "error": True}]},
        {"role": "tool", "trained": False, "tokens": 4, "text": text},
        {"role": "assistant", "trained": True, "tokens": 2, "text": text, "calls": [{**call, "reply": None}]},
    ]
    return {"prompt": [{"role": "system", "content": text}], "turns": turns, "ended": "turns", "error": text}


def test_a_dialog_shows_its_turns_calls_and_masks_and_text_in_it_does_nothing(opened: Callable, tmp_path: Path) -> None:
    fields = lambda step, group, sample: {"dialog": dialog(HOSTILE[(step + sample) % 2]), "task": HOSTILE[0]}  # noqa: E731
    run_dir = write_run(tmp_path / "run", steps=2, groups=2, siblings=2, fields=fields, stored=[1])
    page = opened(write_report([run_dir], tmp_path / "report.html"))
    page.press("#group-list", "Home")
    sample = page.locator(".sample").first
    prompt = page.locator("#group > .dialog")
    assert (prompt.locator(".who").inner_text(), prompt.locator(".text").inner_text()) == ("system", HOSTILE[0])
    turns = sample.locator(".turn")
    assert [text.split("\n")[0] for text in turns.all_inner_texts()] == ["assistant", "tool", "assistant"]
    assert sample.locator(".who .quiet").all_inner_texts() == [
        *("3 tokens, trained on", "4 tokens, masked", "2 tokens, trained on")
    ]
    assert turns.nth(0).locator("> .text").text_content() == HOSTILE[0]
    call, came = turns.nth(0).locator(".asked").first, turns.nth(0).locator(".came")
    assert [call.locator(part).inner_text() for part in ("p", "dt", "dd")] == ["call add", "x", HOSTILE[0]]
    assert came.locator("p").all_inner_texts() == ["✓ answer", "✗ failed"]
    assert came.locator(".text").all_inner_texts() == [HOSTILE[0]] * 2
    assert turns.nth(2).locator(".came").inner_text() == "no answer"
    turns.nth(1).locator("summary").click()
    assert turns.nth(1).locator(".text").inner_text() == HOSTILE[0]
    assert "no turn was left (env.max_steps)" in sample.locator(".ended").inner_text()

    page.keyboard.press("End")  # of this step every token is stored
    page.press("#group-list", "End")
    turns = page.locator(".sample").first.locator(".turn")
    words = ["".join(turns.nth(at).locator(".token").all_text_contents()) for at in range(3)]
    assert words == ["So 2 +", " 2 = 4\n", "#### 4"]
    turns.nth(2).locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("token 8 · entropy 7 ")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


def test_hostile_text_is_shown_and_does_nothing(opened: Callable, tmp_path: Path) -> None:
    texts = [*HOSTILE, "<b>" * 333_333]
    run_dir = write_run(tmp_path / "<img src=x onerror=hacked()>", steps=5, response=lambda step, *_: texts[step])
    page = opened(write_report([run_dir], tmp_path / "report.html"))
    page.press("#group-list", "Home")
    seen = []
    for step in range(5):
        page.fill("#step-from", str(step))
        page.fill("#step-to", str(step))
        page.wait_for_selector(f"#group h3:has-text('Step {step},')")
        seen.append(page.locator(".sample .text").first.text_content())
    assert seen[0] == HOSTILE[0]
    assert seen[1] == HOSTILE[1]
    assert seen[2].startswith("left U+202Eright to leftU+202C U+200FU+0000U+001B[31m U+2028 half U+D800")
    assert seen[3] == HOSTILE[3]
    assert "979,999 characters left out" in seen[4]
    assert page.locator(".sample b").count() == page.locator(".sample header b").count()
    assert page.evaluate("window.hacked") is None
    assert "<img src=x" in page.inner_text("#runs-table")


def settled(page: Any) -> dict[str, list[str]]:
    """The charts, once none near the window waits to be drawn."""
    page.wait_for_function(f"() => ({CHARTS})().settled")
    return page.evaluate(CHARTS)


@pytest.mark.slow
def test_of_a_thousand_steps_only_the_charts_near_the_window_are_drawn(opened: Callable, tmp_path: Path) -> None:
    """Of three runs: each of these charts once when the page opens, and once when a setting changes."""
    runs = [write_run(tmp_path / str(seed), steps=1000, groups=8, seed=seed) for seed in range(3)]
    path = write_report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 12_000_000  # 4.7 of them are plotly
    page = opened(path)
    page.focus("#smooth")
    charts = settled(page)
    assert charts["drawn"] == charts["near"]
    assert 0 < len(charts["near"]) < len(charts["all"]) / 2
    assert page.inner_text("#smooth-says") == "mean of 21 steps"
    assert "further groups of this run are left out" in page.inner_text("#groups-say")
    page.evaluate(COUNT)
    page.keyboard.press("End")
    assert page.inner_text("#smooth-says") == "mean of 201 steps"
    assert settled(page) == charts
    assert page.evaluate("window.drawings") == charts["near"]
    assert len(lines(page, "kl")[0]["x"]) == 1000


def test_runs_that_cannot_be_shown_are_named_with_the_reason(opened: Callable, tmp_path: Path) -> None:
    """Of the one that can be: nothing is compared, and each start says which code and machine made it."""
    run_dir = write_run(tmp_path / "runs" / "0", steps=1)
    starts = [{"command": f"python grpo.py seed={seed}", "commit": "abc-dirty", "host": "<b>a</b>"} for seed in (1, 2)]
    (run_dir / "run.json").write_text(json.dumps({"num_steps": 1, "finished": True, "starts": starts}))
    for number in range(1, 5):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
        note_failure(folder, UserError(f"Mend <b>{number}</b>."))
    page = opened(write_report([tmp_path / "runs"], tmp_path / "report.html"))
    assert page.inner_text("#left-out summary") == "4 left out"
    page.click("#left-out summary")
    reasons = page.locator("#left-out li").all_inner_texts()
    assert len(reasons) == 4
    assert reasons[0].endswith("has not finished a step: it has failed (Mend <b>1</b>).")
    assert page.inner_text("#differences") == page.inner_text("#key") == ""
    assert page.is_hidden("#means")
    assert page.inner_text("#config-table") == "No option matches.", "all are the default"
    page.select_option("#config-kind", "all")
    assert page.locator("#config-table tbody tr").count() > 80
    assert "No checks are recorded of this run." in page.inner_text("#gate-table")
    assert lines(page, "reward")[0]["y"] == rewards(steps=1)
    shown = [text.strip() for text in page.locator("#starts li").all_text_contents()]
    assert shown == [f"python grpo.py seed={seed} · commit abc-dirty · <b>a</b>" for seed in (1, 2)]


def test_steps_under_other_algorithms_are_tables(opened: Callable, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    save_replay(run_dir, 0, [], replay_record())
    save_replay(run_dir, 1, [], replay_record(HOSTILE, title=HOSTILE[1], notes=[*HOSTILE]))
    page = opened(write_report([run_dir], tmp_path / "report.html"), scheme="dark")
    page.click('nav a[href="#replays"]')
    first, second = page.locator("#replays details").all()
    tables = first.locator("table")
    rows = [row.split("\t") for row in tables.nth(0).locator("tr").all_inner_texts()]
    assert rows == [["", "stored", "grpo", "gspo"], ["grad_norm", "0.5", "0.25", "0.25"]]
    assert tables.nth(1).locator("tbody tr").first.inner_text().split("\t") == ["grpo", "0.75", "0.75"]
    assert "A note." in first.inner_text()
    assert not second.locator("table").first.is_visible()
    second.locator("summary").click()
    assert second.locator("table").first.is_visible()
    assert "<img src=x onerror" in second.inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
