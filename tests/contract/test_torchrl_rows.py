"""Our transforms and losses on the rows that TorchRL's own wrappers write, which are no plain TensorDicts inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import TransformedEnv
from torchrl.modules.llm.policies.common import Masks, Tokens
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import Qwen2ForCausalLM

from sota_grpo import keys
from sota_grpo.engines import EngineOptions
from sota_grpo.envs import complete_rows
from sota_grpo.envs.task_env import ScoreResponse
from sota_grpo.policy.causal import FrozenReference
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import GroupAdvantage, ReferenceKL
from tests.contract.test_torchrl_env import MAX_TOKENS, NUM_ENVS, REPEATS, log_probs_of, make_env, make_policy, terse
from tests.engine_rigs import tiny_model
from tests.unit.test_envs import char_tokenizer


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    """With heads of a size that vLLM takes."""
    model = tiny_model(vocab_size=len(char_tokenizer()), eos_token_id=1, pad_token_id=0, max_position_embeddings=512)
    model.generation_config.suppress_tokens = [0]  # the wrapper strips padding from inside a response too
    return model


def vllm_policy(model: Qwen2ForCausalLM, folder: Path) -> Any:
    from torchrl.modules.llm import vLLMWrapper

    from sota_grpo.engines.vllm_engine import VLLMEngine

    model.save_pretrained(folder)
    engine = VLLMEngine(EngineOptions(str(folder), eos_token_ids=[1]))
    return vLLMWrapper(
        engine._llm, tokenizer=char_tokenizer(), input_mode="tokens", generate=True, pad_output=False,
        generate_kwargs={"max_tokens": MAX_TOKENS, "logprobs": 1, "detokenize": False},
    )  # fmt: skip


VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=VLLM)])
def written(request: pytest.FixtureRequest, model: Qwen2ForCausalLM, tmp_path_factory: Any) -> TensorDictBase:
    """``[NUM_ENVS]`` rows as a wrapper and our environment wrote them."""
    is_vllm = request.param == "vllm"
    policy = vllm_policy(model, tmp_path_factory.mktemp("model")) if is_vllm else make_policy(model)
    return make_env().rollout(1, policy).reshape(-1)


@pytest.fixture
def rows(written: TensorDictBase) -> TensorDictBase:
    return complete_rows(written.clone())


def test_a_table_has_every_entry_of_a_wrappers_rows(rows: TensorDictBase) -> None:
    table = RowTable.of(rows)
    for row, single in zip(rows.unbind(0), table.rows(), strict=True):
        for key in (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.REWARD):
            torch.testing.assert_close(single[key], row[key], rtol=0, atol=0, equal_nan=True)


def test_a_table_has_every_entry_of_a_dense_batch() -> None:
    """As ``pad_output=True`` makes it: one TensorDict whose entries are TorchRL's classes of tensors."""
    prompts = torch.full((3, 4), 5)
    masks = Masks(all_attention_mask=torch.ones(3, 4, dtype=torch.bool), padded=True, batch_size=[3])
    batch = TensorDict({"tokens": Tokens(full=prompts, padded=True, batch_size=[3]), "masks": masks}, [3])
    table = RowTable.of(batch)
    assert torch.equal(table.get(keys.FULL_TOKENS), prompts)
    assert table.get(keys.ATTENTION_MASK).shape == (3, 4)


def test_rows_of_a_wrapper_that_pads_are_those_of_one_that_does_not(model: Qwen2ForCausalLM) -> None:
    """But for the padding, before prompts and after responses, which is in no mask."""
    prompts = lazy_stack([TensorDict({"tokens": {"prompt": torch.arange(5, 5 + count)}}) for count in (3, 3, 1, 6)])
    completed = []
    for pad_output in (True, False):
        torch.manual_seed(0)
        policy = make_policy(terse(model), pad_output=pad_output)
        completed.append(complete_rows(policy(prompts.clone())))
    padded, plain = completed
    assert len({len(row[keys.RESPONSE_TOKENS]) for row in plain.unbind(0)}) > 1
    for row, other in zip(padded.unbind(0), plain.unbind(0), strict=True):
        real = row[keys.ATTENTION_MASK]
        assert not (row[keys.ASSISTANT_MASK] & ~real).any()
        for key in (keys.FULL_TOKENS, keys.ASSISTANT_MASK, keys.LOG_PROBS):
            torch.testing.assert_close(row[key][real], other[key], equal_nan=True)


