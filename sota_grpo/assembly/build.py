"""Build the components of a run: first those that are cheap and may fail, then learner, engine and collector.

Unless the run has only one GPU, engines and references are workers in async mode, on a Ray cluster, or with several of
them or of learner ranks. The learner is a worker if it has several ranks or is on a cluster.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose, Transform
from transformers import AutoConfig

from sota_grpo.assembly import learning, sampling
from sota_grpo.assembly.cluster import Cluster, visible_gpus
from sota_grpo.assembly.devices import Plan, device_name, make_plan, resolve_device
from sota_grpo.assembly.estimate import with_micro_batches
from sota_grpo.assembly.preflight import why_no_gpu
from sota_grpo.config import Config, has_reference, model_name, reference_name, replaces_reward
from sota_grpo.config.mixture import groups_per_step, has_dialogs
from sota_grpo.config.secrets import AGENTS_KEY
from sota_grpo.config.validators import judges_alone
from sota_grpo.engines import Engine, resolve_engine_name, temperature_fault
from sota_grpo.engines.stepping import SteppingEngine
from sota_grpo.envs import PromptSource
from sota_grpo.envs.agents import AgentEngine
from sota_grpo.envs.dialogs import DialogEngine
from sota_grpo.envs.gateway import Gateway, SessionQueue
from sota_grpo.envs.prompts import Rollouts
from sota_grpo.errors import UserError
from sota_grpo.files import load_instances
from sota_grpo.functional import max_groups_admitted
from sota_grpo.policy.causal import KNOWN_TO_PACK
from sota_grpo.policy.load import from_pretrained, load_tokenizer, resolve_model_path
from sota_grpo.policy.lora import adapter_pack, engine_weights, packed_weights
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.functions import Functions
from sota_grpo.rewards.grading import GradingPool, task_grader
from sota_grpo.rewards.judge.client import JudgedGrader
from sota_grpo.rl.task import Task
from sota_grpo.rl.transforms import UserTransforms
from sota_grpo.source.replay_buffer import GroupReplayBuffer, Timed
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.gate import NamedReference, TrainingComponents
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import RemoteLearner
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.instances import Instances
from sota_grpo.workers.reference import MAX_ATTEMPTS, ReferenceService
from sota_grpo.workers.rollout import FleetEngine

if TYPE_CHECKING:
    from sota_grpo.source.collector import PromptGroupCollector

logger = logging.getLogger(__name__)

WAIT_S = 3600.0  # longest wait without any progress of a group; dead and hung workers are detected much sooner
#: Engine, learner, weight sync, the transforms of a batch, and options of the collector.
Made = tuple[Engine, Learner | RemoteLearner, EngineWeightSync, list[Timed], dict[str, Any]]


@dataclass(kw_only=True)
class RunComponents(TrainingComponents):
    """The components of a run; ``opened.close()`` closes those that hold resources, the last opened first."""

    tokenizer: Any
    collector: PromptGroupCollector
    evaluator: Evaluator
    opened: ExitStack

    def close(self) -> None:
        """Close all components; if closing one fails, close the others and raise its error; idempotent."""
        self.opened.close()


def build(
    config: Config,
    run_dir: Path,
    should_stop: Callable[[], bool] = lambda: False,
    functions: Functions | None = None,
) -> RunComponents:
    """Build the components of a run and wait until they are ready; if one fails, close the others and raise its error.

    It seeds torch's global random state. Call it on the main thread: a local Ray may be started. ``should_stop`` is
    called repeatedly while workers fill a batch; returning True ends the wait with ``Interrupted``. ``functions`` are
    used instead of the reward functions in ``reward.path``. UserError if a component cannot be used; RunFailed if it
    does not start.
    """
    from sota_grpo.source.collector import PromptGroupCollector  # TorchRL's collectors take seconds to import

    plan = _planned(config)
    starting("Reading the tokenizer and the data")
    tokenizer = learning.trainable_tokenizer(config, plan.engine)
    task = sampling.task_of(config, functions)
    if config.eval.mode != "off":
        sampling.require_heldout(config, task)
    own_transforms = load_instances("env.transforms", config.env.transforms, Transform)
    samplers = load_instances("train.sampler", [config.train.sampler] if config.train.sampler else [], Sampler)
    with ExitStack() as opened:
        # closed last: others wait for scores
        env, instances = sampling.open_env(config, task, tokenizer, opened, run_dir)
        task, grader = env.task, task_grader(env.grader)
        torch.manual_seed(config.seed)
        sized = with_micro_batches(config, plan, env.longest_prompt)
        if plan.workers:
            sampler = samplers[0][1] if samplers else None
            made = _make_in_workers(sized, plan, env, tokenizer, run_dir, should_stop, opened, sampler)
        else:
            made = _make_here(sized, plan, env, tokenizer, run_dir, opened)
        engine, learner, weight_sync, transforms, options = made
        sampled_in, trained_in = config.inference_model.torch_dtype, config.train_model.torch_dtype
        in_float32 = trained_in in ("auto", "float32")
        in_float32 &= sampling.engine_dtype(sampled_in, plan.device_type) == "float32"
        drawn = sampling.make_sampling(config)
        collector = PromptGroupCollector(
            env,
            with_dialogs(config, env, engine, instances, opened),
            sampling=drawn,
            dialog_turns_per_batch=config.train.dialog_turns_per_batch,
            weight_sync=weight_sync,
            graded_transforms=[UserTransforms(own_transforms)] if own_transforms else [],
            seed=config.seed,
            refill=config.algorithm.dynamic_sampling,
            decouple_terms=config.algorithm.decouple_terms,
            poll=learner.poll if isinstance(learner, RemoteLearner) else None,
            as_table=True,
            **options,
        )
        if isinstance(judge := env.grader, JudgedGrader):
            others = collector.metrics_extra
            collector.metrics_extra = lambda: {**others(), **judge.metrics()}
        opened.callback(collector.close)
        if isinstance(grader, GradingPool):
            starting("Waiting for the reward workers")
            grader.wait_ready()  # it has been starting since; a failure to start is raised before the gate
        num_heldout, wanted = len(task.heldout), config.eval.num_samples
        if config.eval.mode != "off" and num_heldout < wanted:
            logger.info("All %d held-out problems are used: eval.num_samples=%d is more.", num_heldout, wanted)
        return RunComponents(
            task=task,
            rollouts=collector.rollouts,
            learner=learner,
            weight_sync=weight_sync,
            sampling=drawn,
            seed=config.seed,
            exact=in_float32 and learning.trainer_precision(config, plan.device_type) == "fp32",
            transforms=transforms,
            stop=tuple(config.inference_model.stop),
            tokenizer=tokenizer,
            collector=collector,
            evaluator=make_evaluator(config, task, collector.rollouts),
            opened=opened.pop_all(),
            **_of_the_models(config),
        )


def _of_the_models(config: Config) -> dict[str, Any]:
    """Return the fields of :class:`RunComponents` that describe the models of policy and reference."""
    name, trusts = config.ref_model.name, config.model.trust_remote_code

    def described(name: str) -> Any:
        return from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trusts).get_text_config()

    policy, reference, reference_exact = described(model_name(config)), None, None
    if name is not None:
        reference = NamedReference(
            name=name,
            policy=model_name(config),
            vocabulary=load_tokenizer(name, trust_remote_code=trusts).get_vocab(),
            context=getattr(described(name), "max_position_embeddings", None),
            longest=sampling.max_model_len(config),
        )
    elif has_reference(config):
        reference_exact = learning.reference_dtype(config) == learning.learner_dtype(config)
    return {
        "num_layers": policy.num_hidden_layers,
        "packs": config.model.attn_implementation is None and policy.model_type in KNOWN_TO_PACK,
        "reference": reference,
        "reference_exact": reference_exact,
    }


def _planned(config: Config) -> Plan:
    device = resolve_device(config)
    if device == "cuda":
        learning.use_expandable_segments(config)
    elif config.device == "auto" and (reason := why_no_gpu()):
        logger.warning("Training on the CPU. %s", reason)
    engine = resolve_engine_name(config.engine.name, device=device)  # checked before a cluster is contacted
    if (fault := temperature_fault(engine, config.inference_model.temperature)) is not None:  # of engine=auto
        raise UserError(fault)
    plan = make_plan(config, device, visible_gpus(config) if device == "cuda" else 0, engine)
    for note in plan.notes:
        logger.info(note)
    logger.info("Device %s, engine %s.", device, plan.engine)
    return plan


def with_dialogs(
    config: Config, env: PromptSource, engine: Engine, instances: Mapping[str, Instances], opened: ExitStack
) -> Engine:
    """Return ``engine``, wrapped if there are multi-turn tasks or agents; ``opened`` closes the agents' server."""
    rules = sampling.dialog_rules(config, env, instances, engine.max_model_len)
    with_turns = DialogEngine(engine, rules) if rules else engine
    agents = sampling.task_agents(config, instances)
    if not agents:
        return with_turns
    queue = next((one.instances for one in agents.values() if isinstance(one.instances, SessionQueue)), None)
    kwargs = {"template_kwargs": config.env.chat_template_kwargs, "stop": config.inference_model.stop, "queue": queue}
    gateway = opened.enter_context(closing(Gateway(engine, env.tokenizer, **kwargs)))
    if queue is not None:
        logger.info("Programs may open sessions: POST %s/v1/sessions, with the key in %s.", gateway.url, AGENTS_KEY)
    return AgentEngine(with_turns, gateway, env, agents)


