"""The typed schema of a run: every option, its default, and its help.

The schema is registered with Hydra as ``schema``; every preset in ``config/`` starts from it, so an unknown option is
an error. A field has the option's help, values and limits; :mod:`sota_grpo.config.validators` relates several options.

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
from sota_grpo.functional.loss_terms import SURROGATES
from sota_grpo.policy.model_sizes import SIZES, model_of_size
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.rewards.judge.questions import KINDS
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.records import MAX_SUPPORT
from sota_grpo.tasks import TASKS

_LONGEST_S = 1e9  # from 9.2e9 s on, timers overflow


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
    """Return an option's dataclass field, with the help ``text`` and the ``choices`` besides the default.

    A number is at least 0, unless ``low`` (None: no limit) or ``above`` (exclusive, as is ``below``) is passed.
    """
    limits = {"above": above, "at least": low if above is None else None, "at most": high, "below": below}
    limits = {words: limit for words, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"help": text, "choices": choices, "limits": limits})


def section(factory: Callable[[], Any], text: str) -> Any:
    """Return the dataclass field of a section or a list, with the default ``factory()`` and the help ``text``."""
    return field(default_factory=factory, metadata={"help": text, "choices": None, "limits": {}})


@dataclass
class EvalConfig:
    """Settings of the evaluation on held-out problems."""

    mode: str = opt("on", "evaluate at the start and at the end; after: not at the start", ("on", "after", "off"))
    every: int = opt(0, "training steps between evaluations; 0: only at the start and at the end")
    num_samples: int = opt(256, "held-out problems to evaluate on, at most", above=0)
    avg_at_k: int = opt(0, "responses per problem sampled at temperature 1, besides the greedy one; 0: none")
    max_tokens: int | None = opt(None, "most tokens of an evaluated response; null: as in training", above=0)
    target: float | None = opt(
        None, "fraction: the run ends when eval/accuracy on all problems reaches it; null: never", above=0, high=1
    )


@dataclass
class RayConfig:
    """Settings of the Ray cluster of workers: for mode=async, or several learner ranks, references or engines."""

    address: str | None = opt(None, "running Ray cluster: HOST:PORT, or auto; null: start one on this machine")
    timeout_s: float = opt(
        600.0,
        "seconds without a heartbeat until an engine or reference worker is replaced, and until a learner rank or "
        "server fails the run; also the limit for getting the cluster's resources and (600 or more) for starting a "
        "server; an engine, reference worker or learner rank may take six times as long to start, an hour at least",
        above=0,
        high=_LONGEST_S,
    )


@dataclass
class CheckConfig:
    """Settings of the checks before the first training step."""

    mode: str = opt("strict", "a failed check ends the run, or (warn) is logged", ("strict", "warn", "off"))


@dataclass
class LoggingConfig:
    """Settings of metrics, reports and stored steps."""

    wandb: str = opt("disabled", "logging to Weights & Biases", ("online", "offline", "disabled"))
    wandb_kwargs: Any = opt(None, "further arguments of wandb.init, such as {project: mine, name: first, tags: [a, b]}")
    sinks: list[str] = section(list, "further metric loggers: tensorboard, or entry points in group sota_grpo.sinks")
    report: bool = opt(True, "write report.html at the end")
    store_steps: bool = opt(True, "save step 0 and each step after a checkpoint in steps/, for report and replay")
    num_examine: int = opt(0, "responses per step written to debug_logs/, with their reward terms")


@dataclass
class EnvConfig:
    """Settings of the task: data, prompts, tools, graders."""

    dataset: str = opt("gsm8k", "task to train on, or FILE.py:CLASS of your own; table: your own data", TASKS)
    mixture: Any = opt(None, "train on several tasks: {NAME: {dataset: .., weight: ..}, ..}, each with its options")
    dataset_path: str | None = opt(
        None, "local .jsonl/.json/.parquet/.csv with the task's columns, or a hub name; null: the task's hub data"
    )
    eval_path: str | None = opt(
        None, "file or hub name of held-out problems; null: the hub's test split, or a part of the data"
    )
    prompt_column: str = opt("prompt", "table: column of the prompts, text or chat lists")
    answer_column: str = opt("ground_truth", "table: column of the right answers")
    num_envs: int = opt(64, "responses generated concurrently, over all prompts; vLLM on a GPU: 256 or more", above=0)
    repeats: int = opt(8, "group size: responses per prompt", above=0)
    shuffle: bool = opt(True, "shuffle the prompts in every epoch, by the seed")
    max_samples: int | None = opt(None, "train on this many examples, the first; null: on all", above=0, high=10**9)
    num_heldout: int | None = opt(
        None,
        "number of held-out examples if the task has no test split; null: 512, at most a tenth of a file",
        high=10**7,
    )
    answer_format: str | None = opt(
        None, "mark of the answer in a response; null: the task's", ("hash", "boxed", "tags", "last_number", "any")
    )
    format_weight: float | None = opt(None, "reward for the right format (a right answer earns 1); null: the task's")
    system_prompt: str | None = opt(None, "system prompt in place of the task's; an empty text: none")
    chat_template_kwargs: Any = opt(None, "further arguments of the chat template, such as {enable_thinking: false}")
    skip_unreadable: bool = opt(False, "skip prompts that are too long or rejected by the template; false: an error")
    tasks: Any = opt(  # a typed dict would not take new keys from Hydra
        None, "reasoning_gym: {TASK: weight, or {weight: .., level: .., OPTION: ..}}; weight 0 leaves a task out"
    )
    sandbox: str = opt("auto", "code: sandbox of the model's programs: bwrap (auto), or URL of a SandboxFusion server")
    difficulty: int = opt(4, "arithmetic: most steps of a problem", low=1, high=5)
    reasoning: bool = opt(False, "after a wrong response, ask the policy to think again, up to env.max_steps turns")
    max_steps: int = opt(1, "most turns of a dialog; inference_model.max_tokens limits each turn", above=0)
    tools: str | None = opt(None, "FILE.py:NAME,NAME: typed functions that the policy may call")
    environment: str | None = opt(
        None,
        "FILE.py:FACTORY: makes objects with reset, methods that the policy may call as tools, and optionally "
        "get_reward; or a server: mcp:COMMAND, mcp+http://HOST:PORT/mcp, openenv+http://HOST:PORT",
    )
    agent: str | None = opt(
        None,
        "FILE.py:NAME or a command line: your own agent, which samples through an OpenAI or Anthropic client and "
        "returns the reward; at most env.max_steps responses per sample; sessions: programs outside of the run",
    )
    transforms: list[str] = section(
        list,
        "FILE.py:NAME of your TorchRL transforms, applied in order to each graded prompt group before its advantage",
    )
    environments_per_worker: int = opt(
        8, "responses whose tools, environments or agents share a process; a call that hangs fails all of them", above=0
    )
    reward_workers: int = opt(1, "grader processes; 0: grade in the trainer, where a hanging grader hangs the run")
    timeout_s: float = opt(
        60.0,
        "longest seconds of a grading or tool call, or of an agent; then its process is replaced",
        above=0,
        high=_LONGEST_S,
    )


@dataclass
class JudgeConfig:
    """Settings of an LLM judge, a model whose score of a response is a reward term, ``judge`` or ``TASK/judge``."""

    kind: str | None = opt(None, "chat: scores by a rubric; score, classify: vLLM's reward model APIs", KINDS)
    url: str | None = opt(None, "base URL of the judge server; set its API key in SOTA_GRPO_JUDGE_KEY")
    model: str | None = opt(None, "name of the model on the server; null: the first that the server lists")
    weight: float = opt(1.0, "weight of the judge's term; 0 in an entry of env.mixture: that task has no judge")
    alone: bool = opt(False, "the judge replaces the task's reward; a score above reward.success_above is a success")
    rubric: str | None = opt(None, "chat: text of the rubric, or a .txt or .md file; null: right, complete, clear")
    reference: bool = opt(False, "chat: show the right answer to the judge")
    extra_body: Any = opt(None, "further fields of each request, such as {max_tokens: 4096}; null removes a field")


@dataclass
class RewardConfig:
    """Settings of the reward: your own functions, the weights of built-in terms, a judge."""

    path: str | None = opt(None, "Python file with reward functions, which replace the task's reward")
    name: Any = opt(None, "function in reward.path, or a list (builtin: the task's reward); null: compute_score")
    weights: list[float] | None = opt(None, "weight of each function of reward.name, in order; null: 1 each")
    success_above: float = opt(0.0, "reward above which a response is a success, unless functions report it", low=None)
    correct: float = opt(1.0, "math: reward of a right answer", low=None)
    wrong: float = opt(-1.0, "math: reward of a wrong answer", low=None)
    no_answer: float = opt(-0.5, "math: reward of a response without an answer", low=None)
    all_weight: float = opt(0.0, "ifeval, instructions: bonus if all are followed, added to the fraction followed")
    judge: JudgeConfig = section(JudgeConfig, "a model that judges responses")


DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINE_DTYPES, PRECISIONS = (*DTYPES, "native"), ("auto", "fp32", "bf16", "fp16", "native")
_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "best_of_others", "batch_mean", "none")
_CORRECTIONS, _MODES = ("none", "token", "sequence", "geometric"), ("truncate", "mask", "reject")
_SCALES = ("group_std", "group_mean", "batch_std", "advantage_std", "none")


@dataclass
class AlgorithmConfig:
    """Settings of advantages and loss; a preset in ``config/algorithm/`` sets them (docs/algorithm.md)."""

    name: str = opt("grpo", "label of the preset, written to the logs")
    baseline: str = opt(
        "group_mean",
        "baseline subtracted from the reward; or your own advantage estimator, FILE.py:FUNCTION",
        _BASELINES,
    )
    scale: str = opt("group_std", "what the reward minus the baseline is divided by", _SCALES)
    decouple_terms: bool = opt(False, "normalise each reward term within its group before summing the terms (GDPO)")
    objective: str = opt("clipped", "surrogate objective per token; or your own, FILE.py:FUNCTION", SURROGATES.keys())
    ratio: str = opt("token", "importance ratio per token, or per sequence (GSPO)", ("token", "sequence"))
    clip_low: float = opt(0.2, "clip the ratio below 1 - clip_low (dppo: the probability, gmpo: the log-ratio)")
    clip_high: float = opt(0.2, "clip the ratio above 1 + clip_high (dppo, gmpo: see clip_low)")
    dual_clip: float | None = opt(
        3.0,
        "objective=clipped, gmpo: largest ratio of tokens with a negative advantage; with an unbiased KL "
        "also there; null: no bound, so one token can dominate the gradient of a step",
        above=1,
    )
    off_policy_threshold: float | None = opt(
        None, "mask responses of negative advantage whose mean logp_engine - logp exceeds this (DeepSeek-V3.2)"
    )
    aggregation: str = opt("sequence", "average over tokens, see docs/algorithm.md", ("token", "sequence", "constant"))
    kl_estimator: str = opt(
        "k3",
        "estimator of the KL to the reference; _unbiased: in the loss times policy / sampling policy, for its gradient "
        "(DeepSeek-V3.2)",
        ("k1", "k2", "k3", "k1_unbiased", "k3_unbiased"),
    )
    entropy_coef: float = opt(0.0, "entropy bonus in the loss; 0 only reports the entropy")
    entropy_target: float | None = opt(
        None,
        "entropy per token, in nats: below it, entropy_coef is applied and grows by 0.005 per optimizer step, up to 1; "
        "above it, entropy_coef is not applied and falls by 0.005, down to 0 (Skywork-OR1); null: constant",
        above=0,
    )
    top_entropy_quantile: float = opt(
        1.0, "fraction of a step's tokens, those of highest entropy, that are trained on", above=0, high=1
    )
    correction: str = opt("none", "importance weights, proximal over behaviour policy", _CORRECTIONS)
    correction_mode: str = opt(
        "truncate", "weights outside floor and cap: clamped, or 0 (mask); reject: mask, with weight 1 inside", _MODES
    )
    correction_cap: float = opt(2.0, "largest correction weight", above=0)
    correction_floor: float = opt(0.0, "smallest correction weight; 0: no lower bound")
    distill_coef: float = opt(0.0, "weight of log p_teacher - log p_policy in the advantage; teacher: ref_model.name")
    advantage_coef: float = opt(1.0, "weight of the task's advantage if distill_coef is above 0")
    drop_truncated: bool = opt(False, "mask responses that were cut off by max_tokens")
    overlong_buffer: int = opt(0, "soft length penalty on the last N tokens before max_tokens (DAPO); 0: none")
    dynamic_sampling: bool = opt(False, "replace zero-advantage groups, sampling up to 10 batches per step (DAPO)")


@dataclass
class EngineConfig:
    """Settings of the inference engine."""

    name: str = opt("auto", "engine; auto is vllm if it is installed, else transformers", ENGINES)
    url: str | None = opt(None, "server that runs already, http://HOST:PORT; null: server engines start one here")


@dataclass
class ModelConfig:
    """Settings of the policy's model."""

    name: str | None = opt(
        None,
        "hub name or local directory; tiny: the embedded policy; smollm2: SmolLM2-135M-Instruct from PyPI; null: the "
        "instruction-tuned Qwen of model.size",
    )
    size: str = opt("1.5B", "parameters of the Qwen model, if model.name is null", SIZES)
    attn_implementation: str | None = opt(None, "sdpa, eager, ..: with padded rows; null: packed rows, if supported")
    load_kwargs: Any = opt(None, "further from_pretrained arguments, not of vLLM or SGLang, as {use_safetensors: true}")
    trust_remote_code: bool = opt(False, "run the Python code in the model's folder")
    quantization: str | None = opt(None, "QLoRA: quantise frozen weights to 4 bits (bitsandbytes)", ("nf4", "fp4"))


