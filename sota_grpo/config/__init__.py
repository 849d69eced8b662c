"""The typed schema of a run: every option, its default, and one line that says what it changes.

The schema is registered with Hydra under the name ``schema``; a preset in ``config/`` starts from it, so an unknown
key fails before anything else happens. Rules that involve several options are in :mod:`sota_grpo.config.validators`.

>>> from sota_grpo.config import Config
>>> Config().env.repeats
8
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sota_grpo.engines import ENGINES
from sota_grpo.functional.surrogates import SURROGATES
from sota_grpo.policy.model_sizes import SIZES, model_of_size
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.rewards.judge.questions import KINDS
from sota_grpo.rl.records import MOST_KEPT
from sota_grpo.tasks import TASKS


def opt(default: Any, text: str, choices: Collection[str] | None = None) -> Any:
    """A config field: its default, what it changes, and the values it accepts beside it when they are few."""
    return field(default=default, metadata={"help": text, "choices": choices})


def section(factory: type, text: str) -> Any:
    """A config field that is a section, or a list, of its own."""
    return field(default_factory=factory, metadata={"help": text, "choices": None})


@dataclass
class EvalConfig:
    """Accuracy on the held-out split."""

    mode: str = opt("on", "evaluate at the start and at the end", ("on", "off"))
    every: int = opt(0, "training steps between evaluations; 0: only at the start and at the end")
    num_samples: int = opt(256, "held-out problems")
    avg_at_k: int = opt(0, "responses per problem at temperature 1 beside the greedy one; 0: greedy only")


@dataclass
class RayConfig:
    """The cluster on which workers run (mode=async, or several devices for a role)."""

    address: str | None = opt(None, "a running cluster (HOST:PORT, auto); null starts one on this machine")
    timeout_s: float = opt(
        600.0,
        "longest silence of an engine or a reference before it is replaced, of a learner rank or a server before the "
        "run ends with its name, and of workers that start; longest wait for the cluster's resources",
    )


@dataclass
class CheckConfig:
    """The gate before the first step."""

    mode: str = opt("strict", "a failed check ends the run, warns, or is not made", ("strict", "warn", "off"))


@dataclass
class LoggingConfig:
    """Where the run is seen."""

    wandb: str = opt("disabled", "Weights & Biases", ("online", "offline", "disabled"))
    project: str = opt("sota_grpo", "W&B project")
    run_name: str | None = opt(None, "W&B name of the run; null: the run directory's name")
    tags: list[str] = section(list, "W&B tags")
    sinks: list[str] = section(
        list, "further copies of the metrics: tensorboard, and entry points sota_grpo.sinks of installed packages"
    )
    report: bool = opt(True, "write report.html at every checkpoint and at the end")
    store_steps: bool = opt(True, "keep step 0 and the steps after checkpoints whole in steps/, for report and replay")
    num_examine: int = opt(0, "completions per step written out in debug_logs/, with the breakdown of their reward")


@dataclass
class EnvConfig:
    """The task, its data, and how many dialogs run at once."""

    dataset: str = opt("gsm8k", "task to train on, or FILE.py:CLASS; table is your own data", TASKS)
    mixture: Any = opt(
        None,
        "several tasks at once, {NAME: {dataset: .., weight: ..}, ..}: options of each that differ from the run's own",
    )
    dataset_path: str | None = opt(
        None,
        "local .jsonl/.json/.parquet/.csv with the task's columns, or a hub name; null: the task's own hub",
    )
    eval_path: str | None = opt(
        None, "local file of held-out problems; null: the hub's test split, or part of the data"
    )
    prompt_column: str = opt("prompt", "table: column of the prompts, text or chat lists")
    answer_column: str = opt("ground_truth", "table: column of the right answers")
    num_envs: int = opt(64, "dialogs in flight")
    repeats: int = opt(8, "group size: responses per prompt")
    shuffle: bool = opt(True, "a fresh order of the prompts every epoch, derived from the seed")
    max_samples: int | None = opt(None, "train on the first so many examples only; null: all")
    num_heldout: int | None = opt(
        None, "examples held out where the task has no test split; null: 512, of a file a tenth at most; 0: none"
    )
    answer_format: str | None = opt(
        None,
        "where the answer stands in a response; null: where the task asks for it",
        ("hash", "boxed", "tags", "last_number", "any"),
    )
    format_weight: float | None = opt(
        None, "reward for an answer in the asked form, beside the 1.0 for a right one; null: the task's own"
    )
    system_prompt: str | None = opt(None, "replaces the task's own system prompt; an empty text leaves it out")
    chat_template_kwargs: Any = opt(
        None, "further arguments of the model's chat template, such as {enable_thinking: false}"
    )
    skip_unreadable: bool = opt(
        False, "leave out prompts that are too long, or that the chat template cannot take; false: they end the run"
    )
    tasks: Any = opt(  # a typed dict would not take new keys from Hydra
        None,
        "reasoning_gym: weight of each task by name, or a dict of its weight, level and options; 0 leaves one out",
    )
    sandbox: str = opt(
        "auto", "code: where programs of the model run: bwrap (auto is the same), or the URL of a SandboxFusion server"
    )
    difficulty: int = opt(4, "arithmetic only: most steps of a problem, 1 to 5")
    reasoning: bool = opt(False, "a wrong response is asked to think again, up to env.max_steps turns in all")
    max_steps: int = opt(1, "most turns of a dialog; inference_model.max_tokens is the length of one turn")
    tools: str | None = opt(None, "FILE.py:NAME,NAME: typed functions that the policy may call, by its chat template")
    environment: str | None = opt(
        None,
        "FILE.py:FACTORY of objects with reset, methods that the policy may call, and perhaps get_reward; or a server: "
        "mcp:COMMAND, mcp+http://HOST:PORT/mcp, openenv+http://HOST:PORT",
    )
    environments_per_worker: int = opt(
        8, "samples whose tools or environments share a process, called in turn; a call that hangs costs all of them"
    )
    reward_workers: int = opt(
        1, "processes that grade responses; 0: in the trainer, where a grader that hangs hangs the run"
    )
    timeout_s: float = opt(
        60.0,
        "longest time for grading one response (a group, for functions that take groups), or for one call of a tool; "
        "then the grader is replaced, or the sample's environment ended",
    )


@dataclass
class JudgeConfig:
    """A model that says what responses are worth: one reward term more (``judge``)."""

    kind: str | None = opt(
        None,
        "chat is asked by a rubric; score and classify are vLLM's, for reward models; null: no judge",
        KINDS,
    )
    url: str | None = opt(None, "base URL of the judge server; set its API key in SOTA_GRPO_JUDGE_KEY")
    model: str | None = opt(None, "name of the model there; null: the first that it serves")
    weight: float = opt(1.0, "of the term; 0 in an entry of env.mixture: its task is not judged")
    alone: bool = opt(False, "the task's own reward does not count; a reward above reward.success_above is a success")
    rubric: str | None = opt(None, "chat: what is good, as text or a file .txt or .md; null: right, complete, clear")
    reference: bool = opt(False, "chat: the judge is shown the right answer")
    extra_body: Any = opt(
        None, "further fields of every request, such as {max_tokens: 4096, seed: 1}; null as a value leaves one out"
    )


@dataclass
class RewardConfig:
    """Reward functions of your own, and what the tasks' own terms weigh."""

    path: str | None = opt(None, "Python file with reward functions, which replace the task's own reward")
    name: Any = opt(None, "function in reward.path, or a list of them; null: compute_score")
    weights: list[float] | None = opt(None, "weight of each function of reward.name; null: 1 each")
    success_above: float = opt(0.0, "reward functions that do not say what is right: a greater reward is a success")
    correct: float = opt(1.0, "math: reward of a right answer")
    wrong: float = opt(-1.0, "math: reward of a wrong answer")
    no_answer: float = opt(-0.5, "math: reward of a response without an answer")
    all_weight: float = opt(
        0.0, "ifeval, instructions: reward where all are followed, beside the share of those that are"
    )
    judge: JudgeConfig = section(JudgeConfig, "a model that judges responses")


DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINE_DTYPES, PRECISIONS = (*DTYPES, "native"), ("auto", "fp32", "bf16", "fp16", "native")


@dataclass
class AlgorithmConfig:
    """The terms of the objective; the presets in ``config/algorithm/`` only choose among them (docs/algorithm.md)."""

    name: str = opt("grpo", "label of the preset, written to the logs")
    baseline: str = opt(
        "group_mean",
        "what the reward is compared with",
        ("group_mean", "leave_one_out", "length_weighted", "best_of_others", "batch_mean", "none"),
    )
    scale: str = opt(
        "group_std",
        "what the centred reward is divided by",
        ("group_std", "group_mean", "batch_std", "advantage_std", "none"),
    )
    decouple_terms: bool = opt(
        False, "every reward term is compared and scaled within its group before they are added (GDPO)"
    )
    objective: str = opt("clipped", "per-token surrogate; or one of your own, FILE.py:FUNCTION", SURROGATES.keys())
    ratio: str = opt("token", "importance ratio per token, or per sequence (GSPO)", ("token", "sequence"))
    clip_low: float = opt(
        0.2, "the ratio is clipped below 1 - clip_low (dppo: of the probability, gmpo: of the log-ratio)"
    )
    clip_high: float = opt(0.2, "the ratio is clipped above 1 + clip_high (dppo, gmpo: as clip_low)")
    dual_clip: float | None = opt(
        3.0,
        "objective=clipped, gmpo: bound above 1 on a token's ratio where the advantage is negative; whatever the "
        "objective, on that of kl_unbiased; null: none, so that one token can be most of a step's gradient",
    )
    off_policy_threshold: float | None = opt(
        None,
        "responses of negative advantage whose mean logp_engine - logp exceeds it, in nats, leave the objective "
        "(DeepSeek-V3.2); null: none",
    )
    aggregation: str = opt("sequence", "weight of each token in the loss", ("token", "sequence", "constant"))
    kl_estimator: str = opt("k3", "estimator of the KL to the reference", ("k1", "k2", "k3"))
    kl_unbiased: bool = opt(
        False, "the KL in the loss times the ratio, so that its gradient is unbiased (DeepSeek-V3.2)"
    )
    entropy_coef: float = opt(0.0, "entropy bonus in the loss; 0 only reports the entropy")
    entropy_target: float | None = opt(
        None,
        "entropy per token, in nats, below which entropy_coef grows by 0.005 with every optimizer step, to 1 at most, "
        "and acts, and above which it falls by as much, to 0 at least (Skywork-OR1); null: it stays as it is",
    )
    top_entropy_quantile: float = opt(
        1.0, "share of an optimizer step's tokens, those of highest entropy, that the objective keeps; 1: all"
    )
    correction: str = opt(
        "none",
        "weights from the proximal to the behaviour policy, per token or per response: product or geometric mean",
        ("none", "token", "sequence", "geometric"),
    )
    correction_mode: str = opt(
        "truncate",
        "weights outside of floor and cap are cut to them or masked; reject: masked, and 1 inside",
        ("truncate", "mask", "reject"),
    )
    correction_cap: float = opt(2.0, "largest correction weight")
    correction_floor: float = opt(0.0, "smallest correction weight, below the cap; 0: none")
    distill_coef: float = opt(
        0.0, "weight of log p_teacher - log p_policy in the advantage of each token; 0: no teacher (ref_model.name)"
    )
    advantage_coef: float = opt(1.0, "weight of the task's advantage beside the teacher's; 0: the teacher alone")
    drop_truncated: bool = opt(False, "responses cut for length take no part in the loss")
    overlong_buffer: int = opt(0, "soft length penalty over the last so many tokens of max_tokens (DAPO); 0: none")
    dynamic_sampling: bool = opt(
        False, "groups whose rewards are all equal are replaced by fresh ones, of 10 collections at most (DAPO)"
    )


