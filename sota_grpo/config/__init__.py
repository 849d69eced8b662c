"""The typed schema of a run: every option, its default, and its help.

Hydra knows the schema as ``schema``; every preset in ``config/`` starts from it, so an unknown key is an error.
A field declares its help, values and limits; rules of several options are in :mod:`sota_grpo.config.validators`.

>>> from sota_grpo.config import Config
>>> Config().env.repeats
8
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sota_grpo.engines import ENGINES
from sota_grpo.functional.surrogates import SURROGATES
from sota_grpo.policy.model_sizes import SIZES, model_of_size
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.rewards.judge.questions import KINDS
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.records import MAX_SUPPORT
from sota_grpo.tasks import TASKS


def opt(
    default: Any,
    text: str,
    choices: Collection[str] | None = None,
    *,
    above: float | None = None,
    low: float | None = 0,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a config field: its default, its help, its other values if they are few, and the limits of a number."""
    limits = {"above": above, "at least": low if above is None else None, "at most": high, "below": below}
    limits = {words: limit for words, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"help": text, "choices": choices, "limits": limits})


def section(factory: Callable[[], Any], text: str) -> Any:
    """Return a config field that is a section or a list."""
    return field(default_factory=factory, metadata={"help": text, "choices": None, "limits": {}})


@dataclass
class EvalConfig:
    """Accuracy on the held-out split."""

    mode: str = opt("on", "evaluate at the start and at the end", ("on", "off"))
    every: int = opt(0, "training steps between evaluations; 0: only at the start and at the end")
    num_samples: int = opt(256, "held-out problems", above=0)
    avg_at_k: int = opt(0, "sampled responses per problem at temperature 1, in addition to the greedy one")


@dataclass
class RayConfig:
    """The cluster on which workers run (mode=async, or several devices for a role)."""

    address: str | None = opt(None, "a running cluster (HOST:PORT, auto); null starts one on this machine")
    timeout_s: float = opt(
        600.0,
        "longest time without a sign of life: of an engine or reference until it is replaced, of a learner rank or "
        "server until the run fails; also for the start of workers and the cluster's resources",
        above=0,
    )


@dataclass
class CheckConfig:
    """Checks before the first step."""

    mode: str = opt("strict", "a failed check ends the run, warns, or is not made", ("strict", "warn", "off"))


@dataclass
class LoggingConfig:
    """Metrics, reports and stored steps."""

    wandb: str = opt("disabled", "Weights & Biases", ("online", "offline", "disabled"))
    project: str = opt("sota_grpo", "W&B project")
    run_name: str | None = opt(None, "W&B name of the run; null: the run directory's name")
    tags: list[str] = section(list, "W&B tags")
    sinks: list[str] = section(list, "further metric loggers: tensorboard, and entry points sota_grpo.sinks")
    report: bool = opt(True, "write report.html at every checkpoint and at the end")
    store_steps: bool = opt(True, "store step 0 and the steps after checkpoints in steps/, for report and replay")
    num_examine: int = opt(0, "completions per step written to debug_logs/, with their reward terms")