def make_evaluator(config: Config, task: Task, rollouts: Rollouts) -> Evaluator:
    """Return an evaluator of the first ``eval.num_samples`` held-out problems, shuffled if ``eval.target`` is set."""
    # a success may be no more than a reward above the limit
    rewards_decide = config.env.mixture is None and (replaces_reward(config) or judges_alone(config))
    examples = list(task.heldout[: config.eval.num_samples])
    if config.eval.target is not None:  # its subsets must be random, which the order of a mixture or a file is not
        examples = random.Random(config.seed).sample(examples, len(examples))
    return Evaluator(
        rollouts,
        examples,
        max_tokens=config.eval.max_tokens or config.inference_model.max_tokens,
        avg_at_k=config.eval.avg_at_k,
        seed=config.seed,
        success_above=config.reward.success_above if rewards_decide else None,
    )


def make_weight_sync(
    config: Config,
    trained: nn.Module | RemoteLearner,
    engine: SteppingEngine | FleetEngine,
    make_room: Callable[[], object] | None = None,
) -> EngineWeightSync:
    """Return the sync that pushes the weights of ``trained`` to ``engine``; workers receive the weights in packs.

    Under LoRA, if the engine supports that, only the adapter is sent, and ``engine.base`` becomes a function that
    returns the base weights; else merged weights are sent. ``make_room`` is passed to ``EngineWeightSync``.
    """
    has_adapter = config.train_model.lora.enabled
    whole: Any  # a function of ``merged``
    if isinstance(trained, RemoteLearner):
        at_dtype = lambda: trained.weights(dtype=engine.weight_dtype)  # noqa: E731
        whole, adapter = trained.weights if has_adapter else at_dtype, trained.adapter
    else:
        in_packs = isinstance(engine, FleetEngine)
        whole, adapter = (
            partial(packed_weights if in_packs else engine_weights, trained),
            partial(adapter_pack, trained),
        )
        if not has_adapter:  # a tied head has its own name
            named = lambda: trained.state_dict().items()  # noqa: E731
            whole = (lambda: WeightPack.of(named(), dtype=engine.weight_dtype)) if in_packs else named
    if not (has_adapter and (engine.takes_adapters or config.inference_model.serve_adapter)):
        return EngineWeightSync(whole, engine, make_room)
    engine.base = partial(whole, merged=False)
    return EngineWeightSync(adapter, engine, make_room, whole)


