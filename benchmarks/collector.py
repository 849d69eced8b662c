"""What the collector adds to its engine: ``python -m benchmarks.collector --engine scripted|transformers|vllm``.

The same number of groups is sampled by the engine alone and by a whole source (prompts, engine, rows, grades,
advantages), in turns, in one process; one JSON line has the medians and their ratio. ``--tokens-per-s`` is the speed
that the scripted engine feigns, asleep: 20,000 is a small model on one GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from sota_grpo.engines import Engine, EngineOptions, make_engine
from sota_grpo.envs import TaskEnv
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import GroupRequest, Sampling, sample_seed
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.tasks import make_task


def make_env(options: argparse.Namespace, seed: int) -> TaskEnv:
    size = options.size
    env = TaskEnv(make_task("arithmetic"), load_tokenizer("tiny"), num_envs=size, repeats=size, seed=seed)
    env.check_prompts()  # as a run does before it starts
    return env


def build_engine(options: argparse.Namespace, env: TaskEnv) -> Engine:
    responses = options.groups * options.size
    return make_engine(
        EngineOptions(
            "tiny",
            engine=options.engine,
            eos_token_ids=[env.tokenizer.eos_token_id],
            pad_token_id=env.tokenizer.pad_token_id,
            max_rows=responses,
            device="cpu",
            duration_s=responses * options.tokens / options.tokens_per_s,
            script=lambda request, sample, version: range(5, 5 + options.tokens),
        )
    )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of both, and what follows."""
    # Prompts of their own for each, so that neither finds the other's in a cache of the engine.
    bare, env = make_env(options, seed=1), make_env(options, seed=2)
    engine, sampling = build_engine(options, env), Sampling(max_tokens=options.tokens, ignore_eos=True)
    responses = options.groups * options.size
    collector = PromptGroupCollector(
        env, engine, sampling=sampling, dialog_turns_per_batch=responses, postproc=GroupAdvantage(), as_table=True
    )

    def engine_alone() -> None:
        requests = [
            GroupRequest(number, bare.prompt_ids(example), options.size, sample_seed(1, number))
            for number, example in bare.stream.draw(options.groups)
        ]
        for _ in engine.generate(requests, sampling):
            pass

    both: dict[str, Callable[[], object]] = {
        "engine": engine_alone,
        "collector": collector.next_batch,
    }
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for turn in range(options.repeat + 1):  # the first warms up
        for name, work in both.items():
            began = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    engine.close()
    medians = {name: statistics.median(measured) for name, measured in seconds.items()}
    return {
        "engine_s": medians["engine"],
        "collector_s": medians["collector"],
        "ratio": medians["collector"] / medians["engine"],
        "us_per_response": 1e6 * (medians["collector"] - medians["engine"]) / responses,
        "engine_tokens_per_s": responses * options.tokens / medians["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["scripted", "transformers", "vllm"], default="scripted")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8, help="responses per group")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every response")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch; vLLM takes OMP_NUM_THREADS")
    parser.add_argument("--tokens-per-s", type=float, default=20_000.0, help="of the scripted engine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(vars(options) | {name: round(value, 4) for name, value in measure(options).items()}))


if __name__ == "__main__":
    main()