@dataclass
class EnvConfig:
    """The task, its data, its tools and its graders."""

    dataset: str = opt("gsm8k", "task to train on, or FILE.py:CLASS; table is your own data", TASKS)
    mixture: Any = opt(None, "several tasks, {NAME: {dataset: .., weight: ..}, ..}, each with the options that differ")
    dataset_path: str | None = opt(
        None, "local .jsonl/.json/.parquet/.csv with the task's columns, or a hub name; null: the task's own hub data"
    )
    eval_path: str | None = opt(None, "file of held-out problems; null: the hub's test split, or part of the data")
    prompt_column: str = opt("prompt", "table: column of the prompts, text or chat lists")
    answer_column: str = opt("ground_truth", "table: column of the right answers")
    num_envs: int = opt(64, "concurrent episodes", above=0)
    repeats: int = opt(8, "group size: responses per prompt", above=0)
    shuffle: bool = opt(True, "shuffle the prompts in every epoch, by the seed")
    max_samples: int | None = opt(None, "train on the first so many examples only; null: all", above=0)
    num_heldout: int | None = opt(
        None, "held-out examples of a task without a test split; null: 512, at most a tenth of a file"
    )
    answer_format: str | None = opt(
        None, "form of the answer in a response; null: the task's own", ("hash", "boxed", "tags", "last_number", "any")
    )
    format_weight: float | None = opt(None, "reward for the right form, where a right answer earns 1; null: the task's")
    system_prompt: str | None = opt(None, "replaces the task's own system prompt; an empty text removes it")
    chat_template_kwargs: Any = opt(None, "further arguments of the chat template, such as {enable_thinking: false}")
    skip_unreadable: bool = opt(False, "skip prompts that are too long, or refused by the template; false: an error")
    tasks: Any = opt(  # a typed dict would not take new keys from Hydra
        None, "reasoning_gym: weight of each task by name, or a dict of weight, level and options; 0 leaves one out"
    )
    sandbox: str = opt("auto", "code: sandbox of the model's programs: bwrap (auto), or a SandboxFusion server's URL")
    difficulty: int = opt(4, "arithmetic: most steps of a problem", low=1, high=5)
    reasoning: bool = opt(False, "after a wrong response ask the policy to think again, up to env.max_steps turns")
    max_steps: int = opt(1, "most turns of an episode; inference_model.max_tokens limits each turn", above=0)
    tools: str | None = opt(None, "FILE.py:NAME,NAME: typed functions that the policy may call")
    environment: str | None = opt(
        None,
        "FILE.py:FACTORY of objects with reset, methods that the policy may call, and optionally get_reward; or a "
        "server: mcp:COMMAND, mcp+http://HOST:PORT/mcp, openenv+http://HOST:PORT",
    )
    transforms: list[str] = section(
        list,
        "FILE.py:NAME of TorchRL transforms of your own, applied in order to each prompt group before its advantage",
    )
    environments_per_worker: int = opt(
        8, "samples whose tools or environments share a process; a call that hangs fails all of them", above=0
    )
    reward_workers: int = opt(1, "grader processes; 0: in the trainer, where a grader that hangs hangs the run")
    timeout_s: float = opt(60.0, "longest time of a grading or of a tool call; then its process is replaced", above=0)


@dataclass
class JudgeConfig:
    """A model that scores responses: a further reward term (``judge``)."""

    kind: str | None = opt(None, "chat scores by a rubric; score and classify are vLLM's APIs of reward models", KINDS)
    url: str | None = opt(None, "base URL of the judge server; set its API key in SOTA_GRPO_JUDGE_KEY")
    model: str | None = opt(None, "name of the model on the server; null: the first that it serves")
    weight: float = opt(1.0, "weight of the term; 0 in an entry of env.mixture: its task has no judge")
    alone: bool = opt(False, "replace the task's own reward; a reward above reward.success_above is a success")
    rubric: str | None = opt(None, "chat: text, or a file .txt or .md; null: right, complete, clear")
    reference: bool = opt(False, "chat: show the right answer to the judge")
    extra_body: Any = opt(None, "further fields of every request, such as {max_tokens: 4096}; null removes a field")


@dataclass
class RewardConfig:
    """Your own reward functions, and the weights of the tasks' own terms."""

    path: str | None = opt(None, "Python file with reward functions, which replace the task's own reward")
    name: Any = opt(None, "function in reward.path, or a list of them; null: compute_score")
    weights: list[float] | None = opt(None, "weight of each function of reward.name; null: 1 each")
    success_above: float = opt(0.0, "functions without a success of their own: a greater reward is one", low=None)
    correct: float = opt(1.0, "math: reward of a right answer", low=None)
    wrong: float = opt(-1.0, "math: reward of a wrong answer", low=None)
    no_answer: float = opt(-0.5, "math: reward of a response without an answer", low=None)
    all_weight: float = opt(0.0, "ifeval, instructions: bonus if all are followed, beyond the share followed")
    judge: JudgeConfig = section(JudgeConfig, "a model that judges responses")


DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINE_DTYPES, PRECISIONS = (*DTYPES, "native"), ("auto", "fp32", "bf16", "fp16", "native")
_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "best_of_others", "batch_mean", "none")
_CORRECTIONS, _MODES = ("none", "token", "sequence", "geometric"), ("truncate", "mask", "reject")
_SCALES = ("group_std", "group_mean", "batch_std", "advantage_std", "none")


@dataclass
class AlgorithmConfig:
    """The terms of the objective; the presets in ``config/algorithm/`` only choose among them (docs/algorithm.md)."""

    name: str = opt("grpo", "label of the preset, written to the logs")
    baseline: str = opt(
        "group_mean",
        "baseline that is subtracted from the reward; or an advantage estimator of your own, FILE.py:FUNCTION",
        _BASELINES,
    )
    scale: str = opt("group_std", "divisor of the centred reward", _SCALES)
    decouple_terms: bool = opt(False, "centre and scale each reward term within its group before their sum (GDPO)")
    objective: str = opt("clipped", "surrogate of each token; or your own, FILE.py:FUNCTION", SURROGATES.keys())
    ratio: str = opt("token", "importance ratio per token, or per sequence (GSPO)", ("token", "sequence"))
    clip_low: float = opt(0.2, "clip the ratio below 1 - clip_low (dppo: the probability, gmpo: the log-ratio)")
    clip_high: float = opt(0.2, "clip the ratio above 1 + clip_high (dppo, gmpo: as clip_low)")
    dual_clip: float | None = opt(
        3.0,
        "objective=clipped, gmpo: bound on the ratio of tokens with a negative advantage; with kl_unbiased also on the "
        "ratio of the KL; null: none, so one token can dominate the gradient of a step",
        above=1,
    )
    off_policy_threshold: float | None = opt(
        None, "mask responses of negative advantage if mean logp_engine - logp exceeds it (DeepSeek-V3.2)"
    )
    aggregation: str = opt("sequence", "weight of each token in the loss", ("token", "sequence", "constant"))
    kl_estimator: str = opt("k3", "estimator of the KL to the reference", ("k1", "k2", "k3"))
    kl_unbiased: bool = opt(False, "multiply the KL in the loss by the ratio: an unbiased gradient (DeepSeek-V3.2)")
    entropy_coef: float = opt(0.0, "entropy bonus in the loss; 0 only reports the entropy")
    entropy_target: float | None = opt(
        None,
        "entropy per token, in nats: below it entropy_coef grows by 0.005 per optimizer step, up to 1, and has an "
        "effect; above it entropy_coef falls by 0.005, down to 0 (Skywork-OR1); null: constant",
        above=0,
    )
    top_entropy_quantile: float = opt(
        1.0, "share of a step's tokens, of highest entropy, that are trained on", above=0, high=1
    )
    correction: str = opt("none", "importance weights of the proximal over the behaviour policy", _CORRECTIONS)
    correction_mode: str = opt(
        "truncate", "outside floor and cap weights are clamped or masked; reject: 1 inside", _MODES
    )
    correction_cap: float = opt(2.0, "largest correction weight", above=0)
    correction_floor: float = opt(0.0, "smallest correction weight; 0: none")
    distill_coef: float = opt(0.0, "weight of log p_teacher - log p_policy in the advantage; teacher: ref_model.name")
    advantage_coef: float = opt(1.0, "weight of the task's advantage when there is a teacher")
    drop_truncated: bool = opt(False, "mask responses that max_tokens cut off")
    overlong_buffer: int = opt(0, "soft length penalty over the last so many tokens of max_tokens (DAPO); 0: none")
    dynamic_sampling: bool = opt(False, "replace zero-advantage groups, by those of up to 10 collections (DAPO)")


