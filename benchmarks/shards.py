"""Host memory and stalls of checkpoints and publishes of several ranks: ``python -m benchmarks.shards --layers 8``.

Real gloo ranks (FSDP2 on the CPU) in Ray actors hold a random model with AdamW's moments. Measured is what each of
them, and this process, takes beyond what it had before (``RssAnon``), and what lies in shared memory (``RssShmem``,
Ray's store). A rank's share is its part of weights and moments. ``--gathered`` saves as before parts were written:
rank 0 gathers the state, which travels through the store to this process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from sota_grpo import keys
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import DType, load_model
from sota_grpo.policy.sharding import join_ranks, shard
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import LearnerWorker, RemoteLearner
from sota_grpo.workers.base import Launcher, ProcessLauncher, WorkerSpec

MIB = 1 << 20
VOCAB = 8192


def settings() -> LearnerSettings:
    return LearnerSettings(lr=1e-4, total_steps=9, optim_batch_size=4, micro_batch_tokens=64)


def make_rows(count: int = 4) -> list[TensorDict]:
    """Rows of random tokens, as small as they may be: what is measured is the state."""
    rows = []
    for index in range(count):
        sampled = torch.arange(8) >= 3
        row = TensorDict({keys.FULL_TOKENS: torch.randint(3, VOCAB, (8,)), keys.ASSISTANT_MASK: sampled})
        row.set(keys.ATTENTION_MASK, torch.ones(8, dtype=torch.bool)).set(keys.ADVANTAGE, torch.randn(1, 1))
        row.set(keys.LOG_PROBS, torch.where(sampled, -9.0, 0.0)).set(keys.TRUNCATED, torch.tensor([False]))
        rows.append(row.set(keys.GROUP_ID, torch.tensor(index)).set(keys.SAMPLE_ID, torch.tensor(0)))
    return rows


class Rank(LearnerWorker):
    """A rank that says how large it is, and for how long its steps have waited for a copy."""

    def __init__(self, make_learner: Callable[[], Learner]) -> None:
        super().__init__(make_learner)
        self.waited_s = 0.0
        wait = self.learner.before_change

        def timed() -> None:
            began = time.perf_counter()
            wait()
            self.waited_s += time.perf_counter() - began

        self.learner.before_change = timed

    def process(self) -> tuple[int, float]:
        """Its id, and the seconds that its steps have waited."""
        return os.getpid(), self.waited_s


def rank_worker(rank: int, size: int, init_method: str, model: str, dtype: DType) -> Rank:
    def make() -> Learner:
        torch.set_num_threads(1)
        policy = CausalPolicy(load_model(model, dtype=dtype, weights=rank == 0), shared_prompt=False)
        ranks = join_ranks(rank, size, init_method=init_method, device="cpu", reduce_once=False)
        if ranks.size > 1:
            shard(policy, ranks)
        loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=None)
        return Learner(policy, loss, settings(), pad_token_id=0, dump_dir=Path(tempfile.gettempdir()), ranks=ranks)

    return Rank(make)


def save_model(folder: str, hidden: int, layers: int) -> str:
    """A model of random weights for :func:`rank_worker` to load."""
    sizes: Any = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, tie_word_embeddings=True, **sizes))
    model.save_pretrained(f"{folder}/model")
    return f"{folder}/model"


class Memory:
    """The most that each process has held since :meth:`start`, beyond what it held then, in bytes."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._stop = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        self._before = [_held(pid) for pid in self.pids]
        self._peaks = list(self._before)
        self._stop.clear()
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            now = [_held(pid) for pid in self.pids]
            self._peaks = [tuple(map(max, old, new)) for old, new in zip(self._peaks, now)]  # type: ignore[misc]

    @property
    def own(self) -> list[int]:
        """Of each process alone."""
        return [peak[0] - before[0] for peak, before in zip(self._peaks, self._before)]

    @property
    def shared(self) -> list[int]:
        """That each process sees of shared memory."""
        return [peak[1] - before[1] for peak, before in zip(self._peaks, self._before)]