def reference_kl(model: Qwen2ForCausalLM, **options: Any) -> ReferenceKL:
    return ReferenceKL(FrozenReference(model), pad_token_id=0, token_budget=4096, **options)


def test_the_ratio_of_the_same_weights_is_one(rows: TensorDictBase, model: Qwen2ForCausalLM) -> None:
    """Whatever the wrapper wrote for a log-prob that it does not know; in TorchRL's loss, too."""
    batch = GroupAdvantage()(rows)
    theirs = TorchRLGRPOLoss(make_policy(model, generate=False), entropy_bonus=False)(batch.clone())
    for loss in (GRPOLoss(model)(pad_rows(batch, pad_token_id=0)), theirs):
        assert loss.ESS.mean().item() == pytest.approx(1.0, abs=1e-3)
        assert loss.kl_approx.mean().item() == pytest.approx(0.0, abs=1e-3)


def rows_of_env(env: Any, policy: Any) -> TensorDictBase:
    return env.rollout(1, policy).reshape(-1)


def through_buffer(rows: TensorDictBase, kl: ReferenceKL, **options: Any) -> TensorDictBase:
    """Sampled as often as there are rows."""
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=NUM_ENVS, sampler=SamplerWithoutReplacement())
    buffer.append_transform(kl, **options)
    buffer.extend(complete_rows(rows))
    return buffer.sample()