@dataclass
class EngineConfig:
    """The inference engine."""

    name: str = opt("auto", "engine; auto is vllm where it is installed", ENGINES)
    url: str | None = opt(None, "running server, http://HOST:PORT; null: a server engine starts one on loopback")


@dataclass
class ModelConfig:
    """The policy that is trained."""

    name: str | None = opt(
        None,
        "hub name or local directory; tiny is the embedded policy, smollm2 SmolLM2-135M-Instruct from PyPI; null: the "
        "instruction-tuned Qwen of model.size",
    )
    size: str = opt("1.5B", "parameters of the model where model.name is null", SIZES)
    attn_implementation: str | None = opt(None, "sdpa, eager, ..: padded rows; null: packed rows, if the model can")
    load_kwargs: Any = opt(None, "further arguments of from_pretrained (not the engine's), as {use_safetensors: true}")
    trust_remote_code: bool = opt(False, "run Python code that ships with the model")
    quantization: str | None = opt(None, "QLoRA: the frozen weights in 4 bits (bitsandbytes)", ("nf4", "fp4"))


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) instead of full fine-tuning."""

    enabled: bool = opt(False, "train adapters, keep the base weights frozen")
    r: int = opt(16, "rank", above=0)
    alpha: int = opt(32, "scale; the update is alpha / r * B A")
    dropout: float = opt(0.0, "dropout on the adapter's input, active in the learner only", below=1)
    target_modules: list[str] | None = opt(None, "linear layers with an adapter, such as [q_proj,v_proj]; null: all")


_DEVICES = "explicit device indices instead of a count"


@dataclass
class TrainModelConfig:
    """The learner's copy of the policy."""

    num_devices: int | None = opt(None, "devices of the learner, an FSDP2 rank on each; null: 1", above=0)
    devices: list[int] | None = opt(None, _DEVICES)
    tensor_parallel_size: int = opt(1, "devices that shard every matrix; num_devices counts all of them", above=0)
    fsdp_size: int | None = opt(None, "devices that shard the weights; fewer than all: HSDP; null: all", above=0)
    torch_dtype: str = opt("auto", "dtype of the weights; auto is float32", DTYPES)
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass: less memory, more time")
    compile: bool | None = opt(None, "compile the decoder's layers, packed rows only; null: on CUDA")
    shard_gradients: bool = opt(False, "several devices: reduce gradients per micro-batch; less memory, more traffic")
    lora: LoraConfig = section(LoraConfig, "low-rank adapters")


@dataclass
class InferenceModelConfig:
    """The engine's copy of the policy, and sampling."""

    num_devices: int | str | None = opt(
        None,
        "devices of the engines, one engine on each; shared with mode=sync: all of the learner's, where engines sleep "
        "while it computes; null: with mode=sync one engine on the learner's, else 1",
        ("shared",),
        above=0,
    )
    devices: list[int] | None = opt(None, _DEVICES)
    tensor_parallel_size: int = opt(1, "GPUs that shard one copy of the model; num_devices counts all of them", above=0)
    torch_dtype: str = opt("auto", "of weights; auto: bfloat16 on CUDA; native: on CPUs that have it", ENGINE_DTYPES)
    gpu_memory_utilization: float = opt(0.5, "share of the GPU's memory that vLLM may take", high=1)
    max_num_seqs: int | None = opt(None, "concurrent samples per engine; null: of env.num_envs, or of a step", above=0)
    max_model_len: int | None = opt(None, "context: prompt plus response tokens; null: what the model allows", above=0)
    max_tokens: int = opt(1024, "most tokens of one response", above=0)
    temperature: float = opt(1.0, "sampling temperature; the learner divides its logits by it too", above=0)
    top_p: float = opt(1.0, "sample from the most likely tokens of that total probability", above=0, high=1)
    top_k: int = opt(0, "sample from the k most likely tokens; 0: all, or 1024 with top_p or min_p", high=MAX_SUPPORT)
    min_p: float = opt(0.0, "least probability of a token, as a share of the most likely one's; 0: from all", below=1)
    stop: list[str] = section(list, "texts that end a response; the token that completes one is kept")
    engine_kwargs: Any = opt(None, "vLLM: further arguments, such as {max_num_batched_tokens: 8192}")
    serve_adapter: bool = opt(False, "vLLM in this process: send and serve the adapter alone, unmerged")


