"""Build the components that sample and grade a run's responses: task, data, rewards, judge, environment, engine."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from sota_grpo.config import Config, max_support, model_name, replaces_reward, reward_names, rubric_file
from sota_grpo.config.mixture import READERS, has_dialogs, task_configs, tasks_named, weights
from sota_grpo.config.secrets import AGENTS_KEY, API_KEY, JUDGE_KEY, key_of
from sota_grpo.config.spelling import walk
from sota_grpo.config.validators import judges_alone
from sota_grpo.engines import ENGINES, EngineOptions, is_server, make_engine, resolve_engine_name
from sota_grpo.engines.stepping import SteppingEngine
from sota_grpo.envs import PromptSource
from sota_grpo.envs.agents import Agents
from sota_grpo.envs.dialogs import GradedTurns, Responder, Rules, ToolResponder, TurnTokens
from sota_grpo.envs.gateway import SessionQueue
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional.log_probs import automatic_precision
from sota_grpo.policy.causal import end_token_ids
from sota_grpo.policy.load import from_pretrained
from sota_grpo.policy.model_sizes import rotary_limit
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.functions import Functions
from sota_grpo.rewards.grading import Grader, GradingPool, LocalGrader, task_grader
from sota_grpo.rewards.judge.client import TERM, JudgeClient, JudgedGrader, VerdictCache
from sota_grpo.rewards.judge.client import Rules as JudgeRules
from sota_grpo.rewards.judge.questions import RUBRIC, Endpoint
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.task import Task, scorer_of, without_examples
from sota_grpo.tasks import make_task, parameters, task_class
from sota_grpo.tasks.agents import AGENT, SESSIONS
from sota_grpo.tasks.dataset import SUFFIXES, FileTask, hash_ordered, normalised, unique_examples
from sota_grpo.tasks.mixture import MixtureTask
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import no_gold_response, think_again, with_reward_functions, with_tools, without_terms
from sota_grpo.workers.instances import Instances

logger = logging.getLogger(__name__)

GPU_ROWS = 256, 1024  # below: a GPU reads all weights for few tokens; above: it mostly reads keys and values


def heldout_task(config: Config) -> Task:
    """Return the task for an evaluation; a file ``env.eval_path`` is read alone unless ``env.dataset_path`` is set."""
    if config.env.mixture is not None:
        return _mixed(config, heldout_task)
    path = config.env.eval_path
    name = config.env.dataset
    is_read = config.env.dataset_path is None and "path" in parameters(name) and issubclass(task_class(name), FileTask)
    if path is None or Path(path).suffix not in SUFFIXES or not is_read:
        return task_of(config)
    task = task_of(config, bare=True)
    assert isinstance(task, FileTask)
    task.train = task.heldout = hash_ordered(unique_examples(task.read(path)))
    return task


def require_heldout(config: Config, task: Task) -> None:
    """Raise a UserError if there are no held-out problems to evaluate."""
    if not task.heldout:
        raise UserError(f"Task {tasks_named(config)} has no held-out problems; set env.eval_path or env.num_heldout.")


def task_of(config: Config, functions: Functions | None = None, *, bare: bool = False) -> Task:
    """Return the task of the config, graded by its own reward or by reward functions; UserError if it cannot be used.

    ``functions`` replace those in ``reward.path``. ``bare``: do not read the data, which scoring does not need.

    >>> task = task_of(Config(), bare=True)
    >>> task.score("#### 4", task.read_row({"answer": "4"}, "demo, row 1")).success
    True
    """
    env, reward = config.env, config.reward
    if env.mixture is not None:
        path = reward.path  # an entry may have other functions
        make = lambda entry: task_of(entry, functions if entry.reward.path == path else None, bare=bare)  # noqa: E731
        return _mixed(config, make, trains=not bare)
    names = reward_names(config)
    values = {option: value for option, _, value in walk(config)}
    options: dict[str, Any] = {parameter: values[option] for option, parameter in READERS.items()}
    options |= {"seed": config.seed, "num_heldout": env.num_heldout}
    options |= {"num_train": env.max_samples, "max_samples": env.max_samples}
    if judges_alone(config) or replaces_reward(config) or env.environment is not None or env.agent is not None:
        options["answer_required"] = False  # of an environment without a reward: see rewarded_dialogs
    read = parameters(env.dataset, bare=bare)
    options = {name: value for name, value in options.items() if name in read and value is not None}  # null: a default
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


def _mixed(config: Config, make: Callable[[Config], Task], *, trains: bool = False) -> Task:
    """Return the mixture of the tasks of ``env.mixture``; ``make`` builds each task from its entry's config.

    ``trains``: no task trains on a question that another task holds out, as two tasks may read one file.
    """
    tasks, limits = {}, {}
    for name, entry in task_configs(config).items():
        try:
            tasks[name] = make(entry)
        except UserError as error:
            raise type(error)(f"env.mixture.{name}: {error}") from error
        if entry.inference_model.max_tokens < config.inference_model.max_tokens:
            limits[name] = entry.inference_model.max_tokens
    heldout = [example for task in tasks.values() if isinstance(task.heldout, list) for example in task.heldout]
    taken = {normalised(example.query) for example in heldout}
    for name, task in tasks.items():
        if trains and isinstance(task.train, list):
            task.train = [example for example in task.train if normalised(example.query) not in taken]
            if not task.train:
                raise UserError(f"env.mixture.{name} has no question that no task holds out; give it other data.")
    return MixtureTask(tasks, weights(config), limits)


def make_grader(config: Config, task: Task) -> Grader:
    """Return a pool of grader processes, which start in the background; a local grader if ``env.reward_workers=0``."""
    scorer, weights, count = scorer_of(task), task.term_weights, config.env.reward_workers
    if count == 0:
        return LocalGrader(scorer, weights)
    return GradingPool(scorer, weights, num_workers=count, timeout_s=config.env.timeout_s)


def start_instances(config: Config, opened: ExitStack) -> dict[str, Instances]:
    """Start the workers of tools, environments and agents; return {task: its workers} when all are ready.

    ``opened`` closes the workers; equal options share them. ``env.agent=sessions`` has a queue instead of workers.
    UserError if they cannot be used.
    """
    offered = {}
    for name, entry in task_configs(config).items():
        env = entry.env
        for kind, value in (("functions", env.tools), ("factory", env.environment), (AGENT, env.agent)):
            if value is not None:
                offered[name] = kind, value, env.timeout_s, env.environments_per_worker
    if offered:
        starting("Starting the tools")
    started: dict[Any, Any] = {}
    for spec in dict.fromkeys(offered.values()):
        kind, value, timeout_s, per_worker = spec
        if kind == AGENT and value == SESSIONS:
            if (key := key_of(AGENTS_KEY)) is None:
                raise UserError(f"env.agent={SESSIONS} needs a key for programs that open sessions; set {AGENTS_KEY}.")
            instances: Any = SessionQueue(timeout_s, key)
        else:
            instances = Instances(instance_spec(value, kind), timeout_s=timeout_s, per_worker=per_worker)
        started[spec] = opened.enter_context(closing(instances))
    for instances in started.values():
        instances.wait_ready()
    return {name: started[spec] for name, spec in offered.items()}


def rewarded_dialogs(config: Config, task: Task, instances: Mapping[str, Instances]) -> Task:
    """Return ``task`` with its environment's or agent's reward, if any, for its own, or added to ``reward.path``'s."""
    configs = task_configs(config)

    def rewarded(name: str, task: Task) -> Task:
        pool, reward = instances.get(name), configs[name].reward
        if pool is None:
            return task
        has_reward = pool.has_reward or configs[name].env.agent is not None
        adds = reward.path is not None or not has_reward
        if adds and reward.path is None and isinstance(task, TableTask):
            task.require_answers()
        return with_tools(task, has_reward=has_reward, adds_task_terms=adds, success_above=reward.success_above)

    return task.with_tasks(rewarded) if isinstance(task, MixtureTask) else rewarded(config.env.dataset, task)


