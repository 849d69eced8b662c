"""Rewards, reference log-probs and advantages, over ragged and dense rows."""

from __future__ import annotations

import logging
import math
import statistics
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose

from sota_grpo import keys
from sota_grpo.envs.task_env import ScoreResponse
from sota_grpo.errors import RunFailed
from sota_grpo.functional.advantages import group_advantages
from sota_grpo.rl.collate import set_loss_weights
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.table import in_place, row_list
from sota_grpo.rl.transforms import GroupAdvantage, OverlongPenalty, ReferenceKL, RowTransform, write_scores
from tests.builders import VOCAB, generator, random_row, random_rows
from tests.training_rigs import make_env

WEIGHTS = {"right": 1.0, "short": 0.25}


def grade(response: str, example: Example) -> Score:
    if response == "boom":
        raise ZeroDivisionError("no answer in this text")
    if response == "timeout":
        return Score({}, False, "TimeoutError: 5 s")
    if response == "nan":
        return Score({"right": float("nan"), "short": 0.0}, True)
    right = response == example.answer
    return Score({"right": float(right), "short": float(len(response) < 3)}, right)


def text_rows(responses: list[str]) -> TensorDictBase:
    fields = {"query": "2 + 2?", "answer": "4"}
    return lazy_stack([TensorDict({"text": {"response": text}} | fields) for text in responses], 0)


def test_scores_that_are_written_again_keep_no_term_of_the_first() -> None:
    rows = lazy_stack([TensorDict({"group_id": torch.tensor(0)}) for _ in range(2)])
    for term in (1.0, None):
        in_place(write_scores)(rows, [Score({"f": term, "g": 2.0}, False)] * 2, {"f": 1.0, "g": 1.0})
    assert [sorted(row["next", "reward_terms"].keys()) for row in row_list(rows)] == [["g"], ["g"]]


@pytest.mark.parametrize("bad", ["boom", "timeout", "nan"])
def test_a_grader_failure_is_counted_and_ends_nothing(bad, caplog) -> None:
    scorer = ScoreResponse(grade, WEIGHTS)
    with caplog.at_level(logging.WARNING):
        rows = scorer(text_rows(["4", bad, bad]))
    assert rows[keys.REWARD].tolist() == [[1.25], [0.0], [0.0]]
    assert rows[keys.REWARD_ERROR].tolist() == [[False], [True], [True]]
    assert rows[keys.REWARD_TIMEOUT].tolist() == [[False], [bad == "timeout"], [bad == "timeout"]]
    assert rows[keys.SUCCESS].tolist() == [[True], [False], [False]]
    assert len(caplog.records) == 1, "the same failure is told once"


def test_a_scorer_of_groups_is_given_all_rows() -> None:
    class Rank:
        def score_group(self, pairs: list[tuple[str, Example]]) -> list[Score]:
            order = sorted(response for response, _ in pairs)
            return [Score({"rank": float(order.index(response))}, False) for response, _ in pairs]

    rows = ScoreResponse(Rank(), {"rank": 1.0})(text_rows(["7", "5", "100"]))
    assert rows[keys.REWARD].tolist() == [[2.0], [1.0], [0.0]]


def test_a_grader_with_other_terms_is_a_mistake_of_the_task() -> None:
    with pytest.raises(KeyError, match="term_weights names"):
        ScoreResponse(grade, {"right": 1.0})(text_rows(["4"]))


# ----------------------------------------------------------------------------------------------- advantage


def advantage_loop(rewards: list[float], groups: list[int]) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups):
        own = [r for r, g in zip(rewards, groups) if g == group]
        out.append((reward - sum(own) / len(own)) / (statistics.stdev(own) + 1e-6))
    return out


def test_rewards_of_several_dtypes_are_compared() -> None:
    kinds = enumerate((torch.float32, torch.float64, torch.int64))
    rewards = [{keys.GROUP_ID: torch.tensor(3), keys.REWARD: torch.tensor([n], dtype=kind)} for n, kind in kinds]
    rows = [TensorDict(row).set(keys.ASSISTANT_MASK, torch.ones(4, dtype=torch.bool)) for row in rewards]
    penalised = OverlongPenalty(4, 2)(GroupAdvantage(scale="none")(lazy_stack(rows)))
    assert penalised["advantage"].flatten().tolist() == [-1.0, 0.0, 1.0]
    assert penalised[keys.REWARD].flatten().tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dense", [False, True])
