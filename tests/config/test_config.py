"""The config cannot lie: typed, documented, validated, read."""

from __future__ import annotations

import re
import shlex
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from sota_grpo.config import Config, register, validators
from sota_grpo.config.spelling import walk
from sota_grpo.config.validators import READERS, ConfigError, faults, validate
from sota_grpo.tasks import TASKS, parameters

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "config").glob("*.yaml"))
HARDWARE = sorted(path.stem for path in (ROOT / "config" / "hardware").glob("*.yaml"))
ALGORITHMS = sorted(path.stem for path in (ROOT / "config" / "algorithm").glob("*.yaml"))


@cache
def chosen(name: str, groups: tuple[str, ...]) -> DictConfig:
    """What Hydra composes of a preset and groups such as ``algorithm=dapo``."""
    register()
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return compose(name, overrides=[*groups])


def composed(name: str = "grpo_cpu", *overrides: str) -> Config:
    """As Hydra composes it, whose time is in the choice of groups: each once, and other options are laid over it."""
    groups = tuple(one for one in overrides if (ROOT / "config" / one.partition("=")[0]).is_dir())
    config = deepcopy(chosen(name, groups))
    for one in OverridesParser.create().parse_overrides([one for one in overrides if one not in groups]):
        OmegaConf.update(config, one.key_or_group, one.value(), merge=True)
    return OmegaConf.to_object(config)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_short_composes_and_keeps_the_rules(name: str) -> None:
    assert len((ROOT / "config" / f"{name}.yaml").read_text().splitlines()) <= 30
    validate(composed(name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_composes_under_its_own_name(name: str) -> None:
    config = composed("grpo_cpu", f"algorithm={name}")
    validate(config)
    assert config.algorithm.name == name
    comment, *terms = (ROOT / "config" / "algorithm" / f"{name}.yaml").read_text().splitlines()
    assert comment.startswith("# ")
    assert len(terms) <= 6


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"grpo_cpu"}))
def test_every_preset_goes_with_all_hardware(name: str, hardware: str) -> None:
    """And its sizes are those of the hardware, whatever the preset's own: steps of 1,024 responses, 4 steps each."""
    config = composed(name, f"hardware={hardware}")
    validate(config)
    sizes = (config.train.dialog_turns_per_batch, config.train.optim_batch_size, config.train.checkpoint_frequency)
    assert sizes == (1024, 256, 10)
    assert config.env.num_envs == 256 * (config.inference_model.num_devices or 1)
    assert config.env.dataset == composed(name).env.dataset


def test_every_option_is_read() -> None:
    """By its name, outside of the rules; a task reads some by its parameters, and one labels the run in the logs."""
    package = ROOT / "sota_grpo"
    rooms = [path for room in ("assembly", "run", "recording") for path in (package / room).rglob("*.py")]
    source = "\n".join(path.read_text() for path in [*rooms, package / "config" / "__init__.py"])
    read = {name for name, _, _ in walk() if re.search(rf"\.{name.rpartition('.')[2]}\b", source)}
    read |= {option for option, name in READERS.items() if any(name in parameters(task) for task in TASKS)}
    assert {name for name, _, _ in walk()} == read | {"algorithm.name"}


