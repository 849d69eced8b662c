"""Invariants of GRPOLoss, numbers by hand, and what it accepts, refuses and says."""

from __future__ import annotations

import inspect
import math
from functools import partial
from itertools import product

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from sota_grpo import keys
from sota_grpo.functional.loss_terms import SURROGATES, clipped_surrogate, sapo_surrogate, vespo_surrogate
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.decoder_layer import compile_options
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.custom_objectives import ObjectiveError, surrogate
from sota_grpo.rl.objectives import GRPOLoss, diagnostic_means, losses_with_slopes
from sota_grpo.rl.planner import micro_batches
from tests.builders import TableActor, generator, random_row, random_rows
from tests.config.test_config import ALGORITHMS, composed
from tests.contract.peers import loss_of
from tests.unit.tiny_models import make_model, make_rows

SEQUENCES = (keys.LOG_PROBS, keys.REF_LOG_PROBS, keys.PROXIMAL_LOG_PROBS, keys.LOSS_WEIGHT)
EVERY_TERM = {
    "objective": "clipped",
    "clip_epsilon": (0.2, 0.28),
    "correction": "token",
    "correction_cap": 1.2,
    "kl_to_ref_coeff": 0.1,
    "kl_to_inference_coeff": 0.05,
    "entropy_coeff": 0.02,
    "distill_coeff": 0.4,
    "advantage_coeff": 0.7,
}
#: Every surrogate beside every other term, and every term that looks at rows.
VARIANTS = {
    **{name: EVERY_TERM | {"objective": name} | ({"correction": None} if one.weighs_rows else {})
       for name, one in SURROGATES.items()},
    "gspo": EVERY_TERM | {"ratio": "sequence"},
    "sapo per sequence": EVERY_TERM | {"objective": "sapo", "ratio": "sequence"},
    "geometric": EVERY_TERM | {"correction": "geometric", "correction_mode": "reject", "correction_floor": 0.9},
    "off-policy": EVERY_TERM | {"off_policy_threshold": 0.0, "kl_unbiased": True},
}  # fmt: skip


def total(out) -> torch.Tensor:
    return sum(value for name, value in out.items() if name.startswith("loss_"))