@dataclass
class LoraConfig:
    """Settings of low-rank adapters (Hu et al. 2021, arXiv:2106.09685), trained instead of all weights."""

    enabled: bool = opt(False, "train adapters, keep the base weights frozen")
    r: int = opt(16, "rank of the adapters", above=0)
    alpha: int = opt(32, "scale: the update of a matrix is alpha / r * B A")
    dropout: float = opt(0.0, "dropout on the adapter's input, in the learner only", below=1)
    target_modules: list[str] | None = opt(None, "linear layers with an adapter, such as [q_proj,v_proj]; null: all")


PROJECT = "sota_grpo"  # of W&B, unless logging.wandb_kwargs names another
_DEVICES = "device indices, in place of num_devices"


@dataclass
class TrainModelConfig:
    """Settings of the learner's copy of the policy."""

    num_devices: int | None = opt(None, "number of the learner's devices, each an FSDP2 rank; null: 1", above=0)
    devices: list[int] | None = opt(None, _DEVICES)
    tensor_parallel_size: int = opt(1, "devices that shard each matrix; num_devices is a multiple", above=0)
    fsdp_size: int | None = opt(None, "devices per FSDP shard group; fewer than all: HSDP; null: all", above=0)
    torch_dtype: str = opt("auto", "dtype of the weights; auto is float32", DTYPES)
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass: less memory, slower")
    compile: bool | None = opt(None, "compile the decoder's layers, for packed rows; null: on CUDA")
    shard_gradients: bool = opt(False, "reduce-scatter gradients per micro-batch: less memory, more traffic")
    lora: LoraConfig = section(LoraConfig, "low-rank adapters")


