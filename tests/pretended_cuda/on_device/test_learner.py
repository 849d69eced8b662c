"""The learner on the device computes what it computes on the CPU, in every precision, and rarely waits for it."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, lazy_stack
from torch import nn

from sota_grpo import keys
from sota_grpo.functional.log_probs import chunked_log_probs
from sota_grpo.policy.causal import AdapterOffReference, CausalPolicy, FrozenReference
from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.tensor_files import stored_tensors
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.rl.transforms import ReferenceKL, reference_log_probs
from sota_grpo.training.checkpoint import ShardWriter, rng_state, set_rng_state
from sota_grpo.training.learner import Learner, NonFiniteStep
from tests.pretended_cuda import kernels
from tests.pretended_cuda.counters import host_traffic
from tests.rank_rigs import build_learner, ragged_rows
from tests.unit.tiny_models import make_model

CUDA = torch.device("cuda", 0)
SEED = random.getrandbits(31)
WAITS_PER_MICRO_BATCH = {"learner": 0, "reference": 1}
COPIES_PER_MICRO_BATCH = 1  # from memory that is not pinned; the rest goes in one block
# relative error of a gradient: the unit roundoffs of bf16 (2^-9) and fp16 (2^-12), of which some ten meet on the way
# through two layers and the head (12 in one random draw, an adapter's), so twenty; float32 sums in another order
CLOSE = {"fp32": 1e-5, "fp16": 20 * 2**-12, "bf16": 20 * 2**-9}


def build(folder: Path, device: str, *, tied: bool, **settings: Any) -> Learner:
    chosen = {"optim_batch_size": 8, "micro_batch_tokens": 60, **settings}
    shape = {"head_dim": 8, "tie_word_embeddings": tied}
    return build_learner(Ranks(), str(folder), device=device, shape=shape, **chosen)


def own_objective(log_prob: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return -advantage * log_prob


@pytest.mark.parametrize(
    ("device", "layers", "objective", "settings", "compiled"),
    [
        (CUDA, True, "clipped", {}, True),
        ("cpu", True, "clipped", {}, False),
        (CUDA, False, "clipped", {}, False),
        (CUDA, True, own_objective, {}, False),
        (CUDA, True, "clipped", {"entropy_target": 0.2}, False),  # its coefficient would be compiled anew in each step
    ],
)
def test_the_loss_is_compiled_where_layers_are_unless_it_changes(
    device: Any, layers: bool, objective: Any, settings: dict[str, Any], compiled: bool, tmp_path: Path
) -> None:
    policy = CausalPolicy(make_model(head_dim=8).to(device))
    policy.fused = layers
    loss = GRPOLoss(policy, objective=objective)
    chosen = LearnerSettings(
        **{"lr": 1e-3, "total_steps": 1, "optim_batch_size": 8, "micro_batch_tokens": 60} | settings
    )
    Learner(policy, loss, chosen, pad_token_id=0, dump_dir=tmp_path)
    assert (loss.fused is not None) == compiled


def rows(count: int = 8) -> LazyStackedTensorDict:
    torch.manual_seed(SEED + 1)
    return ragged_rows(count)


def distance(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of all tensors together, relative to the norm of ``right``."""
    assert found.keys() == right.keys()
    pairs = [(found[name].detach().cpu().float(), right[name].detach().cpu().float()) for name in right]
    gap = torch.stack([(left - other).norm() for left, other in pairs]).norm()
    return float(gap / torch.stack([other.norm() for _, other in pairs]).norm())


