"""Check that a config's options fit together: one generator function per rule, named as the rule.

If a config breaks the rule, the function yields error messages with the values and the smallest fix, in which
``<OPTION>`` stands for the option with its value. No rule edits the config. Every public generator function of this
module, :mod:`.algorithm_rules` and :mod:`.memory_rules` is a rule.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from inspect import isgeneratorfunction
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from sota_grpo.config import (
    Config,
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
from sota_grpo.config.spelling import changed_options, filled, quoted, walk
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
            yield f"<{name}> is not one of {', '.join(filter(None, choices))}{number}."


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
            yield f"<{name}> must be a finite number."
        for words, limit in item.metadata["limits"].items() if isinstance(value, (int, float)) else ():
            if not _LIMITS[words](value, limit):
                yield f"<{name}> must be {words} {limit:g}."


def both_betas_are_decays(config: Config) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield "<optimizer.betas> must be two numbers, each at least 0 and below 1; the default is [0.9,0.999]."


def a_run_is_made_of_whole_steps_of_whole_groups(config: Config) -> Iterator[str]:
    repeats, responses = config.env.repeats, config.train.dialog_turns_per_batch
    for name, value in (("env.num_envs", config.env.num_envs), ("train.dialog_turns_per_batch", responses)):
        if value % repeats:
            nearest = max(repeats, round(value / repeats) * repeats)
            yield f"<{name}> is not divisible by the group size <env.repeats>; use {name}={nearest}."
    if responses % config.train.optim_batch_size:
        fix = f"use train.optim_batch_size={responses}"
        yield f"<train.dialog_turns_per_batch> is not divisible by <train.optim_batch_size>; {fix}."
    if num_steps(config) < 1:
        fix = f"use at least train.total_dialog_turns={responses}"
        yield f"<train.total_dialog_turns> is less than one training step; {fix}."


def sampling_is_the_policys_own_distribution(config: Config) -> Iterator[str]:
    """Refuse top_p, top_k or min_p if the engine reports no sampling supports; top_k=1; temperatures it cannot use."""
    sampling, name = config.inference_model, config.engine.name
    support = f"<inference_model.top_p>, top_k={sampling.top_k} and min_p={sampling.min_p}"
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


#: Half the spacing of the dtype's numbers at 0.02, a usual weight: AdamW changes a weight by about the learning rate,
#: and rounding undoes a smaller change. Of 134.5 M weights in bfloat16, 0.39 % changed at 1e-6 and 1.73 % at 1e-5.
_SMALLEST_STEPS = {"bfloat16": 2.0**-14, "float16": 2.0**-17}


def trained_weights_are_fine_enough_for_loss_scaler_and_learning_rate(config: Config) -> Iterator[str]:
    smallest = _SMALLEST_STEPS.get(config.train_model.torch_dtype)
    if smallest is None or config.train_model.lora.enabled:
        return
    if config.train.precision == "fp16":  # the scaled loss needs float32 gradients to unscale
        fix = "use train_model.torch_dtype=float32 or train.precision=bf16"
        yield f"<train.precision> needs float32 gradients, but <train_model.torch_dtype> has none; {fix}."
    if config.optimizer.lr < smallest:
        yield (
            f"<train_model.torch_dtype> rounds away most steps of <optimizer.lr>: a weight of 0.02 moves by "
            f"{smallest:.1g} or not at all; use train_model.torch_dtype=float32 (train.precision=bf16 still computes "
            "in half precision), or train_model.lora.enabled=true."
        )


def _unused(name: str, default: Any, where: str) -> str:
    return f"<{name}> has no effect {where}; leave it at {default if isinstance(default, str) else quoted(default)}"


#: Options without effect where functions replace a task's own reward.
OWN_TERMS = tuple(name for name in READERS if name.startswith("reward.") or name == "env.format_weight")


def options_that_the_task_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    replaced = "with <reward.path>, which replaces the task's own reward"
    for name, (_, default) in changed_options(config).items() if config.env.mixture is None else ():
        if name in READERS and READERS[name] not in parameters(config.env.dataset):
            others = ", ".join(task for task in TASKS if READERS[name] in parameters(task))
            yield f"{_unused(name, default, 'on <env.dataset>')} or choose another env.dataset ({others})."
        elif name in OWN_TERMS and replaces_reward(config):
            yield f"{_unused(name, default, replaced)}, or add builtin to reward.name."
        elif name in OWN_TERMS and judges_alone(config):
            yield _unused(name, default, "with <reward.judge.alone>") + "."


def an_evaluation_has_problems(config: Config) -> Iterator[str]:
    for env in (task.env for task in task_configs(config).values()):
        path = env.dataset_path
        is_on_hub = "num_train" not in parameters(env.dataset) and not (path and (path == PASSED or is_file(path)))
        has_test_split = is_on_hub and getattr(task_class(env.dataset), "has_test_split", path is None)
        if config.eval.mode != "off" and env.num_heldout == 0 and env.eval_path is None and not has_test_split:
            yield "env.num_heldout=0 leaves <eval.mode> nothing to measure; use eval.mode=off, or give env.eval_path."


def a_target_and_a_best_checkpoint_need_evaluations(config: Config) -> Iterator[str]:
    best, measures = config.train.keep_best, config.eval.mode != "off" and config.eval.every
    for option, value in (("eval.target", config.eval.target), ("train.keep_best", best)):
        if value is not None and not measures:
            missing = "needs evaluations during training, but <eval.mode> and <eval.every>"
            yield f"<{option}> {missing}; use eval.mode=on eval.every=8."
    if best is not None and not best.startswith("eval/"):
        yield "<train.keep_best> is not a metric of the evaluations; use train.keep_best=eval/accuracy."


def a_size_chooses_a_model_that_has_no_name(config: Config) -> Iterator[str]:
    if config.model.name is not None and "model.size" in (changed := changed_options(config)):
        yield f"{_unused('model.size', changed['model.size'][1], 'with <model.name>')}, or add model.name=null."


def a_task_has_its_data(config: Config) -> Iterator[str]:
    name, env = config.env.dataset, config.env
    if env.mixture is not None:
        return
    if env.dataset_path is None and "path" in parameters(name) and not hasattr(task_class(name), "hub_name"):
        yield "<env.dataset> has no data of its own; give env.dataset_path=FILE (or a name on the hub)."
    if "tasks" in parameters(name):
        yield from task_faults(env.tasks)


def several_turns_have_an_observation(config: Config) -> Iterator[str]:
    env = config.env
    fix = "add env.reasoning=true, which asks the policy to think again, or use env.max_steps=1"
    if env.mixture is not None:
        if env.max_steps > 1 and max(turns_of_tasks(config).values()) == 1:
            silent = "each has max_steps=1 of its own, or never answers a response"
            yield f"<env.max_steps> has no effect on any task of env.mixture: {silent}; {fix}."
        return
    if env.reasoning and env.max_steps < 2:
        none = "<env.max_steps> leaves no turn for that"
        yield f"<env.reasoning> asks again after a wrong response, but {none}; use env.max_steps=2."
    if env.max_steps > 1 and not (env.reasoning or replies(env.dataset) or env.tools or env.environment or env.agent):
        yield f"<env.max_steps> has no effect on <env.dataset>, which never answers; {fix}."


def tools_have_turns_to_answer_in(config: Config) -> Iterator[str]:
    env = config.env
    if env.mixture is not None and env.environment is not None:
        fix = "give it to the task whose rows it reads, as env.mixture.NAME.environment"
        yield f"<env.environment> applies to every task of env.mixture; {fix}."
    if env.mixture is not None or (env.tools is None and env.environment is None):
        return
    option, value = ("<env.tools>", env.tools) if env.environment is None else ("<env.environment>", env.environment)
    if env.tools is not None and env.environment is not None:
        yield "<env.tools> and <env.environment> are both set; make the functions its methods."
    if (server := server_of(env.environment)) is not None:
        yield from filter(None, [server.fault()])
    elif value is not None and file_reference(value) is None and not value.endswith(PICKLED) and value != PASSED:
        servers = f", or {FORMS}" if env.tools is None else ""
        yield f"{option} is no FILE.py:NAME; give a file, a colon and a name defined in it{servers}."
    if env.max_steps < 2:
        yield f"{option} offers tools, but <env.max_steps> leaves no turn for results; use env.max_steps=4."
    if env.reasoning or replies(env.dataset):
        other = "<env.reasoning>" if env.reasoning else "<env.dataset>"
        yield f"{option} answers tool calls, but {other} answers every response; use one of them."


def an_agent_makes_its_own_requests(config: Config) -> Iterator[str]:
    env = config.env
    if env.agent is None:
        return
    reasons = {"env.tools": "has its own tools", "env.environment": "has its own tools"}
    for option, reason in (reasons | {"env.reasoning": "decides what follows"}).items():
        if option in changed_options(config):
            yield f"<{option}> has no effect with <env.agent>, which {reason}; leave it out."
    if env.max_steps < 2 and env.mixture is None:
        yield "<env.agent> may make one request only, because <env.max_steps>; use 16."


def every_transform_and_sampler_is_in_a_file(config: Config) -> Iterator[str]:
    for value in config.env.transforms:
        if file_reference(value) is None:
            yield f"env.transforms has {value}, which is no FILE.py:NAME; give a file, a colon and a transform."
    if (sampler := config.train.sampler) is not None and file_reference(sampler) is None:
        yield "<train.sampler> is no FILE.py:NAME; name the file, a colon, and a sampler of TorchRL's."


def every_reward_function_has_a_weight(config: Config) -> Iterator[str]:
    reward, names = config.reward, reward_names(config)
    if reward.path is None:
        options = ["reward.name", "reward.weights"]
        # what scores in place of functions does not say what is a success
        scores_itself = config.env.environment is not None or config.env.agent is not None or judges_alone(config)
        for option in options if scores_itself else [*options, "reward.success_above"]:
            if option in changed_options(config):
                yield f"<{option}> is for your own reward functions; give reward.path=FILE or leave it out."
        return
    if names == ["builtin"]:
        yield "<reward.name> uses no function of <reward.path>; leave both out."
    if not all(isinstance(name, str) for name in names):
        yield "<reward.name> is not the name of a function, nor a list of names; give one of these."
    yield from naming_faults(names, reward.weights)


def sync_has_no_age(config: Config) -> Iterator[str]:
    if config.mode == "sync" and config.train.max_policy_age != 0:
        reason = "where every token is on-policy; use 0 or run grpo-async.py"
        yield f"<train.max_policy_age> has no effect in <mode>, {reason}."
    if config.mode == "sync" and config.train.sampler is not None:
        yield "<train.sampler> has no effect in <mode>, which has no replay buffer; leave it out or run grpo-async.py."


def judges_alone(config: Config) -> bool:
    """Whether the LLM judge is the only reward."""
    return config.reward.judge.kind is not None and config.reward.judge.alone


def a_judge_has_a_server_and_a_weight(config: Config) -> Iterator[str]:
    judge = config.reward.judge
    changed = {name: default for name, (_, default) in changed_options(config).items() if "reward.judge." in name}
    if judge.kind is None:
        yield from (
            f"{_unused(name, changed[name], 'without a judge')}, or give reward.judge.kind." for name in changed
        )
        return
    for option in ("reward.judge.rubric", "reward.judge.reference"):
        if judge.kind != CHAT and option in changed:
            yield _unused(option, changed[option], "on <reward.judge.kind>") + "."
    if judge.url is None:
        yield "<reward.judge.kind> needs a server; give reward.judge.url=http://HOST:PORT."
    if judge.weight == 0 and config.env.mixture is None:
        yield "<reward.judge.weight> leaves the judge without effect; leave reward.judge.kind out."
    if judge.alone and config.env.reasoning:
        silent = "which <reward.judge.alone> does not say"
        yield f"<env.reasoning> needs to know if a response is right, {silent}; use one of them."
    if judge.alone and config.reward.path is not None and config.env.mixture is None:
        names = ", ".join(map(str, reward_names(config)))
        yield f"<reward.judge.alone> replaces the functions {names} of reward.path; leave one of them out."


def addresses_of_servers_have_no_secrets(config: Config) -> Iterator[str]:
    """Refuse a password in an address before another rule repeats the address."""
    if config.engine.url is not None:
        yield from _url_faults("engine.url", config.engine.url, f"set the server's key in the variable {API_KEY}")
    if config.reward.judge.url is not None:
        yield from _url_faults("reward.judge.url", config.reward.judge.url, f"set its key in the variable {JUDGE_KEY}")
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
_MAPPINGS = (
    *("env.chat_template_kwargs", "model.load_kwargs", "inference_model.engine_kwargs", "reward.judge.extra_body"),
    "logging.wandb_kwargs",
)


def arguments_are_passed_on_by_name(config: Config) -> Iterator[str]:
    for option in _MAPPINGS:
        value = attrgetter(option)(config)
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            yield f"{option}={value} is no mapping of names to values; write {option}={{NAME: VALUE}}."
    for name in config.env.chat_template_kwargs or ():
        if name in _OF_TEMPLATES or name.endswith("_token"):
            yield f"env.chat_template_kwargs has {name}, which sota_grpo sets itself or does not support; leave it out."
    for name in config.logging.wandb_kwargs or ():
        if name in _OF_WANDB:
            yield f"logging.wandb_kwargs has {name}, which sota_grpo sets itself; leave it out."
    for name in config.model.load_kwargs or ():
        if name in _OF_LOADING:
            yield f"model.load_kwargs has {name}: {_OF_LOADING[name]}; leave it out."


def every_stop_string_is_text(config: Config) -> Iterator[str]:
    stop = config.inference_model.stop
    if not all(stop) or len(set(stop)) < len(stop):
        yield "<inference_model.stop> has an empty text, or one twice; remove it."


def tasks_of_a_mixture_keep_the_rules(config: Config) -> Iterator[str]:
    for name, task in task_configs(config).items() if config.env.mixture is not None else ():
        yield from (f"env.mixture.{name}: {sentence}" for rule in RULES for sentence in faults(rule, task))


def options_of_a_mixture_are_read_by_one_of_its_tasks(config: Config) -> Iterator[str]:
    for name, default in unread_options(config):
        yield f"{_unused(name, default, 'on any task of env.mixture')}, or give it to a task that reads it."


def token_limits_of_a_mixture_are_within_the_runs(config: Config) -> Iterator[str]:
    longest = longest_response(config)
    for name, task in task_configs(config).items() if config.env.mixture is not None else ():
        limit = task.inference_model.max_tokens
        if limit > config.inference_model.max_tokens:
            option = f"env.mixture.{name}.max_tokens={limit}"
            yield f"{option} exceeds <inference_model.max_tokens>; use inference_model.max_tokens={limit}."
        if (total := limit * task.env.max_steps) < longest and config.algorithm.overlong_buffer:
            yield (
                f"<algorithm.overlong_buffer> counts back from {longest} tokens, the most of any task, but "
                f"env.mixture.{name} (max_tokens={limit}, max_steps={task.env.max_steps}) ends at {total}; leave the "
                "buffer out, or give all tasks the same limit."
            )


_MODULES = (algorithm_rules, memory_rules)
_HERE = {__name__, *(module.__name__ for module in _MODULES)}
_EVERY = [*globals().values(), *(rule for module in _MODULES for rule in vars(module).values())]
_FIRST = (every_value_can_be_saved, addresses_of_servers_have_no_secrets, a_mixture_names_tasks_and_their_options)
_GENERATORS = [one for one in _EVERY if isgeneratorfunction(one) and one.__module__ in _HERE and one.__name__[0] != "_"]
#: In the order of checks: configs are made from the entries of a mixture by rules after these.
RULES = tuple(dict.fromkeys([*_FIRST, *_GENERATORS]))


class ConfigError(UserError, ValueError):
    """A config that breaks a rule."""


def faults(rule: Callable[[Config], Iterator[str]], config: Config) -> Iterator[str]:
    """Yield the messages of a rule that ``config`` breaks, with the values of the options that they name."""
    return (filled(sentence, config) for sentence in rule(config))


def validate(config: Config) -> None:
    """Raise :class:`ConfigError` for the first rule that ``config`` breaks; UserError if a named file is unusable."""
    for rule in RULES:
        for sentence in faults(rule, config):
            raise ConfigError(sentence)