@dataclass
class InferenceModelConfig:
    """Settings of the engine's copy of the policy, and of sampling."""

    num_devices: int | str | None = opt(
        None,
        "number of the engines' devices, one engine on each; shared, for mode=sync: all devices of the learner, where "
        "engines sleep while it trains; null: with mode=sync one engine on the learner's device, else 1",
        ("shared",),
        above=0,
    )
    devices: list[int] | None = opt(None, _DEVICES)
    tensor_parallel_size: int = opt(1, "GPUs that shard one copy of the model; num_devices is a multiple", above=0)
    torch_dtype: str = opt("auto", "of weights; auto: bfloat16 on CUDA; native: on bf16 CPUs too", ENGINE_DTYPES)
    gpu_memory_utilization: float = opt(0.5, "fraction of the GPU's memory that vLLM may use", high=1)
    max_num_seqs: int | None = opt(None, "sequences decoded at once per engine; null: automatic", above=0)
    max_model_len: int | None = opt(None, "most tokens of prompt plus response; null: the model's limit", above=0)
    max_tokens: int = opt(1024, "most tokens of one response", above=0)
    temperature: float = opt(1.0, "sampling temperature; the learner's logits are divided by it too", above=0)
    top_p: float = opt(1.0, "sample from the most likely tokens with this total probability", above=0, high=1)
    top_k: int = opt(0, "sample from the k most likely tokens; 0: all (1024 with top_p or min_p)", high=MAX_SUPPORT)
    min_p: float = opt(0.0, "least probability of a token relative to the most likely one; 0: none", below=1)
    stop: list[str] = section(list, "texts that end a response; the token that completes the text stays in it")
    engine_kwargs: Any = opt(None, "vLLM: further engine arguments, such as {max_num_batched_tokens: 8192}")
    serve_adapter: bool = opt(False, "vLLM in this process: sync and serve the adapter unmerged")