def test_advantage_equals_the_loop_in_any_order(dense: bool) -> None:
    """Groups of 4, 4, 4 and 2."""
    stream = generator()
    rows = random_rows(stream, 14, group_size=4)
    rows = [rows[index] for index in torch.randperm(14, generator=stream).tolist()]
    expected = advantage_loop([row[keys.REWARD].item() for row in rows], [row["group_id"].item() for row in rows])
    batch = lazy_stack([row.exclude("advantage") for row in rows])
    if dense:
        batch = TensorDict({key: batch[key] for key in (keys.REWARD, keys.GROUP_ID)}, batch_size=[14])
    out = GroupAdvantage()(batch)["advantage"]
    assert out.shape == (14, 1, 1)
    assert out.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def batch_of(rewards: list[float], groups: list[int], failed: list[int] = [], **entries) -> TensorDict:  # noqa: B006
    error = torch.tensor([[index in failed] for index in range(len(rewards))])
    following = {"reward": torch.tensor(rewards, dtype=torch.float64).unsqueeze(-1), "reward_error": error, **entries}
    return TensorDict({"next": following, "group_id": torch.tensor(groups)}, [len(rewards)])


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "best_of_others", "batch_mean"])
def test_a_row_whose_grader_failed_is_in_no_statistic_and_has_no_advantage(baseline, scale) -> None:
    """Wrong answers earn -1 and the failed rows 0: the advantages of the others are those of a batch without them."""
    rewards, groups = [-1.0, -1.0, -1.0, 0.0, 1.0, 0.0, -0.5, -1.0, 0.0, 0.5], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    failed = [3, 5, 8]
    kept = [index for index in range(10) if index not in failed]
    actual = GroupAdvantage(baseline, scale)(batch_of(rewards, groups, failed))["advantage"].flatten()
    if baseline in ("leave_one_out", "best_of_others"):
        kept.remove(9)  # it has no sibling left
    own = batch_of([rewards[index] for index in kept], [groups[index] for index in kept])
    assert actual[kept].tolist() == pytest.approx(GroupAdvantage(baseline, scale)(own)["advantage"].flatten().tolist())
    assert not actual[[index for index in range(10) if index not in kept]].any()
    assert not GroupAdvantage(baseline, scale)(batch_of(rewards, groups, list(range(10))))["advantage"].any()


def test_batch_baselines_keep_the_signal_of_a_uniform_group_with_the_kl_in_the_reward() -> None:
    """Rewards 1 1 1 1 | 1 0 0 0 with the KL of rows 1 and 3 at 1e-3: (r - mean) / std of the batch, by hand."""
    rewards = [1.0, 0.999, 1.0, 0.999, 1.0, 0.0, 0.0, 0.0]
    graded = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0], dtype=torch.float64).unsqueeze(-1)
    batch = batch_of(rewards, [0, 0, 0, 0, 1, 1, 1, 1]).set(keys.GRADED_REWARD, graded)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
    actual = GroupAdvantage("batch_mean", "batch_std")(batch)["advantage"].flatten().tolist()
    assert actual == pytest.approx([(reward - mean) / std for reward in rewards], rel=1e-12)


