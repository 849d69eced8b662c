"""Ten steps of every kind of run, as digests: run it in two checkouts; equal lines are runs that are equal bit for bit.

``python scripts/golden_traces.py`` trains the embedded policy in this process's folder with the transformers engine, on
one thread, and prints for each run the digests of its responses with their rewards and of the weights after the last
step. Names after the command choose runs: ``python scripts/golden_traces.py dapo "two turns"``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

COMMON = (
    *("engine=transformers", "device=cpu", "eval.mode=off", "check.mode=off", "env.num_envs=32", "env.repeats=4"),
    *("train.dialog_turns_per_batch=32", "train.optim_batch_size=16", "train.total_dialog_turns=320"),
    *("inference_model.max_tokens=48", "env.difficulty=2"),
)
KL = ("policy.kl_coef=0.05",)
RUNS = {
    "grpo": ("algorithm=grpo",),
    "grpo with kl": ("algorithm=grpo", *KL),
    "dapo with kl": ("algorithm=dapo", *KL),
    "gspo with kl": ("algorithm=gspo", *KL),
    "cispo with kl": ("algorithm=cispo", *KL),
    "lora": ("train_model.lora.enabled=true", *KL),
    "two epochs": ("train.epochs=2",),
    "two turns": ("env.reasoning=true", "env.max_steps=2"),
}


def digest(*files: Path) -> str:
    """Of the contents, names aside."""
    measured = hashlib.sha256()
    for file in files:
        measured.update(file.read_bytes())
    return measured.hexdigest()[:16]


def weights_digest(file: Path) -> str:
    """Of names, dtypes and values, however the file lays them out."""
    measured = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        measured.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        measured.update(tensor.contiguous().view(torch.uint8).numpy())
    return measured.hexdigest()[:16]


def trace(options: tuple[str, ...], run_dir: Path) -> str:
    """Train; the digests of the responses and of the weights."""
    command = [sys.executable, "grpo.py", "--config-name", "grpo_cpu", f"hydra.run.dir={run_dir}", *COMMON, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return f"{digest(*sorted(run_dir.glob('rollouts*')))} {weights_digest(run_dir / 'hf' / 'model.safetensors')}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(sys.argv[1:] or RUNS):
            print(f"{name:<16}{trace(RUNS[name], Path(folder) / str(number))}", flush=True)


if __name__ == "__main__":
    main()
