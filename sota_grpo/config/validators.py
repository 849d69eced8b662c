"""Rules that a config must keep, each named as the rule it states.

A rule yields a sentence for what breaks it, with the values involved and the smallest fix. None of them edits anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import isgeneratorfunction
from urllib.parse import urlsplit

from sota_grpo.config import (
    Config,
    JudgeConfig,
    ModelConfig,
    algorithm_rules,
    memory_rules,
    most_kept,
    responses_per_step,
    reward_names,
)
from sota_grpo.config.memory_rules import device_count
from sota_grpo.config.mixture import (
    READERS,
    a_mixture_names_tasks_and_their_options,
    has_own_group_sizes,
    longest_response,
    replies,
    task_configs,
    turns_of_tasks,
    unread_options,
)
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.engines import ENGINES, is_server, temperature_fault
from sota_grpo.errors import UserError
from sota_grpo.rewards.functions import PASSED, PICKLED
from sota_grpo.rewards.judge.questions import CHAT
from sota_grpo.rl.objective_files import in_file
from sota_grpo.rl.records import MOST_KEPT
from sota_grpo.tasks import TASKS, parameters, task_class
from sota_grpo.tasks.reasoning_gym import task_faults
from sota_grpo.tasks.servers import FORMS, server_of
from sota_grpo.tasks.wrappers import naming_faults
from sota_grpo.text import one_line


def every_choice_is_one_of_its_values(config: Config) -> Iterator[str]:
    for name, item, value in walk(config):
        choices = item.metadata["choices"]
        if name == "algorithm.objective" and in_file(value):  # it is looked at by the rules that ask what it reads
            continue
        if choices and value != item.default and value not in choices:
            others = [choice for choice in choices if choice != item.default]
            yield f"{name}={value} is not one of {', '.join(filter(None, [item.default, *others]))}."


_AMOUNTS = (
    *("env.num_envs", "env.repeats", "inference_model.max_tokens", "train.total_dialog_turns"),
    *("train.dialog_turns_per_batch", "train.optim_batch_size", "train.epochs", "train.micro_batch_tokens"),
    *("train.keep_checkpoints", "eval.num_samples"),
    *("optimizer.lr", "train_model.lora.r", "algorithm.correction_cap", "env.max_samples"),
    *("inference_model.max_num_seqs", "inference_model.max_model_len", "train_model.num_devices"),
    *("inference_model.num_devices", "ref_model.num_devices", "inference_model.tensor_parallel_size"),
    *("train_model.tensor_parallel_size", "train_model.fsdp_size"),
    *("train.weight_update_frequency", "env.timeout_s", "env.max_steps", "ray.timeout_s"),
    *("algorithm.top_entropy_quantile", "algorithm.entropy_target"),
)


def every_amount_is_positive(config: Config) -> Iterator[str]:
    values = {name: value for name, _, value in walk(config)}
    for name in _AMOUNTS:
        if isinstance(values[name], (int, float)) and values[name] <= 0:
            yield f"{name}={values[name]} must be above 0."


_MAY_BE_NEGATIVE = ("seed", "reward.correct", "reward.wrong", "reward.no_answer", "reward.success_above")


def every_coefficient_is_not_negative(config: Config) -> Iterator[str]:
    for name, _, value in walk(config):
        if isinstance(value, (int, float)) and value < 0 and name not in _MAY_BE_NEGATIVE:
            yield f"{name}={value} must not be negative."


_SHARES = (
    *("inference_model.gpu_memory_utilization", "inference_model.top_p", "inference_model.min_p"),
    "algorithm.top_entropy_quantile",
)
_DECAYS = ("train_model.lora.dropout", "optimizer.beta1", "optimizer.beta2")


def every_share_lies_between_0_and_1(config: Config) -> Iterator[str]:
    """At 1 a moving average never moves, and a dropout drops everything."""
    values = {name: value for name, _, value in walk(config)}
    for name in _SHARES:
        if not 0 <= values[name] <= 1:
            yield f"{name}={values[name]} must lie between 0 and 1."
    for name in _DECAYS:
        if not 0 <= values[name] < 1:
            yield f"{name}={values[name]} must be at least 0 and below 1."


def a_collection_is_made_of_whole_groups(config: Config) -> Iterator[str]:
    repeats = config.env.repeats
    for name, value in (
        ("train.dialog_turns_per_batch", config.train.dialog_turns_per_batch),
        ("env.num_envs", config.env.num_envs),
    ):
        if value % repeats and not (name.startswith("train") and config.train.weight_update_frequency):
            nearest = max(repeats, round(value / repeats) * repeats)
            yield f"{name}={value} is not divisible by the group size env.repeats={repeats}; use {name}={nearest}."


def groups_of_different_sizes_are_not_cut(config: Config) -> Iterator[str]:
    """An optimizer step of such groups has a number of groups, not of responses."""
    size, repeats = config.train.optim_batch_size, config.env.repeats
    if has_own_group_sizes(config) and size % repeats:
        yield (
            f"train.optim_batch_size={size} counts groups of env.repeats={repeats} where tasks of env.mixture have "
            f"repeats of their own; use train.optim_batch_size={max(repeats, round(size / repeats) * repeats)}."
        )


def a_collection_is_made_of_whole_optimizer_steps(config: Config) -> Iterator[str]:
    responses, size = responses_per_step(config), config.train.optim_batch_size
    if responses % size:
        yield (
            f"train.dialog_turns_per_batch={responses} is not divisible by train.optim_batch_size={size}; "
            f"use train.optim_batch_size={responses}."
        )


def the_run_has_at_least_one_step(config: Config) -> Iterator[str]:
    total, size = config.train.total_dialog_turns, responses_per_step(config)
    if total < size:
        yield (
            f"train.total_dialog_turns={total} is less than one training step, {size} responses; "
            f"use train.total_dialog_turns={size} or a smaller collection."
        )


def sampling_is_the_policys_own_distribution(config: Config) -> Iterator[str]:
    """Where a part of the vocabulary is left out, the learner has to know which, token by token."""
    sampling, name = config.inference_model, config.engine.name
    truncated = most_kept(config) > 0
    said = f"inference_model.top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}"
    if truncated and name in ENGINES and not ENGINES[name].tells_kept:
        others = ", ".join(one for one, kind in ENGINES.items() if kind.tells_kept)
        yield (
            f"{said} sample from a truncated distribution, and engine={name} does not say which tokens it keeps, so "
            f"that the importance ratio of every token would be biased; use one of {others}, or top_p=1.0, top_k=0 "
            "and min_p=0.0."
        )
    if truncated and config.train_model.log_probs == "liger":
        yield (
            f"train_model.log_probs=liger computes the whole vocabulary, and {said} leave a part of it; use "
            "train_model.log_probs=tiled."
        )
    if sampling.top_p <= 0:
        yield f"inference_model.top_p={sampling.top_p} keeps no token; use a share above 0."
    if not 0 <= sampling.top_k <= MOST_KEPT:
        yield (
            f"inference_model.top_k={sampling.top_k} is not between 0 and {MOST_KEPT}, the most ids that travel with "
            f"a token; use {MOST_KEPT}, or 0 to keep every token."
        )
    if sampling.top_k == 1 or sampling.min_p >= 1:
        yield f"{said} keep one token, so that every sibling is the same response; use top_k=0 and min_p below 1."
    if sampling.temperature == 0:
        yield "inference_model.temperature=0 gives every sibling the same response; use a temperature above 0."
    if (fault := temperature_fault(config.engine.name, sampling.temperature)) is not None:
        yield fault


def difficulty_is_one_to_five(config: Config) -> Iterator[str]:
    if not 1 <= config.env.difficulty <= 5:
        yield f"env.difficulty={config.env.difficulty} must be 1, 2, 3, 4 or 5."


def the_loss_scaler_has_float32_gradients(config: Config) -> Iterator[str]:
    """fp16 autocast scales the loss, and gradients are unscaled in float32; an adapter's weights are float32 anyway."""
    dtype = config.train_model.torch_dtype
    trains_half = dtype in ("float16", "bfloat16") and not config.train_model.lora.enabled
    if config.train.precision == "fp16" and trains_half:
        yield (
            f"train.precision=fp16 scales the loss and needs float32 gradients, but train_model.torch_dtype={dtype}; "
            "use train_model.torch_dtype=float32 or train.precision=bf16."
        )