@dataclass
class RefModelConfig:
    """Settings of the frozen reference or teacher; it is loaded if the run has one (:func:`has_reference`)."""

    name: str | None = opt(None, "hub name or folder of the reference or teacher; null: the initial policy")
    num_devices: int | None = opt(None, "number of its devices; null: a free device, else the learner's", above=0)
    devices: list[int] | None = opt(None, _DEVICES)
    torch_dtype: str = opt("auto", "dtype of the reference's weights; auto: that of the learner", DTYPES)


@dataclass
class PolicyConfig:
    """Weight of the KL term."""

    kl_coef: float = opt(0.0, "coefficient of the KL to the reference; 0: no KL and no reference")


@dataclass
class OptimizerConfig:
    """Settings of the optimizer, by default AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), and its schedule."""

    name: str = opt("adamw", "adamw; adamw_8bit (bitsandbytes); muon, for the layers' matrices", OPTIMIZERS)
    lr: float = opt(1e-6, "peak learning rate", above=0)
    weight_decay: float = opt(0.0, "decoupled weight decay of matrices and embeddings, not of norms and biases")
    betas: list[float] = section(
        lambda: [0.9, 0.999], "decay rates of the moving averages of the gradient and of its square"
    )
    eps: float = opt(1e-8, "added to the root of the average squared gradient", above=0)
    clip_grad_norm: float = opt(1.0, "largest norm of the gradient; 0: no clipping")
    schedule: str = opt("constant", "learning rate schedule after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = opt(0, "optimizer steps over which the learning rate rises from 0")


@dataclass
class TrainConfig:
    """Settings of training: batch sizes, precision, checkpoints."""

    total_dialog_turns: int = opt(100_000, "responses in the whole run", above=0)
    dialog_turns_per_batch: int = opt(256, "responses per training step, after which weights are synced", above=0)
    optim_batch_size: int = opt(256, "responses per optimizer step", above=0)
    epochs: int = opt(1, "epochs over each batch; above 1, proximal log-probs are computed first", above=0)
    micro_batch_tokens: int | str = opt(
        "auto",
        "tokens per micro-batch, a shared prompt counted once; changes memory and speed only. auto: on CUDA as many as "
        "fit, up to 65536 or the longest sample; on a CPU 16384. Forward passes without gradients have four times as "
        "many on CUDA",
        ("auto",),
        above=0,
    )
    precision: str = opt("auto", "autocast of the learner; auto: bf16 on CUDA; native: on bf16 CPUs too", PRECISIONS)
    kl_coef_in_loss: bool = opt(True, "add the KL term to the loss; false: subtract it from the reward")
    max_policy_age: int = opt(0, "most versions by which a token's policy may be older than the learner's")
    sampler: str | None = opt(
        None, "mode=async: TorchRL sampler that chooses different groups for a batch, FILE.py:NAME; null: the oldest"
    )
    grace_s: float = opt(
        25.0, "seconds after SIGTERM or SIGHUP until the unfinished step is abandoned", high=_LONGEST_S
    )
    checkpoint_frequency: int = opt(25, "training steps between checkpoints; 0: one at the end")
    keep_checkpoints: int = opt(3, "number of newest checkpoints that are kept", above=0)
    keep_best: str | None = opt(
        None, "metric of the evaluations, such as eval/accuracy, whose best checkpoint is kept as well (--step best)"
    )
    export_hf: bool = opt(True, "write the trained model to hf/ at the end")
    resume: str | None = opt(None, "run to continue: its directory, or auto: the newest unfinished run of this config")


@dataclass
class Config:
    """The config of a run."""

    seed: int = opt(0, "seed of every random stream of the run", low=-(2**63), high=2**64 - 1)
    mode: str = opt("sync", "sync: sample, then train; async: concurrently; set by the entry script", ("sync", "async"))
    device: str = opt("auto", "auto: CUDA if available; set cpu to train a hub model on a CPU", ("auto", "cpu", "cuda"))
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


def num_steps(config: Config) -> int:
    """Return the number of training steps, ``train.total_dialog_turns // train.dialog_turns_per_batch``."""
    return config.train.total_dialog_turns // config.train.dialog_turns_per_batch


def model_name(config: Config) -> str:
    """Return the policy's hub name or directory: ``model.name``, else that of ``model.size`` (UserError if unknown)."""
    return config.model.name or model_of_size(config.model.size)


def reference_name(config: Config) -> str:
    """Return the hub name or directory of the reference: ``ref_model.name``, or if it is null, :func:`model_name`."""
    return config.ref_model.name or model_name(config)


def has_reference(config: Config) -> bool:
    """Whether the run needs a reference: for a KL term, as teacher, or for an objective that reads its log-probs."""
    algorithm = config.algorithm
    return (
        config.policy.kl_coef > 0 or algorithm.distill_coef > 0 or surrogate(algorithm.objective).reads("ref_log_prob")
    )


def kl_is_unbiased(config: Config) -> bool:
    """Return whether the KL in the loss is multiplied by policy / sampling policy, so that its gradient is unbiased."""
    return config.algorithm.kl_estimator.endswith("_unbiased")


def max_support(config: Config) -> int:
    """Return the most tokens that top_k, top_p and min_p keep at a position; 0 if sampling is not truncated."""
    sampling = config.inference_model
    return sampling.top_k or (MAX_SUPPORT if sampling.top_p < 1 or sampling.min_p > 0 else 0)


def reward_names(config: Config) -> list[str]:
    """Return ``reward.name`` as a list: functions in ``reward.path`` or ``builtin``; by default ``compute_score``."""
    name = config.reward.name
    return ["compute_score"] if name is None else list(name) if isinstance(name, (list, tuple)) else [name]


def replaces_reward(config: Config) -> bool:
    """Whether the functions in ``reward.path`` replace the task's own reward."""
    return config.reward.path is not None and "builtin" not in reward_names(config)


#: Options whose value may be ``FILE.py:NAME``.
IN_FILES = (
    *("algorithm.objective", "algorithm.baseline", "train.sampler"),
    *("env.dataset", "env.tools", "env.environment", "env.agent", "env.transforms"),
)


def rubric_file(rubric: str | None) -> Path | None:
    """Return ``reward.judge.rubric`` as a path if it is a file name; None if it is the text of a rubric, or not set.

    >>> rubric_file("rubric.md"), rubric_file("Is it polite?"), rubric_file("Be brief.\\nSee notes.txt")
    (PosixPath('rubric.md'), None, None)
    """
    is_file = rubric is not None and "\n" not in rubric and rubric.endswith((".md", ".txt"))
    return Path(rubric) if rubric is not None and is_file else None
