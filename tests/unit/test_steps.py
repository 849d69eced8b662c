"""Stored steps: what is written comes back, whatever it holds; what a resumed run does again is dropped."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording import stored_steps as stored_steps_module
from sota_grpo.recording.metrics import declared
from sota_grpo.recording.progress import ZeroAdvantageWatch
from sota_grpo.recording.run_log import ROLLOUT_FIELDS, batch_metrics, rollout_rows
from sota_grpo.recording.stored_steps import (
    STEPS_FOLDER,
    Origin,
    StoredStep,
    StoredSteps,
    drop_steps,
    read_step,
    save_step,
    stored_steps,
    text_pieces,
)
from sota_grpo.rl.records import TASK
from sota_grpo.rl.table import RowTable
from tests.unit.test_row_table import same

ORIGIN = Origin(device="cpu", precision="fp32", num_ranks=0, num_threads=2, rng=torch.arange(5, dtype=torch.uint8))
HALF_A_PAIR = "\ud83d"  # text of a dataset may hold it; no encoding can


def make_row(prompt: int, response: int, *, group: int = 0, sample: int = 0, term: float | None = None) -> TensorDict:
    length = prompt + response
    mask = torch.arange(length) >= prompt
    tokens = torch.arange(length) + 100 * group
    following = {
        "reward": torch.tensor([0.5]),
        "success": torch.tensor([True]),
        "truncated": torch.tensor([False]),
        "policy_version": torch.tensor(3),
        "reward_info": NonTensorData('{"pred": "7"}'),
    }
    if term is not None:
        following["reward_terms"] = {"correct": torch.tensor([term])}
    return TensorDict(
        {
            "query": f"{HALF_A_PAIR} {group}?",
            "answer": "7",
            "text": {"response": NonTensorData("seven")},
            "group_id": torch.tensor(group),
            "sample_id": torch.tensor(sample),
            "next": following,
            "tokens": {"full": tokens, "prompt": tokens[:prompt], "response": tokens[prompt:]},
            "masks": {"all_attention_mask": torch.ones(length).bool(), "all_assistant_mask": mask},
            "log_probs": {"full": torch.where(mask, -0.25, 0.0)},
            "advantage": torch.tensor([[1.5]]),
        }
    )


class Letters:
    """Token ``i`` is the letter ``a + i``."""

    def decode(self, ids, **_) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


def make_stored(step: int = 20, rows: list[TensorDict] | None = None, **changes) -> StoredStep:
    rows = rows or [make_row(2, 3, sample=0, term=1.0), make_row(2, 1, sample=1), make_row(1, 2, group=1, term=0.0)]
    options = {
        "step": step,
        "metrics": {"reward": 0.5, "kl": None, "groups/trained": 2},
        "rows": RowTable.of(rows),
        "fields": rollout_rows(RowTable.of(rows), Letters()),
        "pieces": [[Letters().decode([i]) for i in row[keys.RESPONSE_TOKENS].tolist()] for row in rows],
        "measured": [torch.stack([row[keys.LOG_PROBS] - 1, row[keys.LOG_PROBS] + 1]) for row in rows],
        "origin": ORIGIN,
    }
    return StoredStep(**{**options, **changes})


def test_a_stored_step_comes_back_as_it_was_written(tmp_path: Path) -> None:
    stored = make_stored()
    path = save_step(tmp_path, stored)
    assert path == tmp_path / "steps" / "step_000020.pt"
    actual = read_step(path)
    for name in ("step", "metrics", "fields", "pieces", "samples"):
        assert getattr(actual, name) == getattr(stored, name)
    same(actual.rows, stored.rows)
    assert torch.equal(actual.origin.rng, ORIGIN.rng)
    assert (actual.origin.device, actual.origin.num_threads) == ("cpu", 2)


def test_a_sample_has_one_entry_for_each_token_after_its_prompt(tmp_path: Path) -> None:
    row = make_row(2, 3)
    row[keys.ASSISTANT_MASK][3] = False  # a user's token between two turns
    row.set(keys.REF_LOG_PROBS, torch.tensor([0.0, 0.0, -1.0, 0.0, -2.0]))
    measured = [torch.tensor([[0.0, 0.0, -3.0, 0.0, -4.0], [0.0, 0.0, 5.0, 0.0, 6.0]])]
    (sample,) = read_step(save_step(tmp_path, make_stored(rows=[row], measured=measured))).samples
    assert set(ROLLOUT_FIELDS) < set(sample)
    assert sample["pieces"] == ["c", "d", "e"]
    assert sample["assistant"] == [True, False, True]
    assert sample["ref_log_probs"] == [-1.0, 0.0, -2.0]
    assert sample["policy_log_probs"] == [-3.0, 0.0, -4.0]
    assert sample["entropy"] == [5.0, 0.0, 6.0]
    for sample in read_step(save_step(tmp_path, make_stored(measured=None))).samples:
        assert sample["policy_log_probs"] is sample["entropy"] is sample["ref_log_probs"] is None
        assert sample["log_probs"] == [-0.25] * len(sample["pieces"])


def test_steps_from_the_restart_on_are_dropped_and_the_oldest_go_first_but_for_step_0(tmp_path: Path) -> None:
    size = max(save_step(tmp_path, make_stored(step)).stat().st_size for step in (0, 2, 4))
    torn = tmp_path / STEPS_FOLDER / ".step_000004.pt.5f3a.tmp"
    torn.write_bytes(b"half")
    drop_steps(tmp_path, 2)
    assert list(stored_steps(tmp_path)) == [0]
    assert not torn.exists()
    for step in (1, 2, 3):
        save_step(tmp_path, make_stored(step), most_bytes=int(2.5 * size))
    assert list(stored_steps(tmp_path)) == [0, 3]
    save_step(tmp_path, make_stored(4), most_bytes=1)  # however large
    assert list(stored_steps(tmp_path)) == [0, 4]


def test_a_file_system_that_refuses_ends_the_run_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / STEPS_FOLDER).write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match=r"logging\.store_steps=false"):
        save_step(tmp_path, make_stored())
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"steps cannot be read \(Permission denied\)"):
        stored_steps(tmp_path)


class Watched:
    """A learner that says when it was looked at."""

    settings = SimpleNamespace(precision="fp32")

    def __init__(self) -> None:
        self.version, self.calls = 0, []

    def measured(self, rows) -> torch.Tensor:
        self.calls.append("measured")
        return torch.zeros(2, sum(len(row[keys.FULL_TOKENS]) for row in rows))

    def update(self, rows) -> dict:
        self.calls.append("update")
        self.version += 1
        return {"grad_norm": 1.0}


def stored_steps_of(learner: Watched, folder: Path, *, enabled: bool = True) -> StoredSteps:
    return StoredSteps(SimpleNamespace(), learner, folder, Letters(), device="cpu", enabled=enabled)


def take(stored: StoredSteps, step: int) -> float:
    batch = RowTable.of([make_row(2, 3)])
    if stored.collector.post_collect_hook is not None:
        stored.collector.post_collect_hook(batch)
    update = stored.learner.update(batch)
    return 0.0 if stored.before is None else stored.write(step, update, batch, rollout_rows(batch, Letters()))


def test_the_first_step_and_those_after_a_checkpoint_are_stored(tmp_path: Path) -> None:
    learner = Watched()
    stored = stored_steps_of(learner, tmp_path)
    seconds = [take(stored, 5), take(stored, 6)]
    stored.after_checkpoint()
    seconds += [take(stored, 7), take(stored, 8)]
    assert list(stored_steps(tmp_path)) == [5, 7]
    assert learner.calls == ["measured", "update", "update", "measured", "update", "update"]
    assert [each > 0 for each in seconds] == [True, False, True, False]
    off = stored_steps_of(learner, tmp_path / "off", enabled=False)
    take(off, 0)
    off.after_checkpoint()
    take(off, 1)
    assert learner.calls[6:] == ["update", "update"]
    assert not (tmp_path / "off").exists()


def test_storing_takes_no_more_than_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes 40 s and a step 100 s: the first is over the share and the free seconds until step 13 is done."""
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0])
    monkeypatch.setattr(stored_steps_module, "time", clock)

    class Slow(Watched):
        def measured(self, rows) -> torch.Tensor:
            now_s[0] += 40.0
            return super().measured(rows)

    stored = stored_steps_of(Slow(), tmp_path)
    for step in range(30):
        began_s = now_s[0]
        take(stored, step)
        now_s[0] = max(now_s[0], began_s + 100.0)
        stored.after_checkpoint()
    assert list(stored_steps(tmp_path)) == [0, 14, 27]
    assert 3 * 40.0 / now_s[0] <= 0.04