#: Half the distance between two neighbours of 0.02, a usual weight: AdamW moves a weight by about the learning rate,
#: and a smaller step is rounded away. Of 134.5 M weights in bfloat16, 0.39 % changed at 1e-6 and 1.73 % at 1e-5.
_SMALLEST_STEPS = {"bfloat16": 2.0**-14, "float16": 2.0**-17}


def trained_weights_are_fine_enough_for_the_learning_rate(config: Config) -> Iterator[str]:
    dtype, lr = config.train_model.torch_dtype, config.optimizer.lr
    smallest = _SMALLEST_STEPS.get(dtype, 0.0)
    if lr < smallest and not config.train_model.lora.enabled:
        yield (
            f"train_model.torch_dtype={dtype} rounds away most steps of optimizer.lr={lr:g}: a weight of 0.02 moves by "
            f"{smallest:.1g} or not at all; use train_model.torch_dtype=float32 (train.precision=bf16 computes in "
            "half precision all the same), or train_model.lora.enabled=true, whose adapter is in float32."
        )


def options_that_the_task_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    if config.env.mixture is not None:  # asked of each of its tasks
        return
    for name, (value, default) in changed_options(config).items():
        parameter = READERS.get(name)
        if parameter is not None and parameter not in parameters(config.env.dataset):
            others = ", ".join(task for task in TASKS if parameter in parameters(task))
            yield (
                f"{name}={value} has no effect on env.dataset={config.env.dataset}; leave it at "
                f"{'null' if default is None else default} or choose another env.dataset ({others})."
            )