@dataclass
class EngineConfig:
    """The inference engine."""

    name: str = opt("auto", "engine; auto is vllm where it is installed", ENGINES)
    url: str | None = opt(None, "servers only: one that runs already, http://HOST:PORT; null starts one on loopback")


@dataclass
class ModelConfig:
    """The policy that is trained."""

    name: str | None = opt(
        None,
        "hub name or local directory; tiny is the embedded policy, smollm2 SmolLM2-135M-Instruct from PyPI; null: the "
        "instruction-tuned Qwen of model.size",
    )
    size: str = opt("1.5B", "parameters of the model where model.name is null", SIZES)
    attn_implementation: str | None = opt(None, "sdpa, eager, ..: padded rows; null: packed, shared prompts, if it can")
    load_kwargs: Any = opt(
        None, "further arguments of from_pretrained for the learner and the reference, such as {use_safetensors: true}"
    )
    trust_remote_code: bool = opt(False, "run Python code that ships with the model")
    quantization: str | None = opt(
        None, "with an adapter: the frozen weights of its layers in 4 bits (QLoRA, bitsandbytes)", ("nf4", "fp4")
    )


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) instead of full fine-tuning."""

    enabled: bool = opt(False, "train adapters, keep the base weights frozen")
    r: int = opt(16, "rank")
    alpha: int = opt(32, "scale; the update is alpha / r * B A")
    dropout: float = opt(0.0, "dropout on the adapter's input, active in the learner only")
    target_modules: list[str] | None = opt(None, "linear layers with an adapter, such as [q_proj,v_proj]; null: all")


@dataclass
class TrainModelConfig:
    """The learner's copy of the policy."""

    num_devices: int | None = opt(None, "devices of the learner, an FSDP2 rank on each; null: 1")
    devices: list[int] | None = opt(None, "explicit device indices instead of a count")
    tensor_parallel_size: int = opt(
        1, "devices that see the same rows and divide every matrix among them; num_devices counts all of them"
    )
    fsdp_size: int | None = opt(
        None,
        "devices that divide one copy of the weights, beside tensor_parallel_size; fewer than there are hold copies, "
        "whose gradients are added (HSDP); null: all",
    )
    torch_dtype: str = opt("auto", "dtype in which the weights are kept; auto is float32", DTYPES)
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass: less memory, more time")
    log_probs: str = opt(
        "tiled", "what computes log-probs from the last hidden states: ours, or liger-kernel's head", ("tiled", "liger")
    )
    compile: bool | None = opt(None, "compile the decoder's layers, packed rows only; null: on CUDA")
    shard_gradients: bool = opt(
        False, "several devices: sum gradients after every micro-batch; less memory per rank, more traffic"
    )
    lora: LoraConfig = section(LoraConfig, "low-rank adapters")


