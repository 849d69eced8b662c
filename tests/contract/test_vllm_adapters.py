"""The real vLLM serves an adapter unmerged: log-probs of the adapted model, in place of the adapter before it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.vllm_engine import VLLMEngine, adapter_arguments
from sota_grpo.errors import UserError
from sota_grpo.policy.lora import adapter_pack, add_lora
from sota_grpo.rl.records import GroupRequest, Sampling
from tests.engine_rigs import EOS, generate, largest_gap, ragged_requests, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]


class Rig:
    """A vLLM engine of adapters and the adapted transformers model."""

    def __init__(self, folder: Path):
        model = tiny_model(tied=True, seed=7, max_position_embeddings=512)
        model.save_pretrained(folder)
        self.engine = VLLMEngine(EngineOptions(str(folder), eos_token_ids=[EOS], adapter_rank=3))
        self.model: Any = add_lora(model, r=3, alpha=12).eval()

    def push(self) -> None:
        """Another adapter with fresh random numbers in all of its matrices."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.1)
        self.engine.update_weights(adapter_pack(self.model), self.engine.version + 1)

    def gap(self, prompt_ids: tuple[int, ...] | None = None) -> float:
        requests = ragged_requests(3, 4)
        if prompt_ids is not None:
            requests = [GroupRequest(group_id=7, prompt_ids=prompt_ids, num_samples=2, seed=6)]
        return largest_gap(self.model, requests, generate(self.engine, requests, Sampling(max_tokens=20)), 1.0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("model"))
    yield rig
    folder = rig.engine._folder.path
    rig.engine.close()
    assert not folder.exists()


def test_log_probs_are_those_of_the_adapted_model_after_each_push(rig: Rig) -> None:
    if not rig.engine.version:
        with rig.model.disable_adapter():
            assert rig.gap() < 1e-5  # the base alone, before the first push
    for _ in range(2):
        rig.push()
        assert rig.gap() < 1e-5
        with rig.model.disable_adapter():
            assert rig.gap() > 1e-2


def test_a_push_while_groups_run_is_seen_in_their_versions(rig: Rig) -> None:
    rig.push()
    old = rig.engine.version
    long = GroupRequest(group_id=0, prompt_ids=(3, 4) * 60, num_samples=4, seed=4)
    short = GroupRequest(group_id=1, prompt_ids=(3, 5) * 249, num_samples=1, seed=5)  # room for 14 tokens
    stream = rig.engine.generate([long, short], Sampling(max_tokens=60, ignore_eos=True))
    assert next(stream).group_id == 1
    before = {name: value.clone() for name, value in rig.model.state_dict().items()}
    rig.push()
    (second,) = stream
    after = {name: value.clone() for name, value in rig.model.state_dict().items()}
    for sample in second.samples:
        assert sample.versions.tolist() == [old] * 14 + [old + 1] * 46
        ids = torch.tensor([[*long.prompt_ids, *sample.token_ids.tolist()]])
        with torch.no_grad():
            rig.model.load_state_dict(before)
            first = rig.model(ids[:, : len(long.prompt_ids) + 13], use_cache=True)
            rig.model.load_state_dict(after)  # token 14 on: the new adapter over the keys and values of the old one
            rest = rig.model(ids[:, len(long.prompt_ids) + 13 : -1], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits[0, len(long.prompt_ids) - 1 :], rest.logits[0]]).log_softmax(-1)
        gaps = logits.gather(1, sample.token_ids[:, None])[:, 0] - sample.log_probs
        assert float(gaps.abs().max()) < 1e-5
    # The prompt cache could not be reset under the running group: its old blocks must not serve the next one.
    assert rig.gap(long.prompt_ids) < 1e-5


def test_an_engine_without_adapters_is_given_none_and_ranks_have_an_end() -> None:
    with pytest.raises(UserError, match=r"train_model.lora.r=600 is above 512"):
        adapter_arguments(600)
