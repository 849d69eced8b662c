"""One run is put together: what is cheap and can be wrong first, then learner, engine and collector.

In synchronous mode on one machine all of them live in this process; else engines, references and, where there are
several, the ranks of the learner are workers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrl.envs.transforms import Compose
from transformers import AutoConfig

from sota_grpo.assembly.cluster import Cluster, visible_gpus
from sota_grpo.assembly.devices import Plan, device_name, make_plan, num_engines, resolve_device
from sota_grpo.assembly.estimate import with_micro_batches
from sota_grpo.assembly.judging import judge_metrics
from sota_grpo.assembly.learning import (
    kl_in_reward,
    make_advantage,
    make_learner,
    make_model,
    make_overlong,
    make_policy,
    make_reference,
    make_settings,
    make_transforms,
    reference_dtype,
    reference_options,
    trainable_tokenizer,
    trainer_precision,
    use_expandable_segments,
)
from sota_grpo.assembly.preflight import why_no_gpu
from sota_grpo.assembly.sampling import (
    dialog_rules,
    engine_dtype,
    engine_options,
    make_sampling,
    max_model_len,
    open_env,
    start_engine,
    task_of,
)
from sota_grpo.config import Config, has_reference, model_name, reference_name, reward_names
from sota_grpo.config.mixture import groups_per_step, has_dialogs, mean_group_size
from sota_grpo.config.validators import judges_alone
from sota_grpo.engines import Engine, resolve_engine_name, temperature_fault
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import DialogEngine
from sota_grpo.errors import UserError
from sota_grpo.functional import max_groups_admitted
from sota_grpo.policy.causal import KNOWN_TO_PACK
from sota_grpo.policy.load import from_pretrained, load_tokenizer, resolve_model_path, save_hf
from sota_grpo.policy.lora import AdapterPack, MergedWeights, packed_weights
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.functions import Functions
from sota_grpo.rewards.grading import GradingPool, own_grader
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.task import Task
from sota_grpo.source.replay_buffer import GroupReplayBuffer, Timed
from sota_grpo.source.rollouts import Rollouts
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import RemoteLearner
from sota_grpo.training.subject import NamedReference, Subject
from sota_grpo.workers.fleet import Fleet, worker_metrics
from sota_grpo.workers.instances import Instances
from sota_grpo.workers.reference import MAX_ATTEMPTS, ReferenceService
from sota_grpo.workers.rollout import FleetEngine

if TYPE_CHECKING:
    from sota_grpo.source.collector import PromptGroupCollector

logger = logging.getLogger(__name__)

WAIT_S = 3600.0  # longest wait for any sign of life from any group; dead and hung workers are found much sooner


@dataclass
class Roles:
    """Who samples, learns and refers: all that depends on whether the run has workers.

    Attributes:
        learner: a :class:`~sota_grpo.training.learner.Learner`, or its facade when it spans several processes.
        transforms: what a batch goes through before it is trained on, by phase, for the gate.
        export: writes the trained model to a folder.
        collector_options: of the collector, that follow from it.
        attend: called now and then while samples are waited for.
    """

    engine: Engine
    learner: Any
    weight_sync: EngineWeightSync
    transforms: Sequence[tuple[str, Any]]
    export: Callable[[Path], object]
    collector_options: Mapping[str, Any]
    attend: Callable[[], object] | None


@dataclass
class Parts(Roles):
    """Everything a run is made of.

    Attributes:
        rollouts: of the task's environment and the engine; the gate, the evaluator and the collector all use them.
        exact: engine and trainer both compute in float32, so that their log-probs differ by rounding only.
        opened: what lives in other processes or holds a device; the last one is closed first.
    """

    task: Task
    rollouts: Rollouts
    tokenizer: Any
    collector: PromptGroupCollector
    evaluator: Evaluator
    sampling: Sampling
    exact: bool
    opened: ExitStack

    def close(self) -> None:
        """End what lives in other processes or holds a device, each even if another fails; idempotent."""
        self.opened.close()


def build(
    config: Config,
    run_dir: Path,
    should_stop: Callable[[], bool] = lambda: False,
    functions: Functions | None = None,
) -> Parts:
    """Assemble the run. What is cheap and can be wrong (data, prompts, devices) comes before what is slow.

    Args:
        should_stop: asked while a batch is waited for; true ends the wait (``Interrupted``).
        functions: reward functions that were passed as objects (:mod:`sota_grpo.assembly.passed`).
    """
    from sota_grpo.source.collector import PromptGroupCollector  # TorchRL's collectors take seconds to import

    plan = _planned(config)
    starting("Reading the tokenizer and the data")
    tokenizer = trainable_tokenizer(config, plan.engine)
    task = task_of(config, functions)
    with ExitStack() as opened:
        env, instances = open_env(config, task, tokenizer, opened, run_dir)  # closed last: others wait for scores
        task, grader = env.task, own_grader(env.grader)
        torch.manual_seed(config.seed)
        own = with_micro_batches(config, plan, env.longest_prompt)
        if plan.workers:
            roles = _roles_in_workers(own, plan, env, tokenizer, run_dir, should_stop, opened)
        else:
            roles = _roles_here(own, plan, env, tokenizer, run_dir, opened)
        sampled_in, trained_in = config.inference_model.torch_dtype, config.train_model.torch_dtype
        in_float32 = engine_dtype(sampled_in, plan.device_type) == "float32" and trained_in in ("auto", "float32")
        sampling, engine = make_sampling(config), with_dialogs(config, env, roles.engine, instances)
        collector = PromptGroupCollector(
            env,
            engine,
            sampling=sampling,
            dialog_turns_per_batch=groups_per_step(config) * env.repeats,
            weight_sync=roles.weight_sync,
            seed=config.seed,
            refill=config.algorithm.dynamic_sampling,
            attend=roles.attend,
            as_table=True,
            **roles.collector_options,
        )
        collector.metrics_extra = judge_metrics(env.grader, collector.metrics_extra)
        opened.callback(collector.close)
        if isinstance(grader, GradingPool):
            starting("Waiting for the reward workers")
            grader.wait_ready()  # it has started beside the rest; what keeps it from starting is told before the gate
        tell_of_few_problems(config, task)
        return Parts(
            **vars(roles),
            task=task,
            rollouts=collector.rollouts,
            tokenizer=tokenizer,
            collector=collector,
            evaluator=make_evaluator(config, task, collector.rollouts),
            sampling=sampling,
            exact=in_float32 and trainer_precision(config, plan.device_type) == "fp32",
            opened=opened.pop_all(),
        )


def _planned(config: Config) -> Plan:
    device = resolve_device(config)
    if device == "cuda":
        use_expandable_segments(config)
    elif config.device == "auto" and (reason := why_no_gpu()):
        logger.warning("Training on the CPU. %s", reason)
    engine = resolve_engine_name(config.engine.name, device=device)  # if it is not installed, no cluster is asked
    if (fault := temperature_fault(engine, config.inference_model.temperature)) is not None:  # of engine=auto
        raise UserError(fault)
    plan = make_plan(config, device, visible_gpus(config) if device == "cuda" else 0, engine)
    for note in plan.notes:
        logger.info(note)
    logger.info("Device %s, engine %s.", device, plan.engine)
    return plan


def with_dialogs(config: Config, env: TaskEnv, engine: Engine, instances: Mapping[str, Instances]) -> Engine:
    """``engine`` itself, or what samples whole dialogs with it, where a task has several turns."""
    rules = dialog_rules(config, env, instances, engine.max_model_len)
    return DialogEngine(engine, rules) if rules else engine


def timed(transforms: Sequence[tuple[str, Any]]) -> Compose:
    """One transform of a batch, of these in order; each phase's seconds are a metric."""
    return Compose(*(Timed(phase, transform) for phase, transform in transforms))


