"""``env.transforms``: TorchRL transforms of the user's own between grading and advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import ExcludeTransform, RewardScaling, Transform

import sota_grpo
from sota_grpo import keys
from sota_grpo.assembly.compose import anchor_paths, needs_consent
from sota_grpo.config.validators import validate
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import load_instances
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.rl.collate import drawn_entries, group_table, pad_rows
from sota_grpo.rl.records import Example, Sample, SamplingSupport, Score
from sota_grpo.rl.transforms import GroupAdvantage, UserTransforms, write_scores
from sota_grpo.source.replay_buffer import GroupReplayBuffer
from sota_grpo.training.runs import signature
from tests.config.test_config import composed
from tests.unit.test_api import ROWS, SMALL
from tests.unit.test_collector import make_collector
from tests.unit.test_row_table import same
from tests.unit.tiny_models import make_model

FILE = """
from torchrl.envs.transforms import RewardScaling, Transform

class First(Transform):
    def forward(self, rows):
        for sample, row in enumerate(rows.unbind(0)):
            row["next", "reward"] = row["next", "reward"] * 0 + sample
            row["own"] = row["tokens", "prompt"].sum()
            row["masks", "all_assistant_mask"][-1] = False
        return rows

tripled = RewardScaling(0.0, 3.0, in_keys=[("next", "reward")])
number = 3

def make():
    return First()

def broken():
    raise KeyError("no such thing")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


@pytest.mark.parametrize("concurrent", [False, True])
def test_they_change_rewards_before_the_refill_and_the_advantage(path: Path, concurrent: bool) -> None:
    transforms = UserTransforms(load_instances("env.transforms", [f"{path}:First", f"{path}:tripled"], Transform))
    advantage = GroupAdvantage(scale="none")
    buffer = GroupReplayBuffer(4, 4, transform=advantage) if concurrent else None
    options = {"replay_buffer": buffer} if concurrent else {"postproc": advantage}
    collector = make_collector(graded_transforms=[transforms], refill=True, **options)
    if concurrent:
        collector.start()
    batch = next(iter(buffer if concurrent else collector))
    collector.shutdown()
    rows = batch.unbind(0)
    assert [int(row[keys.GROUP_ID]) for row in rows] == [group for group in range(4) for _ in range(4)]  # 0, 3: alike
    assert [float(row[keys.REWARD]) for row in rows] == [0.0, 3.0, 6.0, 9.0] * 4
    assert [float(row[keys.ADVANTAGE]) for row in rows] == [-4.5, -1.5, 1.5, 4.5] * 4
    for row in rows:
        prompt = row[keys.PROMPT_TOKENS]
        assert row["own"] == prompt.sum()
        assert row[keys.ASSISTANT_MASK].sum() == len(row[keys.FULL_TOKENS]) - len(prompt) - 1


def test_tokens_that_they_leave_out_have_no_support(path: Path) -> None:
    """The model reads the supports of the tokens that are left; a sample that was never drawn has none."""
    drawn = drawn_entries(0, Example("q", "a"), [3, 4])
    support = SamplingSupport(torch.tensor([5, 7, 6, 8, 9], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32))
    whole = Sample(torch.tensor([5, 6]), torch.zeros(2), torch.zeros(2, dtype=torch.int64), False, support=support)
    none = torch.zeros(0)
    failed = replace(whole, token_ids=none.long(), log_probs=none, versions=none, support=None)
    rows = group_table(drawn, [replace(whole, text=""), replace(failed, text="")], None)
    write_scores(rows, [Score({"r": 1.0}, True)] * 2, {"r": 1.0})
    UserTransforms(load_instances("env.transforms", [f"{path}:First"], Transform))(rows)
    counts, ids = rows.cells(keys.SUPPORT_COUNTS), rows.cells(keys.SUPPORT_IDS)
    assert (counts[0].tolist(), ids[0].tolist()) == ([0, 0, 2, 0], [5, 7])
    assert counts[1] is ids[1] is None
    scores, _ = CausalPolicy(make_model()).log_probs(pad_rows(rows.rows(), pad_token_id=0))
    assert scores.isfinite().all()


