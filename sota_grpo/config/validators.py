"""Check that a config's options fit together: one generator function per rule, named as the rule.

If a config breaks the rule, the function yields error messages with the values and the smallest fix. No rule edits the
config. Every public generator function of this module, :mod:`.algorithm_rules` and :mod:`.memory_rules` is a rule.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from inspect import isgeneratorfunction
from typing import Any
from urllib.parse import urlsplit

from sota_grpo.config import (
    Config,
    ModelConfig,
    algorithm_rules,
    max_support,
    memory_rules,
    num_steps,
    replaces_reward,
    reward_names,
)
from sota_grpo.config.mixture import (
    READERS,
    a_mixture_names_tasks_and_their_options,
    longest_response,
    replies,
    task_configs,
    turns_of_tasks,
    unread_options,
)
from sota_grpo.config.secrets import API_KEY, JUDGE_KEY
from sota_grpo.config.spelling import changed_options, quoted, walk
from sota_grpo.engines import ENGINES, temperature_fault
from sota_grpo.errors import UserError
from sota_grpo.files import file_reference
from sota_grpo.rewards.functions import PASSED, PICKLED
from sota_grpo.rewards.judge.questions import CHAT
from sota_grpo.rewards.sandbox import is_url
from sota_grpo.tasks import TASKS, parameters, task_class
from sota_grpo.tasks.dataset import is_file
from sota_grpo.tasks.reasoning_gym import task_faults
from sota_grpo.tasks.servers import FORMS, server_of
from sota_grpo.tasks.wrappers import naming_faults
from sota_grpo.text import one_line


def every_choice_is_one_of_its_values(config: Config) -> Iterator[str]:
    for name, item, value in walk(config):
        choices = item.metadata["choices"]
        of_a_file = name in ("algorithm.objective", "algorithm.baseline") and file_reference(value)
        known = not choices or value == item.default or value in choices
        if isinstance(value, str) and not known and not of_a_file:
            choices = [item.default, *(choice for choice in choices if choice != item.default)]
            number = " or a number" if "int" in str(item.type) else ""
            yield f"{name}={value} is not one of {', '.join(filter(None, choices))}{number}."


def no_text_is_empty_in_place_of_null(config: Config) -> Iterator[str]:
    """Refuse an empty text where the default is null, as ``model.name=$NAME`` gives it with an unset variable."""
    for name, item, value in walk(config):
        if value == "" and item.default is None and name != "env.system_prompt":
            unset = "is a variable of the shell unset?"
            yield f"{name} is an empty text; give a value, or {name}=null, its default ({unset})."


_NOT_SAVED = re.compile("\\$\\{|[\x85\ud800-\udfff]")  # of these YAML reads the second as a space, refuses the last


def every_value_can_be_saved(config: Config) -> Iterator[str]:
    """Refuse ``${``, as an escaped ``\\${name}`` leaves it (a reader would replace it), and what YAML cannot hold."""
    for name, _, value in walk(config):
        if odd := _NOT_SAVED.search(json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)):
            fix = "write the text without it, for example '$ {'" if odd[0] == "${" else "remove it"
            yield f"{name} has {odd[0]!r}, which a saved config cannot hold; {fix}."


_LIMITS = {"above": operator.gt, "at least": operator.ge, "at most": operator.le, "below": operator.lt}


def every_number_is_within_its_limits(config: Config) -> Iterator[str]:
    for name, item, value in walk(config):
        if isinstance(value, float) and not math.isfinite(value) and not item.metadata["limits"]:
            yield f"{name}={value} must be a finite number."
        for words, limit in item.metadata["limits"].items() if isinstance(value, (int, float)) else ():
            if not _LIMITS[words](value, limit):
                yield f"{name}={value} must be {words} {limit:g}."


def both_betas_are_decays(config: Config) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas} must be two numbers, each at least 0 and below 1; the default is [0.9,0.999]."


def batches_are_made_of_whole_groups(config: Config) -> Iterator[str]:
    repeats, responses = config.env.repeats, config.train.dialog_turns_per_batch
    for name, value in (("env.num_envs", config.env.num_envs), ("train.dialog_turns_per_batch", responses)):
        if value % repeats:
            nearest = max(repeats, round(value / repeats) * repeats)
            yield f"{name}={value} is not divisible by the group size env.repeats={repeats}; use {name}={nearest}."


def a_run_is_made_of_whole_steps(config: Config) -> Iterator[str]:
    responses, size = config.train.dialog_turns_per_batch, config.train.optim_batch_size
    if responses % size:
        name, part = "train.dialog_turns_per_batch", "train.optim_batch_size"
        yield f"{name}={responses} is not divisible by {part}={size}; use {part}={responses}."
    if num_steps(config) < 1:
        total = f"train.total_dialog_turns={config.train.total_dialog_turns}"
        yield f"{total} is less than one training step; use at least train.total_dialog_turns={responses}."


def sampling_is_the_policys_own_distribution(config: Config) -> Iterator[str]:
    """Refuse top_p, top_k or min_p if the engine reports no sampling supports; top_k=1; temperatures it cannot use."""
    sampling, name = config.inference_model, config.engine.name
    support = f"inference_model.top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}"
    if max_support(config) and name in ENGINES and not ENGINES[name].reports_support:
        others = ", ".join(engine for engine, spec in ENGINES.items() if spec.reports_support)
        yield (
            f"{support} truncate the distribution, but engine={name} does not return the tokens they keep, so every "
            f"importance ratio would be biased; use one of {others}, or top_p=1.0, top_k=0 and min_p=0.0."
        )
    if sampling.top_k == 1:
        yield f"{support} keep one token, so all responses of a group are the same; use top_k=0."
    if (fault := temperature_fault(name, sampling.temperature)) is not None:
        yield fault


def the_loss_scaler_has_float32_gradients(config: Config) -> Iterator[str]:
    """Refuse train.precision=fp16 with half-precision weights: the scaled loss needs float32 gradients to unscale."""
    dtype = config.train_model.torch_dtype
    is_half = dtype in ("float16", "bfloat16") and not config.train_model.lora.enabled
    if config.train.precision == "fp16" and is_half:
        yield (
            f"train.precision=fp16 needs float32 gradients, but train_model.torch_dtype={dtype} has none; use "
            "train_model.torch_dtype=float32 or train.precision=bf16."
        )


#: Half the spacing of the dtype's numbers at 0.02, a usual weight: AdamW changes a weight by about the learning rate,
#: and rounding undoes a smaller change. Of 134.5 M weights in bfloat16, 0.39 % changed at 1e-6 and 1.73 % at 1e-5.
_SMALLEST_STEPS = {"bfloat16": 2.0**-14, "float16": 2.0**-17}


def trained_weights_are_fine_enough_for_the_learning_rate(config: Config) -> Iterator[str]:
    dtype, lr = config.train_model.torch_dtype, config.optimizer.lr
    smallest = _SMALLEST_STEPS.get(dtype, 0.0)
    if lr < smallest and not config.train_model.lora.enabled:
        yield (
            f"train_model.torch_dtype={dtype} rounds away most steps of optimizer.lr={lr:g}: a weight of 0.02 moves by "
            f"{smallest:.1g} or not at all; use train_model.torch_dtype=float32 (train.precision=bf16 still computes "
            "in half precision), or train_model.lora.enabled=true."
        )


def _unused(name: str, value: Any, default: Any, where: str) -> str:
    now, usual = (item if isinstance(item, str) else quoted(item) for item in (value, default))
    return f"{name}={now} has no effect {where}; leave it at {usual}"


def options_that_the_task_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    for name, (value, default) in changed_options(config).items() if config.env.mixture is None else ():
        if name in READERS and READERS[name] not in parameters(config.env.dataset):
            others = ", ".join(task for task in TASKS if READERS[name] in parameters(task))
            unused = _unused(name, value, default, f"on env.dataset={config.env.dataset}")
            yield f"{unused} or choose another env.dataset ({others})."


#: Options without effect where functions replace a task's own reward.
OWN_TERMS = tuple(name for name in READERS if name.startswith("reward.") or name == "env.format_weight")


def reward_functions_replace_the_tasks_own_terms(config: Config) -> Iterator[str]:
    path = config.reward.path
    for name, (value, default) in changed_options(config).items() if config.env.mixture is None else ():
        if name in OWN_TERMS and replaces_reward(config):
            unused = _unused(name, value, default, f"with reward.path={path}, which replaces the task's own reward")
            yield f"{unused}, or add builtin to reward.name."
        elif name in OWN_TERMS and judges_alone(config):
            yield _unused(name, value, default, "with reward.judge.alone=true") + "."


def an_evaluation_has_problems(config: Config) -> Iterator[str]:
    for env in (task.env for task in task_configs(config).values()):
        path, mode = env.dataset_path, config.eval.mode
        is_on_hub = "num_train" not in parameters(env.dataset) and not (path and (path == PASSED or is_file(path)))
        has_test_split = is_on_hub and getattr(task_class(env.dataset), "has_test_split", path is None)
        if mode != "off" and env.num_heldout == 0 and env.eval_path is None and not has_test_split:
            problem = f"env.num_heldout=0 leaves eval.mode={mode} nothing to measure"
            yield f"{problem}; use eval.mode=off, or give env.eval_path."


def a_target_and_a_best_checkpoint_need_evaluations(config: Config) -> Iterator[str]:
    measures, every = config.eval.mode != "off", config.eval.every
    for option, value in (("eval.target", config.eval.target), ("train.keep_best", config.train.keep_best)):
        if value is not None and not (measures and every):
            yield (
                f"{option}={value} needs evaluations during training, but eval.mode={config.eval.mode} and "
                f"eval.every={every}; use eval.mode=on eval.every=8."
            )
    best = config.train.keep_best
    if best is not None and not best.startswith("eval/"):
        yield f"train.keep_best={best} is not a metric of the evaluations; use train.keep_best=eval/accuracy."


def a_size_chooses_a_model_that_has_no_name(config: Config) -> Iterator[str]:
    if config.model.name is not None and config.model.size != ModelConfig().size:
        where = f"with model.name={config.model.name}"
        yield f"{_unused('model.size', config.model.size, ModelConfig().size, where)}, or add model.name=null."


def a_task_has_its_data(config: Config) -> Iterator[str]:
    name, env = config.env.dataset, config.env
    if env.mixture is not None:
        return
    has_data = env.dataset_path is not None or "path" not in parameters(name) or hasattr(task_class(name), "hub_name")
    if not has_data:
        yield f"env.dataset={name} has no data of its own; give env.dataset_path=FILE (or a name on the hub)."
    if "tasks" in parameters(name):
        yield from task_faults(env.tasks)


def several_turns_have_an_observation(config: Config) -> Iterator[str]:
    env = config.env
    fix = "add env.reasoning=true, which asks the policy to think again, or use env.max_steps=1"
    if env.mixture is not None:
        if env.max_steps > 1 and max(turns_of_tasks(config).values()) == 1:
            text = f"env.max_steps={env.max_steps} has no effect on any task of env.mixture"
            yield f"{text}: each has max_steps=1 of its own, or never answers a response; {fix}."
        return
    if env.reasoning and env.max_steps < 2:
        text = "env.reasoning=true asks again after a wrong response, but env.max_steps=1 leaves no turn for that"
        yield f"{text}; use env.max_steps=2."
    if env.max_steps > 1 and not (env.reasoning or replies(env.dataset) or env.tools or env.environment or env.agent):
        yield f"env.max_steps={env.max_steps} has no effect on env.dataset={env.dataset}, which never answers; {fix}."


def tools_have_turns_to_answer_in(config: Config) -> Iterator[str]:
    env = config.env
    if env.mixture is not None and env.environment is not None:
        problem = f"env.environment={env.environment} applies to every task of env.mixture"
        yield f"{problem}; give it to the task whose rows it reads, as env.mixture.NAME.environment."
    if env.mixture is not None or (env.tools is None and env.environment is None):
        return
    option, value = ("env.tools", env.tools) if env.environment is None else ("env.environment", env.environment)
    if env.tools is not None and env.environment is not None:
        yield f"env.tools={env.tools} and env.environment={value} are both set; make the functions its methods."
    if (server := server_of(env.environment)) is not None:
        yield from filter(None, [server.fault()])
    elif value is not None and file_reference(value) is None and not value.endswith(PICKLED) and value != PASSED:
        servers = f", or {FORMS}" if env.tools is None else ""
        yield f"{option}={value} is no FILE.py:NAME; give a file, a colon and a name defined in it{servers}."
    if env.max_steps < 2:
        yield f"{option}={value} offers tools, but env.max_steps=1 leaves no turn for results; use env.max_steps=4."
    if env.reasoning or replies(env.dataset):
        other = "env.reasoning=true" if env.reasoning else f"env.dataset={env.dataset}"
        yield f"{option}={value} answers tool calls, but {other} answers every response; use one of them."


def an_agent_makes_its_own_requests(config: Config) -> Iterator[str]:
    env = config.env
    if env.agent is None:
        return
    for option, value in (("env.tools", env.tools), ("env.environment", env.environment)):
        if value is not None:
            yield f"{option}={value} has no effect with env.agent={env.agent}, which has its own tools; leave it out."
    if env.reasoning:
        yield f"env.reasoning=true has no effect with env.agent={env.agent}, which decides what follows; leave it out."
    if env.max_steps < 2 and env.mixture is None:
        yield f"env.agent={env.agent} may make one request only, because env.max_steps=1; use 16."


def every_transform_and_sampler_is_in_a_file(config: Config) -> Iterator[str]:
    for value in config.env.transforms:
        if file_reference(value) is None:
            yield f"env.transforms has {value}, which is no FILE.py:NAME; give a file, a colon and a transform."
    if (sampler := config.train.sampler) is not None and file_reference(sampler) is None:
        yield f"train.sampler={sampler} is no FILE.py:NAME; name the file, a colon, and a sampler of TorchRL's."


def every_reward_function_has_a_weight(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.path is None:
        options: dict[str, object] = {"name": reward.name, "weights": reward.weights}
        needs_functions = config.env.environment is None and config.env.agent is None and not judges_alone(config)
        if needs_functions:  # what scores in their place does not say what is a success
            options["success_above"] = reward.success_above or None
        for name, value in options.items():
            if value is not None:
                yield f"reward.{name}={value} is for your own reward functions; give reward.path=FILE or leave it out."
        return
    names = reward_names(config)
    if names == ["builtin"]:
        yield f"reward.name=builtin uses no function of reward.path={reward.path}; leave both out."
    if not all(isinstance(name, str) for name in names):
        yield f"reward.name={reward.name} is not the name of a function, nor a list of names; give one of these."
    yield from naming_faults(names, reward.weights)


def sync_has_no_age(config: Config) -> Iterator[str]:
    age, sampler = config.train.max_policy_age, config.train.sampler
    if config.mode == "sync" and age != 0:
        option = f"train.max_policy_age={age} has no effect in mode=sync"
        yield f"{option}, where every token is on-policy; use 0 or run grpo-async.py."
    if config.mode == "sync" and sampler is not None:
        option = f"train.sampler={sampler} has no effect in mode=sync"
        yield f"{option}, which has no replay buffer; leave it out or run grpo-async.py."


def judges_alone(config: Config) -> bool:
    """Whether the LLM judge is the only reward."""
    return config.reward.judge.kind is not None and config.reward.judge.alone


def a_judge_has_a_server_and_a_weight(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    if judge.kind is None:
        for name, (value, default) in changed_options(config).items():
            if name.startswith("reward.judge."):
                yield f"{_unused(name, value, default, 'without a judge')}, or give reward.judge.kind."
        return
    for option, default in (("rubric", None), ("reference", False)) if judge.kind != CHAT else ():
        if value := getattr(judge, option):
            yield _unused(f"reward.judge.{option}", value, default, f"on reward.judge.kind={judge.kind}") + "."
    if judge.url is None:
        yield f"reward.judge.kind={judge.kind} needs a server; give reward.judge.url=http://HOST:PORT."
    else:
        yield from _url_faults("reward.judge.url", judge.url, f"set its key in the variable {JUDGE_KEY}")
    if judge.weight == 0 and config.env.mixture is None:
        yield "reward.judge.weight=0 leaves the judge without effect; leave reward.judge.kind out."
    if judge.alone and config.env.reasoning:
        text = "env.reasoning=true needs to know if a response is right, which reward.judge.alone=true does not say"
        yield f"{text}; use one of them."
    if judge.alone and config.reward.path is not None and config.env.mixture is None:
        names = ", ".join(map(str, reward_names(config)))
        yield f"reward.judge.alone=true replaces the functions {names} of reward.path; leave one of them out."


def addresses_of_servers_have_no_secrets(config: Config) -> Iterator[str]:
    if config.engine.url is not None:
        yield from _url_faults("engine.url", config.engine.url, f"set the server's key in the variable {API_KEY}")
    if is_url(config.env.sandbox):
        yield from _url_faults("env.sandbox", config.env.sandbox, "leave them out")


def _url_faults(option: str, url: str, fix: str) -> Iterator[str]:
    shown = option if "@" in url or "?" in url else f"{option}={one_line(url)}"
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError:
        yield f"{shown} is no address; use {option}=http://HOST:PORT."
        return
    if address.username is not None or address.password is not None or address.query:
        yield f"{option} has a user name, a password or a query in it, which the run would save; {fix}."
    elif address.scheme not in ("http", "https") or not host:
        yield f"{shown} is no address of a server; use {option}=http://HOST:PORT."


_OF_TEMPLATES = (  # arguments of apply_chat_template that sota_grpo sets, or that change what is returned
    *("conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "tools", "documents", "processor_kwargs"),
)
_OF_LOADING = {  # arguments of from_pretrained that are refused, with the reason or the option to use
    **dict.fromkeys(("config", "state_dict", "output_loading_info"), "the model is loaded as it was saved"),
    **dict.fromkeys(("dtype", "torch_dtype"), "use train_model.torch_dtype and ref_model.torch_dtype"),
    **{"trust_remote_code": "use model.trust_remote_code", "attn_implementation": "use model.attn_implementation"},
    **dict.fromkeys(("device_map", "device_mesh", "max_memory"), "use train_model.num_devices"),
    **dict.fromkeys(("tp_plan", "tp_size", "offload_folder"), "use train_model.num_devices"),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), "use model.quantization"),
    "gguf_file": "weights are trained whole",
    **dict.fromkeys(("revision", "code_revision", "subfolder"), "engine and tokenizer need it too: give the folder"),
    **dict.fromkeys(("token", "use_auth_token"), "the run would save it; use HF_TOKEN"),
    "weights_only": "a pickle is code",
}
_OF_WANDB = ("config", "dir", "id", "mode", "resume", "settings")  # arguments of wandb.init that sota_grpo sets


def arguments_are_passed_on_by_name(config: Config) -> Iterator[str]:
    template, load = config.env.chat_template_kwargs, config.model.load_kwargs
    options = {"env.chat_template_kwargs": template, "model.load_kwargs": load}
    options["inference_model.engine_kwargs"] = config.inference_model.engine_kwargs
    options["reward.judge.extra_body"] = config.reward.judge.extra_body
    options["logging.wandb_kwargs"] = config.logging.wandb_kwargs
    for option, value in options.items():
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            yield f"{option}={value} is no mapping of names to values; write {option}={{NAME: VALUE}}."
    for name in template or ():
        if name in _OF_TEMPLATES or name.endswith("_token"):
            yield f"env.chat_template_kwargs has {name}, which sota_grpo sets itself or does not support; leave it out."
    for name in config.logging.wandb_kwargs or ():
        if name in _OF_WANDB:
            yield f"logging.wandb_kwargs has {name}, which sota_grpo sets itself; leave it out."
    for name in load or ():
        if name in _OF_LOADING:
            yield f"model.load_kwargs has {name}: {_OF_LOADING[name]}; leave it out."


def every_stop_string_is_text(config: Config) -> Iterator[str]:
    stop = config.inference_model.stop
    if not all(stop) or len(set(stop)) < len(stop):
        yield f"inference_model.stop={list(stop)} has an empty text, or one twice; remove it."


def tasks_of_a_mixture_keep_the_rules(config: Config) -> Iterator[str]:
    for name, task in task_configs(config).items() if config.env.mixture is not None else ():
        yield from (f"env.mixture.{name}: {sentence}" for rule in RULES for sentence in rule(task))


def options_of_a_mixture_are_read_by_one_of_its_tasks(config: Config) -> Iterator[str]:
    for name, value, default in unread_options(config):
        yield f"{_unused(name, value, default, 'on any task of env.mixture')}, or give it to a task that reads it."


def token_limits_of_a_mixture_are_within_the_runs(config: Config) -> Iterator[str]:
    most, buffer = config.inference_model.max_tokens, config.algorithm.overlong_buffer
    for name, task in task_configs(config).items() if config.env.mixture is not None else ():
        limit, longest = task.inference_model.max_tokens, longest_response(config)
        if limit > most:
            option = f"env.mixture.{name}.max_tokens={limit}"
            yield f"{option} exceeds inference_model.max_tokens={most}; use inference_model.max_tokens={limit}."
        if (total := limit * task.env.max_steps) < longest and buffer:
            yield (
                f"algorithm.overlong_buffer={buffer} counts back from {longest} tokens, the most of any task, but "
                f"env.mixture.{name} (max_tokens={limit}, max_steps={task.env.max_steps}) ends at {total}; leave the "
                "buffer out, or give all tasks the same limit."
            )


_MODULES = (algorithm_rules, memory_rules)
_HERE = {__name__, *(module.__name__ for module in _MODULES)}
_EVERY = [*globals().values(), *(rule for module in _MODULES for rule in vars(module).values())]
_FIRST = (
    every_value_can_be_saved,
    a_mixture_names_tasks_and_their_options,
)  # before configs are made from entries
_GENERATORS = [one for one in _EVERY if isgeneratorfunction(one) and one.__module__ in _HERE and one.__name__[0] != "_"]
RULES = tuple(dict.fromkeys([*_FIRST, *_GENERATORS]))  # in the order of checks


class ConfigError(UserError, ValueError):
    """A config that breaks a rule."""


def validate(config: Config) -> None:
    """Raise :class:`ConfigError` for the first rule that ``config`` breaks; UserError if a named file is unusable."""
    for rule in RULES:
        for sentence in rule(config):
            raise ConfigError(sentence)