PLACES: dict[str, Callable[..., TensorDictBase]] = {
    "env": lambda env, policy, kl: rows_of_env(env.append_transform(kl), policy),
    "transformed": lambda env, policy, kl: rows_of_env(TransformedEnv(env, kl), policy),
    "buffer, as it is written": lambda env, policy, kl: through_buffer(rows_of_env(env, policy), kl, invert=True),
    "buffer, as it is sampled": lambda env, policy, kl: through_buffer(rows_of_env(env, policy), kl),
    "postproc": lambda env, policy, kl: next(
        iter(
            LLMCollector(
                env, policy=policy, dialog_turns_per_batch=NUM_ENVS, total_dialog_turns=NUM_ENVS, flatten_data=True,
                postproc=lambda rows: kl(complete_rows(rows)),
            )
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_the_kl_is_wherever_torchrl_puts_it(place: str, model: Qwen2ForCausalLM) -> None:
    """The reference has other weights; reward and log-probs are those of a loop over single rows."""
    torch.manual_seed(0)
    policy, env, reference = make_policy(model), make_env(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    kl = reference_kl(reference, in_reward_coeff=0.5)
    rows = complete_rows(PLACES[place](env, policy, kl))
    assert len(rows) == NUM_ENVS
    assert rows[keys.KL_TERM].abs().max() > 1e-2
    for row in rows.unbind(0):
        split = row[keys.PROMPT_TOKENS].shape[0]
        sampled, ref = row[keys.LOG_PROBS][split:], log_probs_of(reference, row)
        torch.testing.assert_close(row[keys.REF_LOG_PROBS][split:], ref, rtol=0, atol=1e-4)
        assert not row[keys.REF_LOG_PROBS][:split].any()
        taken = -0.5 * (sampled - ref)[sampled.isfinite()].sum().item()
        assert row[keys.KL_TERM].item() == pytest.approx(taken, abs=1e-3)
        assert row[keys.REWARD].item() == pytest.approx(row[keys.GRADED_REWARD].item() + taken, abs=1e-3)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_reference_may_be_a_model_or_a_wrapper(rows: TensorDictBase, model: Qwen2ForCausalLM, wrapped: bool) -> None:
    expected = reference_kl(model)(rows.clone())
    reference = make_policy(model, generate=False, pad_output=True) if wrapped else copy.deepcopy(model)
    actual = ReferenceKL(reference, pad_token_id=0, token_budget=4096)(rows)
    for row, other in zip(actual.unbind(0), expected.unbind(0), strict=True):
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], other[keys.REF_LOG_PROBS], rtol=0, atol=1e-4)


def test_a_score_takes_the_place_of_the_reward_that_an_environment_wrote(rows: TensorDictBase) -> None:
    """TorchRL's environments write a ``success``, too; our own score is not written twice."""
    for row in rows.unbind(0):
        row.get("next").pop("reward_error")
        row.set(keys.SUCCESS, torch.tensor([False]))
        row.update({"text": {"response": "4"}})
    calls = []

    def score(response: str, example: Example) -> Score:
        calls.append(response)
        return Score({"own": 2.0}, success=True)

    transform = ScoreResponse(score, {"own": 1.0})
    assert transform(transform(rows))[keys.REWARD].flatten().tolist() == [2.0] * NUM_ENVS
    assert rows[keys.SUCCESS].all()
    assert calls == ["4"] * NUM_ENVS


def graded_rows(rows: TensorDictBase) -> TensorDictBase:
    """With rewards that differ."""
    for index, row in enumerate(rows.unbind(0)):
        row.set(keys.REWARD, torch.tensor([float(index % 4)]))
    return rows


@pytest.mark.parametrize("key", ["group_id", "query"])
def test_siblings_that_arrive_one_by_one_wait_for_each_other(rows: TensorDictBase, key: str) -> None:
    """In any order, by number or by text, and each row has the advantage that it has among its whole group.

    So it has where a part of a group is sampled.
    """
    known = GroupAdvantage(group_size=REPEATS)(graded_rows(rows.clone()))
    expected = {(row["query"], row["sample_id"].item()): row["advantage"].item() for row in known.unbind(0)}
    advantage = GroupAdvantage(group_size=REPEATS, in_keys=(keys.REWARD, key))
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=NUM_ENVS, transform=advantage)
    sizes = []
    for index in torch.randperm(NUM_ENVS).tolist():
        buffer.extend(graded_rows(rows.clone())[index : index + 1])
        sizes.append(len(buffer))
    assert sizes[: REPEATS - 1] == [0] * (REPEATS - 1)
    assert set(sizes) <= {0, REPEATS, NUM_ENVS}
    for sampled in (buffer[:], buffer.sample(REPEATS - 1)):
        for row in sampled.unbind(0):
            assert row["advantage"].item() == pytest.approx(expected[row["query"], row["sample_id"].item()])
    assert any(expected.values())


def test_groups_of_other_environments_are_others(model: Qwen2ForCausalLM) -> None:
    policy, envs = make_policy(model), [make_env(), make_env()]
    for seed, env in enumerate(envs):
        env.set_seed(seed)
    rows = lazy_stack([row for env in envs for row in env.rollout(1, policy).reshape(-1).unbind(0)])
    assert GroupAdvantage(group_size=REPEATS)(rows)["advantage"].shape == (2 * NUM_ENVS, 1, 1)


def test_rows_whose_groups_are_not_known_are_refused(rows: TensorDictBase) -> None:
    """Alone in a buffer that does not wait, of two questions under one name, or without a name.

    As TorchRL's own environments give them, whose siblings have ``query`` alike.
    """
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=2, transform=GroupAdvantage())
    with pytest.raises(ValueError, match=r"each of the 1 responses is alone in its group.*set group_size"):
        buffer.extend(rows[:1])
    buffer.extend(rows.clone())
    assert len(buffer) == NUM_ENVS
    for row in rows.unbind(0):
        row.set("group_id", torch.tensor(0))
    with pytest.raises(ValueError, match=r"the responses of group 0 answer several questions \('"):
        GroupAdvantage()(rows)
    for row in rows.unbind(0):
        del row["group_id"]
    with pytest.raises(KeyError, match="the rows have no group_id; set in_keys="):
        GroupAdvantage()(rows)
    assert GroupAdvantage(in_keys=(keys.REWARD, "query"))(rows)["advantage"].shape == (NUM_ENVS, 1, 1)