def dialog_rules(
    config: Config, env: PromptSource, instances: Mapping[str, Instances], max_model_len: int
) -> dict[str | None, Rules]:
    """Return the rules of each multi-turn task without agent, by its name in the mixture (None for the only task)."""
    rules: dict[str | None, Rules] = {}
    for name, entry in task_configs(config).items():
        if entry.env.max_steps > 1 and entry.env.agent is None:
            task_instances, options = instances.get(name), entry.env
            turns = TurnTokens(env.tokenizer, template_kwargs(entry, task_instances))
            responder: Responder = GradedTurns(task_grader(env.grader), turns)
            if task_instances is not None:
                responder = ToolResponder(env, task_instances, options.chat_template_kwargs)
            rules[name if config.env.mixture else None] = Rules(responder, turns, options.max_steps, max_model_len)
    return rules


def task_agents(config: Config, instances: Mapping[str, Instances]) -> dict[str | None, Agents]:
    """Return the agent of each task that has one, by the task's name in the mixture (None for the only task)."""
    return {
        name if config.env.mixture else None: Agents(instances[name], entry.env.max_steps)
        for name, entry in task_configs(config).items()
        if entry.env.agent is not None
    }


def template_kwargs(config: Config, instances: Instances | None) -> dict[str, Any]:
    """Return the arguments of the chat template: ``env.chat_template_kwargs``, and the tools' schemas."""
    schemas = instances.schemas if instances else []
    return {**(config.env.chat_template_kwargs or {}), **({"tools": schemas} if schemas else {})}


