"""The dry run: what it adds up, what it refuses, and that what it proposes instead really fits."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig

from sota_grpo import keys
from sota_grpo.assembly import estimate as estimating
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.estimate import GIB, Estimate, Machine, estimate, with_micro_batches
from sota_grpo.assembly.sampling import task_of
from sota_grpo.cli import configs as command
from sota_grpo.config import mixture, num_steps
from sota_grpo.config.spelling import overrides_of
from sota_grpo.errors import UserError
from sota_grpo.policy.load import architecture_from, load_tokenizer, resolve_model_path
from sota_grpo.policy.model_sizes import architecture_of
from sota_grpo.rl.planner import micro_batches
from sota_grpo.run.app import as_planned
from sota_grpo.run.entry import CONFIG_DIR
from sota_grpo.tasks.toolbox import load
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.workers.instances import InstanceSpec
from tests.training_rigs import make_components

PRESETS = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))
GPU_PRESETS, HARDWARE = (("grpo_gsm8k", "grpo_ifeval", "grpo_math", "grpo_reasoning"), ("", " hardware=one_gpu"))
FOUR_RANKS = ["train_model.num_devices=4", "policy.kl_coef=0"]
LLAMA = ["model.name=meta-llama/Llama-2-7b-hf", "device=cuda", "env.dataset=arithmetic"]
TINY = architecture_from(AutoConfig.from_pretrained(resolve_model_path("tiny")))
QWEN, CPU = architecture_of("Qwen/Qwen2.5-0.5B"), Machine("cpu", 8 * GIB, 500 * 2**20)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is taken to have none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def planned(*overrides: str, name: str = "grpo_gsm8k", gib: float | None = None, **options: Any) -> Estimate:
    return estimate(compose(name, overrides), memory_gib=gib, **{"prompt_tokens": 300} | options)


def called(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    options = parser.parse_args(["estimate", *arguments])
    return options.run(options)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_the_hardware_that_its_first_line_names(name: str) -> None:
    actual = planned(name=name)
    assert actual.fits, actual.refusal
    assert len(actual.devices) == 1
    facts = actual.as_dict()
    assert facts["optimizer_steps"] >= facts["steps"] > 0


def fits_with_its_change_only(found: Estimate) -> dict[str, Any]:
    """The options that are proposed: they are enough, and none of them may be left out."""
    options = found.change
    assert not found.fits
    assert options
    assert found.with_options(options).fits
    for left_out in options:
        assert not found.with_options({name: value for name, value in options.items() if name != left_out}).fits
    assert " ".join(overrides_of(options)) in found.refusal
    return options


@pytest.mark.parametrize(
    ("gib", "overrides"),
    [
        (16.0, ["train_model.gradient_checkpointing=false"]),
        (24.0, [*LLAMA, "train_model.lora.enabled=true"]),
        (40.0, ["inference_model.gpu_memory_utilization=0.95"]),
    ],
)
def test_what_is_proposed_fits_and_nothing_less_of_it_does(gib: float, overrides: list[str]) -> None:
    fits_with_its_change_only(planned(*overrides, gib=gib))


def test_smaller_micro_batches_are_proposed_before_anything_else_and_no_smaller_than_needed() -> None:
    wide = ["train.micro_batch_tokens=131072", "train.optim_batch_size=128", "model.size=0.5B"]
    actual = planned(*wide, "train_model.gradient_checkpointing=false", "engine=transformers", gib=60.0)
    (option, tokens), = fits_with_its_change_only(actual).items()  # fmt: skip
    assert option == "train.micro_batch_tokens"
    assert not actual.with_options({option: 2 * tokens}).fits


def of_the_limit(found: Estimate) -> float:
    """What learner and reference fill of what is free while they compute, over the share that they may."""
    return max(own / (estimating.FILLED * left) for own, left in (device.learning for device in found.devices))


SMALL = ["model.name=Qwen/Qwen3-0.6B", "train_model.gradient_checkpointing=false"]


@pytest.mark.parametrize(
    ("gib", "overrides"),
    [
        (80.0, SMALL),
        (40.0, [*SMALL, "env.repeats=4", "inference_model.max_tokens=300"]),
        (24.0, ["train_model.lora.enabled=true", "algorithm=gspo"]),
        (80.0, [*SMALL, "model.attn_implementation=sdpa"]),
        (80.0, [*LLAMA, *FOUR_RANKS, "train.optim_batch_size=512", "train.dialog_turns_per_batch=512"]),
    ],
)
def test_auto_fills_nine_tenths_of_what_is_free_while_training(gib: float, overrides: list[str]) -> None:
    actual = planned(*overrides, gib=gib)
    prompt, response = actual.largest_sample
    auto, group = actual.micro_batch_tokens, prompt + actual.config.env.repeats * response
    assert prompt + response < auto < 65_536
    filled, more = (actual.with_options({"train.micro_batch_tokens": size}) for size in (auto, auto + group))
    assert of_the_limit(filled) <= 1 < of_the_limit(more)
    (training,) = [parts for name, parts in actual.devices[-1].moments.items() if name in ("training", "at work")]
    own = sum(training[part] for part in ("weights", "gradients", "optimizer", "activations", "logits"))
    assert own <= 0.9 * (gib * GIB - (sum(training.values()) - own))
    assert actual.as_dict()["micro_batch_tokens"] == auto


def test_auto_ends_at_a_step_at_65536_at_the_longest_sample_and_on_a_cpu() -> None:
    assert planned(*SMALL, gib=2000.0).micro_batch_tokens == 65_536
    assert planned(*SMALL, "train.optim_batch_size=16", gib=2000.0).micro_batch_tokens == 2 * (300 + 8 * 1024)
    assert planned(gib=20.0).micro_batch_tokens == 300 + 1024
    assert Estimate(compose("grpo_cpu"), QWEN, 50, CPU).micro_batch_tokens == 16_384
    assert planned("train.micro_batch_tokens=777", gib=80.0).micro_batch_tokens == 777


def test_a_run_plans_the_micro_batches_of_its_estimate_once(monkeypatch, caplog) -> None:
    actual = planned(*SMALL, gib=80.0)

    def tokens(*overrides: str) -> int | str:
        config = compose("grpo_gsm8k", [*SMALL, *overrides])
        return with_micro_batches(config, actual.plan, 300).train.micro_batch_tokens

    with caplog.at_level("INFO", logger="sota_grpo"):
        with monkeypatch.context() as here:
            here.setattr(estimating, "_machine", lambda *_: (replace(actual.machine, count=1, is_here=True), ""))
            assert tokens() == actual.micro_batch_tokens
        (record,) = caplog.records
        assert record.message.startswith(f"train.micro_batch_tokens=auto is {actual.micro_batch_tokens:,}, which fills")
        assert tokens() == 16_384  # elsewhere: its memory is not known
        assert "not on this machine" in caplog.text
    assert tokens("train.micro_batch_tokens=5") == 5


@pytest.mark.parametrize(
    ("config_yaml", "kept"),
    [("train: {micro_batch_tokens: 4321}", 4321), ("", "auto"), ("seed: 1", "auto")],
)
def test_a_resumed_run_keeps_the_micro_batches_that_were_recorded(config_yaml, kept, tmp_path, caplog) -> None:
    if config_yaml:
        (tmp_path / "config.yaml").write_text(config_yaml)
    fresh, resumed = (SimpleNamespace(path=tmp_path, resumed=resumed) for resumed in (False, True))
    config, chosen = compose("grpo_cpu"), compose("grpo_cpu", ["train.micro_batch_tokens=99"])
    assert (as_planned(config, fresh), as_planned(chosen, resumed)) == (config, chosen)
    with caplog.at_level("INFO"):
        assert as_planned(config, resumed).train.micro_batch_tokens == kept
    sentence = (
        f"{tmp_path / 'config.yaml'} does not record what" if kept == "auto" else "that the last start of this run"
    )
    assert [sentence in message for message in caplog.messages] == [True]


def test_where_nothing_helps_it_says_so() -> None:
    actual = planned("model.name=Qwen/Qwen2.5-72B-Instruct", gib=4.0)
    assert actual.change is None
    assert "smaller model" in actual.refusal
    share = "inference_model.gpu_memory_utilization=0.1"  # which does not hold the model
    assert "KV cache" in planned(*LLAMA, "engine=vllm", share, gib=80.0).refusal


def test_tasks_of_a_mixture_are_not_composed_for_every_change_that_is_tried(monkeypatch) -> None:
    composed = Mock(wraps=mixture._entry_config)
    monkeypatch.setattr(mixture, "_entry_config", composed)
    assert planned("env.mixture={a: {dataset: arithmetic}}", gib=8.0, gpus=2).change
    assert composed.call_count < 20


def test_engines_on_the_learners_gpus_are_counted_by_turns() -> None:
    """As on one GPU: never with gradients and activations; asleep, each leaves its weights on the host."""
    own = [*LLAMA, "engine=vllm", *FOUR_RANKS]
    actual = planned(*own, "inference_model.num_devices=shared", gib=80.0)
    apart = planned(*own, "inference_model.num_devices=4", gib=80.0)
    assert [device.roles for device in actual.devices] == [("learner", "engine")] * 4
    assert len(apart.devices) == 8
    (engine,) = [device for device in apart.devices if device.name == "cuda:0"]
    (rank,) = [device for device in apart.devices if device.name == "cuda:4"]
    parts = actual.devices[0].moments
    resting = {part: parts["training"][part] for part in ("context", "weights", "optimizer")}
    served = {part: size for part, size in engine.moments["at work"].items() if part.startswith("engine")}
    assert parts["sampling"] == resting | served
    assert {**parts["training"], "context": 0} == {**rank.moments["at work"], "context": 0}


def test_proposals_stay_within_the_gpus_that_there_are() -> None:
    """All weights of 7B need more than one GPU of 80 GiB; an adapter does not."""
    for gpus in (1, 4):
        actual = planned(*LLAMA, gib=80.0, gpus=gpus)
        assert actual.with_options(fits_with_its_change_only(actual)).fits
        assert (actual.other_change is None) == (gpus == 1)
    changed = actual.with_options(actual.other_change)
    assert {device.name for device in changed.devices} <= {f"cuda:{index}" for index in range(4)}
    with pytest.raises(UserError, match=r"5 devices are needed .* and 4 can be used"):
        planned(*LLAMA, "train_model.num_devices=4", "inference_model.num_devices=1", gpus=4)


@pytest.mark.parametrize("case", ["grpo_cpu", *(f"{name}{hardware}" for name in GPU_PRESETS for hardware in HARDWARE)])
def test_evaluation_takes_less_than_15_percent_of_the_responses(case: str) -> None:
    """At the start, every ``eval.every`` steps, and at the end."""
    name, *hardware = case.split()
    config = compose(name, hardware)
    options, steps = config.eval, num_steps(config)
    times = 2 + ((steps - 1) // options.every if options.every else 0)
    evaluated = times * options.num_samples * (1 + options.avg_at_k)
    assert evaluated < 0.15 * (evaluated + steps * config.train.dialog_turns_per_batch)


def test_micro_batches_are_those_that_the_learner_makes_of_full_samples() -> None:
    config = compose("grpo_cpu", ["train.micro_batch_tokens=1000", "env.repeats=4", "train.optim_batch_size=32"])
    actual = Estimate(config, QWEN, 50, CPU).micro_batches(1)

    def row(group: int) -> TensorDict:
        is_response = torch.arange(50 + 64) >= 50
        return TensorDict({"tokens": {"full": torch.full((114,), group)}, "masks": {"all_assistant_mask": is_response}})

    made = micro_batches([row(index // 4) for index in range(32)], token_budget=1000)
    assert len(actual) == len(made)
    tokens = [50 * len({int(one["tokens", "full"][0]) for one in part}) + 64 * len(part) for part in made]
    assert [batch.tokens for batch in actual][:-1] == [1000] * (len(made) - 1)  # ragged samples fill it
    assert sum(tokens) <= sum(batch.tokens for batch in actual) + 1000


def test_prompts_are_counted_with_the_tools_that_they_describe() -> None:
    """As the chat template writes them, by hand."""
    tools = Path(__file__).parent / "environments" / "guess.py"
    options = ["env.max_samples=20", "env.num_heldout=4", "env.max_steps=3", f"env.environment={tools}:Guess"]
    config = compose("grpo_cpu", options)
    prompt, _ = estimate(config).largest_sample
    task, tokenizer = task_of(config), load_tokenizer("tiny")
    schemas = load(InstanceSpec("factory", str(tools), ("Guess",)))().schemas
    rendered = [
        tokenizer.apply_chat_template(task.messages(each), tools=schemas, tokenize=False, add_generation_prompt=True)
        for each in [*task.train, *task.heldout]
    ]
    assert prompt == max(len(tokenizer(text)["input_ids"]) for text in rendered)


def test_a_prompt_that_is_longer_than_the_context_is_refused() -> None:
    """As the run itself refuses it, with the same sentence; a context of one token more is enough."""

    def largest_sample(context: int, prompt_tokens: int | None = None) -> tuple[int, int]:
        options = ["env.max_samples=20", "env.num_heldout=4", f"inference_model.max_model_len={context}"]
        return estimate(compose("grpo_cpu", options), prompt_tokens=prompt_tokens).largest_sample

    longest, _ = largest_sample(512)
    message = rf"has {longest} tokens and at most {longest - 1} fit; raise inference_model.max_model_len"
    with pytest.raises(UserError, match=message):
        largest_sample(longest)
    assert largest_sample(longest + 1) == (longest, 1)
    with pytest.raises(UserError, match="leaves no room for a response in a context of 64"):
        largest_sample(64, prompt_tokens=64)
    assert largest_sample(64, prompt_tokens=63) == (63, 1)


def test_a_cpu_run_counts_every_role_on_one_machine() -> None:
    """A teacher as it is, which may be of another size."""
    config = compose("grpo_cpu", ["engine=transformers", "algorithm.distill_coef=1", "ref_model.name=large"])
    large, weights = replace(QWEN, layers=2 * QWEN.layers), 4 * QWEN.parameters
    for teacher, reference in ((None, weights), (large, 4 * large.parameters)):
        (device,) = Estimate(config, QWEN, 100, CPU, teacher=teacher).devices
        training = device.moments["training"]
        assert (training["weights"], training["optimizer"]) == (weights, 2 * weights)
        assert (training["engine: weights"], training["reference: weights"]) == (weights, reference)
        assert device.roles == ("learner", "engine", "reference")
        assert "gradients" not in device.moments["sampling"]
    (kl,) = Estimate(compose("grpo_cpu", ["engine=transformers", "policy.kl_coef=0.1"]), QWEN, 100, CPU).devices
    assert kl.moments["training"]["reference: weights"] == weights


def test_the_command_refuses_with_2_and_names_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    preset = ("--config-name", "grpo_gsm8k", "--prompt-tokens", "200")
    assert called(*preset, "--memory-gb", "16", "model.size=3B") == 2
    printed = capsys.readouterr()
    assert "It does not fit." in printed.out
    assert "use train" in printed.err
    assert called(*preset) == 0
    assert "It fits" in capsys.readouterr().out


GPUS = ["model.size=1.5B", "train_model.torch_dtype=float32"]


@pytest.mark.parametrize(
    ("overrides", "sizes"),  # of 1,543,714,304 parameters in GiB: 17.25 a checkpoint, 5.75 the model
    [
        ([], (17.25, 4, 5.75)),
        (["train.checkpoint_frequency=0", "train.export_hf=false"], (17.25, 1, 0.0)),
        (["train_model.torch_dtype=bfloat16", "optimizer.lr=1e-4"], (8.63, 4, 2.88)),
        (["train_model.lora.enabled=true"], (0.21, 4, 5.75)),
    ],
)
def test_what_is_written_to_the_disk_is_counted(overrides: list[str], sizes: tuple[float, int, float]) -> None:
    actual = planned(*GPUS, *overrides)
    disk = estimating.disk_of(actual.config, actual.model)
    assert (round(disk.checkpoint / GIB, 2), disk.checkpoints, round(disk.export / GIB, 2)) == sizes
    assert disk.total == disk.checkpoint * disk.checkpoints + disk.export


def test_checkpoints_of_a_resumed_run_make_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("grpo_cpu")
    free = estimating.disk_of(config, TINY).total - 1000
    monkeypatch.setattr(estimating.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(UserError, match="The run writes"):
        estimating.require_disk(config, tmp_path)
    CheckpointStore(tmp_path / "checkpoints").save(1, {"a": torch.ones(1000)})
    estimating.require_disk(config, tmp_path)


def test_a_checkpoint_has_the_size_that_is_counted(tmp_path: Path) -> None:
    components = make_components(tmp_path, max_tokens=4)
    rows = components.sample()
    rows.set(keys.ADVANTAGE, torch.ones(len(rows), 1, 1))
    components.learner.update(rows)
    path = CheckpointStore(tmp_path / "c").save(1, components.learner.state_dict())
    counted = estimating.disk_of(compose("grpo_cpu"), TINY).checkpoint
    assert path.stat().st_size == pytest.approx(counted, rel=0.02)