class Changing(Transform):
    def __init__(self, change: Callable[[TensorDictBase], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = self.change(tensordict)
        return tensordict if result is None else result


def written(_: object) -> None:
    """Only the rows were changed, in place."""


def raised(rows: TensorDictBase) -> None:
    raise RuntimeError("what the user's program says")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: written(rows[0][keys.FULL_TOKENS].zero_()), "changed.*tokens.*full"),
        (lambda rows: written(rows[1].set(keys.LOG_PROBS, rows[1][keys.LOG_PROBS] - 1)), "changed.*log_probs"),
        (lambda rows: written(rows[1].set(keys.GROUP_ID, torch.tensor(5))), "changed group_id"),
        (lambda rows: written(rows[0][keys.ASSISTANT_MASK].fill_(True)), "set.*all_assistant_mask.*where the policy"),
        (lambda rows: rows[:3], "3 rows for a prompt group of 4"),
        (ExcludeTransform(keys.SUCCESS).forward, "removed.*success"),
        (lambda rows: written(rows[0][keys.REWARD].fill_(torch.nan)), "finite float"),
        (lambda rows: written(rows[2].set(keys.REWARD, torch.ones(2))), "finite float"),
        (lambda rows: written(rows[2].set(keys.REWARD, torch.ones(1).double())), "finite float"),
        (lambda rows: written(rows[2].set(keys.ASSISTANT_MASK, rows[2][keys.ASSISTANT_MASK].long())), "its dtype"),
        (raised, "failed: RuntimeError: what the user's program says"),
    ],
    ids=["tokens", "log-probs", "group", "mask", "rows", "entry", "nan", "shape", "dtype", "mask's dtype", "raises"],
)
def test_what_they_may_not_change(change: Callable[[TensorDictBase], object], message: str) -> None:
    transforms = UserTransforms([("env.transforms=own.py:Own", Changing(change))])
    collector = make_collector(graded_transforms=[transforms], dialog_turns_per_batch=4)
    with pytest.raises(RunFailed, match=f"env.transforms=own.py:Own .*{message}"):
        collector.next_batch()
    collector.shutdown(raise_on_error=False)


def test_a_transform_that_does_nothing_leaves_the_rows_as_they_are() -> None:
    nothing = UserTransforms([("a.py:A", Changing(written))])
    plain, passed = (make_collector(graded_transforms=given, as_table=True) for given in ([], [nothing]))
    same(passed.next_batch(), plain.next_batch())


def test_what_is_no_transform_is_refused_with_its_option(path: Path) -> None:
    assert isinstance(load_instances("env.transforms", [f"{path}:make"], Transform)[0][1], Transform)
    for name, message in {
        "number": "gives an object of type int, not a TorchRL Transform",
        "missing": "the file does not define 'missing'",
        "broken": r"calling broken failed \(line \d+\): KeyError",
    }.items():
        with pytest.raises(UserError, match=f"env.transforms={path}:{name}.*{message}"):
            load_instances("env.transforms", [f"{path}:{name}"], Transform)


def test_the_option_is_checked_fingerprinted_and_needs_consent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    config = composed("grpo_cpu", "env.transforms=[own.py:First,own.py:tripled]")
    validate(config)
    assert set(needs_consent(config).values()) == {"run own.py"}
    anchor_paths(config)
    assert config.env.transforms == [f"{path}:First", f"{path}:tripled"]
    before = signature({"env": {"transforms": config.env.transforms}})
    path.write_text(FILE + "\n")
    assert signature({"env": {"transforms": config.env.transforms}}) != before


def test_objects_are_passed_from_python_and_guard_the_resume(tmp_path: Path) -> None:
    def trained(scale: float, *overrides: str) -> sota_grpo.Result:
        transform = RewardScaling(0.0, scale, in_keys=[keys.REWARD])
        options = ["engine=transformers", "train.total_dialog_turns=8", *overrides]
        reward = lambda completions, **_: [1.0 + len(text) % 7 for text in completions]  # noqa: E731
        return sota_grpo.train(
            "grpo_cpu", reward=reward, dataset=ROWS, transforms=[transform], overrides=[*SMALL, *options],
            run_dir=tmp_path / "run",
        )  # fmt: skip

    result = trained(5.0)
    assert result.config["env"]["transforms"] == [f"{tmp_path}/run/inputs/transforms.py:RewardScaling_0"]
    assert result.metrics["reward"].iloc[0] >= 5.0
    with pytest.raises(UserError, match="another"):
        trained(6.0, "train.resume=auto", "train.total_dialog_turns=16")
    with pytest.raises(UserError, match=r"transforms is .*give a list"):
        sota_grpo.train("grpo_cpu", transforms=3)