@pytest.mark.parametrize("scale", ["group_std", "group_mean", "batch_std", "advantage_std"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "best_of_others", "batch_mean", "none", "own"])
def test_a_kl_penalty_alone_is_never_divided_by_its_own_spread(baseline: str, scale: str) -> None:
    """Where graded rewards give nothing to divide by, advantages are the penalties minus their baseline."""
    groups = torch.arange(2).repeat_interleave(4)
    penalties = torch.rand(8, dtype=torch.float64)
    by_group = scale.startswith("group") or (scale == "advantage_std" and baseline not in ("batch_mean", "none"))
    own = (lambda rewards: rewards - rewards.mean()) if baseline == "own" else None
    of_groups = torch.tensor([3.0, 5.0])[groups] if by_group and own is None else torch.full((8,), 4.0)
    for graded in (torch.full((8,), 3.0), of_groups):
        for size in (1.0, 1e-3, 1e-7):
            batch = batch_of((graded.double() + size * penalties).tolist(), groups.tolist())
            batch["next", "reward"] = batch["next", "reward"].double()
            batch.set(keys.GRADED_REWARD, graded.double().unsqueeze(-1))
            expected = group_advantages(penalties, groups, baseline="batch_mean" if own else baseline, scale="none")
            actual = GroupAdvantage(own or baseline, scale)(batch)["advantage"].flatten()
            torch.testing.assert_close(actual, size * expected, rtol=1e-5, atol=1e-14)


@pytest.mark.parametrize("kl_first", [False, True])
def test_a_length_penalty_is_graded_whether_it_comes_before_or_after_the_kl(kl_first: bool) -> None:
    """Lengths 6, 7, 10 and 12 of at most 10 are penalised by 0, 1/4, 1 and 1, divided by their own spread."""
    rows = [random_row(generator(), 2, length, group_size=4) for length in (6, 7, 10, 12)]
    for row in rows:
        del row["advantage"], row["next", "ref_log_probs"]
        row.set(keys.REWARD, torch.ones(1))
        row.set(keys.LOG_PROBS, torch.where(row[keys.ASSISTANT_MASK], 1e-6 * torch.rand(1), 0.0))
    order = (kl_of(zeros, 1.0), OverlongPenalty(10, 4))[:: 1 if kl_first else -1]
    batch = GroupAdvantage()(Compose(*order)(lazy_stack(rows)))
    expected = advantage_loop([0.0, -0.25, -1.0, -1.0], [0] * 4)
    assert batch["advantage"].flatten().tolist() == pytest.approx(expected, abs=1e-3)


def test_a_reward_of_the_users_own_is_divided_by_its_spread_though_another_has_a_kl_penalty() -> None:
    batch = batch_of([1.0, 1.0], [0, 0], graded_reward=torch.ones(2, 1), shaped=torch.tensor([[3.0], [1.0]]))
    actual = GroupAdvantage(in_keys=(("next", "shaped"), "group_id"))(batch)["advantage"].flatten().tolist()
    assert actual == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-4)


def test_an_own_estimator_reads_terms_with_an_own_reward() -> None:
    batch = TensorDict({"next": {"mine": torch.zeros(2, 1), "reward_terms": {"a": torch.tensor([[1.0], [2.0]])}}}, [2])
    batch["group_id"] = torch.zeros(2, dtype=torch.int64)
    transform = GroupAdvantage(lambda terms: terms["a"], "none", in_keys=(("next", "mine"), "group_id"))
    assert transform(batch)["advantage"].flatten().tolist() == [1.0, 2.0]


def zeros(padded: TensorDictBase) -> torch.Tensor:
    """A reference that is sure of every token."""
    return torch.zeros(padded[keys.FULL_TOKENS].shape)


def kl_of(reference, coeff: float | None = None, budget: int = 99, **options) -> ReferenceKL:
    return ReferenceKL(reference, in_reward_coeff=coeff, pad_token_id=0, token_budget=budget, **options)


def test_of_the_steps_of_dialogs_only_what_is_whole_is_transformed() -> None:
    """Of a dialog only the last step's reward counts, so a penalty on its earlier turns would be lost."""

    def steps(turns: list[int], done: list[bool]) -> TensorDictBase:
        rows = []
        for index, (turn, ends) in enumerate(zip(turns, done, strict=True)):
            row = random_row(generator(), 2, 3, index=index).exclude("advantage", keys.REF_LOG_PROBS)
            rows.append(row.update({keys.TURN: torch.tensor(turn), "next": {"done": torch.tensor([ends])}}))
        return lazy_stack(rows)

    groups = [GroupAdvantage(group_size=size) for size in (None, 2)]
    penalties = [OverlongPenalty(4, 2), kl_of(zeros, 1.0)]
    for compute in (*groups, *(group.inv for group in groups), *penalties):
        with pytest.raises(ValueError, match=r"row 1 is one step of a dialog \(turn 0, done=False\); join the steps"):
            compute(steps([0, 0], [True, False]))
    for penalty in penalties:
        with pytest.raises(ValueError, match="row 1 is one step of a dialog"):
            penalty(steps([0, 1], [True, True]))
        penalty(steps([0, 0], [True, True]))
    for group in groups:
        assert group(steps([2, 0], [True, True]))["advantage"].abs().min() > 0  # the last steps alone
    kl_of(zeros)(steps([0, 1], [False, True]))


