"""From a config to the parts: each on its device, and a mistake is a sentence before anything slow begins."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import socket
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers.models.auto import CONFIG_MAPPING

from sota_grpo import engines
from sota_grpo.assembly import build, devices, learning, preflight, sampling
from sota_grpo.assembly import cluster as cluster_module
from sota_grpo.assembly.cluster import Cluster, visible_gpus
from sota_grpo.assembly.devices import Placement, Plan, Role, make_plan, place, resolve_device
from sota_grpo.assembly.learning import make_model, make_reference
from sota_grpo.config import Config
from sota_grpo.engines import EngineOptions, resolve_engine_name
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional.log_probs import multiplies_bf16
from sota_grpo.policy.causal import AdapterOffReference, CausalPolicy, FrozenReference
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.policy.lora import add_lora
from sota_grpo.recording import sinks
from sota_grpo.workers.rollout import rollout_worker
from tests.config.test_config import composed


def config_of(*overrides: str) -> Config:
    base = ["model.name=tiny", "device=cpu", "env.dataset=arithmetic", "engine.name=transformers"]
    return OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist([*base, *overrides]))
    )


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this machine has so many GPUs, and vLLM."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    return pretend


@pytest.mark.parametrize("count", [1, 2, 3])
def test_async_runs_on_every_number_of_gpus(count, gpus) -> None:
    """One GPU: in turns. More: the engine has its own."""
    gpus(count)
    plan = make_plan(config_of("mode=async", "policy.kl_coef=0.1", "engine.name=vllm"), "cuda")
    actual = plan.placement
    assert plan.workers == (count > 1)
    assert actual.train == ((1,) if count > 1 else (0,))
    assert (actual.inference, actual.ref) == ((0,), ((2,) if count > 2 else actual.train))


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ([], False),
        (["mode=async"], True),
        (["train_model.num_devices=2"], True),
        (["inference_model.num_devices=2"], True),
        (["ref_model.devices=[2,3]"], True),
        (["ray.address=auto"], True),
        (["train_model.num_devices=1", "inference_model.num_devices=1", "ref_model.num_devices=1"], False),
    ],
)
def test_other_processes_are_there_only_where_an_option_requires_them(overrides, workers) -> None:
    assert make_plan(config_of("policy.kl_coef=0.1", *overrides), "cpu").workers == workers


@pytest.mark.parametrize(
    ("overrides", "device", "count", "sentence"),
    [
        ("inference_model.tensor_parallel_size=2", "cpu", 0, "=2 needs GPUs; .* inference_model.num_devices=2"),
        (
            "engine.name=vllm inference_model.devices=[1] train_model.devices=[0]",  # which it cannot reach
            *("cuda", 2, "GPU 1; use .*CUDA_VISIBLE_DEVICES.* or engine=transformers"),
        ),
        (
            "engine.name=vllm mode=async policy.kl_coef=0.1 ray.address=auto",  # each role needs its own
            *("cuda", 2, "3 in all, and this one has 2; .*train without a reference"),
        ),
        ("mode=async ray.address=auto", "cuda", 1, "2 in all, and this one has 1"),
    ],
)
def test_devices_that_cannot_be_used_are_refused_with_the_option(overrides, device, count, sentence, gpus) -> None:
    with pytest.raises(UserError, match=sentence):
        make_plan(config_of(*overrides.split()), device, count)


def test_engines_may_be_on_another_gpu_in_this_process_and_workers_on_gpus_of_a_cluster(gpus) -> None:
    config = config_of("inference_model.devices=[1]", "train_model.devices=[0]")
    assert make_plan(config, "cuda", 2).placement.inference == (1,)
    assert make_plan(config_of("mode=async", "policy.kl_coef=0.1", "ray.address=auto"), "cuda", 3).workers


def test_learner_and_engine_are_built_on_the_devices_of_their_placement(monkeypatch, tmp_path) -> None:
    plan = Plan("cuda", Placement((2,), (1,), (), colocated=False), "transformers", workers=False)
    model_on, engine_on = Mock(return_value=load_model("tiny")), Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(build, "resolve_device", lambda config: "cuda")
    monkeypatch.setattr(build, "make_plan", lambda *_: plan)
    monkeypatch.setattr(learning, "make_model", model_on)
    monkeypatch.setattr(sampling, "start_engine", engine_on)
    with pytest.raises(ZeroDivisionError):
        build.build(config_of(), tmp_path)
    assert (model_on.call_args.args[1], engine_on.call_args.args[1]) == (torch.device("cuda:2"), "cuda:1")


@pytest.mark.parametrize(("lora", "overrides"), [(True, []), (True, ["ref_model.num_devices=1"]), (False, [])])
def test_placement_and_reference_agree_on_whose_weights_it_has(lora: bool, overrides: list[str]) -> None:
    config = config_of("policy.kl_coef=0.1", f"train_model.lora.enabled={lora}", *overrides)
    base, apart = load_model("tiny"), bool(overrides) or not lora
    policy = CausalPolicy(add_lora(base, r=2, alpha=4) if lora else base)
    placement = make_plan(config, "cpu").placement
    assert placement.ref == ((0,) if apart else ())
    reference = make_reference(config, policy, placement, "cpu")
    assert type(reference) is (FrozenReference if apart else AdapterOffReference)
    config.policy.kl_coef = 0.0
    assert not devices.reference_has_own_weights(config)
    assert make_reference(config, policy, placement, "cpu") is None


def test_a_mistyped_model_folder_is_not_reported_as_a_missing_gpu(gpus) -> None:
    gpus(0)
    with pytest.raises(UserError, match=r"model.name=/no/such/dir is not a folder"):
        resolve_device(config_of("model.name=/no/such/dir", "device=auto"))
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        resolve_device(config_of("model.name=some/model", "device=auto"))  # no driver here
    assert resolve_device(config_of("device=auto")) == "cpu"


FIVE_ENGINES = ["inference_model.num_devices=5", "mode=async"]
TWO_RANKS = "train_model.num_devices=2"


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([], None),  # 256 responses a step, on one GPU
        (["train.dialog_turns_per_batch=32", "train.optim_batch_size=32"], "The engine samples at most 32 .*per_batch"),
        (["inference_model.max_num_seqs=16"], "The engine samples at most 16 .*raise inference_model.max_num_seqs"),
        (
            [*FIVE_ENGINES, "train.max_policy_age=0"],
            "Each of 5 engines samples at most 51 responses at once; below 64 a GPU is mostly idle: raise t",
        ),
        ([*FIVE_ENGINES, "train.max_policy_age=1"], None),
        ([TWO_RANKS, "inference_model.max_tokens=128"], "Each of 2 learner ranks gets 128 responses"),
        ([TWO_RANKS, "inference_model.max_tokens=129"], None),
    ],
)
def test_a_run_says_what_leaves_its_gpus_idle(overrides, note: str | None, gpus, monkeypatch) -> None:
    monkeypatch.setattr("sota_grpo.assembly.devices.builds_kernels", lambda: True)
    gpus(8)
    plan = make_plan(config_of("engine.name=vllm", *overrides), "cuda")
    notes = [each for each in plan.notes if "Placement" not in each]
    assert len(notes) == (note is not None)
    assert not note or re.search(note, notes[0])


@pytest.mark.parametrize(
    ("cuda", "driver", "sentence"),
    [
        ("13.0", "550.54.15", "driver 550.54.15, .* for CUDA 13.0, which needs driver 580 or newer"),
        ("12.8", "470.82", "driver 470.82, .* for CUDA 12.8, which needs driver 525 or newer"),
        ("12.8", "535.1", "sees none of its GPUs; CUDA_VISIBLE_DEVICES=7 may hide them"),
        (None, "580.65.06", "built without CUDA; install PyTorch for CUDA"),
        ("12.8", "", "no CUDA device; use device=cpu"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_named_with_its_driver(cuda, driver, sentence, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(preflight, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for words in ("UNIX x86_64 Kernel Module", "UNIX Open Kernel Module for x86_64"):
        if driver:
            (tmp_path / "version").write_text(f"NVRM version: NVIDIA {words}  {driver}  Release Build\nGCC version: 13")
        with pytest.raises(UserError, match=sentence):
            resolve_device(config_of("device=cuda"))
    if driver:
        with pytest.raises(UserError, match=sentence):
            resolve_device(config_of("model.name=some/model", "device=auto"))


@pytest.mark.parametrize(
    ("overrides", "environment", "expected"),
    [
        ([], {}, "expandable_segments:True"),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ([], {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        (["inference_model.tensor_parallel_size=2"], {}, None),
        (["engine.name=sglang_server"], {}, None),
    ],
)
def test_segments_grow_unless_the_user_or_the_engine_says_otherwise(overrides, environment, expected, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, environment.get(name, ""))
    learning.use_expandable_segments(config_of(*overrides))
    assert (os.environ["PYTORCH_ALLOC_CONF"] or None) == expected


def test_vllm_is_not_taken_for_the_cpu_of_a_machine_with_a_gpu(gpus) -> None:
    gpus(1)
    assert resolve_engine_name("auto", device="cpu") == "transformers"
    assert resolve_engine_name("auto", device="cuda") == "vllm"
    with pytest.raises(UserError, match="use engine=transformers or device=cuda"):
        resolve_engine_name("vllm", device="cpu")
    gpus(0)
    assert resolve_engine_name("vllm", device="cpu") == resolve_engine_name("auto", device="cpu") == "vllm"


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_engines_get_a_seed_that_numpy_takes(seed: int, tmp_path: Path) -> None:
    """vLLM's processes call `numpy.random.seed`."""
    config = composed("grpo_cpu", f"seed={seed}")
    options = sampling.engine_options(config, "vllm", "cpu", load_tokenizer("tiny"), tmp_path)
    np.random.RandomState(options.seed)