#: Options that change nothing where functions take the place of a task's own reward.
OWN_TERMS = tuple(name for name in READERS if name.startswith("reward.") or name == "env.format_weight")


def reward_functions_replace_the_tasks_own_terms(config: Config) -> Iterator[str]:
    is_replaced = config.reward.path is not None and "builtin" not in reward_names(config)
    if config.env.mixture is not None or not (is_replaced or judges_alone(config)):
        return
    for name, (value, _) in changed_options(config).items():
        if name in OWN_TERMS and not is_replaced:
            yield f"{name}={value} has no effect beside reward.judge.alone=true; leave one of them out."
        elif name in OWN_TERMS:
            yield (
                f"{name}={value} has no effect beside reward.path={config.reward.path}, whose functions take the place "
                "of the task's own reward; leave it out, or name builtin in reward.name beside them."
            )


def an_evaluation_has_problems(config: Config) -> Iterator[str]:
    for each in task_configs(config).values():
        env = each.env
        has_test_split = env.dataset_path is None and "num_train" not in parameters(env.dataset)  # one on the hub
        if config.eval.mode == "on" and env.num_heldout == 0 and env.eval_path is None and not has_test_split:
            yield "env.num_heldout=0 leaves eval.mode=on nothing to measure; use eval.mode=off, or give env.eval_path."


def a_size_chooses_a_model_that_has_no_name(config: Config) -> Iterator[str]:
    if config.model.name is not None and config.model.size != ModelConfig().size:
        yield (
            f"model.size={config.model.size} has no effect beside model.name={config.model.name}; add model.name=null "
            "or leave the size out."
        )


def a_table_has_a_place(config: Config) -> Iterator[str]:
    if config.env.mixture is not None:
        return
    name = config.env.dataset
    is_made_up = "path" not in parameters(name)
    if config.env.dataset_path is None and not is_made_up and not hasattr(task_class(name), "hub_name"):
        yield f"env.dataset={name} is your own data; give env.dataset_path=FILE (or a name on the hub)."


def a_mixture_names_its_tasks(config: Config) -> Iterator[str]:
    if "tasks" in parameters(config.env.dataset):
        yield from task_faults(config.env.tasks)


def several_turns_have_something_to_say(config: Config) -> Iterator[str]:
    env, task = config.env, task_class(config.env.dataset)
    if env.mixture is not None:  # of which one task may, and another may not
        if env.max_steps > 1 and max(turns_of_tasks(config).values()) == 1:
            yield (
                f"env.max_steps={env.max_steps} has no effect on any task of env.mixture, which say nothing after a "
                "response; add env.reasoning=true, which asks to think again, or leave it at 1."
            )
        return
    if env.reasoning and env.max_steps < 2:
        yield "env.reasoning=true asks again after a wrong response, and env.max_steps=1 leaves no turn for it; use 2."
    if env.max_steps < 2 and getattr(task, "calls_tools", False):
        yield f"env.dataset={env.dataset} offers a tool, and env.max_steps=1 leaves no turn to answer it; use 3."
    if env.max_steps > 1 and not env.reasoning and not replies(config) and not offers_tools(config):
        yield (
            f"env.max_steps={env.max_steps} has no effect on env.dataset={env.dataset}, which says nothing after a "
            "response; add env.reasoning=true, which asks to think again, or leave it at 1."
        )


