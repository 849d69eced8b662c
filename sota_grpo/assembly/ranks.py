"""The learner's side of a run, built in the process of one of its ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from sota_grpo.assembly.cuda import use_expandable_segments
from sota_grpo.assembly.learning import add_adapter, make_learner, make_model, make_policy
from sota_grpo.config import Config, model_name
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.sharding import join_ranks, shard
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import LearnerServant

LONGEST_START_S = 3600.0  # of rank 0, which loads the model; who waits for the ranks ends them much sooner if they idle


def learner_servant(
    *,
    config: Config,
    rank: int,
    size: int,
    init_method: str,
    device_type: str,
    num_threads: int,
    run_dir: str,
) -> LearnerServant:
    """Rank ``rank`` of ``size``: the factory of a :class:`~sota_grpo.workers.base.ServantSpec`.

    Args:
        config: of the run; every rank has the same.
        init_method: where the ranks meet (:func:`sota_grpo.policy.sharding.join_ranks`).
        device_type: ``cpu``, or ``cuda`` for the one GPU that this process sees.
        num_threads: CPU threads of this process.
        run_dir: where a batch is written whose step was not finite.
    """
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    device = torch.device("cuda:0" if device_type == "cuda" else "cpu")
    if device_type == "cuda":
        use_expandable_segments()

    def make() -> Learner:
        if device_type == "cpu":
            torch.set_num_threads(num_threads)
        loads_on = torch.device("cpu") if size > 1 else device
        model = add_adapter(config, make_model(config, loads_on, weights=rank == 0))  # the others are sent theirs
        policy = make_policy(config, model, device_type)
        ranks = join_ranks(
            rank,
            size,
            init_method=init_method,
            device=device,
            timeout_s=max(60.0, config.train_model.timeout_s),
            start_timeout_s=LONGEST_START_S,
            reduce_once=not config.train_model.shard_gradients,
        )
        shard(policy, ranks)
        return make_learner(config, policy, tokenizer.pad_token_id, device_type, Path(run_dir), ranks)

    return LearnerServant(make, tokenizer)


class AddressServant:
    """Says where ranks can meet on the machine that it runs on."""

    def address(self) -> str:
        """This machine's address and a port that is free now."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"

    def ping(self) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to free."""