def _make_here(config: Config, plan: Plan, env: PromptSource, tokenizer: Any, run_dir: Path, opened: ExitStack) -> Made:
    """Build learner, engine and reference in this process, where they run one after the other."""
    device_type, placement = plan.device_type, plan.placement
    share_device = placement.colocated and device_type == "cuda"
    starting(f"Loading the policy {model_name(config)}")
    device = torch.device(device_name(device_type, placement.train))
    base = learning.make_model(config, device)
    starting(f"Starting the engine {plan.engine}")
    # the engine copies the model before the adapter is added
    engine = sampling.start_engine(config, device_name(device_type, placement.inference), tokenizer, base, run_dir)
    opened.callback(engine.close)
    starting("Building the learner")
    learner = learning.make_learner(
        config, learning.make_policy(config, base, device_type, device), tokenizer, device_type, run_dir
    )
    reference = learning.make_reference(config, learner.policy, placement, device_type, learner.autocast)
    if reference is not None:
        opened.callback(reference.close)
    transforms = learning.make_transforms(config, reference, tokenizer.pad_token_id, env.task.term_weights, device_type)
    make_room = learner.give_back if share_device else None
    weight_sync = make_weight_sync(config, learner.policy.model, engine, make_room)
    return engine, learner, weight_sync, transforms, {"sleep_engine": share_device, "postproc": Compose(*transforms)}


def start_limit(config: Config) -> float:
    """Return how many seconds a worker that loads a model may take to start: six times as long as a silence."""
    return 6 * max(config.ray.timeout_s, 600.0)