def make_evaluator(config: Config, task: Task, rollouts: Rollouts) -> Evaluator:
    """The evaluator on the first ``eval.num_samples`` held-out problems."""
    # a success may be no more than a reward above the limit
    is_replaced = config.reward.path is not None and "builtin" not in reward_names(config)
    rewards_decide = config.env.mixture is None and (is_replaced or judges_alone(config))
    return Evaluator(
        rollouts,
        task.heldout[: config.eval.num_samples],
        max_tokens=config.inference_model.max_tokens,
        avg_at_k=config.eval.avg_at_k,
        seed=config.seed,
        success_above=config.reward.success_above if rewards_decide else None,
    )


def tell_of_few_problems(config: Config, task: Task) -> None:
    """Where fewer problems are held out than are to be measured."""
    wanted, count = config.eval.num_samples, len(task.heldout)
    if config.eval.mode == "on" and count < wanted:
        logger.info("All %d held-out problems are measured (eval.num_samples=%d).", count, wanted)


def make_weight_sync(
    config: Config, model: nn.Module, engine: Engine, *, make_room: Callable[[], object] | None = None
) -> EngineWeightSync:
    """The weights of ``model``, those of an adapter merged, or its adapter alone, pushed to ``engine``."""
    weights: Callable[[nn.Module], Any] = _state
    if config.train_model.lora.enabled:
        weights = AdapterPack.of if config.inference_model.serve_adapter else MergedWeights.of
    return EngineWeightSync(partial(weights, model), engine, make_room)


