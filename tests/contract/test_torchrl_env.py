"""Our environments inside TorchRL's own ``LLMCollector`` with its ``TransformersWrapper``."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.modules.llm import TransformersWrapper
from transformers import Qwen2Config, Qwen2ForCausalLM

from sota_grpo import keys
from sota_grpo.envs import ArithmeticEnv, TaskEnv, complete_rows
from tests.training_rigs import score_of
from tests.unit.test_envs import char_tokenizer

SEED = random.randrange(1 << 30)
NUM_ENVS, REPEATS, MAX_TOKENS = 6, 3, 5


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(char_tokenizer()), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    # the wrapper strips padding from inside a response too, so this random policy must not sample any
    model.generation_config.suppress_tokens = [config.pad_token_id]
    return model


def make_env() -> TaskEnv:
    return ArithmeticEnv(tokenizer=char_tokenizer(), num_envs=NUM_ENVS, repeats=REPEATS, seed=SEED, num_train=16)


def make_policy(
    model: Qwen2ForCausalLM, *, generate: bool = True, pad_output: bool = False, input_mode: str = "tokens"
) -> TransformersWrapper:
    sampling = {"generate_kwargs": {"max_new_tokens": MAX_TOKENS, "do_sample": True}} if generate else {}
    return TransformersWrapper(
        model, tokenizer=char_tokenizer(), input_mode=input_mode, generate=generate, pad_output=pad_output, **sampling
    )


def terse(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """A copy that samples the end token or one of two others, each as likely."""
    model = copy.deepcopy(model)
    others = [*{*range(model.config.vocab_size)} - {1, 5, 6}]
    model.generation_config.update(suppress_tokens=others, temperature=1e3)
    return model


def log_probs_of(model: Qwen2ForCausalLM, row: TensorDictBase) -> torch.Tensor:
    """Of the response tokens, the row alone and unpadded."""
    full, split = row[keys.FULL_TOKENS], row[keys.PROMPT_TOKENS].shape[0]
    with torch.no_grad():
        logits = model(full[None]).logits[0, split - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, full[split:, None])[:, 0]


def assert_rows_are_graded_groups(env: TaskEnv, rows: list[TensorDictBase]) -> None:
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["group_id"].item())]
    assert [len(group) for group in groups] == [REPEATS] * len(groups)
    for group in groups:
        assert [row["sample_id"].item() for row in group] == list(range(REPEATS))
        assert len({row["query"] for row in group}) == 1
    examples = {example.query: example for example in env.task.train}
    for row in rows:
        example, response = examples[row["query"]], row[keys.RESPONSE_TOKENS]
        assert row[keys.PROMPT_TOKENS].tolist() == list(env.prompt_ids(example))
        assert row[keys.FULL_TOKENS].tolist() == [*env.prompt_ids(example), *response.tolist()]
        assert row[keys.REWARD].tolist() == [float(score_of(env, response, example).success)]
        assert row[keys.DONE].item()
        assert row[keys.TRUNCATED].item() == (response[-1].item() != env.tokenizer.eos_token_id)


@pytest.mark.parametrize(
    "options",
    [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}, {"track_policy_version": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_collector_yields_graded_groups(model: Qwen2ForCausalLM, options: dict) -> None:
    env = make_env()
    collector = LLMCollector(
        env, policy=make_policy(model), dialog_turns_per_batch=NUM_ENVS, total_dialog_turns=2 * NUM_ENVS, **options
    )
    rows = [row for batch in collector for row in batch.reshape(-1).unbind(0)]
    collector.shutdown()
    assert len(rows) == 2 * NUM_ENVS
    assert len({row["group_id"].item() for row in rows}) == 2 * NUM_ENVS // REPEATS
    assert_rows_are_graded_groups(env, rows)


def test_completed_rows_carry_the_log_probs_of_each_step(model: Qwen2ForCausalLM) -> None:
    """Also in later steps, so nothing of the step before (its masks above all) reaches the policy."""
    collector = LLMCollector(
        make_env(), policy=make_policy(model), dialog_turns_per_batch=NUM_ENVS, total_dialog_turns=2 * NUM_ENVS,
        flatten_data=True, postproc=complete_rows,
    )  # fmt: skip
    for batch in collector:
        for row in batch.unbind(0):
            split = row[keys.PROMPT_TOKENS].shape[0]
            assert row[keys.ASSISTANT_MASK].nonzero()[0].item() == split
            # torchrl 0.14.1's wrapper overwrites the first response token's log-prob with 0 (_log_probs_generate)
            actual, expected = row[keys.LOG_PROBS][split + 1 :], log_probs_of(model, row)[1:]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    collector.shutdown()


def test_padding_after_a_response_is_no_part_of_it(model: Qwen2ForCausalLM) -> None:
    """Of a wrapper with ``pad_output=True``: what ends with its end token is not truncated."""
    torch.manual_seed(0)
    env = ArithmeticEnv(tokenizer=char_tokenizer(), num_envs=8, repeats=8, seed=SEED, num_train=16)
    rows = complete_rows(env.rollout(1, make_policy(terse(model), pad_output=True))).reshape(-1)
    responses = [row[keys.FULL_TOKENS][row[keys.ASSISTANT_MASK]] for row in rows.unbind(0)]
    assert len({len(response) for response in responses}) > 1
    for row, response in zip(rows.unbind(0), responses, strict=True):
        assert row[keys.TRUNCATED].item() == (response[-1].item() != env.tokenizer.eos_token_id)
        assert len(response) == MAX_TOKENS or not row[keys.TRUNCATED].item()