@dataclass
class InferenceModelConfig:
    """The engine's copy of the policy, and how responses are drawn."""

    num_devices: int | str | None = opt(
        None,
        "devices of the engines, their own, one engine on each; shared with mode=sync: all of the learner's, where "
        "they sleep while it computes; null: with mode=sync one engine shares the learner's, else 1",
    )
    devices: list[int] | None = opt(None, "explicit device indices instead of a count")
    tensor_parallel_size: int = opt(1, "GPUs that hold one copy of the model; num_devices counts all of them")
    torch_dtype: str = opt("auto", "of weights; auto: bfloat16 on CUDA; native: on CPUs that have it", ENGINE_DTYPES)
    gpu_memory_utilization: float = opt(0.5, "share of the GPU's memory that vLLM may take")
    max_num_seqs: int | None = opt(
        None,
        "samples that one engine computes at once; null: its share of env.num_envs, of vLLM on a GPU those of a step "
        "(256 to 1,024)",
    )
    max_model_len: int | None = opt(None, "context: prompt plus response tokens; null: what the model allows")
    max_tokens: int = opt(1024, "most tokens of one response")
    temperature: float = opt(1.0, "sampling temperature; the learner divides its logits by it too")
    top_p: float = opt(1.0, "sample from the fewest most likely tokens that have so much mass; 1 keeps every token")
    top_k: int = opt(
        0, "sample from the most likely tokens, so many; 0 keeps every token, or 1024 of them beside top_p or min_p"
    )
    min_p: float = opt(
        0.0, "sample from tokens that are at least so likely, as a share of the most likely one; 0 keeps every token"
    )
    stop: list[str] = section(list, "texts that end a response; the token that completes one is kept")
    engine_kwargs: Any = opt(None, "vLLM: further arguments, such as {max_num_batched_tokens: 8192}")
    serve_adapter: bool = opt(
        False, "vLLM in this process: it is sent the adapter alone, and computes with it beside the base, unmerged"
    )