KL = "policy.kl_coef=0.1"
JUDGED = "reward.judge.kind=chat reward.judge.url=http://127.0.0.1:1 "
QLORA = "model.quantization=nf4 train_model.lora.enabled=true "
SERVED = "train_model.lora.enabled=true inference_model.serve_adapter=true "
SHARED = "inference_model.num_devices=shared "
DIVIDED = "train_model.num_devices=2 train_model.tensor_parallel_size=2 "
BROKEN = {  # by rule: overrides of grpo_cpu, and a part of the sentence
    "every_choice_is_one_of_its_values": [
        ("check.mode=maybe", "strict"),
        ("train.micro_batch_tokens=full", "not one of auto or a number"),
    ],
    "sampling_is_the_policys_own_distribution": [
        ("engine=vllm_server inference_model.min_p=0.1", "use one of vllm, transformers, or top_p=1.0,"),
        ("inference_model.temperature=3 engine=vllm", "use 2.0, or engine=transformers"),
        ("inference_model.temperature=0.005 engine=vllm_server", "use 0.01, or engine=transformers"),
        ("inference_model.top_k=1", "keep one token"),
    ],
    "a_group_baseline_has_siblings": [
        ("env.repeats=1", "use 2 or more"),
        ("env.repeats=1 algorithm.distill_coef=1 algorithm.advantage_coef=0.1 ref_model.name=other", "use 2 or more"),
        ("algorithm=gdpo env.repeats=1", "decouple_terms"),
        ("env.repeats=1 algorithm=dapo algorithm.baseline=none algorithm.scale=none", "dynamic_sampling"),
    ],
    "overlong_buffer_fits_the_response": [
        ("algorithm.overlong_buffer=100 inference_model.max_tokens=96", "max_tokens=96")
    ],
    "devices_are_counted_or_named": [
        ("ref_model.num_devices=1 ref_model.devices=[0]", "ref_model"),
        (SHARED + "inference_model.devices=[0]", "and inference_model.devices=[0]"),
        ("train_model.devices=[]", "names no device"),
    ],
    "distillation_has_a_teacher": [
        ("algorithm.distill_coef=1", "another teacher than tiny"),
        ("algorithm.advantage_coef=0", "leave it at 1.0"),
        ("ref_model.name=other", "add algorithm.distill_coef=1 (a teacher) or"),
        ("algorithm.distill_coef=1 ref_model.name=other policy.kl_coef=0.1", "use policy.kl_coef=0"),
        ("algorithm=dapo algorithm.distill_coef=1 ref_model.name=other", "dynamic_sampling=false"),
        ("algorithm=gmpo algorithm.distill_coef=1 ref_model.name=other", "weighs whole responses"),
    ],
    "sync_has_no_age": [
        ("train.max_policy_age=1", "max_policy_age=1"),
        ("train.sampler=own.py:Own", "train.sampler=own.py:Own has no effect"),
    ],
    "shared_devices_are_used_in_turn": [
        (SHARED + "mode=async train.max_policy_age=1", "use mode=sync, or give"),
        (SHARED + "engine=sglang_server", "or give inference_model.num_devices a number"),
        (SHARED + "engine=vllm_server engine.url=http://h:1", "leave one of them out"),
    ],
    "a_mean_reward_that_divides_is_not_negative": [
        ("algorithm=maxrl algorithm.overlong_buffer=8", "algorithm.overlong_buffer=0"),
        ("algorithm=maxrl policy.kl_coef=0.1 train.kl_coef_in_loss=false", "policy.kl_coef=0"),
        ("algorithm=maxrl env.dataset=math", "use reward.wrong=0 or algorithm.scale=group_std"),
    ],
    "decoupled_terms_are_those_of_the_task": [
        ("algorithm=gdpo policy.kl_coef=0.1 train.kl_coef_in_loss=false", "train.kl_coef_in_loss=true"),
        ("algorithm=gdpo algorithm.scale=group_mean", "algorithm.scale=batch_std"),
    ],
    "options_that_the_objective_does_not_read_keep_their_default": [
        ("algorithm=cispo algorithm.dual_clip=null", "use algorithm.dual_clip=3.0 or"),
        ("algorithm=rloo algorithm.clip_high=1", "clip_high=0.2 or"),
    ],
    "trained_weights_are_fine_enough_for_loss_scaler_and_learning_rate": [
        ("train.precision=fp16 train_model.torch_dtype=float16", "train_model.torch_dtype=float32"),
        ("train_model.torch_dtype=bfloat16 optimizer.lr=6e-5", "0.02 moves by 6e-05 or not at all"),
    ],
    "options_that_the_task_does_not_read_keep_their_default": [
        ("env.dataset=math reward.path=r.py reward.wrong=-2", "leave it at -1.0, or add builtin to reward.name"),
        (JUDGED + "reward.judge.alone=true env.dataset=math reward.wrong=-2", "reward.wrong=-2.0"),
        ("'env.tasks={gcd: 1}'", "env.tasks"),
        ("env.dataset=gsm8k reward.wrong=-2", "leave it at -1.0 or choose another env.dataset"),
    ],
    "an_evaluation_has_problems": [
        ("env.dataset=table env.dataset_path=rows.jsonl env.num_heldout=0", "nothing to measure; use eval.mode=off"),
        ("env.num_heldout=0", "use eval.mode=off, or give env.eval_path"),
        ("env.dataset=table env.dataset_path=some/sums env.num_heldout=0", "use eval.mode=off"),
    ],
    "a_target_and_a_best_checkpoint_need_evaluations": [
        ("eval.target=0.3 eval.every=0", "eval.every=0; use eval.mode=on eval.every=8"),
        ("train.keep_best=eval/accuracy eval.mode=off eval.every=2", "needs evaluations during training"),
        ("train.keep_best=reward eval.every=2", "use train.keep_best=eval/accuracy"),
    ],
    "every_value_can_be_saved": [
        (r"'env.system_prompt=Write \${answer}.'", "env.system_prompt has '${', which a saved config cannot hold"),
        (
            "'env.system_prompt=\"One\x85two\"'",
            r"env.system_prompt has '\x85', which a saved config cannot hold; remove",
        ),
        ("\"env.chat_template_kwargs={date:'\ud800'}\"", r"env.chat_template_kwargs has '\ud800', which"),
    ],
    "no_text_is_empty_in_place_of_null": [
        ("model.name=", "model.name is an empty text; give a value, or model.name=null")
    ],
    "a_size_chooses_a_model_that_has_no_name": [("model.size=3B", "leave it at 1.5B, or add model.name=null")],
    "every_transform_and_sampler_is_in_a_file": [
        ("env.transforms=[Mine]", "Mine, which is no FILE.py:NAME"),
        ("mode=async train.sampler=Mine", "train.sampler=Mine is no FILE.py:NAME"),
    ],
    "every_reward_function_has_a_weight": [
        ("reward.path=r.py reward.name=builtin", "leave both out"),
        ("reward.name=fn", "reward.path=FILE"),
        ("reward.path=r.py reward.name=[a,a]", "give different names"),
        ("reward.path=r.py reward.name=7", "reward.name=7 is not the name"),
    ],
    "an_agent_makes_its_own_requests": [
        ("env.agent=a.py:run", "env.max_steps=1; use 16"),
        ("env.agent=a.py:run env.max_steps=4 env.tools=b.py:add", "env.tools=b.py:add has no effect"),
        ("env.agent=a.py:run env.max_steps=4 env.reasoning=true", "env.reasoning=true has no effect"),
    ],
    "tools_have_turns_to_answer_in": [
        ("env.tools=t.py:f", "use env.max_steps=4"),
        ("env.tools=t env.max_steps=2", "is no FILE.py:NAME"),
        ("'env.mixture={a: {}}' env.environment=e.py:E env.max_steps=2", "give it to the task whose rows it reads, as"),
        ("env.tools=t.py:f env.environment=e.py:E env.max_steps=2", "make the functions its methods"),
        ("env.environment=e.py:E env.max_steps=2 env.reasoning=true", "env.reasoning=true answers every response"),
    ],
    "arguments_are_passed_on_by_name": [
        ("model.load_kwargs=[a]", "write model.load_kwargs={NAME: VALUE}"),
        ("'env.chat_template_kwargs={1: a}'", "no mapping of names"),
        ("'env.chat_template_kwargs={tools: []}'", "has tools"),
        ("'env.chat_template_kwargs={eos_token: a}'", "has eos_token"),
        ("'model.load_kwargs={load_in_4bit: true}'", "use model.quantization"),
        ("'logging.wandb_kwargs={mode: offline}'", "logging.wandb_kwargs has mode"),
    ],
    "every_stop_string_is_text": [
        ("'inference_model.stop=[a,'\"'\"''\"'\"']'", "an empty text, or one twice"),
        ("inference_model.stop=[a,a]", "an empty text, or one twice"),
    ],
    "a_mixture_names_tasks_and_their_options": [
        ("'env.mixture={a: {weight: 0}}'", "env.mixture.a.weight=0"),
        ("'env.mixture={}'", "env.mixture={} has no task"),
        ("'env.mixture={a: 5}'", "env.mixture.a=5 is no mapping"),
        ("'env.mixture={a: {datset: gsm8k}}'", "env.mixture.a.datset is no option of an entry; did you mean dataset?"),
        ("'env.mixture={a: {env: {}}}'", "use weight, dataset_path, "),
        ("'env.mixture={a: {dataset: nope}}'", "env.mixture.a.dataset=nope is not one of gsm8k, "),
        ("'env.mixture={a/b: {}}'", "rename it"),
        ("'env.mixture={accuracy: {}}'", "env.mixture.accuracy has the name of the accuracy on all tasks; rename it."),
        ("'env.mixture={a: {difficulty: hard}}'", "Value 'hard' of type 'str' could not be converted to Integer."),
    ],
    "tasks_of_a_mixture_keep_the_rules": [
        ("\"env.mixture={a: {tools: 't.py:f'}}\"", "use env.max_steps=4"),
        ("'env.mixture={a: {max_steps: 2}}'", "add env.reasoning=true, which asks the policy"),
    ],
    "token_limits_of_a_mixture_are_within_the_runs": [
        ("'env.mixture={a: {max_tokens: 65}}'", "use inference_model.max_tokens=65"),
        ("'env.mixture={a: {max_tokens: 60}, b: {}}' algorithm.overlong_buffer=8", "max_steps=1) ends at 60"),
        ("'env.mixture={b: {reasoning: true, max_steps: 2}, a: {}}' algorithm.overlong_buffer=8", "back from 128"),
    ],
    "an_optimizer_trains_what_it_can": [
        ("optimizer.name=muon train_model.lora.enabled=true", "use optimizer.name=adamw"),
        ("optimizer.name=adamw_8bit train_model.num_devices=2", "=adamw or train_model.num_devices=1."),
        ("optimizer.name=adamw_8bit train_model.devices=[3,1,2]", "or train_model.devices=[3]."),
    ],
    "the_learners_devices_are_a_product": [
        ("train_model.num_devices=5 train_model.tensor_parallel_size=2", "5 devices; use train_model.num_devices=4"),
        ("train_model.devices=[4,3,2] train_model.tensor_parallel_size=2", "3 devices; use train_model.devices=[4,3]."),
        ("train_model.devices=[4] train_model.tensor_parallel_size=2", "; use 2 devices in train_model.devices."),
        (
            "train_model.num_devices=6 train_model.tensor_parallel_size=2 train_model.fsdp_size=2",
            "use train_model.num_devices=4",
        ),
    ],
    "matrices_are_divided_where_that_is_tested": [
        (DIVIDED + "optimizer.name=muon", "use adamw"),
        (DIVIDED + "train_model.compile=true", "leave it out"),
        (DIVIDED + "train_model.lora.enabled=true train_model.lora.dropout=0.1", "use train_model.lora.dropout=0"),
    ],
    "only_frozen_weights_are_in_4_bits": [
        ("model.quantization=nf4", "add train_model.lora.enabled=true"),
        (QLORA + "train_model.num_devices=2", "one device, but it has 2; use train_model.num_devices=1 or"),
        (QLORA + "train_model.compile=true", "leave it out"),
        (QLORA + "policy.kl_coef=0.01 ref_model.num_devices=1", "use policy.kl_coef=0, or mode=sync on one device"),
    ],
    "an_adapter_is_served_by_a_synchronous_vllm": [
        ("inference_model.serve_adapter=true", "add train_model.lora.enabled=true"),
        (SERVED + "engine=transformers", "has no effect on engine=transformers"),
        (SERVED + "mode=async", "mode=async, several devices"),
        (SERVED + "inference_model.tensor_parallel_size=2", "leave it out"),
        (SERVED + "model.quantization=nf4", "leave one of these options out"),
    ],
    "both_betas_are_decays": [("optimizer.betas=[0.9]", "two numbers"), ("optimizer.betas=[0.9,1]", "below 1")],
    "every_number_is_within_its_limits": [
        ("train.epochs=0", "train.epochs"),
        ("policy.kl_coef=-1", "policy.kl_coef"),
        ("inference_model.temperature=0", "above 0"),
        ("train_model.lora.dropout=1", "lora.dropout=1"),
        ("algorithm.dual_clip=1", "dual_clip=1.0 must be above 1"),
        ("inference_model.top_k=2000", "at most 1024"),
        ("seed=18446744073709551616", "at most 1.84467e+19"),
        ("optimizer.eps=0", "optimizer.eps=0.0 must be above 0"),
        ("env.num_heldout=10000000000000000000000000", "at most 1e+07"),
        ("env.max_samples=10000000000", "at most 1e+09"),
        ("train.grace_s=1e10", "at most 1e+09"),
        ("env.timeout_s=inf", "at most 1e+09"),
        ("reward.success_above=nan", "reward.success_above=nan must be a finite number"),
    ],
    "a_run_is_made_of_whole_steps_of_whole_groups": [
        ("train.optim_batch_size=96", "train.optim_batch_size=128"),
        ("train.total_dialog_turns=64", "total_dialog_turns=128"),
        ("env.repeats=3", "env.repeats=3"),
    ],
    "the_kl_has_the_gradient_of_its_estimator": [
        ("algorithm=deepseek_v32 policy.kl_coef=0.1 train.kl_coef_in_loss=false", "train.kl_coef_in_loss=true"),
        ("policy.kl_coef=0.1 algorithm.kl_estimator=k1", "kl_estimator=k3 (or k2)"),
    ],
    "an_entropy_bonus_and_its_tokens_have_an_effect": [
        ("algorithm=skywork_or1 algorithm.entropy_coef=2", "entropy_coef=2.0 is above 1"),
        ("algorithm=gmpo algorithm.top_entropy_quantile=0.2", "use algorithm.objective=clipped"),
    ],
    "a_correction_has_bounds_and_an_effect": [
        ("algorithm.correction_floor=0.5", "no effect on algorithm.correction=none"),
        ("algorithm=icepop algorithm.correction_floor=5", "use algorithm.correction_floor=0.2"),
        ("algorithm=vespo algorithm.correction=token", "use algorithm.correction=none"),
    ],
    "an_objective_has_a_ratio_of_its_level_or_is_on_policy": [
        ("algorithm=dppo algorithm.ratio=sequence", "clipped or cispo or sapo"),
        ("algorithm=rloo algorithm.ratio=sequence", "algorithm.ratio=token"),
        ("algorithm=rloo train.epochs=2", "train.epochs=1"),
        ("algorithm=rloo train.optim_batch_size=64 algorithm.correction=token", "train.optim_batch_size=128"),
        ("mode=async algorithm=rloo", "train.max_policy_age=0"),
    ],
    "old_policies_are_corrected_in_several_epochs": [
        ("mode=async train.max_policy_age=4 train.epochs=2", "use algorithm.correction=token or train.epochs=1"),
        ("mode=async train.epochs=2 algorithm=vespo", "use train.epochs=1"),
    ],
    "engines_fill_their_devices": [
        ("inference_model.num_devices=5 inference_model.tensor_parallel_size=2", "inference_model.num_devices=4"),
        ("inference_model.devices=[4,3,2] inference_model.tensor_parallel_size=2", "inference_model.devices=[4,3]."),
        (SHARED + "train_model.num_devices=6 inference_model.tensor_parallel_size=4", "tensor_parallel_size=2"),
    ],
    "a_url_is_one_running_server": [
        ("engine=scripted engine.url=http://127.0.0.1:1", "engine=vllm_server"),
        ("engine=vllm_server engine.url=http://h:1 inference_model.num_devices=2", "leave num_devices and devices out"),
        ("engine=vllm_server ray.address=auto device=cuda", "use engine=vllm, engine.url of a server on GPUs"),
    ],
    "engine_arguments_go_to_a_vllm_that_is_started_here": [
        ("engine=transformers 'inference_model.engine_kwargs={block_size: 8}'", "it out or use vllm, vllm_server"),
        ("engine=vllm_server engine.url=http://h:1 'inference_model.engine_kwargs={max_logprobs: 8}'", "leave it out"),
    ],
    "a_task_has_its_data": [
        ("env.dataset=table", "env.dataset_path=FILE"),
        ("env.dataset=reasoning_gym", "env.tasks={chain_sum: 1}"),
        ("env.dataset=reasoning_gym 'env.tasks={chain_sum: 1, codeio: 1}'", "codeio, which is refused"),
    ],
    "several_turns_have_an_observation": [
        ("env.reasoning=true", "env.max_steps=1 leaves no turn"),
        ("env.max_steps=3", "env.reasoning=true"),
        ("'env.mixture={a: {}}' env.max_steps=3", "on any task of env.mixture"),
    ],
    "options_of_a_mixture_are_read_by_one_of_its_tasks": [
        ("'env.mixture={a: {difficulty: 1}}' env.difficulty=2", "leave it at 4, or give it to a task that reads"),
        ("\"env.mixture={a: {tools: 't.py:f', max_steps: 2}, b: {}}\" env.max_steps=3", "on any task of env.mixture"),
        ("'env.mixture={a: {tools: null}}' env.tools=t.py:f", "has no effect on any task of env.mixture"),
    ],
    "addresses_of_servers_have_no_secrets": [
        ("engine=vllm_server \"engine.url='http://a:b@h:1'\"", "in it, which the run would save; set the server's key"),
        ("engine=vllm_server \"engine.url='http://h:1?key=b'\"", "a user name, a password or a query"),
        ("engine=vllm_server engine.url=http://h:x", "engine.url=http://h:x is no address"),
        ("engine=vllm_server \"engine.url='http://a:b@h:x'\"", "engine.url is no address"),
        ("env.dataset=code env.dataset_path=a.jsonl \"env.sandbox='https://a@h:1'\"", "env.sandbox has a user name"),
        ("env.sandbox='https://a:b@h'", "env.sandbox has a user name"),  # which this task does not read
        ("reward.judge.url='http://a:b@h'", "reward.judge.url has a user name"),  # without a judge
        ("reward.judge.kind=chat reward.judge.url=h:1", "is no address of a server"),
    ],
    "a_judge_has_a_server_and_a_weight": [
        ("reward.judge.weight=2", "leave it at 1.0, or give reward.judge.kind"),
        ("reward.judge.kind=chat", "give reward.judge.url=http://HOST:PORT"),
        ("reward.judge.kind=score reward.judge.url=http://h:1 reward.judge.rubric=Kind?", "=Kind? has no"),
        ("reward.judge.kind=classify reward.judge.url=http://h:1 reward.judge.reference=true", "leave it at false"),
        (JUDGED + "reward.judge.weight=0", "leave reward.judge.kind out"),
        (JUDGED + "reward.judge.alone=true env.reasoning=true env.max_steps=2", "use one of them"),
        (JUDGED + "reward.judge.alone=true reward.path=r.py", "the functions compute_score of reward.path"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "overrides", "expected"), [(rule, *case) for rule, cases in BROKEN.items() for case in cases]
)
def test_each_rule_says_values_and_fix(rule: str, overrides: str, expected: str) -> None:
    config = composed("grpo_cpu", *shlex.split(overrides))
    sentence = next(faults({actual.__name__: actual for actual in validators.RULES}[rule], config))
    assert expected in sentence
    assert re.search(r"[.?]$", sentence)
    with pytest.raises(ConfigError) as refused:
        validate(config)
    assert "a:b@" not in str(refused.value), "a password is not repeated by any rule"


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.dual_clip=null"],
        ["mode=async", "train.max_policy_age=4", "train.epochs=2", "algorithm.correction=token"],
        ["algorithm=gspo", "algorithm.dual_clip=2"],
        ["train.precision=fp16", "train_model.torch_dtype=float16", "train_model.lora.enabled=true"],
        ["train.precision=fp16"],
        ["train_model.torch_dtype=bfloat16", "optimizer.lr=1e-4"],
        ["train_model.torch_dtype=bfloat16", "optimizer.lr=1e-6", "train_model.lora.enabled=true"],
        ["env.max_samples=5"],
        ["env.dataset=gsm8k", "env.dataset_path=openai/gsm8k", "env.num_heldout=0"],
        ["env.dataset=ifeval", "env.dataset_path=allenai/RLVR-IFeval", "env.num_heldout=0"],
        ["env.reasoning=true", "env.max_steps=2"],
        ["env.dataset=countdown", "env.max_steps=3"],
        ["env.agent=a.py:run", "env.max_steps=2"],
        ["env.agent='python a.py'", "env.max_steps=16"],
        ["env.dataset=instructions", "env.eval_path=x.jsonl", "env.system_prompt=Hi", "reward.all_weight=1"],
        ["env.dataset=math", "reward.wrong=-2", "env.answer_format=tags"],
        ["env.dataset=reasoning_gym", "env.tasks={chain_sum: 2, gcd: {weight: 1, level: 2, max_value: 50}, lcm: 0}"],
        ["env.dataset=table", "env.dataset_path=x.parquet", "reward.path=r.py", "reward.name=fn"],
        ["reward.path=r.py", "reward.name=[a,b]", "reward.weights=[1.0,-0.5]"],
        ["env.dataset=math", "reward.path=r.py", "reward.name=[a,builtin]", "reward.wrong=-2"],
        ["model.name=null", "model.size=3B"],
        [KL, "ref_model.name=other"],
        ["algorithm.objective=cispo", "algorithm.dual_clip=2", "algorithm.kl_estimator=k3_unbiased", KL],
        ["env.repeats=1", "algorithm.distill_coef=1", "algorithm.advantage_coef=0", "ref_model.name=other"],
        ["env.chat_template_kwargs={enable_thinking: false}", "model.load_kwargs={use_safetensors: true}"],
        ["engine=vllm", "inference_model.engine_kwargs={max_logprobs: 8}", "inference_model.stop=[a,'b c']"],
        ["engine=vllm_server", "ray.address=auto", "device=cpu"],
        ["train_model.num_devices=4", "inference_model.num_devices=shared", "inference_model.tensor_parallel_size=2"],
        ["engine=vllm_server", "ray.address=auto", "device=cuda", "engine.url=http://127.0.0.1:1"],
        [*JUDGED.split(), "reward.judge.alone=true", "reward.success_above=0.5"],
        ["env.mixture={a: {}, c: {dataset: countdown}}", "env.max_steps=3"],
        ["env.mixture={a: {dataset: gsm8k}, b: {}}", "env.difficulty=2"],
        ["env.mixture={a: {}}", "env.reasoning=true", "env.max_steps=2"],
        ["env.mixture={a: {dataset: table, dataset_path: x.jsonl, reward_path: r.py, reward_name: [f, g]}}"],
        [*JUDGED.split(), "env.mixture={a: {judge_weight: 0, reward_path: r.py}, b: {}}", "reward.judge.alone=true"],
    ],
)
def test_rules_let_pass_what_works(overrides: list[str]) -> None:
    validate(composed("grpo_cpu", *overrides))


def test_every_rule_is_tested_and_edits_nothing() -> None:
    assert {*BROKEN} == {rule.__name__ for rule in validators.RULES}
    config = composed("grpo_cpu")
    before = deepcopy(config)
    validate(config)
    assert config == before
