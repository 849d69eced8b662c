"""The slow tests in CI: every file has its turn, the time is kept, and a failure is never lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts import slow_tests
from scripts.slow_tests import Outcome, Result, ordered, run_file, run_within

FILES = dict.fromkeys("abcdefgh", 1)


def test_the_order_is_the_seeds_and_every_file_comes_first_for_some_seed() -> None:
    backwards = dict(reversed(FILES.items()))
    firsts = set()
    for seed in map(str, range(100)):
        order = ordered(FILES, seed)
        assert sorted(order) == list(FILES)
        assert order == ordered(backwards, seed)
        firsts.add(order[0])
    assert firsts == set(FILES)


class Files:
    """Take minutes by a clock of their own and are cut when their time is over; ``bad`` ones fail halfway."""

    def __init__(self, bad: str = "", **minutes: float):
        self.bad, self.minutes = bad, minutes
        self.now_s, self.limits = 1000.0, {}

    def run(self, name: str, limit_s: float) -> Outcome:
        self.limits[name] = limit_s / 60
        need_s = self.minutes[name] * (30 if name in self.bad else 60)
        self.now_s += min(need_s, limit_s)
        if need_s > limit_s:
            return Outcome(Counter(passed=1), is_cut=True)
        return Outcome(Counter(passed=1, failed=1) if name in self.bad else Counter(passed=2))

    def within(self, minutes: float) -> Result:
        return run_within(list(self.minutes), minutes * 60, self.run, lambda: self.now_s)


def test_files_are_run_until_the_time_is_over_and_the_others_are_named() -> None:
    files = Files(a=10, b=10, c=10, d=1)
    result = files.within(25)
    assert files.limits == {"a": 25, "b": 15, "c": 5}
    assert str(result) == "Not reached: c\nNot reached: d\n5 passed, 0 failed, 0 skipped"
    assert str(Files(a=10, b=10).within(20)) == "4 passed, 0 failed, 0 skipped"


def test_a_failure_stays_one_whatever_comes_after_it() -> None:
    result = Files("a", a=10, b=10, c=10).within(20)
    assert result.counts == Counter(passed=4, failed=1)
    assert result.unreached == ["c"]


def test_no_time_is_no_failure_and_no_closing_line() -> None:
    for minutes in (1, 0, -3):
        files = Files(a=1, b=1)
        assert str(files.within(minutes)) == "Not reached: a\nNot reached: b"
        assert not files.limits


def test_a_real_file_ends_with_its_first_failure_or_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tests, "GRACE_S", 2.0)  # an interrupt may come before there is anything to interrupt
    path = tmp_path / "test_three.py"
    head = "import pytest, time\npytestmark = pytest.mark.slow\ndef test_a(): pass\n"
    path.write_text(head + "def test_b(): assert 0\ndef test_c(): time.sleep(3600)\n")
    assert run_file(str(path), 600.0) == Outcome(Counter(passed=1, failed=1))
    path.write_text(head + "def test_b(): time.sleep(3600)\n")
    cut = run_file(str(path), 0.01)
    assert cut.is_cut
    assert not cut.counts["failed"]
    path.write_text("raise SystemExit(7)\n")
    assert run_file(str(path), 600.0).counts["failed"] == 1
