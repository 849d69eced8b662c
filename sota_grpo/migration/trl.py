"""A script for TRL 1.16 that trains as a config of ours does: its ``GRPOConfig`` and what is around it.

What TRL's trainer computes is compared with our objective in ``tests/contract/test_trl_parity.py``: under the arguments
given here, loss and gradient of a whole optimizer step are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from sota_grpo.config import Config, most_kept, responses_per_step
from sota_grpo.config.algorithm_rules import has_no_ratio
from sota_grpo.config.mixture import longest_response
from sota_grpo.engines import ENGINES
from sota_grpo.migration.data import Account, Facts
from sota_grpo.policy.optimizers import OPTIMIZERS

SCRIPT = """{comment}
from __future__ import annotations

{imports}

HERE = Path(__file__).resolve().parent
MODEL = {model}


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with TRL, as a run of sota_grpo was trained.")
    parser.add_argument("--output-dir", default=str(HERE / "output"))
    parser.add_argument("--max-steps", type=int, help="optimizer steps, instead of those of the run")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --output-dir")
    options = parser.parse_args()
    os.environ.setdefault("WANDB_PROJECT", {project})
    arguments = GRPOConfig(
        output_dir=options.output_dir,
{arguments}
    )
    if options.max_steps is not None:
        arguments.max_steps = options.max_steps
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[{rewards}],
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(HERE / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(
            MODEL, padding_side="left", truncation_side="left", trust_remote_code={trust_remote_code}
        ),
        peft_config={lora},
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
"""


VERSION, NEXT = "1.16", "1.17"

_SCALES = {"group_std": "group", "batch_std": "batch", "none": "none"}
_NEAREST = {"advantage_std": "batch", "group_mean": "group"}  # of those that TRL has


_OF_A_LOSS = {
    "sapo": {
        "sapo_temperature_pos": "algorithm.tau_positive",
        "sapo_temperature_neg": "algorithm.tau_negative",
    },
    "vespo": {
        "vespo_k_pos": "algorithm.k_positive",
        "vespo_lambda_pos": "algorithm.lambda_positive",
        "vespo_k_neg": "algorithm.k_negative",
        "vespo_lambda_neg": "algorithm.lambda_negative",
    },
}


class Code(str):
    """An expression of the script, not a text in it."""


HAS_CUDA = Code("torch.cuda.is_available()")


def trl_arguments(config: Config) -> tuple[dict[str, Any], Account]:
    """Keywords of ``trl.GRPOConfig``, in the order of the script, and the account of our options.

    >>> arguments, ours = trl_arguments(Config())
    >>> arguments["loss_type"], arguments["num_generations"], arguments["max_steps"]
    ('grpo', 8, 390)
    """
    ours = Account(config)
    arguments: dict[str, Any] = {}
    for section in (_amounts, _objective, _advantage, _reference, _optimizer, _learner, _engine, _records):
        arguments |= section(config, ours)
    ours.carry("model.name", "model.size")
    return arguments, ours


def trl_script(config: Config, facts: Facts, heading: Sequence[str]) -> str:
    """The script; the exported data and ``config.yaml`` are looked for beside it."""
    arguments, ours = trl_arguments(config)
    buffer = config.algorithm.overlong_buffer
    rewards = ['trl_reward(HERE / "config.yaml")']
    if buffer:
        rewards.append(f"trl_overlong({longest_response(config)}, {buffer})")
    comment = [*heading, "", *ours.comment()]
    body = {
        "arguments": "\n".join(f"        {name}={_python(value)}," for name, value in arguments.items()),
        "rewards": ", ".join(rewards),
        "lora": _lora(config),
    }
    return SCRIPT.format(
        comment="\n".join(f"# {line}".rstrip() for line in comment),
        imports="\n".join(_imports(" ".join(body.values()))),
        model=_python(facts.model),
        project=_python(config.logging.project),
        trust_remote_code=config.model.trust_remote_code,
        **body,
    )


def _imports(body: str) -> list[str]:
    """What a script of this ``body`` needs: standard library, packages, ours."""
    vllm = ["from importlib.util import find_spec"] if "find_spec" in body else []
    torch = ["import torch"] if "torch." in body else []
    lora = ["from peft import LoraConfig"] if "LoraConfig" in body else []
    packages = ["from transformers import AutoTokenizer", "from trl import GRPOConfig, GRPOTrainer"]
    graders = "trl_overlong, trl_reward" if "trl_overlong" in body else "trl_reward"
    return [
        *("import argparse", "import os", *vllm, "from pathlib import Path", ""),
        *(*torch, "from datasets import load_dataset", *lora, *packages, ""),
        f"from sota_grpo.migration.data import {graders}",
    ]


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_python(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str) and not isinstance(value, Code):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def steps_per_publish(config: Config) -> int:
    """Optimizer steps between two publishes."""
    return config.train.epochs * (responses_per_step(config) // config.train.optim_batch_size)


def _amounts(config: Config, ours: Account) -> dict[str, Any]:
    """A step is one generation batch; a micro-batch is a group where groups fill an optimizer step."""
    ours.carry("train.dialog_turns_per_batch", "mode")
    if config.mode == "async":
        ours.carry("train.weight_update_frequency")
        ours.note("mode", "GRPOTrainer collects and trains in turn.")
    ranks = ours.num_devices("train_model")
    if ranks > 1:
        ours.note("train_model.num_devices", f"start the script with accelerate launch --num_processes {ranks}.")
    size, repeats = ours["train.optim_batch_size"], ours["env.repeats"]
    per_rank = size // ranks
    micro = math.gcd(per_rank, repeats)
    ours.note("train.micro_batch_tokens", f"TRL pads, and counts responses: {micro} at a time.")
    steps = ours["train.total_dialog_turns"] // responses_per_step(config)
    return {
        "num_generations": repeats,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": per_rank // micro,
        "steps_per_generation": responses_per_step(config) // (micro * ranks),
        "num_iterations": ours["train.epochs"],
        "max_steps": steps * steps_per_publish(config),
        "shuffle_dataset": ours["env.shuffle"],
        "seed": ours["seed"],
        **({"chat_template_kwargs": template} if (template := ours["env.chat_template_kwargs"]) else {}),
    }


def _objective(config: Config, ours: Account) -> dict[str, Any]:
    algorithm, several = config.algorithm, steps_per_publish(config) > 1
    loss = ours.loss_of("trl", "algorithm.aggregation", f"TRL's {algorithm.objective} weighs every token alike.")
    aggregation, is_cispo = algorithm.aggregation, loss == "cispo"
    if aggregation == "token" and several:
        ours.note("algorithm.aggregation", "TRL divides by the mean number of tokens of the steps of a collection.")
    if has_no_ratio(config):
        ours.note("algorithm.objective", "the ratio of a batch's only step is 1, so the gradient is REINFORCE's.")
    low, high = ours.clips("trl")
    options = {
        "loss_type": loss,
        "importance_sampling_level": ours["algorithm.ratio"],
        "epsilon": low,
        "epsilon_high": 1 + high if is_cispo else high,  # TRL's is the bound of CISPO's ratio itself
        "delta": ours["algorithm.dual_clip"],
        "mask_truncated_completions": ours["algorithm.drop_truncated"],
        "entropy_coef": ours["algorithm.entropy_coef"],
    }
    options |= {argument: ours[option] for argument, option in _OF_A_LOSS.get(loss, {}).items()}
    if algorithm.off_policy_threshold is not None:
        options["off_policy_mask_threshold"] = ours["algorithm.off_policy_threshold"]
        ours.note("algorithm.off_policy_threshold", "without vLLM it is measured from the learner's own log-probs.")
    if algorithm.top_entropy_quantile < 1:
        options["top_entropy_quantile"] = ours["algorithm.top_entropy_quantile"]
        ours.note("algorithm.top_entropy_quantile", "TRL takes the quantile of each micro-batch, over all devices.")
    if algorithm.entropy_target is not None:
        options |= {
            "use_adaptive_entropy": True,
            "entropy_target": ours["algorithm.entropy_target"],
            "entropy_coef_delta": ours["algorithm.entropy_coef_delta"],
            "entropy_coef_max": ours["algorithm.entropy_coef_max"],
        }
    has_bonus = bool(algorithm.entropy_coef) or algorithm.entropy_target is not None
    if has_bonus and algorithm.top_entropy_quantile < 1:
        ours.note("algorithm.entropy_coef", "TRL's bonus and its target are those of the tokens that it keeps.")
    if has_bonus and aggregation != "token":
        ours.note("algorithm.entropy_coef", "TRL's bonus is a mean over tokens, whatever the loss type.")
    return options | _correction(config, ours)


def _correction(config: Config, ours: Account) -> dict[str, Any]:
    """How the mismatch between engine and learner is weighed, of which only vLLM has one in TRL."""
    level, mode = ours["algorithm.correction"], config.algorithm.correction_mode
    if level == "geometric" or (level != "none" and mode == "reject"):
        ours.note("algorithm.correction", f"TRL has none of level {level} and mode {mode}, so there is none.")
        return {"vllm_importance_sampling_correction": False}
    if level == "none":
        if config.train.epochs == 1 and not has_no_ratio(config):
            ours.note(
                "algorithm.correction", "the ratio is taken to the learner's own log-probs, here to the engine's."
            )
        return {"vllm_importance_sampling_correction": False}
    ours.note("algorithm.correction", "without vLLM there is none in TRL.")
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{level}_{ours['algorithm.correction_mode']}",
        "vllm_importance_sampling_clip_max": ours["algorithm.correction_cap"],
        "vllm_importance_sampling_clip_min": ours["algorithm.correction_floor"] or None,
    }


def _advantage(config: Config, ours: Account) -> dict[str, Any]:
    """TRL always compares with the group's mean; leaving one out is that, times G / (G - 1)."""
    baseline, scale = ours["algorithm.baseline"], ours["algorithm.scale"]
    repeats = config.env.repeats
    factor = 1.0
    if baseline == "leave_one_out" and scale == "none" and repeats > 1:
        factor = repeats / (repeats - 1)
    elif baseline != "group_mean":
        ours.note("algorithm.baseline", "TRL compares with the mean of the group.")
    if ours["algorithm.dynamic_sampling"]:
        ours.note("algorithm.dynamic_sampling", "TRL trains on zero-advantage groups as well.")
    if ours["env.max_steps"] > 1 or ours["env.reasoning"]:
        ours.note("env.max_steps", "each response is one turn; TRL's dialogs are calls of tools.")
    if scale in _NEAREST:
        ours.note("algorithm.scale", f"TRL divides by no {scale}; this is the std of the {_NEAREST[scale]}'s rewards.")
    elif scale != "none":
        ours.note("algorithm.scale", "TRL adds 1e-4 to the standard deviation, ours 1e-6.")
    rewards = 2 if ours["algorithm.overlong_buffer"] else 1  # the penalty is a function of its own
    return {"scale_rewards": (_SCALES | _NEAREST)[scale]} | (
        {"reward_weights": [factor] * rewards} if factor != 1 else {}
    )


def _reference(config: Config, ours: Account) -> dict[str, Any]:
    """k3 without TRL's weight of the ratio; with it the gradient is that of our k2 where a batch is used once."""
    coef, estimator = ours["policy.kl_coef"], ours["algorithm.kl_estimator"]
    if coef and not ours["train.kl_coef_in_loss"]:
        ours.note("train.kl_coef_in_loss", "TRL has no KL in the reward, so there is none.")
        return {"beta": 0.0}
    unbiased = bool(coef) and ours["algorithm.kl_unbiased"]
    if unbiased and estimator == "k1":
        ours.note("algorithm.kl_estimator", "k3, which has the same gradient on average when the ratio weighs it.")
    elif coef and estimator == "k2":
        ours.note("algorithm.kl_estimator", "k3 weighed by the ratio, of the same gradient in a batch's first step.")
    elif coef and estimator == "k1":
        ours.note("algorithm.kl_estimator", "TRL's is k3.")
    if unbiased and ours["algorithm.dual_clip"] is not None:
        ours.note("algorithm.dual_clip", "TRL's ratio on the KL has no bound.")
    return {"beta": coef} | ({"use_bias_correction_kl": unbiased or estimator == "k2"} if coef else {})


def _optimizer(config: Config, ours: Account) -> dict[str, Any]:
    schedule, warmup = ours["optimizer.schedule"], ours["optimizer.warmup_steps"]
    if warmup:
        ours.note("optimizer.warmup_steps", f"TRL's first step is at 0, ours at 1/{warmup} of the rate.")
    optimizer = OPTIMIZERS[ours["optimizer.name"]].trl
    if optimizer is None and config.optimizer.name != "adamw":
        ours.note("optimizer.name", "transformers' Trainer has no such optimizer; this is AdamW.")
    return {
        **({"optim": optimizer} if optimizer else {}),
        "learning_rate": ours["optimizer.lr"],
        "lr_scheduler_type": "constant_with_warmup" if schedule == "constant" and warmup else schedule,
        "warmup_steps": warmup,
        "weight_decay": ours["optimizer.weight_decay"],
        "adam_beta1": ours["optimizer.beta1"],
        "adam_beta2": ours["optimizer.beta2"],
        "adam_epsilon": ours["optimizer.eps"],
        "max_grad_norm": ours["optimizer.clip_grad_norm"],
    }


def _learner(config: Config, ours: Account) -> dict[str, Any]:
    lora = config.train_model.lora
    if ours["train_model.lora.enabled"]:
        ours.carry("train_model.lora.r", "train_model.lora.alpha", "train_model.lora.dropout")
    dtype, attention = ours["train_model.torch_dtype"], ours["model.attn_implementation"]
    loading: dict[str, Any] = {"dtype": "float32" if dtype == "auto" else dtype}
    if attention is not None:
        loading["attn_implementation"] = attention
    precision, on_cpu = ours["train.precision"], ours["device"] == "cpu"
    half: Any = {**dict.fromkeys(("auto", "native"), False if on_cpu else HAS_CUDA), "bf16": True}.get(precision, False)
    return {
        "model_init_kwargs": loading,
        "trust_remote_code": ours["model.trust_remote_code"],
        "disable_dropout": not (lora.enabled and lora.dropout),  # it would take the adapter's, too
        "gradient_checkpointing": ours["train_model.gradient_checkpointing"],
        "bf16": half,
        "fp16": precision == "fp16",
        "use_cpu": on_cpu,
    }


def _engine(config: Config, ours: Account) -> dict[str, Any]:
    if ours["inference_model.ignore_eos"]:
        ours.note("inference_model.ignore_eos", "add generation_kwargs, which differ between vLLM and transformers.")
    sampling = {
        "max_completion_length": ours["inference_model.max_tokens"],
        "temperature": ours["inference_model.temperature"],
        "top_p": ours["inference_model.top_p"],
        "top_k": ours["inference_model.top_k"],
    }
    if most_kept(config):
        ours.note("inference_model.top_p", "TRL before 1.17 takes log-probs over the whole vocabulary, a biased ratio.")
    name, url = ours["engine.name"], ours["engine.url"]
    known = "colocate" if name == "auto" else ENGINES[name].trl
    if known is None:
        ours.note("engine.name", "TRL samples with transformers or vLLM; this is transformers.")
    if known in (None, "transformers"):
        return sampling | {"use_vllm": False}
    uses: Any = Code(f'{HAS_CUDA} and find_spec("vllm") is not None') if name == "auto" else True
    if known == "server":
        server = {"use_vllm": uses, "vllm_mode": "server"}
        return sampling | server | ({} if url is None else {"vllm_server_base_url": url})
    return sampling | {
        "use_vllm": uses,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": ours["inference_model.gpu_memory_utilization"],
        "vllm_tensor_parallel_size": ours["inference_model.tensor_parallel_size"],
        "vllm_max_model_length": ours["inference_model.max_model_len"],
    }


def _records(config: Config, ours: Account) -> dict[str, Any]:
    if ours["eval.mode"] == "on":
        ours.note("eval.mode", "TRL evaluates rewards, not accuracy: measure the saved model with sota-grpo eval.")
    per_publish, every = steps_per_publish(config), ours["train.checkpoint_frequency"]
    is_tracked = ours["logging.wandb"] != "disabled"
    ours.carry("logging.project", "train.export_hf", "train.resume")
    return {
        "logging_steps": per_publish,
        "save_strategy": "steps" if every else "no",
        "save_steps": max(1, every * per_publish),
        "save_total_limit": ours["train.keep_checkpoints"],
        "report_to": "wandb" if is_tracked else "none",
        "run_name": ours["logging.run_name"],
    }


def _lora(config: Config) -> str:
    lora = config.train_model.lora
    sizes = f"r={lora.r}, lora_alpha={lora.alpha}, lora_dropout={lora.dropout}"
    targets = lora.target_modules or "all-linear"
    return f'LoraConfig({sizes}, target_modules={targets!r}, task_type="CAUSAL_LM")' if lora.enabled else "None"