@dataclass
class RefModelConfig:
    """The frozen reference of the KL term, or the teacher; not built where policy.kl_coef and distill_coef are 0."""

    name: str | None = opt(
        None,
        "hub name or local directory of the reference, a teacher with algorithm.distill_coef; null: the policy at its "
        "start",
    )
    num_devices: int | None = opt(None, "devices of the reference, its own; null: a spare one, else the learner's")
    devices: list[int] | None = opt(None, "explicit device indices instead of a count")
    torch_dtype: str = opt("auto", "dtype of the reference's weights; auto is that of the learner", DTYPES)


@dataclass
class PolicyConfig:
    """The pull towards the reference."""

    kl_coef: float = opt(0.0, "coefficient of the KL to the reference; 0 builds no reference at all")


@dataclass
class OptimizerConfig:
    """The optimizer, AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) by default, and its schedule."""

    name: str = opt(
        "adamw",
        "AdamW; AdamW with moments of 8 bits (bitsandbytes); or Muon for matrices of layers, AdamW for the rest",
        OPTIMIZERS,
    )
    lr: float = opt(1e-6, "peak learning rate")
    weight_decay: float = opt(0.0, "decoupled weight decay of matrices and embeddings; norms and biases have none")
    beta1: float = opt(0.9, "decay of the gradient average")
    beta2: float = opt(0.999, "decay of the squared-gradient average")
    eps: float = opt(1e-8, "added to the root of the squared-gradient average")
    clip_grad_norm: float = opt(1.0, "largest norm of the gradient; 0 leaves it as it is")
    schedule: str = opt("constant", "learning rate after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = opt(0, "optimizer steps over which the learning rate rises from 0")


@dataclass
class TrainConfig:
    """How much is collected, how it is cut into optimizer steps, what is saved."""

    total_dialog_turns: int = opt(100_000, "responses in all")
    dialog_turns_per_batch: int = opt(256, "responses per collection, one training step")
    optim_batch_size: int = opt(256, "responses per optimizer step")
    epochs: int = opt(1, "times a collection is used; above 1 the proximal log-probs are recomputed first")
    micro_batch_tokens: int | str = opt(
        "auto",
        "tokens per training pass, prompts once; changes memory and speed, no result. auto: on CUDA the most that fit, "
        "at most 65536 or the longest group; on a CPU 16384. Passes without a gradient take four times as many on CUDA",
    )
    precision: str = opt("auto", "autocast of the learner; auto: bf16 on CUDA; native: CPUs that have it", PRECISIONS)
    kl_coef_in_loss: bool = opt(True, "the KL term stands in the loss; false: it is subtracted from the reward")
    max_policy_age: int = opt(0, "oldest policy, in published versions, whose tokens may be trained on")
    weight_update_frequency: int | None = opt(
        None, "mode=async: optimizer steps between two publishes; null: those of dialog_turns_per_batch"
    )
    grace_s: float = opt(
        25.0, "after SIGTERM or SIGHUP: longest wait for the current step before the run ends without it"
    )
    checkpoint_frequency: int = opt(25, "training steps between checkpoints; 0: only the last")
    keep_checkpoints: int = opt(3, "checkpoints kept")
    export_hf: bool = opt(True, "write the trained model to hf/ at the end")
    resume: str | None = opt(None, "auto: the newest unfinished run of this config; or the path of a run directory")


@dataclass
class Config:
    """One run."""

    seed: int = opt(0, "every random stream of the run derives from it")
    mode: str = opt("sync", "synchronous or concurrent collection; set by the entry script", ("sync", "async"))
    device: str = opt(
        "auto",
        "auto is CUDA where there is one; a hub model is only trained on CPU if told so",
        ("auto", "cpu", "cuda"),
    )
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "terms of the objective")
    engine: EngineConfig = section(EngineConfig, "inference engine")
    env: EnvConfig = section(EnvConfig, "task and data")
    reward: RewardConfig = section(RewardConfig, "reward functions and the weights of the tasks' own terms")
    model: ModelConfig = section(ModelConfig, "policy")
    train_model: TrainModelConfig = section(TrainModelConfig, "the learner's copy")
    inference_model: InferenceModelConfig = section(InferenceModelConfig, "the engine's copy")
    ref_model: RefModelConfig = section(RefModelConfig, "the reference")
    policy: PolicyConfig = section(PolicyConfig, "pull towards the reference")
    optimizer: OptimizerConfig = section(OptimizerConfig, "optimizer")
    train: TrainConfig = section(TrainConfig, "amounts")
    eval: EvalConfig = section(EvalConfig, "evaluation")
    ray: RayConfig = section(RayConfig, "cluster")
    check: CheckConfig = section(CheckConfig, "gate")
    logging: LoggingConfig = section(LoggingConfig, "logs")


