"""The rollout side of a run: the task with its data and its reward, the environment, the engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from sota_grpo.assembly.judging import judged_task
from sota_grpo.config import Config, model_name, most_kept, reward_names
from sota_grpo.config.mixture import READERS, group_sizes, has_dialogs, mean_responses_per_step, task_configs, weights
from sota_grpo.config.secrets import API_KEY, key_of
from sota_grpo.config.spelling import walk
from sota_grpo.config.validators import judges_alone
from sota_grpo.engines import ENGINES, Deadlines, Engine, EngineOptions, is_server, make_engine, resolve_engine_name
from sota_grpo.envs import PromptSource
from sota_grpo.envs.dialogs import GradedTurns, Responder, Rules, ToolResponder, TurnTokens
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional.log_probs import automatic_precision
from sota_grpo.policy.end_tokens import end_token_ids
from sota_grpo.policy.load import from_pretrained
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.functions import Functions
from sota_grpo.rewards.grading import Grader, GradingPool, LocalGrader, own_grader
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks import make_task, parameters, task_class
from sota_grpo.tasks.dataset import SUFFIXES, DatasetError, hash_ordered, load_rows, unique_examples
from sota_grpo.tasks.mixture import MixtureTask
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import think_again, with_reward_functions, with_tools, without_terms
from sota_grpo.workers.instances import Instances

logger = logging.getLogger(__name__)

GPU_ROWS = 256, 1024  # with fewer, a GPU reads its weights for few tokens; more, and keys and values are what it reads


def heldout_task(config: Config) -> Task:
    """The task for an evaluation: of held-out problems in a file alone where no training data are named.

    Otherwise that of :func:`task_of`, whose training data may have to come from the hub. Nobody draws from ``train``.

    Raises:
        UserError: its data or its reward functions cannot be used.
    """
    if config.env.mixture is not None:
        return _mixed(config, heldout_task)
    path = config.env.eval_path
    is_read = config.env.dataset_path is None and "path" in parameters(config.env.dataset)
    if path is None or Path(path).suffix not in SUFFIXES or not is_read:
        return task_of(config)
    task = task_of(config, bare=True)
    rows = load_rows(path)
    places = [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
    examples = [replace(task.read_row(row, place), place=place) for row, place in zip(rows, places, strict=True)]
    for example in examples:
        if not example.query.strip():
            raise DatasetError(f"{example.place}: the question is empty; mend or remove the row.")
    task.train = task.heldout = hash_ordered(unique_examples(examples))
    return task


def task_of(config: Config, functions: Functions | None = None, *, bare: bool = False) -> Task:
    """The task that the config names, with its own reward or what ``reward.path`` puts in its place.

    Args:
        functions: reward functions that were passed as objects; in this process they stand for ``reward.path``.
        bare: without its data, which scoring does not need.

    Raises:
        UserError: its options, its data or its reward functions cannot be used.

    >>> task = task_of(Config(), bare=True)
    >>> task.score("#### 4", task.read_row({"answer": "4"}, "demo, row 1")).success
    True
    """
    env, reward = config.env, config.reward
    if env.mixture is not None:
        passed = reward.path  # an entry may have functions of its own
        return _mixed(config, lambda each: task_of(each, functions if each.reward.path == passed else None, bare=bare))
    names = reward_names(config)
    values = {option: value for option, _, value in walk(config)}
    options: dict[str, Any] = {parameter: values[option] for option, parameter in READERS.items()}
    options |= {"seed": config.seed, "num_heldout": env.num_heldout}
    options |= {"num_train": env.max_samples, "max_samples": env.max_samples}
    is_replaced = reward.path is not None and "builtin" not in names
    if judges_alone(config) or is_replaced or env.environment is not None:
        options["answer_required"] = False  # of an environment without a reward: see rewarded_dialogs
    read = parameters(env.dataset, bare=bare)
    options = {name: value for name, value in options.items() if name in read and value is not None}  # null: its own
    try:
        task = task_class(env.dataset)(**options) if bare else make_task(env.dataset, **options)
    except UserError:
        raise
    except ValueError as error:  # weights that contradict each other; the sentence says which
        raise UserError(str(error)) from error
    if reward.path is not None:
        task = with_reward_functions(
            task, reward.path, names, reward.weights, success_above=reward.success_above, functions=functions
        )
    if judges_alone(config):
        task = without_terms(task)
    return think_again(task) if env.reasoning else task


def _mixed(config: Config, make: Callable[[Config], Task]) -> Task:
    """The tasks of ``env.mixture``, each made by the config of its entry."""
    tasks, limits = {}, {}
    for name, each in task_configs(config).items():
        try:
            tasks[name] = make(each)
        except UserError as error:
            raise type(error)(f"env.mixture.{name}: {error}") from error
        if each.inference_model.max_tokens < config.inference_model.max_tokens:
            limits[name] = each.inference_model.max_tokens
    return MixtureTask(tasks, weights(config), limits, group_sizes(config))


def make_grader(config: Config, task: Task) -> Grader:
    """Reward workers, which start while the rest of the run is put together; 0 of them grade in this process."""
    scorer, weights, count = scorer_of(task), task.term_weights, config.env.reward_workers
    if count == 0:
        return LocalGrader(scorer, weights)
    return GradingPool(scorer, weights, num_workers=count, timeout_s=config.env.timeout_s)


def start_instances(config: Config, opened: ExitStack) -> dict[str, Instances]:
    """By the name of its task, what the policy's tools live in, ready; tasks with the same tools share it.

    Closed with ``opened``. Tasks without tools are not there.

    Raises:
        UserError: what the config names cannot be loaded, or offers no tools.
    """
    offered = {}
    for name, each in task_configs(config).items():
        env = each.env
        kind, value = ("factory", env.environment) if env.tools is None else ("functions", env.tools)
        if value is not None:
            offered[name] = kind, value, env.timeout_s
    if offered:
        starting("Starting the tools")
    started = {}
    for one in dict.fromkeys(offered.values()):
        kind, value, timeout_s = one
        instances = Instances(instance_spec(value, kind), timeout_s=timeout_s)
        started[one] = opened.enter_context(closing(instances))
    for instances in started.values():
        instances.wait_ready()
    return {name: started[one] for name, one in offered.items()}


def rewarded_dialogs(config: Config, task: Task, instances: Mapping[str, Instances]) -> Task:
    """``task`` as dialogs with tools earn: an environment's reward for the task's, or beside that of functions."""
    configs = task_configs(config)

    def rewarded(name: str, task: Task) -> Task:
        own, reward = instances.get(name), configs[name].reward
        if own is None:
            return task
        asks_task = reward.path is not None or not own.has_reward
        if asks_task and reward.path is None and isinstance(task, TableTask):
            task.require_answers()
        return with_tools(task, has_reward=own.has_reward, asks_task=asks_task, success_above=reward.success_above)

    return task.with_tasks(rewarded) if isinstance(task, MixtureTask) else rewarded(config.env.dataset, task)


def dialog_rules(
    config: Config, env: PromptSource, instances: Mapping[str, Instances], max_model_len: int
) -> dict[str | None, Rules]:
    """With whom the policy episodes, in those tasks of a mixture, by name, whose dialogs may have several turns.

    Of a run of one task they stand under None.

    Args:
        env: whose prompts tell of the tools.
        max_model_len: of the engine.

    Raises:
        UserError: the chat template has no tools.
    """
    rules: dict[str | None, Rules] = {}
    for name, each in task_configs(config).items():
        if each.env.max_steps > 1:
            own, options = instances.get(name), each.env
            turns = TurnTokens(env.tokenizer, template_kwargs(each, own))
            responder: Responder = GradedTurns(own_grader(env.grader), turns)
            if own is not None:
                responder = ToolResponder(env, own, options.chat_template_kwargs)
            rules[name if config.env.mixture else None] = Rules(responder, turns, options.max_steps, max_model_len)
    return rules


def template_kwargs(config: Config, instances: Instances | None) -> dict[str, Any]:
    """What prompts give the chat template beside the messages: the user's arguments, and the tools."""
    return {**(config.env.chat_template_kwargs or {}), **({"tools": instances.schemas} if instances else {})}