def in_bytes(ids) -> str:
    """A tokenizer whose tokens are the bytes."""
    return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_is_shown_at_its_last() -> None:
    for text, pieces in {"a€b": ["a", "", "", "€", "b"], "🙂": ["", "", "", "🙂"]}.items():
        assert text_pieces(list(text.encode()), in_bytes) == pieces
    assert text_pieces(list(b"A\xe2\x82"), in_bytes) == ["A", "", "\ufffd"]  # half a character at the end is not lost
    # the mark itself may be half a character before the next
    assert text_pieces(list("\ufffd!".encode()), in_bytes) == ["", "", "", "\ufffd!"]


def test_a_space_that_a_decoder_drops_at_the_start_belongs_to_its_word() -> None:
    words = ["▁two", "▁more", "s", "▁", "▁end"]

    def decode(ids) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert text_pieces(range(5), decode) == ["two", " more", "s", "", "  end"]


def test_the_pieces_of_any_tokens_join_to_their_text() -> None:
    tokenizer = load_tokenizer("tiny")
    for _ in range(20):
        ids = random.choices(range(len(tokenizer)), k=random.randrange(60))
        assert "".join(text_pieces(ids, tokenizer.decode)) == tokenizer.decode(ids), ids
        raw = random.choices(range(256), k=200)
        assert "".join(text_pieces(raw, in_bytes)) == in_bytes(raw), raw


