"""Compiled decoder layers: the log-probs and gradients of eager ones, one compilation for rows of any length."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._dynamo.utils import counters

from sota_grpo import keys
from sota_grpo.assembly import devices, learning
from sota_grpo.config import Config
from sota_grpo.policy import sharding
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.lora import adapter_disabled, add_lora
from sota_grpo.policy.sharding import gathered
from tests.unit.test_shared_prompt import GROUPS, make_groups
from tests.unit.tiny_models import make_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
LENGTHS = (GROUPS, [(9, [3, 4, 5])], [(1, [1]), (30, [2, 17])])


def measured(policy: CausalPolicy, rows: TensorDict, precise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and the whole gradient."""
    policy.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
        log_probs = policy(rows)[keys.LOG_PROBS]
    log_probs.sum().backward()
    return log_probs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


# under an adapter they are compiled thrice: of what the compiler makes of layers the whole model's are enough
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_layers_equal_eager_ones(lora: bool) -> None:
    """In float32 to its rounding; in bfloat16, rounded where eager mode rounds, much closer than bfloat16's own.

    Each is compiled by itself, so each is asked of one model: float32 of the whole one, bfloat16 of the adapters.
    """
    model = make_model("qwen3").train()
    if lora:
        model = add_lora(model, r=2, alpha=4)
    models = [copy.deepcopy(model) for _ in range(2)]
    for each in models:
        enable_gradient_checkpointing(each.base_model.model if lora else each)
    eager, fused = (CausalPolicy(each, fused=compiled).train() for each, compiled in zip(models, (False, True)))
    precise, close = (False, 3e-3) if lora else (True, 1e-5)
    graphs = []
    for groups in LENGTHS:
        rows = make_groups(groups)
        (expected, gradient), (found, other) = (measured(policy, rows, precise) for policy in (eager, fused))
        assert (found - expected).norm() <= close * expected.norm()
        assert (other - gradient).norm() <= close * gradient.norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0
    if lora:
        with adapter_disabled(fused.model), adapter_disabled(eager.model), torch.no_grad():
            rows = make_groups(GROUPS)
            gap = fused(rows)[keys.LOG_PROBS] - eager(rows)[keys.LOG_PROBS]
            assert gap.norm() <= 1e-5 * fused(rows)[keys.LOG_PROBS].norm()


@pytest.mark.parametrize("builds", [False, True])
def test_layers_are_compiled_where_they_can_be(builds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left open: on CUDA, with a compiler, and a run without one says so; asked for, everywhere."""
    monkeypatch.setattr(learning, "builds_kernels", lambda: builds)
    monkeypatch.setattr(devices, "builds_kernels", lambda: builds)
    config = Config()
    assert learning.wants_fused_layers(config, "cuda") == builds
    assert not learning.wants_fused_layers(config, "cpu")
    said = any("C compiler" in note for note in devices.make_plan(config, "cuda", 1).notes)
    assert said != builds
    config.train_model.compile = True
    assert learning.wants_fused_layers(config, "cpu")


@pytest.mark.slow
def test_compiled_layers_are_sharded_as_eager_ones(tmp_path: Path) -> None:
    """FSDP2 over a mesh of one; the gradient of the compiled, checkpointed layers is that of the eager ones."""
    models = [make_model("qwen3").train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ranks = sharding.join_ranks(0, 1, init_method=f"file://{tmp_path}/rendezvous", device="cpu", timeout_s=60)
    try:
        for each in models:
            enable_gradient_checkpointing(each)
        eager, fused = (CausalPolicy(each, fused=compiled) for each, compiled in zip(models, (False, True)))
        sharding.shard_over(fused, ranks)
        rows, gradients = make_groups(GROUPS), []
        for policy in (eager, fused):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                log_probs = policy(rows)[keys.LOG_PROBS]
            log_probs.sum().backward()
            gradients.append(torch.cat([gathered(p.grad).flatten() for p in policy.parameters()]))
        assert (gradients[1] - gradients[0]).norm() <= 3e-3 * gradients[0].norm()
    finally:
        dist.destroy_process_group()


def test_a_copy_is_not_compiled() -> None:
    """The engine's copy of the policy decodes in other shapes, one token at a time."""
    policy = CausalPolicy(make_model("qwen3"), fused=True)
    layers = [layer for layer in policy.model.modules() if layer._compiled_call_impl is not None]
    assert len(layers) == policy.model.config.num_hidden_layers
    assert all(module._compiled_call_impl is None for module in copy.deepcopy(policy.model).modules())