def offers_tools(config: Config) -> bool:
    """Whether the policy may call tools by its chat template."""
    return config.env.tools is not None or config.env.environment is not None


def tools_have_turns_to_answer_in(config: Config) -> Iterator[str]:
    env = config.env
    if env.mixture is not None:  # asked of each of its tasks
        if env.environment is not None:
            yield (
                f"env.environment={env.environment} would have the rows of every task of env.mixture; give it to the "
                "task whose rows it reads, as env.mixture.NAME.environment."
            )
        return
    if not offers_tools(config):
        return
    option, value = ("env.tools", env.tools) if env.environment is None else ("env.environment", env.environment)
    if env.tools is not None and env.environment is not None:
        yield f"env.tools={env.tools} and env.environment={value}: make the functions methods of the environment."
    if (server := server_of(env.environment)) is not None:
        yield from filter(None, [server.fault()])
    elif value is not None and in_file(value) is None and not value.endswith(PICKLED) and value != PASSED:
        servers = f" (or a server: {FORMS})" if env.tools is None else ""
        yield f"{option}={value} is no FILE.py:NAME; name the file, a colon, and what it defines{servers}."
    if env.max_steps < 2:
        yield f"{option}={value} offers tools, and env.max_steps=1 leaves no turn to hear them; use 4."
    if env.reasoning or replies(config):
        answers = "env.reasoning=true" if env.reasoning else f"env.dataset={env.dataset}"
        yield f"{option}={value} answers the calls of tools, and {answers} answers every response; use one of them."


def every_transform_is_in_a_file(config: Config) -> Iterator[str]:
    for value in config.env.transforms:
        if in_file(value) is None:
            yield f"env.transforms has {value}, which is no FILE.py:NAME; name the file, a colon, and a transform."