def _held(pid: int) -> tuple[int, int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    own, shared = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return own, shared


@contextmanager
def started(
    launcher: Launcher, size: int, hidden: int, layers: int, dtype: DType = "float32"
) -> Iterator[tuple[RemoteLearner, Memory]]:
    """A learner that has taken a step, so that its optimizer has all that it keeps; rank 0 first, this process last."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "size": size,
            "init_method": f"file://{folder}/rendezvous",
            "model": save_model(folder, hidden, layers),
            "dtype": dtype,
        }
        specs = [WorkerSpec("benchmarks.shards:rank_worker", {"rank": rank, **options}) for rank in range(size)]
        places = [{"bundle": rank} if hasattr(launcher, "_group") else {} for rank in range(size)]
        workers = [launcher.start(f"learner-{n}", spec, threads=1, **places[n]) for n, spec in enumerate(specs)]
        with closing(RemoteLearner(workers, settings(), share=launcher.share)) as learner:
            learner.update(make_rows())
            pids = [pid for pid, _ in ask_all(learner, "process")]
            yield learner, Memory([*pids, os.getpid()])


def ask_all(learner: RemoteLearner, method: str) -> list[Any]:
    answers: list[Future[Any]] = [worker.call(method) for worker in learner.workers]
    return [answer.result(60) for answer in answers]


def save(
    learner: RemoteLearner, store: CheckpointStore, *, gathered: bool = False, training: bool = False
) -> tuple[float, float]:
    """Save, perhaps while a step is taken; the seconds for which training waited, and those of the whole."""
    began = time.perf_counter()
    if gathered:
        state = learner.state_dict()
        stalled = time.perf_counter() - began
        store.save(1, {"learner": state})
        return stalled, time.perf_counter() - began
    before = [waited for _, waited in ask_all(learner, "process")] if training else []
    began = time.perf_counter()
    rest, shards = learner.begin_save(store.folder(1))
    stalled = time.perf_counter() - began
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(_seconds, began, partial(store.save, 1, {"learner": rest}, shards))
        if training:
            learner.update(make_rows())
            after = [waited for _, waited in ask_all(learner, "process")]
            stalled += max(late - early for early, late in zip(before, after))
        return stalled, saving.result()


def _seconds(began: float, write: Callable[[], object]) -> float:
    write()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and moments")
    parser.add_argument("--gathered", action="store_true", help="save as before")
    parser.add_argument("--processes", action="store_true", help="without Ray")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where a checkpoint is written"
    )
    args = parser.parse_args()
    if args.processes:
        launcher: Any = ProcessLauncher()
    else:
        from sota_grpo.workers.ray_cluster import RayLauncher

        launcher = RayLauncher([{"CPU": 1.0}] * args.ranks)
    with closing(launcher), started(launcher, args.ranks, args.hidden, args.layers, args.dtype) as (learner, memory):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            store = CheckpointStore(folder)
            with memory.watched():
                save(learner, store, gathered=args.gathered)
            share = store.num_bytes / args.ranks
            parameters = round(store.num_bytes / (3 * getattr(torch, args.dtype).itemsize) / 1e6)
            print(f"{parameters} million parameters over {args.ranks} ranks, a share of {share / MIB:.0f} MiB")
            _print("checkpoint", memory, share)
            for _ in range(3):
                stalled, saved = save(learner, store, gathered=args.gathered, training=True)
                print(f"  training waited {stalled:.3f} s of {saved:.2f} s ({100 * stalled / saved:.1f} %)")
            with memory.watched():
                measured = store.latest()
                assert measured is not None
                learner.load_state_dict(measured[1]["learner"])
            _print("resume", memory, share)
        for dtype in (None, torch.bfloat16):
            with memory.watched():
                pack = learner.weights(dtype=dtype)
                shared = launcher.share(pack)
            _print(f"publish in {dtype or 'float32'}", memory, share)
            del pack, shared


def _print(what: str, memory: Memory, share: float) -> None:
    own, shared = ([f"{value / share:.2f}" for value in values] for values in (memory.own, memory.shared))
    print(
        f"{what}: own memory in shares, rank 0 first and the driver last: {' '.join(own)}; shared: {' '.join(shared)}"
    )


if __name__ == "__main__":
    main()
