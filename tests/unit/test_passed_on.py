"""Options that are passed on: to the chat template, to vLLM, to from_pretrained; and prompts that are left out."""

from __future__ import annotations

import json
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sota_grpo.assembly.build import start_limit
from sota_grpo.assembly.learning import make_model, reference_options
from sota_grpo.assembly.sampling import engine_options, make_env, task_of
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.engines import EngineOptions
from sota_grpo.engines.vllm_server import engine_arguments, refuse_arguments
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.errors import UserError
from sota_grpo.migration.verl import Facts, verl_options, verl_script
from sota_grpo.policy.load import TINY, load_tokenizer
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.workers.rollout import rollout_worker
from tests.config.test_config import composed

THINKS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{%- endif -%}"""


def thinking_tokenizer() -> Any:
    """With a switch of thinking, as Qwen3's template has."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = THINKS
    return tokenizer


def env_of(config: Config, tokenizer: Any = None) -> Any:
    task = task_of(config)
    grader = LocalGrader(task.score, task.term_weights)
    return make_env(config, task, tokenizer or load_tokenizer(TINY), grader)


def with_template(options: dict[str, Any] | None) -> Config:
    config = composed("grpo_cpu", "env.num_heldout=8", "env.max_samples=8")
    return with_options(config, {"env.chat_template_kwargs": options})


def test_the_template_is_given_them_in_prompts_and_between_turns() -> None:
    tokenizer, off = thinking_tokenizer(), {"enable_thinking": False}
    prompts = []
    for options in (None, off):
        env = env_of(with_template(options), tokenizer)
        prompts.append(tokenizer.decode(env.prompt_ids(env.task.train[0])))
        reply = TurnTokens(tokenizer, env.template_kwargs).ids([{"role": "user", "content": "Again?"}], -1)
        assert tokenizer.decode(reply).endswith("<think></think>") == (options is off)
    assert prompts[1] == prompts[0] + "<think></think>"
    with pytest.raises(UserError, match="has enable_thinkin, which the chat template of tiny does not read"):
        env_of(with_template({"enable_thinkin": False}), tokenizer)


LONG = "long " * 300