def test_masks_may_be_integers() -> None:
    rows = [row.exclude("advantage", keys.REF_LOG_PROBS) for row in random_rows(generator(), 4, group_size=4)]
    others = [row.clone().update({"masks": {"all_assistant_mask": row[keys.ASSISTANT_MASK].long()}}) for row in rows]
    for transform in (
        kl_of(FakeReference(), 0.1),
        OverlongPenalty(4, 4),
        GroupAdvantage("length_weighted"),
        lambda rows: set_loss_weights(rows, "sequence"),
    ):
        transform(lazy_stack(rows)), transform(lazy_stack(others))
    for row, other in zip(rows, others, strict=True):
        for key in (keys.REF_LOG_PROBS, keys.REWARD, keys.ADVANTAGE, keys.LOSS_WEIGHT):
            assert torch.equal(row[key], other[key])


def test_a_penalty_that_one_row_lacks_keeps_its_weight() -> None:
    """Weights 1 and -0.5 of ``right`` and ``long``; w (t - mean) / (std + eps) added by hand; one row has None."""
    rows, terms = [], {"right": [1.0, 0.0, 1.0, 0.0], "long": [3.0, 1.0, None, 8.0]}
    for values in zip(*terms.values()):
        own = {name: torch.tensor([value]) for name, value in zip(terms, values) if value is not None}
        rows.append(TensorDict({"next": {"reward": torch.zeros(1), "reward_terms": own}, "group_id": 0}))
    expected = [0.0] * 4
    for weight, values in zip((1.0, -0.5), terms.values()):
        own = [value for value in values if value is not None]
        mean, std = statistics.fmean(own), statistics.stdev(own) + 1e-6
        expected = [e + (0 if value is None else weight * (value - mean) / std) for e, value in zip(expected, values)]
    options = {"baseline": "none", "scale": "none", "decouple_terms": True}
    transform = GroupAdvantage(**options, term_weights={"right": 1.0, "long": -0.5})
    assert transform(lazy_stack(rows))["advantage"].flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_an_incomplete_group_is_refused_by_id() -> None:
    rows = lazy_stack([row.exclude("advantage") for row in random_rows(generator(), 8, group_size=4)[:7]], 0)
    with pytest.raises(ValueError, match=r"group 1 has 3 responses in this batch instead of 4"):
        GroupAdvantage(group_size=4)(rows)


# ----------------------------------------------------------------------------------------------- reference


