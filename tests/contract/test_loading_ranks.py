"""Two real ranks (one process each): rank 0 reads the model, the other is sent its part, and nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.learning import add_adapter, make_model, make_settings
from sota_grpo.policy import load
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model
from sota_grpo.policy.lora import add_lora, engine_weights
from sota_grpo.training.remote_learner import RemoteLearner
from sota_grpo.workers.base import WorkerSpec
from sota_grpo.workers.processes import ProcessLauncher


@pytest.mark.parametrize("adapter", [[], ["train_model.lora.enabled=true", "train_model.torch_dtype=bfloat16"]])
def test_ranks_have_the_models_own_weights_bit_for_bit(adapter: list[str], tmp_path: Path) -> None:
    config = compose("grpo_cpu", ["train_model.num_devices=2", *adapter])
    options = {"config": config, "size": 2, "init_method": f"file://{tmp_path}/rendezvous", "device_type": "cpu"}
    options |= {"num_threads": 1, "run_dir": str(tmp_path)}
    launcher = ProcessLauncher()
    try:
        specs = [WorkerSpec("sota_grpo.assembly.learning:learner_worker", {"rank": n, **options}) for n in range(2)]
        workers = [launcher.start(f"learner-{n}", spec, threads=1) for n, spec in enumerate(specs)]
        learner = RemoteLearner(workers, make_settings(config, "cpu"), share=launcher.share)
        found = dict(learner.weights().tensors())
        trained = learner.state_dict()["model"]
    finally:
        launcher.close()
    model = add_adapter(config, make_model(config, torch.device("cpu")))
    expected = dict(engine_weights(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    own = {name: value for name, value in CausalPolicy(model).scorer.named_parameters() if value.requires_grad}
    assert trained.keys() == own.keys()
    assert all(torch.equal(trained[name], value) for name, value in own.items())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_without_weights_has_the_same_shape_and_takes_no_memory(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_model("tiny")
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    empty = load_model("tiny", weights=False)
    shapes = [{n: (v.shape, v.dtype) for n, v in model.state_dict().items()} for model in (real, empty)]
    assert shapes[0] == shapes[1]
    assert len(list(real.parameters())) == len(list(empty.parameters()))  # tied as it is
    assert sum(value.untyped_storage().nbytes() for value in empty.parameters()) < 1000
    assert CausalPolicy(add_lora(empty, r=rank, alpha=8) if rank else empty).shared_prompt  # it can be put together