def kwargs_of_tasks(config: Config, instances: Mapping[str, Instances]) -> dict[str, Any]:
    """:func:`template_kwargs` as a :class:`~sota_grpo.envs.PromptSource` takes them, of a mixture by task."""
    if config.env.mixture is None:
        return {"template_kwargs": template_kwargs(config, instances.get(config.env.dataset))}
    by_task = {name: template_kwargs(config, own) for name, own in instances.items()}
    return {"template_kwargs": template_kwargs(config, None), "task_kwargs": by_task}


def open_env(
    config: Config,
    task: Task,
    tokenizer: Any,
    opened: ExitStack,
    run_dir: Path | None = None,
) -> tuple[PromptSource, Mapping[str, Instances]]:
    """The environment with its grader and the tools of its tasks, whose processes are closed with ``opened``.

    Args:
        run_dir: where a judge's answers are kept; None: nowhere.
    """
    instances = start_instances(config, opened)
    task = rewarded_dialogs(config, task, instances)
    task, grader = judged_task(config, task, partial(make_grader, config), run_dir)
    opened.enter_context(closing(grader))
    return make_env(config, task, tokenizer, grader, instances), instances


def make_env(
    config: Config,
    task: Task,
    tokenizer: Any,
    grader: Grader,
    instances: Mapping[str, Instances] = {},
) -> PromptSource:
    """The environment, after a look at the longest prompt; see :class:`~sota_grpo.envs.PromptSource`.

    Args:
        instances: by task, of the tools that its prompts tell of.

    Raises:
        UserError: ``env.chat_template_kwargs`` has what the chat template does not read; or a prompt is too long.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for name in config.env.chat_template_kwargs or ():  # a typing error would change nothing, and say nothing
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"env.chat_template_kwargs has {name}, which the chat template of {model_name(config)} does not read; "
                "leave it out."
            )
    env = PromptSource(
        task,
        tokenizer,
        repeats=config.env.repeats,
        shuffle=config.env.shuffle,
        seed=config.seed,
        max_prompt_tokens=max_model_len(config) - 1,
        grader=grader,
        multi_turn=has_dialogs(config),
        **kwargs_of_tasks(config, instances),
    )
    env.check_prompts(skip=config.env.skip_unreadable)
    return env


def max_model_len(config: Config) -> int:
    """Context of the run: what the config says, at most what the model allows.

    Raises:
        UserError: neither says any.
    """
    name, trust = model_name(config), config.model.trust_remote_code
    text = from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trust).get_text_config()
    lengths = [config.inference_model.max_model_len, getattr(text, "max_position_embeddings", None)]
    if not any(lengths):
        raise UserError(
            f"model.name={name} names no context (max_position_embeddings in its config.json); give "
            "inference_model.max_model_len."
        )
    return min(filter(None, lengths))


def make_sampling(config: Config) -> Sampling:
    """How a response is drawn in training."""
    options = config.inference_model
    return Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=most_kept(config),
        min_p=options.min_p,
    )


def engine_dtype(name: str, device_type: str) -> str:
    """Dtype of the engine's weights: ``auto`` and ``native`` are bfloat16 on CUDA, the latter on some CPUs, too."""
    return {"bf16": "bfloat16", "fp32": "float32"}.get(chosen := automatic_precision(name, device_type), chosen)