def register() -> None:
    """Make the schema known to Hydra as ``schema``, the first entry of every preset's defaults list."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # made of the dataclasses anew each time, which a test suite does often
        store.store(name="schema", node=Config)


def responses_per_step(config: Config) -> int:
    """Responses trained on between two publishes, in one training step.

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
    """Training steps: whole collections that fit into ``train.total_dialog_turns``."""
    return config.train.total_dialog_turns // responses_per_step(config)


def model_name(config: Config) -> str:
    """Hub name or directory of the policy."""
    return config.model.name or model_of_size(config.model.size)


def reference_name(config: Config) -> str:
    """Hub name or directory of the reference, where there is one."""
    return config.ref_model.name or model_name(config)


def has_reference(config: Config) -> bool:
    """Whether a reference's log-probs are asked for: by a KL term, or of a teacher."""
    return config.policy.kl_coef > 0 or config.algorithm.distill_coef > 0


def most_kept(config: Config) -> int:
    """Most tokens of the set that one is drawn from; 0 where that is the whole vocabulary."""
    sampling = config.inference_model
    return sampling.top_k or (MOST_KEPT if sampling.top_p < 1 or sampling.min_p > 0 else 0)


def reward_names(config: Config) -> list[str]:
    """The functions of ``reward.path``, in order; ``compute_score`` where none is named, as in verl."""
    name = config.reward.name
    return ["compute_score"] if name is None else list(name) if isinstance(name, (list, tuple)) else [name]


def rubric_file(rubric: str | None) -> Path | None:
    """The file that ``reward.judge.rubric`` names; None where it is the text itself.

    >>> rubric_file("rubric.md"), rubric_file("Is it polite?"), rubric_file("Be brief.\\nSee notes.txt")
    (PosixPath('rubric.md'), None, None)
    """
    is_file = rubric is not None and "\n" not in rubric and rubric.endswith((".md", ".txt"))
    return Path(rubric) if rubric is not None and is_file else None