def every_reward_function_has_a_weight(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.path is None:
        options: dict[str, object] = {"name": reward.name, "weights": reward.weights}
        if config.env.environment is None and not judges_alone(config):  # these do not say what is a success
            options["success_above"] = reward.success_above or None
        for name, value in options.items():
            if value is not None:
                yield f"reward.{name}={value} belongs to reward functions; give reward.path=FILE or leave it out."
        return
    names = reward_names(config)
    if names == ["builtin"]:
        yield f"reward.name=builtin asks nothing of reward.path={reward.path}; leave both out."
    if not all(isinstance(name, str) for name in names):
        yield f"reward.name={reward.name} is not the name of a function, or a list of different ones."
    yield from naming_faults(names, reward.weights)


def devices_are_counted_or_named(config: Config) -> Iterator[str]:
    for name in ("train_model", "inference_model", "ref_model"):
        role = getattr(config, name)
        if role.num_devices is not None and role.devices is not None:
            yield (
                f"{name}.num_devices={role.num_devices} and {name}.devices={list(role.devices)} say the same thing "
                f"twice; drop one of them."
            )
        if role.devices is not None and len(role.devices) == 0:
            yield f"{name}.devices=[] names no device; name one or leave it out."


def sync_has_no_age(config: Config) -> Iterator[str]:
    if config.mode == "sync" and config.train.max_policy_age != 0:
        yield (
            f"train.max_policy_age={config.train.max_policy_age} has no meaning in mode=sync, where every token comes "
            "from the newest policy; leave it at 0 or run grpo-async.py."
        )


def sync_publishes_after_every_collection(config: Config) -> Iterator[str]:
    if config.mode == "sync" and config.train.weight_update_frequency is not None:
        yield (
            f"train.weight_update_frequency={config.train.weight_update_frequency} has no meaning in mode=sync, which "
            "publishes after every collection; leave it out or run grpo-async.py."
        )


def a_publish_is_made_of_whole_groups(config: Config) -> Iterator[str]:
    frequency, size, repeats = config.train.weight_update_frequency, config.train.optim_batch_size, config.env.repeats
    if config.mode == "async" and frequency is not None and responses_per_step(config) % repeats:
        nearest = max(repeats, round(size / repeats) * repeats)
        yield (
            f"train.weight_update_frequency={frequency} times train.optim_batch_size={size} is not divisible by the "
            f"group size env.repeats={repeats}; use train.optim_batch_size={nearest}."
        )


def a_copy_of_the_model_fills_its_devices(config: Config) -> Iterator[str]:
    engine = config.inference_model
    size = engine.tensor_parallel_size
    count = device_count(engine) or size
    if size > 0 and count % size:  # every_amount_is_positive says the rest
        yield (
            f"inference_model takes {count} devices and one copy of the model takes tensor_parallel_size={size}; use "
            f"inference_model.num_devices={max(1, count // size) * size}."
        )


def a_url_belongs_to_a_server(config: Config) -> Iterator[str]:
    if config.engine.url is not None and not is_server(config.engine.name):
        yield (
            f"engine.url is set and engine.name={config.engine.name} is no server; use engine=vllm_server or leave "
            "engine.url out."
        )


def a_url_is_one_engine(config: Config) -> Iterator[str]:
    count = device_count(config.inference_model)
    if config.engine.url is not None and count is not None:
        yield (
            f"engine.url={config.engine.url} is one running server, and inference_model asks for {count} devices to "
            "start engines on; leave inference_model.num_devices and devices out."
        )


def a_server_started_here_has_gpus_of_its_own(config: Config) -> Iterator[str]:
    """A server is a child of this process, and on a cluster the GPUs are Ray's to give, to actors only."""
    server, address = is_server(config.engine.name), config.ray.address
    if server and address is not None and config.engine.url is None and config.device != "cpu":
        yield (
            f"engine={config.engine.name} starts its servers on this machine, whose GPUs the cluster of ray.address="
            f"{address} gives to others; use engine=vllm there, engine.url of a server on GPUs that Ray does not have, "
            "device=cpu, or leave ray.address out."
        )


def judges_alone(config: Config) -> bool:
    """Whether a judge is all that rewards."""
    return config.reward.judge.kind is not None and config.reward.judge.alone


def a_judge_is_asked_for_what_it_can_do(config: Config) -> Iterator[str]:
    judge: JudgeConfig = config.reward.judge
    if judge.kind is None:
        for name, (value, default) in changed_options(config).items():
            if name.startswith("reward.judge."):
                left = "null" if default is None else default
                yield f"{name}={value} belongs to a judge; give reward.judge.kind, or leave it at {left}."
        return
    for option in ("rubric", "reference") if judge.kind != CHAT else ():
        if value := getattr(judge, option):
            yield f"reward.judge.{option}={value} has no effect on reward.judge.kind={judge.kind}; leave it out."
    if judge.url is None:
        yield f"reward.judge.kind={judge.kind} needs a server; give reward.judge.url=http://HOST:PORT."
    else:
        yield from _url_faults(judge.url)
    if judge.weight == 0 and config.env.mixture is None:
        yield "reward.judge.weight=0 asks the judge for nothing; leave reward.judge.kind out."
    if judge.alone and config.env.reasoning:
        yield "reward.judge.alone=true has no rule for thinking again (env.reasoning); use one of them."
    if judge.alone and config.reward.path is not None and config.env.mixture is None:
        yield (
            f"reward.judge.alone=true leaves no place for the functions {', '.join(map(str, reward_names(config)))} of "
            "reward.path; leave one of them out."
        )


def _url_faults(url: str) -> Iterator[str]:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        yield f"reward.judge.url={one_line(url)} is no address ({error}); write http://HOST:PORT."
        return
    if address.scheme not in ("http", "https") or not host:
        yield f"reward.judge.url={one_line(url)} is no address of a server; write http://HOST:PORT."
    if address.username is not None or address.password is not None or address.query:
        yield (
            "reward.judge.url has a user name, a password or a query in it, which the run would save; the key of a "
            "judge is the environment variable SOTA_GRPO_JUDGE_KEY."
        )


_MAPPINGS = (
    *("env.chat_template_kwargs", "inference_model.engine_kwargs", "model.load_kwargs"),
    "reward.judge.extra_body",
)


def arguments_are_passed_on_by_name(config: Config) -> Iterator[str]:
    for name, _, value in walk(config):
        is_named = isinstance(value, Mapping) and all(isinstance(one, str) for one in value)
        if name in _MAPPINGS and value is not None and not is_named:
            yield f"{name}={value} is no mapping of names; write {name}={{NAME: VALUE}}."


_OF_TEMPLATES = (  # what this program gives to apply_chat_template, or what changes what that returns
    *("conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "tools", "documents", "processor_kwargs"),
)


def a_chat_template_is_given_nothing_of_ours(config: Config) -> Iterator[str]:
    for name in config.env.chat_template_kwargs or ():
        if name in _OF_TEMPLATES or name.endswith("_token"):
            yield (
                f"env.chat_template_kwargs has {name}, which prompts are made with here; leave it out (tools are "
                "offered by tasks)."
            )


def every_stop_string_is_text(config: Config) -> Iterator[str]:
    stop = config.inference_model.stop
    if not all(stop) or len(set(stop)) < len(stop):
        yield f"inference_model.stop={list(stop)} has an empty text, or one twice; leave that out."


def further_arguments_go_to_a_vllm_that_is_started_here(config: Config) -> Iterator[str]:
    name = config.engine.name
    if not config.inference_model.engine_kwargs:
        return
    if name in ENGINES and not ENGINES[name].takes_kwargs:
        others = ", ".join(one for one, kind in ENGINES.items() if kind.takes_kwargs)
        yield f"inference_model.engine_kwargs has no effect on engine={name}; leave it out or use {others}."
    if config.engine.url is not None:
        yield "inference_model.engine_kwargs has no effect on a server that runs already (engine.url); leave it out."


_OF_LOADING = {  # arguments of from_pretrained that have no effect or a wrong one, and what stands for them
    **dict.fromkeys(("config", "state_dict", "output_loading_info"), "the model is loaded as it was saved"),
    **dict.fromkeys(("dtype", "torch_dtype"), "use train_model.torch_dtype and ref_model.torch_dtype"),
    **{"trust_remote_code": "use model.trust_remote_code", "attn_implementation": "use model.attn_implementation"},
    **dict.fromkeys(("device_map", "device_mesh", "max_memory"), "use train_model.num_devices"),
    **dict.fromkeys(("tp_plan", "tp_size", "offload_folder"), "use train_model.num_devices"),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), "use model.quantization"),
    "gguf_file": "weights are trained whole",
    **dict.fromkeys(("revision", "code_revision", "subfolder"), "engine and tokenizer need it too: give the folder"),
    **dict.fromkeys(("token", "use_auth_token"), "it would be saved with the run; use HF_TOKEN"),
    "weights_only": "a pickle is code",
}