def _make_in_workers(
    config: Config,
    plan: Plan,
    env: PromptSource,
    tokenizer: Any,
    run_dir: Path,
    should_stop: Callable[[], bool],
    opened: ExitStack,
    sampler: Sampler | None,
) -> Made:
    """Start the workers of engines, reference and (if several) learner ranks, all at the same time."""
    starting(f"Starting the workers, engine={plan.engine}")
    cluster = opened.enter_context(closing(Cluster(config, plan, run_dir)))
    engine = FleetEngine(
        opened.enter_context(closing(_rollout_fleet(config, plan, tokenizer, cluster, run_dir))),
        name=plan.engine,
        max_model_len=sampling.max_model_len(config),
        share=cluster.engine_launcher.share,
        deadline_s=config.ray.timeout_s,
    )
    if plan.shared:
        engine.fleet.wait_ready()  # an engine measures the free memory, so no other process may take any meanwhile
    reference = _reference_service(config, plan, tokenizer, cluster) if plan.placement.ref else None
    if reference is not None:
        opened.callback(reference.close)
    starting(f"Loading the policy {model_name(config)}")
    learner: Learner | RemoteLearner
    if cluster.num_ranks:
        learner = RemoteLearner(
            cluster.start_ranks(),
            learning.make_settings(config, plan.device_type),
            share=cluster.launcher.share,
            silence_s=config.ray.timeout_s,
            start_s=start_limit(config),
        )
        opened.callback(learner.close)
    else:
        if plan.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cluster.threads)
        device = torch.device(device_name(plan.device_type, plan.placement.train))
        policy = learning.make_policy(config, learning.make_model(config, device), plan.device_type, device)
        learner = learning.make_learner(config, policy, tokenizer, plan.device_type, run_dir)
    starting("Waiting for the workers")
    fleets = [engine.fleet, *([reference.fleet] if reference else [])]
    for fleet in fleets:
        fleet.wait_ready()
    if isinstance(learner, RemoteLearner):
        learner.require_folder(run_dir)
        engine.fleet.poll = learner.poll  # a push waits for both
    grader = task_grader(env.grader)
    if isinstance(grader, GradingPool):  # build waits for it
        fleets.append(grader.fleet)
    term_weights = env.task.term_weights
    transforms = learning.make_transforms(config, reference, tokenizer.pad_token_id, term_weights, plan.device_type)
    options: dict[str, Any] = {
        "should_stop": should_stop,
        "wait_deadline_s": WAIT_S,
        "metrics_extra": lambda: {
            "workers/restarts": sum(fleet.restarts for fleet in fleets),
            "workers/requeued": sum(fleet.requeued for fleet in fleets),
        },
    }
    if plan.shared:
        options |= {"sleep_engine": True, "postproc": Compose(*transforms)}
    else:  # the collector fills a replay buffer: groups go to the reference one by one, while others are sampled
        age, num_groups = config.train.max_policy_age, groups_per_step(config)
        slots, advantage = max_groups_admitted(age, num_groups), Compose(*learning.make_advantage(config, term_weights))
        options |= {
            "max_policy_age": age,
            "replay_buffer": GroupReplayBuffer(slots, num_groups, transform=advantage, as_table=True, sampler=sampler),
            "group_transforms": learning.make_overlong(config),
            "reference": reference.submit if reference else None,
        }
    trained = learner if isinstance(learner, RemoteLearner) else learner.policy.model
    weight_sync = make_weight_sync(config, trained, engine, learner.give_back if plan.shared else None)
    return engine, learner, weight_sync, transforms, options


def _rollout_fleet(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster, run_dir: Path) -> Fleet:
    options = sampling.engine_options(config, plan.engine, plan.device_type, tokenizer, run_dir, cluster.num_engines)
    return Fleet(
        "rollout",
        cluster.start_rollout(options),
        cluster.num_engines,
        capacity=options.max_rows // (1 if has_dialogs(config) else config.env.repeats),  # a dialog is one sample
        silence_s=config.ray.timeout_s,
        start_s=start_limit(config),
        shares_devices=plan.shared,
    )


def _reference_service(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster) -> ReferenceService:
    options = learning.reference_options(config, plan.device_type)
    options |= {
        "model": {"name": resolve_model_path(reference_name(config)), **options["model"]},
        "num_threads": cluster.threads if plan.device_type == "cpu" else None,
        "pad_token_id": tokenizer.pad_token_id,
        "gives_back": plan.shared,
    }
    count = len(plan.placement.ref)
    fleet = Fleet(
        "reference",
        cluster.start_reference(options),
        count,
        capacity=2,  # one waits while another is computed
        max_attempts=MAX_ATTEMPTS,
        silence_s=config.ray.timeout_s,
        start_s=start_limit(config),
    )
    return ReferenceService(fleet, num_workers=count, in_reward_coeff=learning.kl_in_reward(config))