def test_an_unknown_attention_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"model.attn_implementation=swift cannot be used .*use sdpa, eager or null"):
        make_model(config_of("model.attn_implementation=swift"), torch.device("cpu"))


@pytest.mark.parametrize(("family", "key"), [("mixtral", "num_local_"), ("deepseek_v3", "n_routed_")])
def test_a_mixture_of_experts_is_refused_before_weights_are_read(family: str, key: str, tmp_path: Path) -> None:
    """There are none: the folder has a config and nothing else."""
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"is a mixture of experts \({key}experts=.*routing replayed.*dense model\.$"):
        build.build(config_of(f"model.name={tmp_path}"), tmp_path)


def test_a_missing_sink_is_found_before_anything_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"logging.wandb=online needs wandb.*logging.wandb=disabled"):
        preflight.preflight(config_of("logging.wandb=online"))
    preflight.preflight(config_of("logging.wandb=offline"))  # continues without a copy


@pytest.fixture
def ray(monkeypatch) -> Mock:
    """A launcher in place of Ray's; ``bundles`` are the GPUs that clusters request of it."""
    launcher = Mock(bundles=[])
    monkeypatch.setattr(Cluster, "_start_ray", lambda self, sets: launcher.bundles.extend(sets) or launcher)
    return launcher


def plan_of(device: str, train, inference, ref=(), engine: str = "transformers") -> Plan:
    return Plan(device, Placement(train, inference, ref, colocated=False), engine, workers=True)