def engine_rows(config: Config, engine: str, device_type: str, num_engines: int = 1) -> int:
    """Samples that each of ``num_engines`` engines computes at once; never less than the largest group.

    Engines that give out memory for keys and values as rows grow take many rows on a GPU: the responses that training
    has in flight, so that a step is not sampled in waves with a tail each, and never few, since an evaluation asks for
    thousands. Rows that the memory has no room for wait.

    >>> config = Config()
    >>> config.env.num_envs, config.env.repeats
    (64, 8)
    >>> [engine_rows(config, "vllm", device, engines) for device, engines in (("cpu", 2), ("cpu", 16), ("cuda", 2))]
    [32, 8, 256]
    >>> config.train.dialog_turns_per_batch = 1024
    >>> [engine_rows(config, "vllm", "cuda", engines) for engines in (1, 2)]
    [1024, 512]
    >>> engine_rows(config, "vllm", "cuda", 3)  # a multiple of 16, as the sizes of vLLM's CUDA graphs are
    352
    """
    rows = config.inference_model.max_num_seqs
    if rows is None:
        rows = config.env.num_envs // num_engines
        if device_type == "cuda" and ENGINES[engine].memory == "vllm":
            fewest, most = GPU_ROWS
            in_flight = mean_responses_per_step(config) * (1 + config.train.max_policy_age)
            rows = max(rows, fewest, min(most, -(-in_flight // (16 * num_engines)) * 16))
    return max(*group_sizes(config).values(), rows)


def engine_options(
    config: Config, engine: str, device_type: str, tokenizer: Any, run_dir: Path, num_engines: int = 1
) -> EngineOptions:
    """How each of the run's engines is built, here or in a process of its own."""
    inference, ends = config.inference_model, end_token_ids(tokenizer)
    if not ends:
        raise UserError("The model names no end token; set eos_token in its tokenizer_config.json.")
    options = EngineOptions(
        model_name(config),
        engine=engine,
        dtype=engine_dtype(inference.torch_dtype, device_type),
        device=device_type,
        max_model_len=max_model_len(config),
        max_rows=engine_rows(config, engine, device_type, num_engines),
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        tensor_parallel_size=inference.tensor_parallel_size,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        stop=tuple(inference.stop),
        adapter_rank=config.train_model.lora.r if inference.serve_adapter else 0,
        engine_kwargs=inference.engine_kwargs or {},
    )
    if engine != "vllm" and inference.serve_adapter:  # what engine=auto is
        raise UserError(f"inference_model.serve_adapter=true has no effect on engine={engine}; leave it out.")
    if options.engine_kwargs:
        from sota_grpo.engines.vllm_server import refuse_arguments

        if not ENGINES[engine].takes_kwargs:  # what engine=auto is
            raise UserError(f"inference_model.engine_kwargs has no effect on engine={engine}; leave it out.")
        refuse_arguments(options, on_cpu=device_type == "cpu")
    if not is_server(engine):
        return options
    return replace(
        options,
        url=config.engine.url,
        api_key=key_of(API_KEY) if config.engine.url is not None else None,
        log_path=str(run_dir / f"{engine}.log"),
        shared_folder=str(run_dir),
        deadlines=Deadlines(control=config.ray.timeout_s),
    )


def start_engine(config: Config, device: str, tokenizer: Any, model: PreTrainedModel | None, run_dir: Path) -> Engine:
    """The engine of a run in one process; it copies ``model``, which has no adapter yet, or, without one, loads it.

    Raises:
        RunFailed: vLLM does not start here; its traceback is in the log of the run.
    """
    device_type = device.partition(":")[0]
    name = resolve_engine_name(config.engine.name, device=device_type)
    options = engine_options(config, name, device_type, tokenizer, run_dir)
    try:
        return make_engine(replace(options, model=model, device=device))
    except (ValueError, RuntimeError, ImportError) as error:  # of vLLM: no memory, a model that it does not serve
        if name != "vllm" or isinstance(error, UserError):
            raise
        logger.error("engine=vllm cannot start.", exc_info=error, extra={"file_only": True})
        reason = " ".join(str(error).split())
        fix = "; install vLLM again, or use engine=transformers" if isinstance(error, ImportError) else ""
        raise RunFailed(f"engine=vllm cannot start ({type(error).__name__}: {reason}){fix}.") from error