def _state(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """What a rollout engine loads of a whole model without an adapter; a tied head comes under its own name too."""
    return model.state_dict().items()


def _roles_here(config: Config, plan: Plan, env: TaskEnv, tokenizer: Any, run_dir: Path, opened: ExitStack) -> Roles:
    """Learner, engine and reference in this process, taking turns (the reference may have a process of its own)."""
    device_type, placement = plan.device_type, plan.placement
    share_device = placement.colocated and device_type == "cuda"
    starting(f"Loading the policy {model_name(config)}")
    device = torch.device(device_name(device_type, placement.train))
    base = make_model(config, device)
    starting(f"Starting the engine {plan.engine}")
    # the engine copies the model while that has no adapter
    engine = start_engine(config, device_name(device_type, placement.inference), tokenizer, base, run_dir)
    opened.callback(engine.close)
    starting("Putting the learner together")
    policy = make_policy(config, base, device_type, device)
    learner = make_learner(config, policy, tokenizer.pad_token_id, device_type, run_dir)
    reference = make_reference(config, learner.policy, placement, device_type, learner.autocast)
    if reference is not None:
        opened.callback(reference.close)
    transforms = make_transforms(config, reference, tokenizer.pad_token_id, env.task.term_weights, device_type)
    model = learner.policy.model
    return Roles(
        engine=engine,
        learner=learner,
        weight_sync=make_weight_sync(config, model, engine, make_room=learner.give_back if share_device else None),
        collector_options={"sleep_engine": share_device, "postproc": timed(transforms)},
        transforms=transforms,
        export=partial(save_hf, model, tokenizer),
        attend=None,
    )


def _roles_in_workers(
    config: Config,
    plan: Plan,
    env: TaskEnv,
    tokenizer: Any,
    run_dir: Path,
    should_stop: Callable[[], bool],
    opened: ExitStack,
) -> Roles:
    """Rollout, reference and reward workers, and perhaps a learner of several ranks: all start at once."""
    starting(f"Starting the workers, engine={plan.engine}")
    cluster = opened.enter_context(closing(Cluster(config, plan, run_dir)))
    engine = FleetEngine(
        opened.enter_context(closing(_rollout_fleet(config, plan, tokenizer, cluster, run_dir))),
        name=plan.engine,
        max_model_len=max_model_len(config),
        share=cluster.engine_launcher.share,
        deadline_s=config.ray.timeout_s,
    )
    if plan.shared:
        engine.fleet.wait_ready()  # an engine measures what is free, so nobody else may take memory meanwhile
    reference = _reference_service(config, plan, tokenizer, cluster) if plan.placement.ref else None
    if reference is not None:
        opened.callback(reference.close)
    starting(f"Loading the policy {model_name(config)}")
    learner, export = _learner_beside_workers(config, plan, tokenizer, cluster, run_dir, opened)
    starting("Waiting for the workers")
    fleets = [engine.fleet, *([reference.fleet] if reference else [])]
    for fleet in fleets:
        fleet.wait_ready()
    if isinstance(learner, RemoteLearner):
        learner.require_folder(run_dir)
        engine.fleet.attend = learner.attend  # weights are pushed where both may be lost at once
    grader = own_grader(env.grader)
    if isinstance(grader, GradingPool):  # waited for by whoever started it
        fleets.append(grader.fleet)
    of_rows = tokenizer.pad_token_id, env.task.term_weights
    transforms = make_transforms(config, reference, *of_rows, plan.device_type)
    in_turn = {"sleep_engine": True, "postproc": timed(transforms)}
    return Roles(
        engine=engine,
        learner=learner,
        weight_sync=_weight_sync(config, plan, engine, learner),
        collector_options={
            **(in_turn if plan.shared else _beside(config, env, reference)),
            "should_stop": should_stop,
            "wait_deadline_s": WAIT_S,
            "metrics_extra": partial(worker_metrics, fleets),
        },
        transforms=transforms,
        export=export,
        attend=learner.attend if isinstance(learner, RemoteLearner) else None,
    )


def _beside(config: Config, env: TaskEnv, reference: ReferenceService | None) -> dict[str, Any]:
    """Of a collector that fills a replay buffer: groups go to the reference one by one, while others are sampled."""
    num_groups, age = groups_per_step(config), config.train.max_policy_age
    advantage = timed(make_advantage(config, env.task.term_weights))
    return {
        "max_policy_age": age,
        "replay_buffer": GroupReplayBuffer(
            max_groups_admitted(age, num_groups), num_groups, transform=advantage, as_table=True
        ),
        "group_transforms": [transform for _, transform in make_overlong(config)],
        "reference": reference.submit if reference else None,
    }


def _learner_beside_workers(
    config: Config, plan: Plan, tokenizer: Any, cluster: Cluster, run_dir: Path, opened: ExitStack
) -> tuple[Learner | RemoteLearner, Callable[[Path], object]]:
    """The learner, of several ranks or of this process, and what writes its model to a folder."""
    if cluster.num_ranks:
        remote = RemoteLearner(
            cluster.start_ranks(),
            make_settings(config, plan.device_type),
            share=cluster.launcher.share,
            silence_s=config.ray.timeout_s,
            start_silence_s=config.ray.timeout_s,
        )
        opened.callback(remote.close)
        return remote, remote.export_hf
    if plan.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cluster.threads)
    device = torch.device(device_name(plan.device_type, plan.placement.train))
    policy = make_policy(config, make_model(config, device), plan.device_type, device)
    learner = make_learner(config, policy, tokenizer.pad_token_id, plan.device_type, run_dir)
    return learner, partial(save_hf, policy.model, tokenizer)