class FakeReference:
    """Log-prob of a token is -1/10 of its id at its own position; NaN on padding, so padding must not be read."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def __call__(self, padded: TensorDictBase) -> torch.Tensor:
        tokens = padded[keys.FULL_TOKENS]
        self.widths.append(int(padded[keys.ATTENTION_MASK].sum()))  # where prompts differ: the packed tokens
        return torch.where(padded[keys.ATTENTION_MASK], -tokens / 10, torch.nan)


def test_a_group_of_which_some_have_an_advantage_is_refused_and_other_groups_get_theirs() -> None:
    def rows_of(*groups: int) -> list[TensorDict]:
        rewards = enumerate(groups)
        return [TensorDict({keys.GROUP_ID: torch.tensor(g), keys.REWARD: torch.tensor([float(i)])}) for i, g in rewards]

    first, second = rows_of(3, 3), rows_of(4, 4)
    before = GroupAdvantage()(lazy_stack(first))[keys.ADVANTAGE].tolist()
    both = GroupAdvantage()(lazy_stack([*second, *first]))[keys.ADVANTAGE].tolist()
    assert both == before + before
    with pytest.raises(ValueError, match="only some responses of group 3 have advantage"):
        GroupAdvantage()(lazy_stack([first[0], *rows_of(3, 3)]))


def test_a_response_to_which_no_reward_function_applies_is_in_no_statistic() -> None:
    """Its functions said None, and not 0: (3, 1) have the mean 2 and the standard deviation 1.4142."""
    rows = TensorDict({"group_id": torch.zeros(4, dtype=torch.int64)}, [4])
    terms = [{"f": 3.0, "g": None}, {"f": None, "g": None}, {"f": None, "g": 1.0}, {"f": None, "g": None}]
    rows = lazy_stack(list(rows.unbind(0)))
    in_place(write_scores)(rows, [Score(each, False) for each in terms], {"f": 1.0, "g": 1.0})
    advantage = GroupAdvantage()(rows)["advantage"].flatten()
    torch.testing.assert_close(advantage, torch.tensor([0.7071, 0.0, -0.7071, 0.0]), atol=1e-4, rtol=0)
    assert rows["next", "reward_error"].flatten().tolist() == [False, True, False, True]


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_reference_log_probs_are_on_their_own_tokens(budget) -> None:
    rows = [row.exclude(keys.REF_LOG_PROBS) for row in random_rows(generator(), 9)]
    for index, row in enumerate(rows):
        row[keys.FULL_TOKENS][0] = VOCAB + index  # prompts must differ: equal ones are packed once, and then more fits
    reference, before = FakeReference(), [row[keys.REWARD].item() for row in rows]
    kl_of(reference, 0.5, budget)(lazy_stack(rows, 0))
    for row, reward in zip(rows, before, strict=True):
        expected, gap = [], 0.0
        for token, trained, logp in zip(
            *(row[k].tolist() for k in (keys.FULL_TOKENS, keys.ASSISTANT_MASK, keys.LOG_PROBS))
        ):
            expected.append(-token / 10 if trained else 0.0)
            gap += logp + token / 10 if trained else 0.0
        assert row[keys.REF_LOG_PROBS].tolist() == pytest.approx(expected)
        assert row[keys.REWARD].item() == pytest.approx(reward - 0.5 * gap, rel=1e-4, abs=1e-5)
    assert budget == 1 or max(reference.widths) <= budget


def test_a_reference_that_pads_is_given_as_many_rows_as_its_own_padding_allows() -> None:
    """16 responses of 2 tokens to one prompt of 40 are 72 packed tokens, and 42 each where they are padded."""
    rows = [random_row(generator(), 40, 2, index=index).exclude(keys.REF_LOG_PROBS) for index in range(16)]
    for row in rows:
        row[keys.FULL_TOKENS][:40] = torch.arange(40)
    for shared, rows_of_a_pass in ((True, [16]), (False, [2] * 8)):
        reference = Mock(spec=FakeReference(), side_effect=zeros)
        kl_of(reference, budget=84, shared_prompt=shared)(lazy_stack([row.clone() for row in rows]))
        assert [len(call.args[0]) for call in reference.call_args_list] == rows_of_a_pass


def test_a_reference_that_cannot_compute_ends_the_run_in_a_sentence() -> None:
    row = random_row(generator(), 4, 2).exclude(keys.REF_LOG_PROBS)
    full = Mock(spec=FakeReference(), side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried.\nand details"))
    sentence = r"lacks memory for the reference's micro-batches of 4,096 tokens \(CUDA .* Tried\); use a smaller"
    with pytest.raises(RunFailed, match=sentence):
        kl_of(full, budget=4096)(lazy_stack([row]))
    with pytest.raises(ValueError, match="not finite"):
        kl_of(lambda padded: zeros(padded) * torch.nan)(lazy_stack([row]))


def test_every_pass_of_the_reference_is_launched_before_one_is_fetched() -> None:
    """A fetch waits for the device, which would have nothing to do until the next pass is packed."""
    events: list[str] = []

    class OnDevice:
        def __init__(self, values: torch.Tensor):
            self.values = values
            events.append("launched")

        def detach(self) -> OnDevice:
            return self

        def to(self, *_: object) -> torch.Tensor:
            events.append("fetched")
            return self.values

    rows = [row.exclude(keys.REF_LOG_PROBS) for row in random_rows(generator(), 6)]
    kl_of(lambda padded: OnDevice(torch.zeros(padded.shape[0], 64)), budget=1)(lazy_stack(rows, 0))
    assert events == ["launched"] * 6 + ["fetched"] * 6


def test_without_a_coefficient_the_reward_stays_and_twice_is_once() -> None:
    rows = [row.exclude(keys.REF_LOG_PROBS) for row in random_rows(generator(), 4)]
    before = [row[keys.REWARD].clone() for row in rows]
    kl_of(FakeReference())(lazy_stack(rows, 0))
    assert all(torch.equal(row[keys.REWARD], reward) for row, reward in zip(rows, before, strict=True))
    again = FakeReference()
    kl_of(again, 1.0)(lazy_stack(rows, 0))
    assert again.widths == []


def test_kl_noise_in_the_reward_stays_noise() -> None:
    """Rewards 0 0 | 1 0 and a KL of 0.01 on row 1 alone: only the second group is scaled to unit variance."""
    rows, noise, half = random_rows(generator(), 4, group_size=2), 1e-2, 0.5**0.5
    for index, (row, reward) in enumerate(zip(rows, [0.0, 0.0, 1.0, 0.0])):
        del row["advantage"], row["next", "ref_log_probs"]
        row.set(keys.REWARD, torch.tensor([reward]))
        mask = row[keys.ASSISTANT_MASK]
        row.set(keys.LOG_PROBS, torch.where(mask, noise / mask.sum() if index == 1 else 0.0, 0.0))
    batch = GroupAdvantage()(kl_of(zeros, 1.0)(lazy_stack(rows)))
    for key, expected in (
        (keys.KL_TERM, [0, -noise, 0, 0]),
        (keys.REWARD, [0, -noise, 1, 0]),
        (keys.ADVANTAGE, [noise / 2, -noise / 2, half, -half]),
    ):
        assert [float(row[key]) for row in batch.unbind(0)] == pytest.approx(expected, rel=1e-3, abs=1e-9)


# ------------------------------------------------------------------------------------- penalty, composition


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_overlong_penalty_by_hand(shape: tuple[int, ...]) -> None:
    """max 10, buffer 4: lengths 6, 7, 10, 12 give 0, -1/4, -1, -1, here weighed by 2, in the shape of the reward."""
    rows = [
        TensorDict({"masks": {"all_assistant_mask": torch.ones(n).bool()}, "next": {"reward": torch.ones(shape)}})
        for n in (6, 7, 10, 12)
    ]
    out = OverlongPenalty(10, 4, weight=2.0)(lazy_stack(rows, 0))
    assert out[keys.REWARD].tolist() == torch.tensor([1.0, 0.5, -1.0, -1.0]).reshape(4, *shape).tolist()
    penalties = torch.tensor([0.0, -0.25, -1.0, -1.0]).reshape(4, *shape).tolist()
    assert out[(*keys.REWARD_TERMS, "overlong")].tolist() == penalties
    with pytest.raises(ValueError, match="buffer_tokens is 11"):
        OverlongPenalty(10, 11)


@pytest.mark.parametrize("transform", [OverlongPenalty(4, 4), kl_of(FakeReference(), 0.1)], ids=["overlong", "kl"])
def test_rows_that_were_sampled_before_get_their_penalty_once_and_others_theirs(transform: RowTransform) -> None:
    """As by a replay buffer, which gives its rows themselves, with others each time."""
    rows = [row.exclude(keys.REF_LOG_PROBS) for row in random_rows(generator(), 4)]
    expected = transform(lazy_stack([row.clone() for row in rows]))[keys.REWARD].tolist()
    assert len({str(value) for value in expected}) == 4
    for sampled in ([0, 1], [2, 0], [1, 3], [3, 2]):
        batch = transform(lazy_stack([rows[number] for number in sampled]))
        assert batch[keys.REWARD].tolist() == [expected[number] for number in sampled]


def test_they_compose_as_a_collectors_postproc() -> None:
    drop = (keys.REF_LOG_PROBS, "advantage", "query")
    rows = [row.exclude(*drop) for row in random_rows(generator(), 4, group_size=4)]
    for row, text in zip(rows, ["4", "5", "boom", "100"], strict=True):
        row.update({"text": {"response": text}, "query": "2 + 2?", "answer": "4"})
    postproc = Compose(
        ScoreResponse(grade, WEIGHTS),
        OverlongPenalty(100, 10),
        kl_of(FakeReference(), budget=50),
        GroupAdvantage(scale="none", group_size=4),
    )
    before = set(rows[0].keys(include_nested=True, leaves_only=True))
    out = postproc(lazy_stack(rows, 0))
    written = set(row_list(out)[0].keys(include_nested=True, leaves_only=True)) - before
    assert written <= {key for transform in postproc for key in transform.out_keys}
    assert out["advantage"].flatten().tolist() == [0.75, -0.25, 0.0, -0.5]  # "boom" takes no part
    assert all(keys.REF_LOG_PROBS in row.keys(True) for row in row_list(out))


def test_group_advantage_inside_an_env_is_refused() -> None:
    with pytest.raises(RuntimeError, match="postproc"):
        TransformedEnv(make_env(), GroupAdvantage()).output_spec  # noqa: B018


def test_terms_are_decoupled_by_the_weights_given_or_by_those_of_the_rows() -> None:
    """Two groups; a wide term, a narrow one and a penalty that weighs 1; the second group lacks the narrow one."""
    terms = [{"wide": 300.0, "narrow": 0.0, "overlong": 0.0}, {"wide": 100.0, "narrow": 0.1, "overlong": -1.0}]
    terms += [{"wide": 1.0, "overlong": 0.0}, {"wide": 1.0, "overlong": 0.0}]
    listed = []
    for index, one in enumerate(terms):
        entries = {name: torch.tensor([value]) for name, value in one.items()}
        listed.append(TensorDict({"next": {"reward": torch.zeros(1), "reward_terms": entries}, "group_id": index // 2}))
    rows = lazy_stack(listed, 0)
    options = {"baseline": "none", "scale": "none", "decouple_terms": True}
    with pytest.raises(ValueError, match="pass term_weights"):
        GroupAdvantage(**options)(rows)
    with pytest.raises(ValueError, match=r"the rows have no \('next', 'reward_terms'\)"):
        GroupAdvantage(**options, term_weights={"wide": 2.0})(batch_of([1.0, 0.0], [0, 0]))
    with_kl = batch_of([1.0, 0.0], [0, 0], reward_terms={"kl": torch.zeros(2, 1)})
    with_kl.set(keys.GRADED_REWARD, with_kl[keys.REWARD])
    with pytest.raises(ValueError, match="a KL penalty in the reward, which that would rescale; use kl_to_ref_coeff"):
        GroupAdvantage(**options, term_weights={})(with_kl)
    first = GroupAdvantage(**options, term_weights={"wide": 2.0, "narrow": 3.0})(rows)["advantage"].flatten()
    half = math.sqrt(0.5)
    assert first.tolist() == pytest.approx([half * (2 - 3 + 1), half * (-2 + 3 - 1), 0.0, 0.0], abs=1e-4)
    again = lazy_stack([row.exclude("advantage") for row in listed], 0)
    assert GroupAdvantage(**options)(again)["advantage"].flatten().tolist() == first.tolist()


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_decoupled_terms_and_rewards_may_be_integers(kind: torch.dtype) -> None:
    found = []
    for dtype in (torch.float32, kind):
        terms = {"right": torch.tensor([[1], [0], [1]]).to(dtype), "short": torch.tensor([[0.0], [0.5], [2.0]])}
        rows = batch_of([1.0, 0.0, 1.0], [0, 0, 0], reward_terms=terms)
        rows.set(keys.REWARD, rows[keys.REWARD].to(dtype))
        found.append(GroupAdvantage(decouple_terms=True, term_weights={"right": 0.5, "short": 0.25})(rows))
    assert torch.equal(*(rows["advantage"] for rows in found))
    assert found[1]["advantage"].flatten().unique().numel() == 3