def a_model_is_loaded_with_nothing_of_ours(config: Config) -> Iterator[str]:
    for name in config.model.load_kwargs or ():
        if name in _OF_LOADING:
            yield f"model.load_kwargs has {name}: {_OF_LOADING[name]}; leave it out."


def tasks_of_a_mixture_keep_the_rules(config: Config) -> Iterator[str]:
    if config.env.mixture is None:
        return
    for name, each in task_configs(config).items():
        yield from (f"env.mixture.{name}: {sentence}" for rule in RULES for sentence in rule(each))


def options_beside_a_mixture_are_read_by_one_of_its_tasks(config: Config) -> Iterator[str]:
    for name, value, default in unread_options(config):
        yield (
            f"{name}={value} has no effect on any task of env.mixture; leave it at "
            f"{'null' if default is None else default}, or give it to a task that reads it."
        )


def token_limits_of_a_mixture_are_within_the_runs(config: Config) -> Iterator[str]:
    most, buffer = config.inference_model.max_tokens, config.algorithm.overlong_buffer
    for name, each in task_configs(config).items() if config.env.mixture is not None else ():
        limit, longest = each.inference_model.max_tokens, longest_response(config)
        if limit > most:
            yield (
                f"env.mixture.{name}.max_tokens={limit} is more than inference_model.max_tokens={most}, the "
                f"most of any task; use inference_model.max_tokens={limit}."
            )
        if (own := limit * each.env.max_steps) < longest and buffer:
            yield (
                f"algorithm.overlong_buffer={buffer} counts back from {longest} tokens, the most of any task, and "
                f"env.mixture.{name} (max_tokens={limit}, max_steps={each.env.max_steps}) ends at {own}; leave the "
                "buffer out, or give the tasks one limit."
            )


_MODULES = (algorithm_rules, memory_rules)
_HERE = {__name__, *(module.__name__ for module in _MODULES)}
_EVERY = [*globals().values(), *(rule for module in _MODULES for rule in vars(module).values())]
RULES = (  # in their order; of entries before what is made of them
    a_mixture_names_tasks_and_their_options,
    *(one for one in _EVERY if isgeneratorfunction(one) and one.__module__ in _HERE and one.__name__[0] != "_"),
)


class ConfigError(UserError, ValueError):
    """The config cannot be run; the message says why and what to change."""


def validate(config: Config) -> None:
    """Raise :class:`ConfigError` with the sentence of the first rule that ``config`` breaks."""
    for rule in RULES:
        for sentence in rule(config):
            raise ConfigError(sentence)