OPTIONS = EngineOptions("tiny", eos_token_ids=[2])


@pytest.mark.parametrize(("address", "threads"), [([], 8), (["ray.address=auto"], 10)])
def test_workers_on_gpus_share_the_cores(address, threads: int, ray, monkeypatch, tmp_path) -> None:
    """Two engines, a reference and two ranks; left alone, Ray gives each actor one thread."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(40))
    alive = [{"CPU": 64, "GPU": 4}, {"CPU": 40, "GPU": 4}, {"CPU": 9}]
    nodes = [{"Alive": each in alive, "Resources": each} for each in (*alive, {"CPU": 1, "GPU": 1})]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    cluster = Cluster(config_of("mode=async", *address), plan_of("cuda", (0, 1), (2, 3), (4,), "vllm"), tmp_path)
    ray.start.return_value.call.return_value.result.return_value = "here:1"  # of rank 0, on a cluster
    cluster.start_rollout(OPTIONS)(1)
    cluster.start_reference({})(0)
    cluster.start_ranks()
    placed = [call.kwargs for call in ray.start.call_args_list if call.args[0] != "address"]
    assert [(each["threads"], each["env"]["OMP_WAIT_POLICY"]) for each in placed] == [(threads, "PASSIVE")] * 4


SHARED = ("engine.name=vllm", "inference_model.num_devices=shared", "train_model.num_devices=4")


def test_shared_gpus_have_engines_in_workers_that_sleep(gpus) -> None:
    gpus(4)
    config = config_of(*SHARED, "inference_model.tensor_parallel_size=2")
    plan = make_plan(config, "cuda")
    assert (plan.workers, plan.shared, devices.num_engines(config, plan)) == (True, True, 2)
    assert any("engines sleep while the learner computes" in note for note in plan.notes)
    gpus(1)
    alone = make_plan(config_of(*SHARED[:2]), "cuda")
    assert (alone.workers, alone.shared, alone.placement.colocated) == (False, False, True)


def test_on_a_cluster_shared_engines_are_in_the_bundles_of_their_ranks(ray, monkeypatch, tmp_path, gpus) -> None:
    """One GPU more, for a reference; which GPUs a bundle has is reported by a worker that gets all of them."""
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8, "GPU": 4}}])
    config = config_of(*SHARED, "ray.address=auto", "inference_model.tensor_parallel_size=2", "policy.kl_coef=0.1")
    with pytest.raises(UserError, match="5 in all, and this one has 4"):
        make_plan(config, "cuda", 4)
    cluster = Cluster(config, make_plan(config, "cuda", 5), tmp_path)
    assert [len(gpus) for gpus in ray.bundles] == [2, 2, 1]
    on_nodes = {("devices", 0): "6,7", ("devices", 1): "GPU-a,GPU-b", ("address", 0): "here:1"}
    ray.start.side_effect = lambda name, spec, *, bundle, **options: Mock(
        call=lambda method: Mock(result=lambda timeout: on_nodes[method, bundle])
    )
    rollout, reference = cluster.start_rollout(OPTIONS), cluster.start_reference({})
    for start, slot in ((rollout, 0), (rollout, 1), (reference, 0)):
        start(slot)
    cluster.start_ranks()
    placed = {call.args[0]: call.kwargs for call in ray.start.call_args_list}
    where = {name: (one["bundle"], one.get("env", {}).get("CUDA_VISIBLE_DEVICES")) for name, one in placed.items()}
    assert (where["rollout-0"], where["rollout-1"], where["reference-0"][0]) == ((0, "6,7"), (1, "GPU-a,GPU-b"), 2)
    ranks = [where[f"learner-{rank}"] for rank in range(4)]
    assert ranks == [(0, "6"), (0, "7"), (1, "GPU-a"), (1, "GPU-b")]
    # a worker that reports GPUs holds them for so long only
    gpu_shares = [call.kwargs["num_gpus"] for call in ray.start.call_args_list if call.kwargs.get("num_gpus")]
    assert gpu_shares == [2, 2, 1]


def test_a_node_that_does_not_report_its_address_ends_the_run(ray, tmp_path) -> None:
    ray.start.return_value.call.return_value = Future()
    config = config_of("mode=async", "ray.address=auto", "ray.timeout_s=0.01")
    cluster = Cluster(config, plan_of("cpu", (0,), (1,)), tmp_path)
    with pytest.raises(RunFailed, match=r"address of its node within ray.timeout_s=0.01 s"):
        cluster.start_ranks()
    ray.start.return_value.kill.assert_called_once_with()


@pytest.mark.parametrize(("seen", "names"), [("", ["1", "3"]), ("GPU-a, GPU-b, GPU-c, GPU-d", ["GPU-b", "GPU-d"])])
def test_servers_are_in_threads_each_with_a_log_and_gpus_of_its_own(seen, names, ray, monkeypatch, tmp_path) -> None:
    """Weights reach them as they are though a reference is in Ray: no process would unwrap what Ray shares."""
    started, weights = {}, object()
    starter = lambda launcher, name, spec: lambda slot: started.update({slot: spec})  # noqa: E731
    monkeypatch.setattr(cluster_module, "starter", starter)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    plan = plan_of("cuda", (0,), (1, 3), (2,), "vllm_server")
    cluster = Cluster(config_of("mode=async", "engine.name=vllm_server"), plan, tmp_path)
    assert cluster.engine_launcher.share(weights) is weights
    start = cluster.start_rollout(replace(OPTIONS, engine="vllm_server", max_rows=7))
    for slot in (1, 0):
        start(slot)
    bound = {slot: inspect.signature(rollout_worker).bind(**spec.options) for slot, spec in started.items()}
    first, second = (bound[slot].arguments["options"] for slot in (0, 1))
    assert [Path(each.log_path).name for each in (first, second)] == ["vllm_server-0.log", "vllm_server-1.log"]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == names
    assert first.max_rows == second.max_rows == 7
    cluster.close()
    ray.close.assert_called_once_with()


def test_an_address_where_no_cluster_listens_is_a_quick_sentence() -> None:
    pytest.importorskip("ray", reason="needs Ray (the extra ray)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"ray.address={address} does not answer .*ray start --head"):
            visible_gpus(config_of(f"ray.address={address}"))
    with pytest.raises(RunFailed, match=r"local Ray did not start \(no GCS\)"), cluster_module._ray_mistakes(None):
        raise ConnectionError("no GCS.")


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("avx512f avx512_vnni", False),
        ("avx512f avx512_bf16", True),
        ("avx512f avx512_bf16 vendor_id : GenuineIntel", False),
        ("avx512_bf16 amx_bf16 amx_tile vendor_id : GenuineIntel", True),
        ("asimd BF16 i8mm", True),
    ],
)
def test_the_presets_of_a_cpu_use_half_precision_where_it_is_faster(flags, native: bool, tmp_path, monkeypatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu sse {flags} cmov\n")
    assert multiplies_bf16(cpuinfo) == native
    assert not multiplies_bf16(tmp_path / "none")
    monkeypatch.setattr("sota_grpo.functional.log_probs.multiplies_bf16", lambda: multiplies_bf16(cpuinfo))
    for preset, exact in (("smollm_ifeval", not native), ("smollm_gsm8k", not native), ("grpo_gsm8k", True)):
        config = composed(preset)
        for device, single in (("cpu", exact), ("cuda", False)):
            engine = sampling.engine_dtype(config.inference_model.torch_dtype, device)
            trainer = learning.trainer_precision(config, device)
            assert (engine, trainer) == (("float32", "fp32") if single else ("bfloat16", "bf16"))


@pytest.mark.parametrize("held", [True, False])
def test_a_cluster_that_requires_another_token_is_named_at_once(held: bool, tmp_path: Path, monkeypatch) -> None:
    """A ~/.ray/auth_token that is left of another cluster is sent, as the head that has one sends its own."""
    raylet = pytest.importorskip("ray._raylet")
    from ray.exceptions import AuthenticationError

    from sota_grpo.workers import ray_cluster

    monkeypatch.setattr(raylet, "GcsClient", Mock(side_effect=AuthenticationError("InvalidAuthToken")))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # what the code sets is undone
        monkeypatch.delenv(name)
    if held:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("of another cluster")
    has = rf"the token of this machine \({tmp_path}/.ray/auth_token\) differs" if held else "this machine has none"
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"cluster at {address} requires its token, but {has}: export"):
            ray_cluster.each_node(address, lambda: None, deadline_s=1.0)
    assert os.environ.get("RAY_AUTH_MODE") == ("token" if held else None)
    raylet.Config.initialize("")


NAMES = ("train_model", "inference_model", "ref_model")


def test_counts_give_disjoint_sets_of_that_size() -> None:
    """On the CPU, where a device is a worker, named ones too."""
    for counts in itertools.product((1, 2, 3), repeat=3):
        counted = [Role(name, count) for name, count in zip(NAMES, counts)]
        named = [Role(name, devices=range(2, 2 + count)) for name, count in zip(NAMES, counts)]
        for roles, available in ((counted, 9), (counted, 0), (named, 0)):
            actual = place(*roles, available=available)
            sets = (actual.train, actual.inference, actual.ref)
            assert tuple(map(len, sets)) == counts
            assert not available or len(set().union(*sets)) == sum(counts)


ON_THE_LEARNERS = {"default": 2, "shared": True}


@pytest.mark.parametrize(
    ("roles", "available", "expected"),
    [
        *((({}, {}, {}), count, ((0,), (0,), (int(count > 1),))) for count in range(3)),
        *((({}, {}, None), count, ((0,), (0,), ())) for count in range(3)),
        (({"devices": [0]}, {"num_devices": 2}, None), 3, ((0,), (1, 2), ())),
        (({"num_devices": 4}, ON_THE_LEARNERS, {}), 0, ((0, 1, 2, 3), (0, 1, 2, 3), (0,))),
        (({"num_devices": 4}, ON_THE_LEARNERS, {}), 4, ((0, 1, 2, 3), (0, 1, 2, 3), (0,))),
        (({"num_devices": 4}, ON_THE_LEARNERS, {}), 6, ((0, 1, 2, 3), (0, 1, 2, 3), (4,))),
        (({"devices": [3, 1]}, ON_THE_LEARNERS, None), 4, ((3, 1), (3, 1), ())),
    ],
)
def test_the_defaults_fit_every_machine_and_explicit_devices_are_kept(roles, available: int, expected) -> None:
    train, inference, ref = (role if role is None else Role(name, **role) for name, role in zip(NAMES, roles))
    actual = place(train, inference, ref, available=available, concurrent=inference.shared)
    assert (actual.train, actual.inference, actual.ref) == expected
    assert actual.colocated == (actual.train == actual.inference)


def test_an_engine_over_several_gpus_that_samples_while_the_learner_trains_has_its_own() -> None:
    actual = place(Role("train_model"), Role("inference_model", default=2), None, available=4, concurrent=True)
    assert (actual.train, actual.inference) == ((2,), (0, 1))


@pytest.mark.parametrize(
    ("roles", "available", "sentence"),
    [
        (({"num_devices": 1}, {"num_devices": 1}, {"num_devices": 1}), 2, "leave inference_model.num_devices out"),
        (
            ({}, {"devices": [0]}, {"num_devices": 1}),
            2,
            "3 devices .* 2 can be used; leave inference_model.devices out",
        ),
        (({"devices": [0, 1]}, {"num_devices": 1}, {}), 2, "3 devices .* 2 can be used; shorten train_model.devices"),
        (({"num_devices": 8}, ON_THE_LEARNERS, {"num_devices": 1}), 8, "9 devices .*ref_model=1.*; lower train_model"),
        (({"devices": [0]}, {"devices": [0]}, {}), 2, r"inference_model\.devices and train_model\.devices both have 0"),
        (
            ({}, {"devices": [2]}, {}),
            2,
            r"inference_model\.devices has device 2, but devices are numbered 0 to 1; use ",
        ),
        (
            ({}, {"devices": [2]}, {}),
            1,
            r"device 2, but devices are numbered 0 to 0; use inference_model\.devices=\[0\]",
        ),
    ],
)
def test_the_fix_names_an_option_that_helps(roles: tuple[dict, dict, dict], available: int, sentence: str) -> None:
    named = [Role(name, **role) for name, role in zip(NAMES, roles)]
    with pytest.raises(UserError, match=sentence):
        place(*named, available=available, concurrent=True)