def table(folder: Path, odd: str) -> Path:
    """Forty rows, of which those numbered 3, 10, 17, ... begin with ``odd``."""
    rows = [{"prompt": f"{odd if i % 7 == 2 else ''}row {i}?", "answer": "4"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture
def long_rows(tmp_path: Path) -> Path:
    """Those are too long for a context of 128 tokens."""
    return table(tmp_path, LONG)


def of_table(path: Path, *more: str) -> Config:
    few = ("env.dataset=table", f"env.dataset_path={path}", "env.num_heldout=8", "inference_model.max_model_len=128")
    return composed("grpo_cpu", *few, *more)


def test_a_prompt_that_cannot_be_used_names_its_row(long_rows: Path) -> None:
    with pytest.raises(UserError, match=rf"^the prompt of 'long long .*' \({long_rows}, row \d+\) has \d+ tokens"):
        env_of(of_table(long_rows))


def test_rows_that_cannot_be_used_are_left_out_of_both_sides_where_they_stood(long_rows: Path, caplog) -> None:
    whole = task_of(of_table(long_rows))
    with caplog.at_level(logging.WARNING):
        env = env_of(of_table(long_rows, "env.skip_unreadable=true"))
    for name in ("train", "heldout"):
        kept = [example for example in getattr(whole, name) if not example.query.startswith("long")]
        assert getattr(env.task, name) == kept
    assert {example.query for _, example in env.stream.draw(40)} <= {example.query for example in env.task.train}
    again = env_of(of_table(long_rows, "env.skip_unreadable=true"))
    again.stream.load_state_dict(env.stream.state_dict())
    assert again.stream.draw(30) == env.stream.draw(30)
    told = re.escape(f"6 prompts are skipped ({long_rows}, row ")
    told += r"([\d, ]+)\)\. Reason for the first: the prompt of"
    (rows,) = re.match(told, caplog.records[0].getMessage()).groups()
    assert sorted(map(int, rows.split(", "))) == [3, 10, 17, 24, 31, 38]


def test_a_prompt_with_half_of_a_surrogate_pair_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    path = table(tmp_path, "half \ud83d ")
    with pytest.raises(UserError, match=rf"^the prompt of 'half .*' \({path}, row \d+\): .* half of a surrogate pair"):
        env_of(of_table(path))
    task = env_of(of_table(path, "env.skip_unreadable=true")).task
    assert sorted(int(one.query[4:-1]) for one in (*task.train, *task.heldout)) == [i for i in range(40) if i % 7 != 2]


def test_a_row_cannot_forge_a_line_of_the_log(long_rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "x\n2026-01-01 ERROR sota_grpo: forged", "content": "?"}, {"role": "user", "content": "?"}]
    with long_rows.open("a") as file:
        file.writelines(json.dumps({"prompt": turns, "answer": str(number)}) + "\n" for number in range(40))
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + THINKS
    with caplog.at_level(logging.WARNING):
        env_of(of_table(long_rows, "env.skip_unreadable=true", "inference_model.max_model_len=4096"), tokenizer)
    (record,) = caplog.records
    assert "cannot render messages of the roles x\\n2026-01-01 ERROR sota_grpo: forged, user" in record.getMessage()


def test_vllm_is_given_what_is_no_option_here_and_nothing_that_is_set_here() -> None:
    plain = EngineOptions("m", eos_token_ids=[1], tensor_parallel_size=2)
    options = replace(plain, tensor_parallel_size=1, engine_kwargs={"max_num_batched_tokens": 4096})
    for on_cpu in (True, False):
        refuse_arguments(options, on_cpu=on_cpu)
        assert engine_arguments(options, on_cpu=on_cpu)["max_num_batched_tokens"] == 4096
        for name in engine_arguments(plain, on_cpu=on_cpu):
            with pytest.raises(UserError, match=f"has {name}, which sota-grpo itself sets"):
                refuse_arguments(replace(options, engine_kwargs={name: 1}), on_cpu=on_cpu)


def test_vllm_is_given_nothing_that_would_make_samples_wrong() -> None:
    for name, reason in (
        ("speculative_config", "a step would give several tokens of unknown seeds"),
        ("spec_tokens", "fly keeps tokens that the policy rejects"),
        ("override_generation_config", "another distribution"),
        ("hf_overrides", "the learner's"),
        ("data_parallel_size", "inference_model.num_devices"),
        ("enable_lora", "merged"),
        ("worker_extension_cls", "vLLM's own worker"),
        ("hf_token", "it would be saved"),
    ):
        with pytest.raises(UserError, match=f"inference_model.engine_kwargs has {name}.*{reason}.*; leave it out"):
            refuse_arguments(EngineOptions("m", eos_token_ids=[1], engine_kwargs={name: 1}), on_cpu=False)


def test_an_argument_that_vllm_has_not_is_reported_with_one_that_it_has() -> None:
    pytest.importorskip("vllm")
    options = EngineOptions("m", eos_token_ids=[1], engine_kwargs={"max_num_batched_token": 1})
    with pytest.raises(UserError, match=r"no argument max_num_batched_token .*did you mean max_num_batched_tokens\?"):
        refuse_arguments(options, on_cpu=True)


def test_an_engine_that_auto_selects_refuses_them_too(tmp_path: Path) -> None:
    config = composed("grpo_cpu", "inference_model.engine_kwargs={max_logprobs: 8}")
    with pytest.raises(UserError, match="no effect on engine=transformers"):
        engine_options(config, "transformers", "cpu", load_tokenizer(TINY), tmp_path)


def test_learner_reference_and_an_engine_in_a_worker_are_loaded_with_them(monkeypatch, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    seen: list[Any] = []
    load = AutoModelForCausalLM.from_pretrained

    def loaded(*args: Any, **options: Any) -> Any:
        model, info = load(*args, **options)
        seen.append((options["use_safetensors"], model.config._attn_implementation))
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    config = composed("grpo_cpu", "model.load_kwargs={use_safetensors: true}", "model.attn_implementation=eager")
    make_model(config, torch.device("cpu"))
    rollout_worker(engine_options(config, "transformers", "cpu", load_tokenizer(TINY), tmp_path)).close()
    assert seen == [(True, "eager")] * 2
    assert reference_options(config, "cpu")["model"]["load_kwargs"] == {"use_safetensors": True}
    config.model.load_kwargs = {"use_safetensor": True}
    with pytest.raises(UserError, match=r"model.load_kwargs=.*is not accepted by the model .*use_safetensor"):
        make_model(config, torch.device("cpu"))


def test_starts_and_pushes_of_a_server_have_the_time_limit_of_workers_and_at_least_ten_minutes(tmp_path: Path) -> None:
    for limit, longest in ((1800.0, 1800.0), (20.0, 600.0)):  # a server that loads shows no progress
        config = composed("grpo_cpu", "engine=vllm_server", f"ray.timeout_s={limit}")
        limits = engine_options(config, "vllm_server", "cpu", load_tokenizer(TINY), tmp_path)
        assert (limits.load_s, limits.timeout_s) == (longest, limit)
        assert start_limit(config) == 6 * longest


def test_a_copy_on_several_gpus_does_not_take_ray_inside_an_actor() -> None:
    """Ray is vLLM's own choice there."""
    for count, executor in ((1, None), (2, "mp")):
        options = EngineOptions("model", eos_token_ids=[1], tensor_parallel_size=count)
        assert engine_arguments(options, on_cpu=False).get("distributed_executor_backend") == executor


def test_cuda_graphs_are_captured_up_to_the_rows_that_run_at_once() -> None:
    """vLLM's own end at 512, in steps of 16; what a user says of compilation stays."""

    def compilation(rows: int, on_cpu: bool = False, **options: object) -> object:
        resolved = EngineOptions(str(TINY), eos_token_ids=(), max_rows=rows, **options).resolved()
        return engine_arguments(resolved, on_cpu=on_cpu).get("compilation_config")

    for rows, captured in ((1024, 1024), (1000, 992)):
        assert compilation(rows) == {"max_cudagraph_capture_size": captured}
    assert compilation(512) is None
    assert compilation(1024, on_cpu=True) is compilation(1024, engine_kwargs={"enforce_eager": True}) is None
    own = {"engine_kwargs": {"compilation_config": {"max_cudagraph_capture_size": 64, "mode": 3}}}
    assert compilation(1024, **own) == {"max_cudagraph_capture_size": 64, "mode": 3}
    refuse_arguments(EngineOptions(str(TINY), eos_token_ids=(), max_rows=1024, **own).resolved(), on_cpu=False)


def test_exports_take_the_templates_arguments_along_whatever_they_are_called() -> None:
    facts = Facts(TINY, "run", longest_prompt=10, num_train=64)
    kwargs = {"enable_thinking": False, 'a": __import__("os").abort(), "b': "x'$(touch PWNED)\n"}
    config = Config()
    config.env.chat_template_kwargs = kwargs
    options, ours = verl_options(config, facts)
    script = verl_script(options, ours, ["A heading."])
    (word,) = [one for one in shlex.split(script.partition("main_ppo")[2]) if "apply_chat_template_kwargs" in one]
    assert word.startswith("++data.apply_chat_template_kwargs={enable_thinking:false,")
    config.env.chat_template_kwargs = None
    assert "template_kwargs=" not in verl_script(*verl_options(config, facts), [])
