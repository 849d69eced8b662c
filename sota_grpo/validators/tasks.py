"""The rules about the task, its dialogs and its rewards."""

from __future__ import annotations

from sota_grpo.config import Config, ModelConfig, reward_names, walk

PROCEDURAL = ("instructions", "arithmetic", "countdown", "calculator")  # they make their own problems
DIALOGS = ("countdown", "calculator")  # what they answer goes on in several turns

_FROM_DATA = ("gsm8k", "math", "ifeval", "reasoning", "table")
READERS = {  # tasks that read an option; the others refuse it
    "env.dataset_path": _FROM_DATA,
    "env.eval_path": (*_FROM_DATA, "instructions"),
    "env.system_prompt": (*_FROM_DATA, "instructions", *DIALOGS),
    "env.prompt_column": ("table",),
    "env.answer_column": ("table",),
    "env.answer_format": ("gsm8k", "math", "reasoning", "table"),
    "env.format_weight": ("gsm8k", "math", "reasoning", "countdown"),
    "env.difficulty": ("arithmetic",),
    "reward.correct": ("math",),
    "reward.wrong": ("math",),
    "reward.no_answer": ("math",),
    "reward.instructions_weight": ("ifeval", "instructions"),
    "reward.all_weight": ("ifeval", "instructions"),
    "reward.thinking_weight": ("reasoning",),
    "reward.min_think_words": ("reasoning",),
}


def options_that_the_task_does_not_read_keep_their_default(config: Config) -> str | None:
    default = {name: value for name, _, value in walk()}
    for name, _, value in walk(config):
        kept = default[name]
        if value != kept and config.env.dataset not in READERS.get(name, (config.env.dataset,)):
            return (
                f"{name}={value} has no effect on env.dataset={config.env.dataset}; leave it at "
                f"{'null' if kept is None else kept} or choose another env.dataset ({', '.join(READERS[name])})."
            )
    return None


OWN_TERMS = (  # options that change nothing where functions take the place of a task's own reward
    *("env.format_weight", "reward.correct", "reward.wrong", "reward.no_answer", "reward.instructions_weight"),
    *("reward.all_weight", "reward.thinking_weight", "reward.min_think_words"),
)


def reward_functions_replace_the_tasks_own_terms(config: Config) -> str | None:
    if config.reward.path is None or "builtin" in reward_names(config):
        return None
    default = {name: value for name, _, value in walk()}
    for name, _, value in walk(config):
        if name in OWN_TERMS and value != default[name]:
            return (
                f"{name}={value} has no effect beside reward.path={config.reward.path}, whose functions take the place "
                "of the task's own reward; leave it out, or name builtin in reward.name beside them."
            )
    return None


def a_size_chooses_a_model_that_has_no_name(config: Config) -> str | None:
    if config.model.name is not None and config.model.size != ModelConfig().size:
        return (
            f"model.size={config.model.size} has no effect beside model.name={config.model.name}; add model.name=null "
            "or leave the size out."
        )
    return None


def a_table_has_a_place(config: Config) -> str | None:
    if config.env.dataset == "table" and config.env.dataset_path is None:
        return "env.dataset=table is your own data; give env.dataset_path=FILE (or a name on the hub)."
    return None


def several_turns_have_something_to_say(config: Config) -> str | None:
    env = config.env
    if env.reasoning and env.max_steps < 2:
        return "env.reasoning=true asks again after a wrong response, and env.max_steps=1 leaves no turn for it; use 2."
    if env.max_steps < 2 and env.dataset == "calculator":
        return "env.dataset=calculator offers a calculator, and env.max_steps=1 leaves no turn to answer it; use 3."
    if env.max_steps > 1 and not env.reasoning and env.dataset not in DIALOGS:
        return (
            f"env.max_steps={env.max_steps} has no effect on env.dataset={env.dataset}, which says nothing after a "
            "response; add env.reasoning=true, which asks to think again, or leave it at 1."
        )
    return None


def every_reward_function_has_a_weight(config: Config) -> str | None:
    reward = config.reward
    if reward.path is None:
        given = {"name": reward.name, "weights": reward.weights, "success_above": reward.success_above or None}
        for name, value in given.items():
            if value is not None:
                return f"reward.{name}={value} belongs to reward functions; give reward.path=FILE or leave it out."
        return None
    names = reward_names(config)
    if names == ["builtin"]:
        return f"reward.name=builtin asks nothing of reward.path={reward.path}; leave both out."
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        return f"reward.name={reward.name} is not the name of a function, or a list of different ones."
    if reward.weights is not None and len(reward.weights) != len(names):
        return f"reward.weights has {len(reward.weights)} entries for {len(names)} functions ({', '.join(names)})."
    return None