def _rollout_fleet(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster, run_dir: Path) -> Fleet:
    shared_by = num_engines(config, plan)
    options = engine_options(config, plan.engine, plan.device_type, tokenizer, run_dir, shared_by)
    groups = max(1, int(options.max_rows / mean_group_size(config)))
    return Fleet(
        "rollout",
        cluster.start_rollout(options),
        cluster.num_engines,
        capacity=options.max_rows if has_dialogs(config) else groups,  # the samples of a dialog come alone
        silence_s=config.ray.timeout_s,
        start_silence_s=config.ray.timeout_s,
        shares_devices=plan.shared,
    )


def _reference_service(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster) -> ReferenceService:
    options = reference_options(config, plan.device_type) | {
        "model_name": resolve_model_path(reference_name(config)),
        "num_threads": cluster.threads if plan.device_type == "cpu" else None,
        "pad_token_id": tokenizer.pad_token_id,
        "gives_back": plan.shared,
    }
    count = len(plan.placement.ref)
    fleet = Fleet(
        "reference",
        cluster.start_reference(options),
        count,
        capacity=2,  # the next group is there when one is answered
        max_attempts=MAX_ATTEMPTS,
        silence_s=config.ray.timeout_s,
        start_silence_s=config.ray.timeout_s,
    )
    return ReferenceService(fleet, num_workers=count, in_reward_coeff=kl_in_reward(config))


def _weight_sync(config: Config, plan: Plan, engine: FleetEngine, learner: Learner | RemoteLearner) -> EngineWeightSync:
    """A push hands over an adapter alone (and all weights, merged, where it is asked for them), or all weights."""
    make_room = learner.give_back if plan.shared else None
    if isinstance(learner, RemoteLearner):
        if not config.train_model.lora.enabled:
            return EngineWeightSync(partial(learner.weights, dtype=engine.weight_dtype), engine, make_room)
        engine.base = partial(learner.weights, merged=False)
        return EngineWeightSync(learner.adapter, engine, make_room, learner.weights)
    model = learner.policy.model
    if not config.train_model.lora.enabled:
        return EngineWeightSync(lambda: WeightPack.of(_state(model), dtype=engine.weight_dtype), engine, make_room)
    engine.base = partial(packed_weights, model, merged=False)
    return EngineWeightSync(partial(AdapterPack.of, model), engine, make_room, partial(packed_weights, model))


def subject_of(config: Config, parts: Parts) -> Subject:
    """What the gate checks of a run that is put together."""
    name, trusts = config.ref_model.name, config.model.trust_remote_code

    def described(name: str) -> Any:
        return from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trusts).get_text_config()

    loaded, reference, reference_exact = described(model_name(config)), None, None
    if name is not None:
        reference = NamedReference(
            name=name,
            policy=model_name(config),
            vocabulary=load_tokenizer(name, trust_remote_code=trusts).get_vocab(),
            context=getattr(described(name), "max_position_embeddings", None),
            longest=max_model_len(config),
        )
    elif has_reference(config) and parts.learner.version == 0:  # it is the policy at its start
        learners = config.train_model.torch_dtype
        reference_exact = reference_dtype(config) == ("float32" if learners == "auto" else learners)
    return Subject(
        task=parts.task,
        rollouts=parts.rollouts,
        learner=parts.learner,
        weight_sync=parts.weight_sync,
        sampling=parts.sampling,
        seed=config.seed,
        exact=parts.exact,
        transforms=[transform for _, transform in parts.transforms],
        packs=config.model.attn_implementation is None and loaded.model_type in KNOWN_TO_PACK,
        num_layers=loaded.num_hidden_layers,
        reference=reference,
        reference_exact=reference_exact,
        stop=tuple(config.inference_model.stop),
    )