@dataclass
class RefModelConfig:
    """The frozen reference of the KL term, or the teacher; not built where policy.kl_coef and distill_coef are 0."""

    name: str | None = opt(None, "hub name or folder of the reference or teacher; null: the initial policy")
    num_devices: int | None = opt(None, "devices of the reference; null: a spare one, else the learner's", above=0)
    devices: list[int] | None = opt(None, _DEVICES)
    torch_dtype: str = opt("auto", "dtype of the reference's weights; auto is that of the learner", DTYPES)


@dataclass
class PolicyConfig:
    """The KL term."""

    kl_coef: float = opt(0.0, "coefficient of the KL to the reference; 0 builds no reference at all")


@dataclass
class OptimizerConfig:
    """The optimizer, AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) by default, and its schedule."""

    name: str = opt("adamw", "AdamW, 8-bit AdamW (bitsandbytes), or Muon for matrices of layers", OPTIMIZERS)
    lr: float = opt(1e-6, "peak learning rate", above=0)
    weight_decay: float = opt(0.0, "decoupled weight decay of matrices and embeddings; norms and biases have none")
    betas: list[float] = section(
        lambda: [0.9, 0.999], "decay of the average of gradients, and of the average of their squares"
    )
    eps: float = opt(1e-8, "added to the root of the squared-gradient average")
    clip_grad_norm: float = opt(1.0, "largest norm of the gradient; 0: no clipping")
    schedule: str = opt("constant", "learning rate after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = opt(0, "optimizer steps over which the learning rate rises from 0")


@dataclass
class TrainConfig:
    """Batch sizes, precision, checkpoints."""

    total_dialog_turns: int = opt(100_000, "responses in the whole run", above=0)
    dialog_turns_per_batch: int = opt(256, "responses per training step", above=0)
    optim_batch_size: int = opt(256, "responses per optimizer step", above=0)
    epochs: int = opt(1, "passes over a batch; above 1 the proximal log-probs are recomputed first", above=0)
    micro_batch_tokens: int | str = opt(
        "auto",
        "tokens per forward pass, a shared prompt counted once; changes memory and speed only. auto: on CUDA as many "
        "as fit, up to 65536 or the longest group; on a CPU 16384. Passes without a gradient take four times as many "
        "on CUDA",
        ("auto",),
        above=0,
    )
    precision: str = opt("auto", "autocast of the learner; auto: bf16 on CUDA; native: CPUs that have it", PRECISIONS)
    kl_coef_in_loss: bool = opt(True, "add the KL term to the loss; false: subtract it from the reward")
    max_policy_age: int = opt(0, "largest age of a token's policy, in versions, at its training step")
    weight_update_frequency: int | None = opt(
        None, "mode=async: optimizer steps between weight syncs; null: all", above=0
    )
    sampler: str | None = opt(
        None, "mode=async: TorchRL sampler that chooses the groups of a batch, FILE.py:NAME; null: the oldest groups"
    )
    grace_s: float = opt(25.0, "after SIGTERM or SIGHUP: longest wait for the current step, which is then given up")
    checkpoint_frequency: int = opt(25, "training steps between checkpoints; 0: only the last")
    keep_checkpoints: int = opt(3, "checkpoints kept", above=0)
    export_hf: bool = opt(True, "write the trained model to hf/ at the end")
    resume: str | None = opt(None, "auto: the newest unfinished run of this config; or the path of a run directory")


@dataclass
class Config:
    """One run."""

    seed: int = opt(0, "seed of every random stream of the run", low=None)
    mode: str = opt("sync", "synchronous or concurrent collection; set by the entry script", ("sync", "async"))
    device: str = opt("auto", "auto is CUDA; on a CPU a hub model needs device=cpu", ("auto", "cpu", "cuda"))
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "terms of the objective")
    engine: EngineConfig = section(EngineConfig, "inference engine")
    env: EnvConfig = section(EnvConfig, "task and data")
    reward: RewardConfig = section(RewardConfig, "reward functions and the weights of the tasks' own terms")
    model: ModelConfig = section(ModelConfig, "policy")
    train_model: TrainModelConfig = section(TrainModelConfig, "the learner's copy")
    inference_model: InferenceModelConfig = section(InferenceModelConfig, "the engine's copy")
    ref_model: RefModelConfig = section(RefModelConfig, "the reference")
    policy: PolicyConfig = section(PolicyConfig, "KL term")
    optimizer: OptimizerConfig = section(OptimizerConfig, "optimizer")
    train: TrainConfig = section(TrainConfig, "batch sizes")
    eval: EvalConfig = section(EvalConfig, "evaluation")
    ray: RayConfig = section(RayConfig, "cluster")
    check: CheckConfig = section(CheckConfig, "checks before training")
    logging: LoggingConfig = section(LoggingConfig, "logs")


