"""Compiled decoder layers: the log-probs and gradients of eager ones, one compilation for rows of any length.

With the kernel for half precision on CUDA, which plain torch replaces here, a layer is one graph.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._dynamo.utils import counters

from sota_grpo import keys
from sota_grpo.assembly import devices, learning
from sota_grpo.config import Config
from sota_grpo.policy import causal, decoder_layer, sharding, shared_prompt
from sota_grpo.policy.causal import CausalPolicy, adapter_disabled, base_model
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.sharding import gather
from tests.pretended_cuda import kernels
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


def without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """As kernels are: what they are given decides how they round."""

    @wraps(kernel)
    def computed(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return kernel(*args)

    return computed


def attention_of_cpus() -> Any:
    """In place of the module of kernels, where there is none that works."""

    names = ("packed_attention", "packed_attention_backward", "unrotate")
    return SimpleNamespace(**{name: without_autocast(getattr(kernels, name)) for name in names})


@pytest.fixture
def gpus_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes the way that it takes on CUDA; nothing is compiled yet."""
    torch._dynamo.reset()
    for module in (shared_prompt, decoder_layer, causal):
        monkeypatch.setattr(module, "takes_kernels", lambda device, dtype, width: dtype == torch.bfloat16)
    monkeypatch.setattr(causal, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setitem(sys.modules, "sota_grpo.policy.attention_kernels", attention_of_cpus())


# under an adapter they are compiled thrice: of what the compiler makes of layers the whole model's are enough
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_layers_equal_eager_ones_and_are_one_graph_each(lora: bool, gpus_kernel: None) -> None:
    """In bfloat16, rounded where eager mode rounds, but for the sum of three gradients; for rows of any length."""
    model = make_model("qwen3", head_dim=8).train()
    eager, fused = pair_of(add_lora(model, r=2, alpha=4) if lora else model)
    counters.clear()
    for groups in LENGTHS:
        assert_equal(eager, fused, make_groups(groups), 5e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    if lora:
        with adapter_disabled(fused.model), adapter_disabled(eager.model), torch.no_grad():
            rows = make_groups(GROUPS)
            gap = fused(rows)[keys.LOG_PROBS] - eager(rows)[keys.LOG_PROBS]
            assert gap.norm() <= 1e-5 * fused(rows)[keys.LOG_PROBS].norm()


def test_what_a_device_can_is_no_reason_to_leave_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + shared_prompt._builds_kernels(tensor.device)

    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(3)), chosen(torch.zeros(3)))
    assert float(compiled(torch.zeros(2))[0]) in (0, 1)


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones_around_the_attention_of_cpus() -> None:
    """In float32 to its rounding, in the same graphs for rows of any length."""
    eager, fused = pair_of(make_model("qwen3").train())
    graphs = []
    for groups in LENGTHS:
        assert_equal(eager, fused, make_groups(groups), 1e-5, precise=True)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0


def pair_of(model: torch.nn.Module) -> list[CausalPolicy]:
    """The same policy, checkpointed, with eager and with compiled layers."""
    models = [copy.deepcopy(model) for _ in range(2)]
    for each in models:
        enable_gradient_checkpointing(base_model(each))
    return [CausalPolicy(each, fused=compiled).train() for each, compiled in zip(models, (False, True))]


def assert_equal(
    eager: CausalPolicy, fused: CausalPolicy, rows: TensorDict, close: float, precise: bool = False
) -> None:
    (expected, gradient), (actual, other) = (measured(policy, rows, precise) for policy in (eager, fused))
    assert (actual - expected).norm() <= close * expected.norm()
    assert (other - gradient).norm() <= close * gradient.norm()


@pytest.mark.parametrize("builds", [False, True])
def test_layers_are_compiled_where_they_can_be(builds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left open: on CUDA, with a compiler, and a run without one says so; requested, everywhere."""
    monkeypatch.setattr(learning, "builds_kernels", lambda: builds)
    monkeypatch.setattr(devices, "builds_kernels", lambda: builds)
    config = Config()
    assert learning.wants_fused_layers(config, "cuda") == builds
    assert not learning.wants_fused_layers(config, "cpu")
    is_noted = any("C compiler" in note for note in devices.make_plan(config, "cuda", 1).notes)
    assert is_noted != builds
    config.train_model.compile = True
    assert learning.wants_fused_layers(config, "cpu")


@pytest.mark.slow
def test_compiled_layers_are_sharded_as_eager_ones(tmp_path: Path, gpus_kernel: None) -> None:
    """FSDP2 over a mesh of one; the gradient of the compiled, checkpointed layers is that of the eager ones."""
    models = [make_model("qwen3", head_dim=8).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ranks = sharding.join_ranks(0, 1, init_method=f"file://{tmp_path}/rendezvous", device="cpu", timeout_s=60)
    try:
        for each in models:
            enable_gradient_checkpointing(each)
        eager, fused = (CausalPolicy(each, fused=compiled) for each, compiled in zip(models, (False, True)))
        sharding.shard(fused, ranks)
        rows, gradients = make_groups(GROUPS), []
        for policy in (eager, fused):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                log_probs = policy(rows)[keys.LOG_PROBS]
            log_probs.sum().backward()
            gradients.append(torch.cat([gather(p.grad).flatten() for p in policy.parameters()]))
        assert (gradients[1] - gradients[0]).norm() <= 5e-3 * gradients[0].norm()
    finally:
        dist.destroy_process_group()


def test_a_copy_is_not_compiled() -> None:
    """The engine's copy of the policy decodes in other shapes, one token at a time."""
    policy = CausalPolicy(make_model("qwen3"), fused=True)
    layers = [layer for layer in policy.model.modules() if layer._compiled_call_impl is not None]
    assert len(layers) == policy.model.config.num_hidden_layers
    assert all(module._compiled_call_impl is None for module in copy.deepcopy(policy.model).modules())
