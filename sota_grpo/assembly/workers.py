"""A run over several processes: rollout, reference and reward workers, and perhaps a learner of several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from sota_grpo.assembly.cluster import Cluster
from sota_grpo.assembly.devices import Plan, device_name
from sota_grpo.assembly.learning import (
    add_adapter,
    make_advantage,
    make_learner,
    make_model,
    make_overlong,
    make_policy,
    make_settings,
    reference_dtype,
    trainer_precision,
    wants_fused_layers,
)
from sota_grpo.assembly.parts import Crew, Roles
from sota_grpo.assembly.rollout import engine_options, engine_rows, max_model_len
from sota_grpo.config import Config, model_name
from sota_grpo.config.validators import obstacle_to_a_broadcast
from sota_grpo.engines import is_server
from sota_grpo.envs import TaskEnv
from sota_grpo.policy.load import resolve_model_path, save_hf
from sota_grpo.policy.lora import AdapterPack, base_pack, packed_weights
from sota_grpo.recording.heartbeat import starting
from sota_grpo.rewards.grading import GradingPool
from sota_grpo.rl.collate import row_list
from sota_grpo.rl.transforms import ReferenceKL
from sota_grpo.training.learner import Learner, Publisher
from sota_grpo.training.remote_learner import RemoteLearner
from sota_grpo.workers.base import ServantSpec, promised
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.fleet_engine import FleetEngine
from sota_grpo.workers.reference import ReferenceService
from sota_grpo.workers.weight_transfer import WeightSender, WeightTransfer

WAIT_S = 3600.0  # longest wait for any sign of life from any group; dead and hung workers are found much sooner


def roles_in_workers(
    config: Config,
    plan: Plan,
    env: TaskEnv,
    tokenizer: Any,
    run_dir: Path,
    should_stop: Callable[[], bool],
    crew: Crew,
) -> Roles:
    """Start everything at once, then wait for it."""
    starting(f"Starting the workers, engine={plan.engine}")
    cluster: Cluster = crew.add(Cluster(config, plan, run_dir))
    fleet: Fleet = crew.add(_rollout_fleet(config, plan, tokenizer, cluster, run_dir))
    engine = FleetEngine(
        fleet,
        name=plan.engine,
        max_model_len=max_model_len(config),
        share=cluster.share,
        deadline_s=config.inference_model.timeout_s,
    )
    reference = crew.add(_reference(config, plan, tokenizer, cluster)) if plan.placement.ref else None
    starting(f"Loading the policy {model_name(config)}")
    learner, publisher, export = _learning(config, plan, tokenizer, cluster, engine, run_dir, crew)
    graders = [env.grader.fleet] if isinstance(env.grader, GradingPool) else []
    started = [fleet, *graders, *([reference.fleet] if reference else [])]
    starting("Waiting for the workers")
    for waited in [fleet, *([reference.fleet] if reference else [])]:
        waited.wait_ready()  # the graders are waited for by whoever started them
    overlong, advantage = make_overlong(config), make_advantage(config)
    return Roles(
        engine=engine,
        learner=learner,
        publisher=publisher,
        source={
            "reference": _completed_by(reference, overlong),
            "transforms": advantage,
            "should_stop": should_stop,
            "wait_deadline_s": WAIT_S,
            "metrics_extra": _counts(started),
        },
        transforms=[*overlong, *_reference_transform(config, reference, tokenizer), *advantage],
        export=export,
    )


def _rollout_fleet(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster, run_dir: Path) -> Fleet:
    count = cluster.num_engines
    rows = engine_rows(config, plan.engine, plan.device_type, count)
    options = replace(engine_options(config, plan.engine, plan.device_type, tokenizer, run_dir), max_rows=rows)
    return Fleet(
        "rollout",
        cluster.start_rollout(options),
        count,
        capacity=rows if config.env.max_steps > 1 else max(1, rows // config.env.repeats),  # later turns come alone
        silence_s=config.inference_model.timeout_s,
        start_silence_s=config.ray.start_timeout_s,
    )


def _reference(config: Config, plan: Plan, tokenizer: Any, cluster: Cluster) -> ReferenceService:
    options = {
        "model_name": resolve_model_path(model_name(config)),
        "dtype": reference_dtype(config),
        "attn_implementation": config.model.attn_implementation,
        "trust_remote_code": config.model.trust_remote_code,
        "device": plan.device_type,
        "num_threads": cluster.threads if plan.device_type == "cpu" else None,
        "temperature": config.inference_model.temperature,
        "precision": trainer_precision(config, plan.device_type),
        "token_budget": config.train.micro_batch_tokens,
        "pad_token_id": tokenizer.pad_token_id,
        "fused": wants_fused_layers(config, plan.device_type),
    }
    count = len(plan.placement.ref)
    fleet = Fleet(
        "reference",
        cluster.start_reference(ServantSpec("sota_grpo.workers.reference:reference_servant", options)),
        count,
        capacity=2,  # the next group is there when one is answered
        silence_s=config.ref_model.timeout_s,
        start_silence_s=config.ray.start_timeout_s,
    )
    in_reward = None if config.train.kl_coef_in_loss else config.policy.kl_coef
    return ReferenceService(fleet, num_workers=count, in_reward_coeff=in_reward)


def _completed_by(
    reference: ReferenceService | None, overlong: list[tuple[str, Any]]
) -> Callable[[list[TensorDictBase]], Future[list[TensorDictBase]]] | None:
    """What a group goes through once it is graded and kept: the length penalty, then the reference, which may subtract
    the KL from the reward. Whether a group is flat is judged before, as in lockstep."""
    if not overlong:
        return reference.submit if reference else None

    def complete(rows: list[TensorDictBase]) -> Future[list[TensorDictBase]]:
        batch: TensorDictBase = lazy_stack(rows)
        for _, transform in overlong:
            batch = transform(batch)
        if reference is not None:
            return reference.submit(row_list(batch))
        done = promised()
        done.set_result(row_list(batch))
        return done

    return complete


def _reference_transform(config: Config, reference: ReferenceService | None, tokenizer: Any) -> list[tuple[str, Any]]:
    """The reference as the gate asks it: over a whole batch, waiting for the answer."""
    if reference is None:
        return []
    transform = ReferenceKL(
        reference,
        in_reward_coeff=None if config.train.kl_coef_in_loss else config.policy.kl_coef,
        pad_token_id=tokenizer.pad_token_id,
        token_budget=config.train.micro_batch_tokens,
    )
    return [("ref", transform)]


def _learning(
    config: Config,
    plan: Plan,
    tokenizer: Any,
    cluster: Cluster,
    engine: FleetEngine,
    run_dir: Path,
    crew: Crew,
) -> tuple[Learner | RemoteLearner, Publisher, Callable[[Path], object]]:
    """The learner in this process, or its facade over the ranks; what publishes its weights; what exports them."""
    if cluster.num_ranks:
        remote: RemoteLearner = crew.add(
            RemoteLearner(
                cluster.start_ranks(),
                make_settings(config, plan.device_type),
                share=cluster.share,
                silence_s=config.train_model.timeout_s,
                start_silence_s=config.ray.start_timeout_s,
            )
        )
        collective = _collective(config, plan, cluster, engine, remote, crew)
        publisher = collective or Publisher(lambda: remote.weights(dtype=engine.weight_dtype), [engine])
        return remote, publisher, remote.export_hf
    if plan.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cluster.threads)
    model = add_adapter(config, make_model(config, torch.device(device_name(plan.device_type, plan.placement.train))))
    learner = make_learner(
        config, make_policy(config, model, plan.device_type), tokenizer.pad_token_id, plan.device_type, run_dir
    )
    if config.train_model.lora.enabled:
        engine.base = lambda: base_pack(model)
        publisher = Publisher(lambda: AdapterPack.of(model), [engine])
    else:
        collective = _collective(config, plan, cluster, engine, WeightSender(model), crew)
        publisher = collective or Publisher(lambda: packed_weights(model, dtype=engine.weight_dtype), [engine])
    return learner, publisher, lambda folder: save_hf(model, tokenizer, folder)


def _collective(
    config: Config, plan: Plan, cluster: Cluster, engine: FleetEngine, sender: Any, crew: Crew
) -> Publisher | None:
    """A publisher that broadcasts the weights, where the config asks for one or NCCL has a short way."""
    part = config.inference_model
    if not broadcasts_weights(config, plan):
        return None
    transfer = crew.add(
        WeightTransfer(
            engine.fleet,
            sender,
            share=cluster.share,
            backend="nccl" if plan.device_type == "cuda" else "gloo",
            deadline_s=part.timeout_s,
            host=cluster.host,
            dtype=lambda: engine.weight_dtype,
        )
    )
    return Publisher(lambda: transfer, [engine])


def broadcasts_weights(config: Config, plan: Plan) -> bool:
    """Whether weights go by broadcast: on GPUs of one machine they do, unless something is in the way.

    NCCL wants a GPU for each member. Between machines a broadcast has not been tried: there it has to be asked for.
    """
    if config.inference_model.weight_transfer != "auto":
        return config.inference_model.weight_transfer == "collective"
    own = set(plan.placement.train).isdisjoint(plan.placement.inference)
    near = plan.device_type == "cuda" and config.ray.address is None and not is_server(plan.engine)
    return near and own and obstacle_to_a_broadcast(config) is None


def _counts(fleets: list[Fleet]) -> Callable[[], dict[str, float]]:
    return lambda: {
        "workers/restarts": sum(fleet.restarts for fleet in fleets),
        "workers/requeued": sum(fleet.requeued for fleet in fleets),
    }