def register() -> None:
    """Register the schema with Hydra as ``schema``, the first entry of every preset's defaults list."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # made of the dataclasses anew each time, which a test suite does often
        store.store(name="schema", node=Config)


def responses_per_step(config: Config) -> int:
    """Return the responses of one training step, which ends with a weight sync.

    >>> config = Config(mode="async")
    >>> config.train.optim_batch_size, config.train.weight_update_frequency = 64, 2
    >>> responses_per_step(config)
    128
    """
    frequency = config.train.weight_update_frequency
    if config.mode == "async" and frequency is not None:
        return frequency * config.train.optim_batch_size
    return config.train.dialog_turns_per_batch


def num_steps(config: Config) -> int:
    """Return the number of training steps: whole batches in ``train.total_dialog_turns``."""
    return config.train.total_dialog_turns // responses_per_step(config)


def model_name(config: Config) -> str:
    """Return the hub name or directory of the policy."""
    return config.model.name or model_of_size(config.model.size)


def reference_name(config: Config) -> str:
    """Return the hub name or directory of the reference."""
    return config.ref_model.name or model_name(config)


def has_reference(config: Config) -> bool:
    """Whether a KL term, a teacher or the objective reads a reference's log-probs."""
    algorithm = config.algorithm
    return (
        config.policy.kl_coef > 0 or algorithm.distill_coef > 0 or surrogate(algorithm.objective).reads("ref_log_prob")
    )


def max_support(config: Config) -> int:
    """Return the largest size of the sampling support; 0 for the whole vocabulary."""
    sampling = config.inference_model
    return sampling.top_k or (MAX_SUPPORT if sampling.top_p < 1 or sampling.min_p > 0 else 0)


def reward_names(config: Config) -> list[str]:
    """Return the functions of ``reward.path``, in order; by default ``compute_score``, as in verl."""
    name = config.reward.name
    return ["compute_score"] if name is None else list(name) if isinstance(name, (list, tuple)) else [name]


def rubric_file(rubric: str | None) -> Path | None:
    """Return the file that ``reward.judge.rubric`` names; None where it is the text itself.

    >>> rubric_file("rubric.md"), rubric_file("Is it polite?"), rubric_file("Be brief.\\nSee notes.txt")
    (PosixPath('rubric.md'), None, None)
    """
    is_file = rubric is not None and "\n" not in rubric and rubric.endswith((".md", ".txt"))
    return Path(rubric) if rubric is not None and is_file else None