def run(loss: GRPOLoss, batches) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and diagnostics of one optimizer step made of these micro-batches."""
    loss.zero_grad()
    value, sums = 0.0, None
    for batch in batches:
        out = loss(batch)
        total(out).backward()
        value += total(out).item()
        sums = out.sums if sums is None else sums + out.sums
    actor = loss.actor_network
    means = {name: entry.item() for name, entry in diagnostic_means(sums).items()}
    return value, torch.cat([actor.log_probs.grad, actor.entropy.grad]), means


def scene(count=8, **options) -> tuple[list[TensorDict], GRPOLoss, torch.Generator]:
    stream = generator()
    rows = set_loss_weights(random_rows(stream, count, dtype=torch.float64), "token")
    return rows, GRPOLoss(TableActor(rows, stream), **options), stream


def assert_same_step(a, b) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-9, atol=1e-12)
    assert a[2] == pytest.approx(b[2], rel=1e-9)


def token_by_hand(rho, adv, logp, objective, dual):
    """Loss and d loss / d logp of one token, from the definitions, with clip widths of 0.15 and 0.25."""
    if objective == "reinforce":
        return -adv * logp, -adv
    if objective == "cispo":
        return -min(rho, 1.25) * adv * logp, -min(rho, 1.25) * adv
    value, outside = -min(rho * adv, min(max(rho, 0.85), 1.25) * adv), rho > 1.25 if adv > 0 else rho < 0.85
    if dual is not None and adv < 0 and rho > dual:
        value, outside = -dual * adv, True
    return value, 0.0 if outside else -rho * adv


def loss_by_hand(rows, actor, objective, ratio, correction, mode, kl, dual):
    """The whole loss, its gradient and ESS by loops over rows and tokens; a weight is capped at 1.1."""
    value, grad, weights = 0.0, torch.zeros_like(actor.log_probs), []
    for index, row in enumerate(rows):
        spots = row[keys.ASSISTANT_MASK].nonzero().flatten().tolist()
        logp = actor.log_probs.detach()[index, spots].tolist()
        old, ref, prox, weight = (row[key][spots].tolist() for key in SEQUENCES)
        adv, mean = float(row["advantage"]), sum(a - b for a, b in zip(logp, prox)) / len(spots)
        for k, t in enumerate(spots):
            rho = math.exp(mean if ratio == "sequence" else logp[k] - prox[k])
            loss, slope = token_by_hand(rho, adv, logp[k], objective, dual)
            if correction:
                c = math.exp(sum(prox) - sum(old) if correction == "sequence" else prox[k] - old[k])
                c = min(c, 1.1) if mode == "truncate" else c * (c <= 1.1)
                loss, slope = c * loss, c * slope
            d = logp[k] - ref[k]
            penalty = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) + d - 1, 1 - math.exp(-d))}[kl]
            value += weight[k] * (loss + 0.3 * penalty[0])
            grad[index, t] += weight[k] * (slope + 0.3 * penalty[1])
            weights.append(math.exp(logp[k] - old[k]))
    return value, grad, sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)


@pytest.mark.parametrize(
    ("objective", "ratio"), [*product(("clipped", "cispo"), ("token", "sequence")), ("reinforce", "token")]
)
def test_equals_the_loops_in_value_and_gradient(objective, ratio) -> None:
    corrections = [(None, "truncate"), *product(("token", "sequence"), ("truncate", "mask"))]
    for (correction, mode), kl in product(corrections, ("k1", "k2", "k3")):
        dual = 1.3 if (objective, kl) == ("clipped", "k2") else None
        options = {"objective": objective, "ratio": ratio, "correction": correction, "correction_mode": mode}
        options |= {"kl_estimator": kl, "dual_clip": dual, "correction_cap": 1.1, "clip_epsilon": (0.15, 0.25)}
        rows, loss, _ = scene(**options, kl_to_ref_coeff=0.3, entropy_bonus=False)
        out = loss(pad_rows(rows, pad_token_id=0))
        total(out).backward()
        value, grad, ess = loss_by_hand(rows, loss.actor_network, objective, ratio, correction, mode, kl, dual)
        assert total(out).item() == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(loss.actor_network.log_probs.grad, grad, rtol=1e-6, atol=1e-9)
        assert out.ESS.item() == pytest.approx(ess)


def test_three_tokens_by_hand() -> None:
    """rho = 2, 0.5, 1 with A = 1 and weights 1/3: -(1.2 + 0.5 + 1) / 3; ESS = 3.5^2 / (3 * 5.25); one token clipped."""
    batch = hand_batch(behaviour=[0.0, -math.log(2), math.log(2), 0.0], advantage=1.0)
    loss = GRPOLoss(Constant([0.0] * 4), entropy_bonus=False)
    out = loss(batch)
    assert out.loss_objective.item() == pytest.approx(-0.9)
    assert out.clip_fraction.item() == pytest.approx(1 / 3)
    assert out.ESS.item() == pytest.approx(3.5**2 / (3 * 5.25))
    assert out.kl_approx.item() == pytest.approx(0.0, abs=1e-7)
    # KL(engine, trainer) by k3 with d = log rho: (2 - log 2 - 1) + (0.5 + log 2 - 1) + 0
    assert out.mismatch_kl.item() == pytest.approx(0.5 / 3)
    batch.set(keys.PROXIMAL_LOG_PROBS, batch[keys.LOG_PROBS] + 1.0)  # the trainer's, if they are known: (e - 1 - 1) * 3
    again = loss(batch)
    assert again.mismatch_kl.item() == pytest.approx(math.e - 2)
    assert again.loss_objective.item() == pytest.approx(-3.5 / math.e / 3)  # and then the ratio is to them


class Constant(nn.Module):
    """An actor that gives one row of log-probs, whatever the batch."""

    def __init__(self, log_probs: list[float]):
        super().__init__()
        self.log_probs = nn.Parameter(torch.tensor([log_probs]))

    def forward(self, td):
        return td.set(keys.LOG_PROBS, self.log_probs)


def hand_batch(behaviour: list[float], advantage: float) -> TensorDict:
    """One row: a prompt token, then assistant tokens."""
    mask = torch.tensor([[False] + [True] * (len(behaviour) - 1)])
    return TensorDict(
        {
            "tokens": {"full": torch.ones(1, len(behaviour), dtype=torch.long)},
            "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
            "log_probs": {"full": torch.tensor([behaviour])},
            "advantage": torch.full((1, 1, 1), advantage),
        },
        batch_size=[1],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_invariant_to_the_micro_batch_split_to_order_and_to_laziness(variant) -> None:
    rows, loss, stream = scene(**VARIANTS[variant])
    whole = run(loss, [pad_rows(rows, pad_token_id=0)])
    for budget in (1, 7, 15):  # eight rows of at least two tokens never fit into one
        parts = micro_batches(rows, token_budget=budget)
        assert len(parts) > 1
        assert_same_step(run(loss, [pad_rows(part, pad_token_id=0) for part in parts]), whole)
    order = torch.randperm(len(rows), generator=stream).tolist()
    assert_same_step(run(loss, [pad_rows([rows[i] for i in order], pad_token_id=7)]), whole)
    assert_same_step(run(loss, [lazy_stack(rows, 0)]), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_padding_nor_nan_off_the_mask_changes_anything(variant) -> None:
    rows, loss, _ = scene(**VARIANTS[variant])
    clean = pad_rows(rows, pad_token_id=0)
    whole = run(loss, [clean])
    wide = clean.apply(lambda value: nn.functional.pad(value, (0, 5)) if value.dim() == 2 else value)
    off = ~wide[keys.ASSISTANT_MASK]
    for key in SEQUENCES:
        wide.set(key, wide[key].masked_fill(off, torch.nan))
    with torch.no_grad():
        for table in (loss.actor_network.log_probs, loss.actor_network.entropy):
            table[:, : off.shape[1]][off] = torch.nan
    after = run(loss, [wide])
    assert after[1].isfinite().all()
    assert_same_step(after, whole)


FUSED = VARIANTS | {"no other term": {"clip_epsilon": (0.2, 0.28), "dual_clip": 3.0, "entropy_coeff": 1e-9}}


@pytest.mark.parametrize("variant", FUSED)
def test_the_fused_loss_has_the_same_values_and_gradients(variant) -> None:
    rows, loss, _ = scene(**FUSED[variant])
    rows[2][keys.LOG_PROBS][1] = torch.nan
    batches = [pad_rows(rows[part], pad_token_id=0) for part in (slice(3), slice(3, 4), slice(4, None))]
    whole = run(loss, batches)
    loss.fused = losses_with_slopes
    assert_same_step(run(loss, batches), whole)
    outs = [loss(batches[0]), GRPOLoss(loss.actor_network, **FUSED[variant])(batches[0])]
    assert set(outs[0].keys()) == set(outs[1].keys())
    known = {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
    for name in [name for name, _ in outs[0].items() if name.startswith("loss_")]:  # each has its own gradient
        by = [torch.autograd.grad(out.get(name), loss.actor_network.log_probs, **known)[0] for out in outs]
        torch.testing.assert_close(*by, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 4])
def test_losses_of_single_tokens_are_not_fused(count: int) -> None:
    """Their gradients are of another shape than the slopes."""
    rows, loss, stream = scene(count, aggregation="none")
    batch, grads = pad_rows(rows, pad_token_id=0), []
    weights = torch.rand(loss(batch).loss_objective.shape, generator=stream, dtype=torch.float64)
    for loss.fused in (None, losses_with_slopes):
        loss.zero_grad()
        (weights * loss(batch).loss_objective).sum().backward()
        grads.append(loss.actor_network.log_probs.grad)
    assert torch.equal(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("variant", FUSED)
def test_the_fused_loss_is_compiled_as_one_graph(variant) -> None:
    rows, loss, _ = scene(**FUSED[variant])
    batches = [pad_rows(rows[:3], pad_token_id=0), pad_rows(rows[3:4], pad_token_id=0)]
    whole = run(loss, batches)
    backend = compile_options() if variant == "clipped" else {"backend": "eager", "dynamic": True}
    torch.compiler.reset()
    loss.fused = torch.compile(losses_with_slopes, fullgraph=True, **backend)
    assert_same_step(run(loss, batches), whole)


@pytest.mark.parametrize("objective", [name for name, one in SURROGATES.items() if one.clipped and name != "cispo"])
def test_gradient_is_zero_exactly_where_the_clip_says(objective) -> None:
    stream = generator()
    rows = set_loss_weights([row.exclude("proximal_log_probs") for row in random_rows(stream, 12)], "token")
    actor = TableActor(rows, stream)
    widths = 0.02 if objective == "dppo" else 0.2
    loss = GRPOLoss(actor, entropy_bonus=False, objective=objective, clip_epsilon=widths)
    out = loss(pad_rows(rows, pad_token_id=0))
    out.loss_objective.backward()
    dead = sum((grad[: len(row[keys.ASSISTANT_MASK])][row[keys.ASSISTANT_MASK]] == 0).sum()
               for row, grad in zip(rows, actor.log_probs.grad, strict=True))  # fmt: skip
    assert 0 < dead == out.sums["clip_fraction"]


def test_off_policy_rows_have_no_gradient_and_are_counted() -> None:
    """Two rows that the policy has left by 1 nat per token, one bad: it alone is left out, its KL is not."""
    for advantage, expected in ((-1.0, 0.0), (1.0, -math.exp(-1))):
        batch = hand_batch(behaviour=[0.0, -1.0, -1.0], advantage=advantage)
        batch.set(keys.REF_LOG_PROBS, torch.tensor([[0.0, -3.0, -2.5]]))
        loss = GRPOLoss(Constant([0.0, -2.0, -2.0]), off_policy_threshold=0.5, entropy_bonus=False, kl_to_ref_coeff=1.0)
        out = loss(batch)
        (slope,) = torch.autograd.grad(out.loss_objective, loss.actor_network.log_probs, retain_graph=True)
        assert slope.tolist()[0] == pytest.approx([0.0, expected / 2, expected / 2])
        assert out.loss_objective.item() == pytest.approx(expected)
        assert out.off_policy_fraction.item() == (advantage < 0)
        assert out.loss_kl_to_ref.item() > 0

    batch = hand_batch(behaviour=[0.0, -500.0, 0.0, 0.0], advantage=-1.0)  # a dropped row may overflow
    loss = GRPOLoss(Constant([0.0, -1.0, -400.0, -400.0]), off_policy_threshold=0.5, entropy_bonus=False)
    (value := loss(batch).loss_objective).backward()
    assert value.item() == 0
    assert not loss.actor_network.log_probs.grad.any()


@pytest.mark.parametrize("objective", SURROGATES)
def test_an_unbiased_kl_is_weighed_by_the_ratio_with_its_gradient(objective: str) -> None:
    """rho (exp(-d) + d - 1) with d = logp - ref has the slope rho d, and rho d has rho (1 + d): rho = 2, d = log 3.

    So it has where the ratio, to the policy that sampled, is exactly dual_clip, whatever torch's own ``clamp`` does
    there. Above it, dual_clip is the weight, without a gradient: no token owns the divergence.
    """
    batch = hand_batch(behaviour=[0.0, -math.log(2)], advantage=0.0)
    batch.set(keys.REF_LOG_PROBS, torch.tensor([[0.0, -math.log(3)]])).set(keys.PROXIMAL_LOG_PROBS, torch.ones(1, 2))
    options = {"objective": objective, "kl_to_ref_coeff": 1.0, "kl_unbiased": True, "entropy_bonus": False}
    gap = math.log(3)
    for estimator, value, slope in (("k3", 1 / 3 + gap - 1, 1 - 1 / 3), ("k1", gap, 1.0)):
        for dual_clip, weight, pull in ((None, 2, 1), (3.0, 2, 1), (2.0, 2, 1), (1.5, 1.5, 0)):
            loss = GRPOLoss(Constant([0.0, 0.0]), **options, kl_estimator=estimator, dual_clip=dual_clip)
            out = loss(batch)
            out.loss_kl_to_ref.backward()
            assert out.loss_kl_to_ref.item() == pytest.approx(weight * value)
            assert out.kl_to_ref.item() == pytest.approx(value)
            assert loss.actor_network.log_probs.grad[0, 1].item() == pytest.approx(weight * (slope + pull * value))


#: By preset the largest weight of a token relative to that of one with a ratio of 1; dual clip's for the others.
LARGEST_WEIGHT = {"dppo": 20.0, "cispo": 5.0}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_token_owns_a_step_however_far_off_the_engine_was(name: str) -> None:
    """All ratios are 1 but one: its share of the squares of d loss / d logp is at most that of its largest weight."""
    config, stream, length, count = composed("grpo_cpu", f"algorithm={name}"), generator(), 16, 64
    corrected = config.algorithm.correction != "none"
    rows = [random_row(stream, 2, length, index=index, dtype=torch.float64) for index in range(count)]
    actor = TableActor(rows, stream, shift=0.0)
    for index, row in enumerate(set_loss_weights(rows, "token")):
        own = actor.log_probs.detach()[index, : length + 2]
        row["advantage"] = torch.full((1, 1), (-1.0) ** index, dtype=torch.float64)
        row[keys.REF_LOG_PROBS], row[keys.PROXIMAL_LOG_PROBS] = own - 0.01 * row[keys.ASSISTANT_MASK], own.clone()
    batch = pad_rows(rows if corrected else [row.exclude("proximal_log_probs") for row in rows], pad_token_id=0)
    for nats, index in product((5.0, 12.0, 200.0, -200.0), (0, 1)):
        injected = batch.clone()
        injected[keys.LOG_PROBS][index, 5] -= nats
        out = loss_of(config, actor, beta=0.05)(injected)
        (slopes,) = torch.autograd.grad(total(out), actor.log_probs)
        squares = slopes.square()
        share = (squares.max() / squares.sum()).item()
        bound = 1.05 * LARGEST_WEIGHT.get(name, 3.0)  # a twentieth for the divergence
        assert share <= bound**2 / (bound**2 + 0.95**2 * (count - 1) * length), (nats, index)
        assert (out.gradient_squared_max / out.sums["gradient_squared"]).item() == pytest.approx(share, rel=1e-12)


def test_only_loss_entries_carry_a_gradient() -> None:
    rows, loss, _ = scene(**EVERY_TERM)
    out = loss(pad_rows(rows, pad_token_id=0))
    entries = dict(out.to_tensordict().items(include_nested=True, leaves_only=True))
    live = {name for name, value in entries.items() if value.requires_grad}
    assert live == {"loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy"}
    assert {name for name in entries if str(name).startswith("loss_")} == live


def test_loss_and_coefficients_move_the_batch_to_their_device() -> None:
    batch, actor, seen = hand_batch(behaviour=[0.0, 0.1], advantage=1.0), Constant([0.0, 0.0]), []
    actor.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].device))
    loss = GRPOLoss(actor, device="cpu", entropy_bonus=False)
    loss(batch)
    loss.coefficients(batch)
    assert (batch.device, seen) == (None, [torch.device("cpu")] * 2)


CORRECTED = [  # log-weights with A = 1 on policy, options, objective, fraction of the tokens that a bound changes
    ([math.log(4), -math.log(2), -math.log(2)], {"correction_mode": "truncate"}, -1.0, 1 / 3),  # 2, 0.5 and 0.5
    ([math.log(4), -math.log(2), -math.log(2)], {"correction_mode": "mask"}, -1 / 3, 1 / 3),  # 0, 0.5 and 0.5
    # the geometric mean is exp(0.2), so a floor of 1 takes the row whole and 1.3 not
    ([0.5, -0.1], {"correction": "geometric", "correction_mode": "reject", "correction_floor": 1.0}, -1.0, 0.0),
    ([0.5, -0.1], {"correction": "geometric", "correction_mode": "reject", "correction_floor": 1.3}, 0.0, 1.0),
    ([0.0, 0.0], {"correction_mode": "mask", "correction_floor": 1.0}, -1.0, 0.0),  # at a bound is within it
    ([0.0, 0.0], {"correction_mode": "mask", "correction_cap": 1.0}, -1.0, 0.0),
]


@pytest.mark.parametrize(("log_weights", "options", "objective", "fraction"), CORRECTED)
def test_corrections_by_hand_and_how_many_are_bounded(log_weights, options, objective, fraction) -> None:
    batch = hand_batch(behaviour=[0.0, *(-each for each in log_weights)], advantage=1.0)
    batch.set(keys.PROXIMAL_LOG_PROBS, torch.zeros(1, 1 + len(log_weights)))
    actor = Constant([0.0] * (1 + len(log_weights)))
    out = GRPOLoss(actor, **{"correction": "token", "correction_cap": 2.0, "entropy_bonus": False} | options)(batch)
    assert out.loss_objective.item() == pytest.approx(objective)
    assert out.correction_fraction.item() == pytest.approx(fraction)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_of_a_batch_that_is_used_once_a_correction_changes_the_gradient_of_clipped_tokens_alone(advantage) -> None:
    """Ratios to the engine of 0.7, 0.9, 1.1 and 1.5, clip 0.2, cap 2: the clip cuts the last, or the first."""
    ratios = torch.tensor([0.7, 0.9, 1.1, 1.5])
    batch = hand_batch(behaviour=[0.0, *(-ratios.log()).tolist()], advantage=advantage)
    gradients = []
    for correction in (None, "token"):
        actor = Constant([0.0] * 5)
        batch.set(keys.PROXIMAL_LOG_PROBS, torch.zeros(1, 5)) if correction else None
        GRPOLoss(actor, correction=correction, entropy_bonus=False, clip_epsilon=0.2)(batch).loss_objective.backward()
        gradients.append(actor.log_probs.grad[0, 1:] * 4)
    clipped = ratios > 1.2 if advantage > 0 else ratios < 0.8
    torch.testing.assert_close(gradients[0], torch.where(clipped, 0.0, -advantage * ratios))
    torch.testing.assert_close(gradients[1], -advantage * ratios)


def test_tokens_of_weight_zero_take_no_part() -> None:
    """A dropped row changes neither loss nor diagnostics, however bad its numbers."""
    stream = generator()
    rows = random_rows(stream, 6, dtype=torch.float64)
    rows[2][keys.TRUNCATED] = torch.tensor([True])
    rows[2][keys.LOG_PROBS] = torch.full_like(rows[2][keys.LOG_PROBS], -torch.inf)
    loss = GRPOLoss(TableActor(rows, stream), entropy_bonus=False)
    with_row = step(loss, set_loss_weights(rows, "sequence", drop_truncated=True))
    without = step(loss, set_loss_weights(rows[:2] + rows[3:], "sequence"))
    assert with_row == pytest.approx(without)


def step(loss: GRPOLoss, rows: list[TensorDict]) -> list[float]:
    out = loss(pad_rows(rows, pad_token_id=0))
    return [out.loss_objective.item(), out.ESS.item(), out.clip_fraction.item(), out.sums["tokens"].item()]


def padded_scene(**options) -> tuple[TensorDict, GRPOLoss]:
    stream = generator()
    rows = [row.exclude("proximal_log_probs") for row in random_rows(stream, 6)]
    return pad_rows(rows, pad_token_id=0), GRPOLoss(TableActor(rows, stream), **{"entropy_bonus": False} | options)


def test_takes_every_keyword_of_torchrl_with_its_default() -> None:
    theirs = inspect.signature(TorchRLGRPOLoss).parameters
    ours = inspect.signature(GRPOLoss).parameters
    for name, parameter in theirs.items():
        if name not in ("actor_network", "kwargs"):
            assert ours[name].default == parameter.default, name


NO_EFFECT = {"samples_mc_entropy": 4, "gamma": 0.99, "reduction": "sum", "clip_value": 0.2}
NO_EFFECT |= {"ref_log_prob_padding_side": "right", "ref_log_prob_padding_value": 1.0}
NO_CHOICE = {"objective": "ppo", "kl_estimator": "k4", "loss_aggregation": "mean"}
NO_CHOICE |= {"correction": "harmonic", "correction_mode": "drop"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(({name: value}, f"{name} is .*{value}") for name, value in (NO_EFFECT | NO_CHOICE).items()),
        ({"objective": "reinforce", "dual_clip": 3.0}, "dual_clip is 3.0"),
        ({"objective": "reinforce", "ratio": "sequence"}, "'reinforce', which has no ratio"),
        ({"objective": "dppo", "ratio": "sequence"}, "'dppo', which takes it per token"),
        ({"objective": "vespo", "correction": "token"}, "'vespo', which already weights whole rows"),
        ({"kl_unbiased": True, "kl_estimator": "k2"}, "'k1' or 'k3'"),
        ({"aggregation": "prompt_mean", "loss_aggregation": "token"}, "give one"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_keywords_without_effect_or_choice_and_terms_that_do_not_go_together_are_refused(options, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        GRPOLoss(nn.Identity(), **options)


def test_a_partial_of_a_surrogate_sets_its_options_keeps_its_rules_and_sets_no_term_of_the_loss() -> None:
    batch, loss = padded_scene(objective="sapo")
    default, other = (
        GRPOLoss(loss.actor_network, objective=partial(sapo_surrogate, tau_negative=tau), entropy_bonus=False)(batch)
        for tau in (1.05, 3.0)
    )
    assert default.loss_objective == loss(batch).loss_objective != other.loss_objective
    assert default.clip_fraction == loss(batch).clip_fraction == 0
    declared = surrogate(partial(vespo_surrogate, k_positive=1.0))
    assert (declared.weighs_rows, declared.advantage_only, declared.ratios) == (True, True, ("token",))
    with pytest.raises(ObjectiveError, match="sets clip_low, clip_high; leave this out, and set clip widths"):
        surrogate(partial(clipped_surrogate, clip_low=0.01, clip_high=0.01))
    with pytest.raises(ObjectiveError, match=r"the call of algorithm.objective does not fit .*correct its partial"):
        surrogate(partial(sapo_surrogate, tau_pos=2.0))


@pytest.mark.parametrize(
    ("options", "aggregation"),
    [
        ({}, "token"),
        ({"aggregation": "token_mean"}, "token"),
        ({"aggregation": "prompt_mean"}, "sequence"),
        ({"loss_aggregation": "sequence"}, "sequence"),
        ({"loss_aggregation": "constant", "max_response_tokens": 9}, "constant"),
    ],
)
def test_weights_are_derived_from_the_mask_where_the_batch_has_none(options, aggregation) -> None:
    batch, loss = padded_scene(**options)
    derived = loss(batch).loss_objective
    rows = list(batch.unbind(0))
    weights = torch.stack([row["loss_weight"] for row in set_loss_weights(rows, aggregation, max_response_tokens=9)])
    plain = GRPOLoss(loss.actor_network, entropy_bonus=False)
    torch.testing.assert_close(plain(batch.set("loss_weight", weights)).loss_objective, derived)


@pytest.mark.parametrize("options", [{"aggregation": "none"}, {"reduction": "none"}])
def test_none_gives_the_loss_of_each_token(options) -> None:
    batch, loss = padded_scene(**options)
    per_token = loss(batch).loss_objective
    mask = batch[keys.ASSISTANT_MASK]
    assert per_token.shape == (*mask.shape, 1)
    assert not per_token[~mask].any()
    mean = GRPOLoss(loss.actor_network, entropy_bonus=False)(batch).loss_objective
    torch.testing.assert_close(per_token.sum() / mask.sum(), mean)


def test_kl_mask_leaves_drifted_tokens_out_of_loss_and_normaliser() -> None:
    batch, loss = padded_scene(kl_mask_threshold=0.05)
    out = loss(batch)
    drift = 0.5 * (loss.actor_network(batch.copy())[keys.LOG_PROBS] - batch[keys.LOG_PROBS]).square()
    kept = batch[keys.ASSISTANT_MASK] & (drift <= 0.05)
    assert 0 < kept.sum() < batch[keys.ASSISTANT_MASK].sum()
    same = GRPOLoss(loss.actor_network, entropy_bonus=False)(batch.set(keys.ASSISTANT_MASK, kept))
    torch.testing.assert_close(out.loss_objective, same.loss_objective)


def test_set_keys_is_honoured() -> None:
    batch, loss = padded_scene(kl_to_ref_coeff=0.1)
    before = loss(batch)
    renamed = {"advantage": "adv", "sample_log_prob": "old", "ref_log_probs": ("ref", "lp"), "mask": "trained"}
    moved = {"adv": keys.ADVANTAGE, "old": keys.LOG_PROBS, ("ref", "lp"): keys.REF_LOG_PROBS}
    for new, old in (moved | {"trained": keys.ASSISTANT_MASK}).items():
        batch.set(new, batch.get(old))
        del batch[old]
    loss.set_keys(**renamed)
    after = loss(batch)
    assert after.loss_objective == before.loss_objective
    assert after.loss_kl_to_ref == before.loss_kl_to_ref
    with pytest.raises(ValueError, match="not an accepted"):
        loss.set_keys(advantages="adv")


@pytest.mark.parametrize(
    ("options", "missing", "error", "message"),
    [
        ({"kl_to_ref_coeff": 0.1}, keys.REF_LOG_PROBS, KeyError, "ReferenceKL"),
        ({"distill_coeff": 0.1}, keys.REF_LOG_PROBS, KeyError, "distill_coeff is 0.1 but the batch has no"),
        ({"correction": "token"}, None, KeyError, "recompute the log-probs"),
        ({}, keys.ADVANTAGE, KeyError, "no advantage, which sota_grpo.rl.transforms.GroupAdvantage writes; it has"),
        ({}, keys.ASSISTANT_MASK, KeyError, "no masks.all_assistant_mask, which sota_grpo.envs.complete_rows writes"),
        ({"masking_strategy": "generic"}, None, ValueError, "prompt tokens"),
    ],
)
def test_a_missing_entry_is_named(options, missing, error, message) -> None:
    batch, loss = padded_scene(**options)
    if missing is not None:
        del batch[missing]
    with pytest.raises(error, match=message):
        loss(batch)


def test_an_entropy_bonus_needs_a_differentiable_entropy() -> None:
    batch, loss = padded_scene(entropy_bonus=True)
    assert loss(batch).loss_entropy.requires_grad
    loss.actor_network.entropy.requires_grad_(False)
    for loss.fused in (None, losses_with_slopes):
        with pytest.raises(ValueError, match="without a gradient"):
            loss(batch)


def test_torchrl_advantage_shapes_are_read_alike_half_precision_is_widened_and_what_is_not_measured_is_absent() -> None:
    batch, loss = padded_scene()
    advantage, width = batch["advantage"], batch[keys.FULL_TOKENS].shape[1]
    expected = loss(batch).loss_objective
    for shaped in (advantage.flatten(), advantage.squeeze(-1), advantage.expand(-1, width, 1)):
        assert loss(batch.set("advantage", shaped)).loss_objective == expected
    loss.actor_network.to(torch.bfloat16)
    assert loss(batch).loss_objective.dtype == torch.float32
    del batch[keys.REF_LOG_PROBS]
    absent = {"kl_to_ref", "loss_kl_to_ref", "loss_entropy", "correction_fraction"}
    assert not set(loss(batch).to_tensordict().keys()) & absent


@pytest.mark.parametrize("wrap", [lambda model: model, CausalPolicy], ids=["model", "policy"])
def test_a_model_and_its_policy_are_actors_at_the_defaults(wrap) -> None:
    """TorchRL's default has an entropy bonus, so the entropy has a gradient there, and no others pay for it."""
    rows = make_rows([6, 4])
    rows.set(keys.LOG_PROBS, torch.zeros(rows[keys.FULL_TOKENS].shape))
    rows.set(keys.ADVANTAGE, torch.ones(2, 1, 1))
    loss = GRPOLoss(wrap(make_model()))
    actual = loss(rows)
    assert actual.loss_entropy.requires_grad
    (actual.loss_objective + actual.loss_entropy).backward()
    assert all(one.grad.isfinite().all() for one in loss.parameters())
    assert GRPOLoss(wrap(make_model()), entropy_bonus=False)(rows).loss_entropy is None
