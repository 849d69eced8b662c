"""Start the workers of a run: Ray actors in one placement group, or threads that are clients of engine servers."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sota_grpo.assembly.devices import Plan
from sota_grpo.config import Config
from sota_grpo.engines import EngineOptions, is_server
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.workers.base import Launcher, ThreadLauncher, Worker, WorkerSpec, starter


class Cluster:
    """Starts the engines, references and learner ranks of a run on their devices: in Ray, except engine servers.

    If Ray is needed, the constructor joins the cluster at ``ray.address`` (UserError or RunFailed if it cannot), or
    starts a local Ray, for which it must be on the main thread. On one machine the plan assigns the GPUs; on a cluster,
    Ray does. The learner is in this process only if it has one rank and there is no cluster. Each Ray worker has a
    bundle; an engine and the ranks that share its GPUs have the same one, in which ``CUDA_VISIBLE_DEVICES`` assigns the
    GPUs, because Ray assigns a GPU to one process only.

    Attributes:
        launcher: starts references and learner ranks, and shares large values with them.
        engine_launcher: starts the engines' workers; for engine servers they are threads of this process.
        num_ranks: number of learner ranks in other processes; 0: the learner is in this process.
    """

    def __init__(self, config: Config, plan: Plan, run_dir: Path):
        self._config, self._plan, self._run_dir = config, plan, run_dir
        self._on_cluster = config.ray.address is not None
        self._gpus_by_ray = self._on_cluster and plan.device_type == "cuda"
        per_engine = config.inference_model.tensor_parallel_size
        gpus = plan.placement.inference
        self._engines = [gpus[i : i + per_engine] for i in range(0, len(gpus), per_engine)]
        self._references = [(index,) for index in plan.placement.ref]
        ranks = plan.placement.train if self._on_cluster or len(plan.placement.train) > 1 else ()
        self._ranks = [(index,) for index in ranks]
        self.num_engines, self.num_ranks = len(self._engines), len(self._ranks)
        self._rendezvous_file: Path | None = None
        self._servers = ThreadLauncher()
        self._engines_in_ray = 0 if is_server(plan.engine) else self.num_engines
        self._ranks_share_bundles = plan.shared and self._engines_in_ray > 0
        of_ranks = [] if self._ranks_share_bundles else self._ranks
        in_ray = [*self._engines[: self._engines_in_ray], *self._references, *of_ranks]  # in the order of bundles
        self.launcher: Any = self._start_ray(in_ray) if in_ray else self._servers
        self.engine_launcher: Launcher = self._servers if is_server(plan.engine) else self.launcher

    @property
    def threads(self) -> int:
        """CPU threads of each engine, reference and learner rank, at least 1.

        An equal share of this machine's cores (macOS: 1); on a GPU cluster, the cores per GPU of the node with fewest.
        """
        if self._gpus_by_ray:
            from sota_grpo.workers.ray_cluster import cores_per_gpu

            return cores_per_gpu()
        busy = self.num_engines + len(self._references) + max(1, self.num_ranks)
        return max(1, len(os.sched_getaffinity(0)) // busy) if hasattr(os, "sched_getaffinity") else 1

    def start_rollout(self, options: EngineOptions) -> Callable[[int], Worker]:
        """Return a function of an engine's index that starts its worker; workers of engine servers are threads."""
        threads = self.threads if self._plan.device_type == "cpu" else None

        def start_of(options: EngineOptions, **placed: Any) -> Callable[[int], Worker]:
            spec = WorkerSpec("sota_grpo.workers.rollout:rollout_worker", {"options": options, "num_threads": threads})
            return starter(self.engine_launcher, "rollout", spec, **placed)

        if not is_server(self._plan.engine):
            return start_of(options, placements=self._placements(self._engines, first=0))
        starts = []
        for index, gpus in enumerate(self._engines):
            log_path = str(self._run_dir / f"{self._plan.engine}-{index}.log")
            environment = {**options.environment, **self._placed(gpus)["env"]}
            starts.append(start_of(replace(options, log_path=log_path, environment=environment)))
        return lambda slot: starts[slot](slot)

    def start_reference(self, options: Mapping[str, Any]) -> Callable[[int], Worker]:
        spec = WorkerSpec("sota_grpo.workers.reference:reference_worker", options)
        placements = self._placements(self._references, first=self._engines_in_ray)
        return starter(self.launcher, "reference", spec, placements)

    def start_ranks(self) -> list[Worker]:
        """Start one worker per learner rank, with the address of their process group; return before they are ready."""
        first, per_engine = self._engines_in_ray + len(self._references), len(self._engines[0])
        ranks = range(self.num_ranks)
        bundles = [rank // per_engine if self._ranks_share_bundles else first + rank for rank in ranks]
        if self._on_cluster:  # ranks meet at an address of rank 0's machine, here at a file
            meeting = f"tcp://{self._address_calls('address', bundles[:1])[0]}"
        else:
            self._rendezvous_file = Path(tempfile.gettempdir()) / f"sota_grpo_{uuid.uuid4().hex}"
            meeting = f"file://{self._rendezvous_file}"
        options = {
            "config": self._config,
            "size": self.num_ranks,
            "init_method": meeting,
            "device_type": self._plan.device_type,
            "num_threads": self.threads,
            "run_dir": str(self._run_dir.absolute()),  # a rank may have another working directory
        }
        workers = []
        for rank, gpus in enumerate(self._ranks):
            spec = WorkerSpec("sota_grpo.assembly.learning:learner_worker", {"rank": rank, **options})
            workers.append(self.launcher.start(f"learner-{rank}", spec, bundle=bundles[rank], **self._placed(gpus)))
        return workers

    @cached_property
    def _names(self) -> dict[int, str]:
        """{index in the plan: name on the node} of each GPU that an engine and a learner rank share on a cluster."""
        if not (self._ranks_share_bundles and self._gpus_by_ray):
            return {}
        per_engine = len(self._engines[0])
        reported = self._address_calls("devices", range(self._engines_in_ray), num_gpus=per_engine)
        names = [name for bundle in reported for name in bundle.split(",")]
        if len(names) != len(self._plan.placement.inference):
            raise RunFailed(
                f"Ray assigned {len(self._plan.placement.inference)} GPUs to the engines, but CUDA_VISIBLE_DEVICES is "
                f"{reported}; unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray is started."
            )
        return dict(zip(self._plan.placement.inference, names))

    def _address_calls(self, method: str, bundles: Sequence[int], **options: Any) -> list[str]:
        """Return ``method()`` of an :class:`~sota_grpo.workers.ray_cluster.AddressWorker` in each of these bundles.

        RunFailed if one does not answer within ``ray.timeout_s``.
        """
        spec = WorkerSpec("sota_grpo.workers.ray_cluster:AddressWorker")
        hosts = [self.launcher.start("address", spec, bundle=bundle, **options) for bundle in bundles]
        try:
            answers = [host.call(method) for host in hosts]
            return [answer.result(self._config.ray.timeout_s) for answer in answers]
        except TimeoutError as error:
            what = {"address": "address of its node", "devices": "GPUs of its bundle"}[method]
            raise RunFailed(
                f"A Ray worker did not report the {what} within ray.timeout_s={self._config.ray.timeout_s:g} s; "
                "increase it, or read Ray's logs on that node."
            ) from error
        finally:
            for host in hosts:
                host.kill()

    def _placements(self, devices: Sequence[tuple[int, ...]], *, first: int) -> list[Mapping[str, Any]]:
        return [{"bundle": first + slot, **self._placed(gpus)} for slot, gpus in enumerate(devices)]

    def _placed(self, gpus: Sequence[int]) -> Mapping[str, Any]:
        env = {"OMP_WAIT_POLICY": "PASSIVE"}
        options: dict[str, Any] = {"threads": self.threads, "env": env}  # left alone, Ray gives an actor one thread
        shared = bool(gpus) and all(index in self._names for index in gpus)
        if self._gpus_by_ray and not shared:
            options["num_gpus"] = len(gpus)
        elif self._plan.device_type == "cuda":
            names = ",".join(self._names[index] for index in gpus) if shared else visible_names(gpus)
            env |= {"CUDA_VISIBLE_DEVICES": names, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return options

    def _start_ray(self, gpu_sets: Sequence[tuple[int, ...]]) -> Any:
        bundles = [{"CPU": 1.0} | ({"GPU": float(len(gpus))} if self._gpus_by_ray else {}) for gpus in gpu_sets]
        with _ray_mistakes(self._config.ray.address):
            from sota_grpo.workers.ray_cluster import RayLauncher

            return RayLauncher(bundles, address=self._config.ray.address, deadline_s=self._config.ray.timeout_s)

    def close(self) -> None:
        """Kill the remaining workers, and end the local Ray or the connection to the cluster; idempotent."""
        for launcher in dict.fromkeys((self._servers, self.launcher)):
            launcher.close()
        if self._rendezvous_file is not None:  # killed ranks leave it behind
            self._rendezvous_file.unlink(missing_ok=True)


def visible_gpus(config: Config) -> int:
    """Return the number of GPUs that this process sees, or of the cluster of ``ray.address``, which is then joined."""
    if config.ray.address is None:
        return torch.cuda.device_count()
    with _ray_mistakes(config.ray.address):
        from sota_grpo.workers.ray_cluster import cluster_gpus

        return cluster_gpus(config.ray.address)


def visible_names(gpus: Sequence[int]) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` of a worker; ``gpus`` are indices among the GPUs that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else None
    return ",".join(names[index].strip() if names else str(index) for index in gpus)


@contextmanager
def _ray_mistakes(address: str | None) -> Iterator[None]:
    """Raise UserError if Ray is not installed or does not answer, RunFailed if it times out or does not start."""
    if find_spec("ray") is None:
        raise UserError(
            "mode=async, several devices or ray.address need Ray, which is not installed: "
            "`pip install 'sota-grpo[ray]'`, or run grpo.py with one device for each role and without ray.address."
        )
    try:
        yield
    except ConnectionError as error:
        if address is None:
            raise RunFailed(f"A local Ray did not start ({str(error).rstrip('.')}); read its logs.") from error
        raise UserError(
            f"ray.address={address} does not answer ({str(error).rstrip('.')}); start a cluster there with "
            "`ray start --head`, or leave ray.address out."
        ) from error
    except TimeoutError as error:
        raise RunFailed(str(error)) from error