FULL = {"lora": False, "dropout": 0.0, "tied": True, "checkpointing": False}
CASES = [
    {**FULL, "precision": "fp32", "tied": False},
    {**FULL, "precision": "bf16", "lora": True, "checkpointing": True, "recompute": True, "epochs": 2},
    {**FULL, "precision": "fp16"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(name for name, on in case.items() if on))
def test_it_learns_what_the_cpu_learns(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 on the CPU: gradient, losses, gradient norm, weights after an update of two steps."""
    calls = []
    name = "sota_grpo::packed_attention"
    attention = kernels.STAND_INS[name]
    monkeypatch.setitem(kernels.STAND_INS, name, lambda *args: (calls.append(len(args)), attention(*args))[1])
    here = build(tmp_path, "cuda", **case)
    there = build(tmp_path, "cpu", **{**case, "precision": "fp32"})
    assert here.device == CUDA
    assert here.policy.shared_prompt
    calls.clear()
    close, batch = CLOSE[case["precision"]], row_list(rows(16))
    gradients = [learner.gradient(batch, token_budget=60) for learner in (here, there)]
    assert distance(*gradients) < close
    assert bool(calls) == (case["precision"] != "fp32")
    norm, gap, _ = here.gradient_gap(batch, (1000, 20))
    assert norm > 0.01
    assert gap < close
    metrics = [learner.update(rows(16)) for learner in (here, there)]
    for name in ("loss/objective", "loss/kl", "grad_norm", "entropy", "kl", "ess"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=close, abs=close), name
    assert metrics[0].get("skipped_steps", 0) == 0
    assert metrics[0]["optimizer_steps"] == 2 * case.get("epochs", 1)
    weights = [dict(engine_weights(learner.policy.model)) for learner in (here, there)]
    assert all(weight.device == CUDA for weight in weights[0].values())
    assert distance(*weights) < 0.1 * close  # a step moves them little


def test_it_is_saved_restored_and_probed_where_it_is(tmp_path: Path) -> None:
    """Dropout of an adapter draws from the device's random stream, which a checkpoint keeps beside the state."""
    options = {**FULL, "precision": "fp16", "lora": True, "dropout": 0.3, "checkpointing": True}
    learner, other = (build(tmp_path, "cuda", **options) for _ in range(2))
    batch = rows()
    learner.update(batch.clone())
    state, streams = copy.deepcopy(learner.state_dict()), rng_state()
    expected = learner.update(batch.clone())["grad_norm"]
    for seed in (None, 2):
        other.load_state_dict(state)
        set_rng_state(streams)
        if seed is not None:
            torch.cuda.manual_seed(seed)
        assert (other.update(batch.clone())["grad_norm"] == expected) == (seed is None)
    before = {name: value.detach().clone() for name, value in learner.trainable.items()}
    learner.perturb()
    assert distance(learner.trainable, before) > 0.01
    learner.restore()
    assert all(torch.equal(value, before[name]) for name, value in learner.trainable.items())
    assert learner.measured(row_list(rows())).device == torch.device("cpu")


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_answers_from_the_device(lora: bool, tmp_path: Path) -> None:
    learner = build(tmp_path, "cuda", **{**FULL, "precision": "bf16", "lora": lora})
    there = build(tmp_path, "cpu", **{**FULL, "precision": "fp32", "lora": lora})
    actual = []
    for one in (learner, there):
        reference = AdapterOffReference(one.policy) if lora else FrozenReference(copy.deepcopy(one.policy.model))

        def log_probs(batch: Any, one: Learner = one, reference: Any = reference) -> torch.Tensor:
            with one.autocast():
                return reference(batch)  # as a run calls it: the rows are on the CPU

        fresh = lazy_stack([row.exclude(("next", "ref_log_probs")).clone() for row in row_list(rows())])
        answer = ReferenceKL(log_probs, in_reward_coeff=None, pad_token_id=0, token_budget=60)(fresh)
        actual.append(torch.cat([row["next", "ref_log_probs", "full"] for row in row_list(answer)]))
    assert actual[0].device == torch.device("cpu")
    assert distance({"log_probs": actual[0]}, {"log_probs": actual[1]}) < CLOSE["bf16"]


def test_the_head_keeps_its_logits_in_float32() -> None:
    """Rounded to bfloat16 they would move a log-prob by some 1e-2."""
    hidden, weight = (torch.randn(rows, 24).bfloat16() for rows in (17, 300))
    targets = torch.randint(0, 300, (17,))
    actual, entropy = chunked_log_probs(hidden.to(CUDA), weight.to(CUDA), targets.to(CUDA), with_entropy=True)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    assert (actual.cpu().double() - exact.gather(1, targets.unsqueeze(1)).squeeze(1)).abs().max() < 1e-4
    assert (entropy.cpu().double() + (exact.exp() * exact).sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("whose", ["learner", "reference"])
def test_a_micro_batch_rarely_makes_the_host_wait(whose: str, tmp_path: Path) -> None:
    """Of passes over the same rows in one micro-batch and in many, by their difference."""
    learner = build(tmp_path, "cuda", **{**FULL, "precision": "bf16", "optim_batch_size": 16})
    reference = FrozenReference(make_model(head_dim=8).to("cuda"))
    counted, batch = {}, row_list(rows(16))
    for budget in (20, 1000):
        with host_traffic() as traffic:
            if whose == "learner":
                learner._dry_run(batch, budget)
            else:
                reference_log_probs(reference, batch, pad_token_id=0, token_budget=budget)
        counted[len(learner._passes(batch, budget))] = traffic
    (many, several), (one, single) = counted.items()
    assert one == 1
    assert many >= 4
    waits, copies = (
        (getattr(several, kind).total() - getattr(single, kind).total()) / (many - one) for kind in ("waits", "copies")
    )
    print(f"a micro-batch: {waits:.1f} waits, {copies:.1f} copies; in one:\n{single}")
    assert waits <= WAITS_PER_MICRO_BATCH[whose]
    assert copies <= COPIES_PER_MICRO_BATCH


def test_what_a_rank_writes_is_what_was_there_before_the_step_that_went_on(tmp_path: Path) -> None:
    learner = build(tmp_path, "cuda", lora=False, dropout=0.0, tied=True, checkpointing=False)
    learner.update(rows())
    writer = ShardWriter(Ranks(device=CUDA))
    learner.before_change = writer.wait_copied
    before = {name: value.detach().cpu().clone() for name, value in learner.trainable.items()}
    writer.begin(tmp_path / "parts", learner.state_dict())
    learner.update(rows())
    name, _ = writer.written.result(60)
    stored = stored_tensors([tmp_path / "parts" / name])
    assert all(torch.equal(stored[f"model.{name}"].block(()), value) for name, value in before.items())
    assert not any(torch.equal(value.detach().cpu(), before[name]) for name, value in learner.trainable.items())
    writer.thread.close()


def test_an_optimizer_step_waits_once_and_skips_itself_where_it_is_not_finite(tmp_path: Path) -> None:
    """Fused AdamW clips, and leaves weights and moments alone, before the host has read a number."""
    learner = build(tmp_path, "cuda", **{**FULL, "precision": "bf16", "optim_batch_size": 16})
    batch = RowTable.of(rows(16)).rows()
    assert learner.skips_by_itself
    learner._step(batch, learner._passes(batch, 1000))
    with host_traffic() as traffic:
        learner._step(batch, learner._passes(batch, 60))
    assert traffic.waits.total() == 1, str(traffic)
    before = copy.deepcopy(learner.state_dict())
    for row in batch:
        row[keys.ADVANTAGE] = torch.full((1, 1), math.nan)
    with pytest.raises(NonFiniteStep, match="this step changed no weight"):
        learner._step(batch, learner._passes(batch, 1000))
    after = learner.state_dict()
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    assert after["optimizer_steps"] == before["optimizer_steps"]
    moments = [state["optimizer"]["state"] for state in (before, after)]
    assert all(
        torch.equal(moments[0][key][name], moments[1][key][name]) for key in moments[0] for name in moments[0][key]
    )


def test_a_step_over_weights_in_half_precision_is_clipped_by_a_norm_in_float32(tmp_path: Path) -> None:
    """Fused AdamW takes no other dtype for the factor that it divides gradients by."""
    learner = build(tmp_path, "cuda", **{**FULL, "precision": "fp32", "optim_batch_size": 16})
    for parameter in learner.parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = learner._stepped({"loss": torch.ones((), device="cuda")})
    assert norm.dtype == learner.optimizer.grad_scale.dtype == torch.float32
    halved = [nn.Parameter(torch.ones(4, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    learner.parameters, learner.optimizer = halved, torch.optim.AdamW(halved, lr=0.5, fused=True)
    for parameter in halved:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = learner._stepped({"loss": torch.ones((), device="cuda")})
    assert float(norm) == pytest.approx(3 * 8**0.5, rel=1e-2)
    assert learner.optimizer.grad_scale.dtype == torch.float32
    assert all(bool((parameter < 1).all()) for parameter in halved)