def row(prompt: int, response: int, reward: float, advantage: float, version: int, cut: bool) -> TensorDict:
    made, info = make_row(prompt, response, term=reward), {"acc": reward, "pred": "x"} if prompt == 3 else {}
    following = {
        **{"reward": torch.tensor([reward]), "success": torch.tensor([reward > 0.5])},
        **dict.fromkeys(("reward_error", "reward_timeout", "truncated"), torch.tensor([cut])),
        **{"reward_info": NonTensorData(json.dumps(info)), "policy_version": torch.tensor(version)},
    }
    return made.update({"advantage": torch.tensor([[advantage]]), "next": following})


def test_four_rows() -> None:
    rows = [row(3, 2, 1.0, 0.5, 4, False), row(3, 4, 0.0, -0.5, 5, True)]
    rows += [row(5, 6, 1.0, 0.0, 5, False), row(5, 8, 1.0, 0.0, 5, False)]
    rows[3]["masks", "all_assistant_mask"] = torch.tensor([0] * 5 + [1] * 3 + [0] * 2 + [1] * 5).bool()  # two turns
    actual = batch_metrics(RowTable.of(rows), version=5)
    expected = {
        "reward": 0.75,
        "reward/std": 3**0.5 / 4,  # of 1 0 1 1
        "reward/correct": 0.75,
        "success": 0.75,
        "reward_errors": 1,
        "reward_timeouts": 1,
        "grader/acc": 0.5,  # of the two rows that have it; text is no metric
        "advantage": 0.25,
        "truncated": 0.25,
        "response_tokens/mean": 5,
        "response_tokens/max": 8,
        "prompt_tokens/mean": 4,
        "turns/mean": 1.25,
        "turn_tokens/mean": 4,
        "policy_age/mean": 0.25,
        "policy_age/max": 1,
    }
    assert actual == pytest.approx(expected)
    assert all(declared(name) for name in actual)


def test_batches_without_a_sampled_token_or_with_huge_rewards_have_finite_metrics() -> None:
    """Of agents that all failed before their first request; of functions that return -1e38 for what is invalid."""
    actual = batch_metrics(RowTable.of([row(3, 0, 0.0, 0.0, -1, False) for _ in range(2)]), version=5)
    assert actual["turns/mean"] == actual["turn_tokens/mean"] == 0
    assert all(map(math.isfinite, actual.values()))
    rows = [row(3, number, reward, 0.0, 4, False) for number, reward in enumerate((3e38, 3e38, -3e38, 3e38))]
    for entry in rows:
        entry["extra"] = NonTensorData(json.dumps({TASK: "sums"}))
    actual = batch_metrics(RowTable.of(rows), version=5)
    assert actual["reward"] == actual["task/sums/reward"] == pytest.approx(1.5e38)
    assert actual["reward/std"] == pytest.approx(3e38 * 3**0.5 / 2)


def test_numbers_keep_their_names_and_a_term_hides_no_metric(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(3, 2, reward, 0.0, 4, False) for reward in (1.0, 0.0)]
    for entry in rows:
        info = {"长度": 4, "个数": 1, "a b": 2, "a_b": 3, "huge": 1.7e308}
        entry["next", "reward_info"] = NonTensorData(json.dumps(info))
    for _ in range(2):
        actual = batch_metrics(RowTable.of(rows), version=5)
    numbers = {name: value for name, value in actual.items() if name.startswith("grader/")}
    assert numbers == {"grader/长度": 4, "grader/个数": 1, "grader/a_b": 2}
    assert all(declared(name).name == "grader/<name>" for name in numbers)
    (message,) = caplog.messages
    assert message == "grader/a_b is the grader's 'a b'; its 'a_b' would have that name: rename one to log both."
    entry = row(1, 1, 1.0, 0.0, 0, False)
    entry["next", "reward_terms", "std"] = torch.tensor([7.0])
    with pytest.raises(ValueError, match="std"):
        batch_metrics(RowTable.of([entry]), version=0)


def warnings(caplog: pytest.LogCaptureFixture, total: int, advantages: list[float], failed: float = 0.0) -> list[str]:
    watch = ZeroAdvantageWatch(total)
    for step, advantage in enumerate(advantages):
        row = {"advantage": advantage, "reward": 0.25, "reward_errors": failed}
        watch.look(step, row, responses=8)
    return caplog.messages


def test_three_steps_in_a_row_of_zero_advantage_groups_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two are not, but where the run has no more."""
    assert warnings(caplog, 20, [0.0, 0.0, 0.1, 0.0, 0.0]) == []
    (warned,) = warnings(caplog, 20, [0.5, 0.0, 0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0])
    assert warned.startswith("All advantages of the last 3 steps were 0 (last mean reward 0.25)")
    caplog.clear()
    assert len(warnings(caplog, 2, [0.0, 0.0])) == 1


def test_a_grader_that_always_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, 20, [0.5, 0.5], failed=7.0) == []
    (text,) = warnings(caplog, 20, [0.5, 0.5], failed=8.0)
    assert text.startswith("The grader failed at all 8 responses of step 1")