def kwargs_of_tasks(config: Config, instances: Mapping[str, Instances]) -> dict[str, Any]:
    """Return the ``template_kwargs`` of :class:`~sota_grpo.envs.PromptSource` and, for a mixture, ``task_kwargs``."""
    if config.env.mixture is None:
        return {"template_kwargs": template_kwargs(config, instances.get(config.env.dataset))}
    by_task = {name: template_kwargs(config, task_instances) for name, task_instances in instances.items()}
    return {"template_kwargs": template_kwargs(config, None), "task_kwargs": by_task}


def open_env(
    config: Config, task: Task, tokenizer: Any, opened: ExitStack, run_dir: Path | None = None
) -> tuple[PromptSource, Mapping[str, Instances]]:
    """Start graders, tools and judge; return (environment with its grader, workers of tools and agents by task).

    ``opened`` closes graders and workers. ``run_dir`` gets the cache of the judge's answers.
    """
    instances = start_instances(config, opened)
    task = rewarded_dialogs(config, task, instances)
    task, grader = judged_task(config, task, run_dir)
    opened.enter_context(closing(grader))
    return make_env(config, task, tokenizer, grader, instances), instances


def make_env(
    config: Config, task: Task, tokenizer: Any, grader: Grader, instances: Mapping[str, Instances] = {}
) -> PromptSource:
    """Return the environment, with the tools of ``instances`` in its prompts; UserError if a prompt cannot be used."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for name in config.env.chat_template_kwargs or ():  # a typing error would have no effect
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
    """Return the context length in tokens, the smallest of the config's, the model's and its :func:`rotary_limit`.

    UserError if none is given.
    """
    name, trust = model_name(config), config.model.trust_remote_code
    text = from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trust).get_text_config()
    lengths = [config.inference_model.max_model_len, getattr(text, "max_position_embeddings", None)]
    lengths.append(rotary_limit(text))
    if not any(lengths):
        raise UserError(
            f"The context length of model.name={name} is unknown: its config.json has no max_position_embeddings; set "
            "inference_model.max_model_len."
        )
    return min(filter(None, lengths))


def make_sampling(config: Config) -> Sampling:
    """Return the sampling options of training."""
    options = config.inference_model
    return Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max_support(config),
        min_p=options.min_p,
    )


def engine_dtype(name: str, device_type: str) -> str:
    """Return the dtype that the option's value ``name`` means on ``cuda`` or ``cpu``.

    ``auto`` is bfloat16 on CUDA, else float32; ``native`` is bfloat16 also on CPUs that multiply bf16 fast.
    """
    return {"bf16": "bfloat16", "fp32": "float32"}.get(chosen := automatic_precision(name, device_type), chosen)


def engine_rows(config: Config, engine: str, device_type: str, num_engines: int = 1) -> int:
    """Return the most sequences that each of ``num_engines`` engines decodes at once; at least a group.

    It is ``inference_model.max_num_seqs``, else ``env.num_envs / num_engines``, which vLLM on a GPU raises to 256 or to
    its share of the responses in flight (at most 1024), because it queues what its KV cache cannot hold.

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
            in_flight = config.train.dialog_turns_per_batch * (1 + config.train.max_policy_age)
            rows = max(rows, fewest, min(most, -(-in_flight // (16 * num_engines)) * 16))
    return max(config.env.repeats, rows)


def engine_options(
    config: Config, engine: str, device_type: str, tokenizer: Any, run_dir: Path, num_engines: int = 1
) -> EngineOptions:
    """Return the options of one of ``num_engines`` engines; UserError if an option or the tokenizer cannot be used."""
    inference, ends = config.inference_model, end_token_ids(tokenizer)
    if not ends:
        raise UserError("The tokenizer of the model has no end token; set eos_token in its tokenizer_config.json.")
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
        attn_implementation=config.model.attn_implementation,
        load_kwargs=config.model.load_kwargs,
        seed=config.seed % (1 << 31),  # servers keep seeds in 31 or 32 bits, and no sample depends on it
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
        timeout_s=config.ray.timeout_s,
    )


def start_engine(
    config: Config, device: str, tokenizer: Any, model: PreTrainedModel | None, run_dir: Path
) -> SteppingEngine:
    """Start the engine in this process, or a client of a server; UserError or RunFailed if it cannot start.

    engine=transformers copies ``model`` (the policy without adapter); others, or without ``model``, read files.
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
        reason = " ".join(str(error).split()).rstrip(".")
        fix = "install vLLM again" if isinstance(error, ImportError) else "correct this"
        raise RunFailed(
            f"engine=vllm cannot start ({type(error).__name__}: {reason}); {fix}, or use engine=transformers."
        ) from error


CACHE_FILE = "judge.jsonl"
_LONGEST_RUBRIC = 1 << 16


def judged_task(config: Config, task: Task, run_dir: Path | None) -> tuple[Task, Grader]:
    """Return (task, its grader); connect the LLM judge of the config, if any, and add its reward terms.

    A judged task is a copy without gold responses, whose scores are not known. ``run_dir`` gets the cache of the
    judge's answers. UserError if the judge is unusable.
    """
    options = config.reward.judge
    if options.kind is None:
        return task, make_grader(config, task)
    assert options.url is not None
    if config.env.mixture is None:
        rules: dict[str | None, JudgeRules] = {None: _rules_of(config, TERM)}
    else:
        configs = task_configs(config).items()
        rules = {name: _rules_of(entry, f"{name}/{TERM}") for name, entry in configs if entry.reward.judge.kind}
    for term in {rule.term for rule in rules.values()} & task.term_weights.keys():
        raise UserError(f"{term} is the name of the judge's reward; give the reward function another name.")
    starting("Connecting to the judge")
    endpoint = Endpoint(options.kind, options.model or "", extra_body=options.extra_body or {})
    cache = VerdictCache(run_dir and run_dir / CACHE_FILE)
    judge = JudgeClient(options.url, endpoint, cache, api_key=key_of(JUDGE_KEY))
    try:
        judge.connect()
        grader = JudgedGrader(make_grader(config, task), judge, without_examples(task), rules)
    except BaseException:
        judge.close()
        raise
    changed = copy.copy(task)
    vars(changed).update(term_weights=grader.term_weights, gold_response=no_gold_response, is_judged=True)
    return changed, grader


def _rules_of(config: Config, term: str) -> JudgeRules:
    options = config.reward.judge
    rubric, file = options.rubric or RUBRIC, rubric_file(options.rubric)
    if file is not None:
        try:
            rubric = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            kind = type(error).__name__
            raise UserError(f"reward.judge.rubric={options.rubric} cannot be read ({kind}); use another.") from error
        if not rubric.strip() or len(rubric) > _LONGEST_RUBRIC:
            raise UserError(
                f"reward.judge.rubric={options.rubric} is blank, or longer than {_LONGEST_RUBRIC} characters; edit it."
            )
    success_above = config.reward.success_above if options.alone else None
    return JudgeRules(term, options.weight, rubric, options.reference, success_above)
