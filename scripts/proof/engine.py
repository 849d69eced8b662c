"""Stage 6: vLLM on the device, beside the learner: log-probs, pushes, sleep, and whole runs with it."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.trainer_work import SHAPES
from scripts.proof import Finding, Options
from scripts.proof.kernels import synchronised
from scripts.proof.runs import NUM_CHECKS, accuracies, command, gate_of, metrics, ran
from sota_grpo.engines import Engine, EngineOptions, make_engine
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling

EOS = 1
ROWS = 1024
Answers = list[tuple[GroupRequest, GroupOutput]]


def policy_of(options: Options) -> torch.nn.Module:
    """Qwen3-0.6B's shape (a tiny one where small) with weights that are not tiny, as vLLM keeps them."""
    family, sizes = SHAPES["tiny" if options.small else "qwen3-0.6b"]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**sizes, initializer_range=0.04)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def changed(policy: torch.nn.Module) -> torch.nn.Module:
    """Another policy: every matrix with noise of a fifth of its own size."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(0.008 * torch.randn_like(weight))
    return other


def requests_of(options: Options, groups: int) -> list[GroupRequest]:
    stream = torch.Generator().manual_seed(2)
    vocab, longest = SHAPES["tiny"][1]["vocab_size"], 24 if options.small else 400
    made = []
    for group in range(groups):
        length = int(torch.randint(3, longest, (), generator=stream))
        ids = torch.randint(3, vocab, (length,), generator=stream).tolist()
        made.append(GroupRequest(group, tuple(ids), 8, seed=1000 + group))
    return made


@torch.no_grad()
def log_probs(policy: torch.nn.Module, prompt: Sequence[int], response: torch.Tensor) -> torch.Tensor:
    """Of one response ``[R]``, by one forward pass without a cache."""
    device = next(policy.parameters()).device
    ids = torch.cat([torch.tensor(prompt), response]).to(device)
    logits = policy(ids[None], logits_to_keep=len(response) + 1).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, response.to(device)[:, None]).squeeze(1).cpu()


@torch.no_grad()
def log_prob_over_old_keys(
    old: torch.nn.Module, new: torch.nn.Module, prompt: Sequence[int], sample: Sample, at: int
) -> tuple[float, float]:
    """Of the token ``at``, the first of new weights: the new policy over the old one's keys; and the old policy's."""
    device = next(old.parameters()).device
    ids = torch.cat([torch.tensor(prompt), sample.token_ids]).to(device)
    last, token = len(prompt) + at - 1, int(sample.token_ids[at])
    seen = old.model(ids[None, :last], use_cache=True).past_key_values
    mixed = new(ids[None, last : last + 1], past_key_values=copy.deepcopy(seen)).logits[0, -1].float()
    alone = old(ids[None, last : last + 1], past_key_values=seen).logits[0, -1].float()
    return float(mixed.log_softmax(-1)[token]), float(alone.log_softmax(-1)[token])


def gap_of(policy: torch.nn.Module, exact: torch.nn.Module, answers: Answers) -> tuple[bool, dict[str, float]]:
    """Mean and largest distance of the engine's log-probs from the policy's in float32 (``exact``).

    They may be twice as far off as the policy's own in the engine's dtype: half precision moves a random policy.
    """
    gaps, own = [], []
    for request, output in answers:
        for sample in output.samples[:2]:
            true = log_probs(exact, request.prompt_ids, sample.token_ids)
            gaps.append((true - sample.log_probs).abs())
            own.append((true - log_probs(policy, request.prompt_ids, sample.token_ids)).abs())
    mean, allowed = float(torch.cat(gaps).mean()), max(1e-5, 2 * float(torch.cat(own).mean()))
    return mean < allowed, {"mean_gap": mean, "largest_gap": float(torch.cat(gaps).max()), "allowed": allowed}


def sampled(engine: Engine, requests: Sequence[GroupRequest], sampling: Sampling) -> Answers:
    by_id = {output.group_id: output for output in engine.generate(requests, sampling)}
    return [(request, by_id[request.group_id]) for request in requests]


def used_gib(options: Options) -> float:
    """Of the device, by all that run on it."""
    if options.device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def started(options: Options, folder: Path) -> tuple[Engine, float]:
    began = synchronised(options)
    engine = make_engine(
        EngineOptions(
            str(folder), engine="vllm", eos_token_ids=(EOS,), max_model_len=256 if options.small else 2048,
            gpu_memory_utilization=0.6, max_rows=64 if options.small else ROWS,
        )
    )  # fmt: skip
    return engine, synchronised(options) - began


def vllm_engine(options: Options) -> Iterator[Finding]:
    """Start, parity, speed, a push at rest, one in flight, sleep: vLLM in this process."""
    if find_spec("vllm") is None:
        yield Finding("vLLM", None, {"skipped": "vLLM is not installed"})
        return
    old = policy_of(options)
    new = changed(old)
    exact = [copy.deepcopy(policy).float() for policy in (old, new)]
    with tempfile.TemporaryDirectory() as name:
        old.save_pretrained(name)
        engine, start_s = started(options, Path(name))
        yield Finding("vLLM starts", None, {"start_s": start_s, "used_gib": used_gib(options)})
        few, most = requests_of(options, 8), Sampling(max_tokens=16 if options.small else 128)
        yield Finding("vLLM's log-probs are the policy's", *gap_of(old, exact[0], sampled(engine, few, most)))
        yield from speed(options, engine)
        yield from parts(options, engine)
        yield push_in_flight(options, engine, exact[0], exact[1])
        yield Finding("and the new policy's after a push", *gap_of(new, exact[1], sampled(engine, few, most)))
        if options.device == "cuda":
            yield from sleep(options, engine, new, exact[1])
        engine.close()


def speed(options: Options, engine: Engine) -> Iterator[Finding]:
    """Tokens per second of responses of one length and of several, few rows and all at once."""
    tokens, most = (8, 64) if options.small else (256, ROWS)
    lengths = {"even": [tokens] * (most // 8), "ragged": [tokens // 4 + 4 * row for row in range(most // 8)]}
    scheduler = engine._engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    for rows in (most // 4, most):
        scheduler.max_num_active_reqs = rows
        for name, each in lengths.items():
            requests, began = requests_of(options, len(each)), synchronised(options)
            samplings = [Sampling(max_tokens=length, ignore_eos=True) for length in each]
            futures = [engine.submit(request, sampling) for request, sampling in zip(requests, samplings)]
            while engine.advance():
                pass
            count = sum(len(sample.token_ids) for future in futures for sample in future.result().samples)
            rate = count / (synchronised(options) - began)
            yield Finding(f"vLLM samples, {name}", None, {"rows": rows, "tokens_per_s": rate, "tokens": count})


def parts(options: Options, engine: Engine) -> Iterator[Finding]:
    """Milliseconds of an engine step with all rows decoding, by what it does: is it the GPU that samples, or Python?"""
    llm: Any = engine._engine  # type: ignore[attr-defined]
    core = llm.engine_core.engine_core
    spent: dict[str, float] = {}
    clocked = {
        "schedule": (core.scheduler, "schedule"),
        "update_from_output": (core.scheduler, "update_from_output"),
        "process_outputs": (llm.output_processor, "process_outputs"),
        "launch": (core.model_executor, "execute_model"),
        "launch_sampler": (core.model_executor, "sample_tokens"),
        "whole": (llm, "step"),
    }

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return call

    before = [vars(owner).get(method) for owner, method in clocked.values()]
    for name, (owner, method) in clocked.items():
        setattr(owner, method, timed(name, getattr(owner, method)))
    tokens, most = (12, 64) if options.small else (96, ROWS)
    core.scheduler.max_num_active_reqs = most
    for request in requests_of(options, most // 8):
        engine.submit(request, Sampling(max_tokens=tokens, ignore_eos=True))
    for _ in range(tokens // 3):
        engine.advance()
    spent.clear()
    for _ in range(tokens // 3):
        engine.advance()
    figures = {f"{name}_ms": round(3e3 * seconds / tokens, 3) for name, seconds in spent.items()}
    while engine.advance():
        pass
    for (owner, method), own in zip(clocked.values(), before):
        delattr(owner, method)
        if own is not None:  # a shorter way (sota_grpo.engines.vllm_engine.shorten)
            setattr(owner, method, own)
    yield Finding(f"a step of {most} rows; what is left of whole is waiting and the rest", None, figures)


def push_in_flight(options: Options, engine: Engine, old: torch.nn.Module, new: torch.nn.Module) -> Finding:
    """Each token is labelled with the weights that gave it: the last old one and the first new one show it."""
    requests = requests_of(options, 4)
    tokens = 24 if options.small else 96
    futures = [engine.submit(request, Sampling(max_tokens=tokens, ignore_eos=True)) for request in requests]
    for _ in range(tokens // 2):
        engine.advance()
    began = synchronised(options)
    engine.update_weights(engine_weights(new), 1)
    push_s = synchronised(options) - began
    while engine.advance():
        pass
    last_old, first_new, if_old = [], [], []
    for request, future in zip(requests, futures):
        for sample in future.result().samples[:4]:
            at = int((sample.versions == 0).sum())
            last_old.append(log_probs(old, request.prompt_ids, sample.token_ids[:at])[-1] - sample.log_probs[at - 1])
            mixed, alone = log_prob_over_old_keys(old, new, request.prompt_ids, sample, at)
            first_new.append(mixed - float(sample.log_probs[at]))
            if_old.append(alone - float(sample.log_probs[at]))
    means = [float(torch.tensor(gaps).abs().mean()) for gaps in (last_old, first_new, if_old)]
    figures = dict(zip(("last_old", "first_new", "first_new_by_old_weights"), means)) | {"push_s": push_s}
    good = 10 * max(means[:2]) < means[2]
    return Finding("a push in flight: every token has its weights' label", good, figures)


def sleep(options: Options, engine: Engine, policy: torch.nn.Module, exact: torch.nn.Module) -> Iterator[Finding]:
    """What the engine gives back asleep, how long both take, and the same weights afterwards."""
    for turn in range(2):
        awake, began = used_gib(options), synchronised(options)
        engine.sleep()
        slept_s, asleep = synchronised(options) - began, used_gib(options)
        began = synchronised(options)
        engine.wake()
        wake_s = synchronised(options) - began
        alike, gap = gap_of(policy, exact, sampled(engine, requests_of(options, 2), Sampling(max_tokens=64)))
        figures = {"awake_gib": awake, "asleep_gib": asleep, "back_gib": used_gib(options), "sleep_s": slept_s}
        yield Finding(f"sleep and wake, {turn + 1}", alike and asleep < awake / 2, figures | {"wake_s": wake_s} | gap)


def demonstration(options: Options) -> Iterator[Finding]:
    """The embedded policy learns with vLLM what it learns on a CPU: at least 90 % of the held-out problems."""
    if find_spec("vllm") is None:
        return
    folder = options.out / "with_vllm"
    measured = ran(command(options, folder, "engine=vllm", "inference_model.gpu_memory_utilization=0.2"))
    seen = accuracies(folder)
    good = measured["exit"] == 0 and len(gate_of(folder)) >= NUM_CHECKS
    good = good and (options.small or (len(seen) > 1 and seen[-1] >= 0.9))
    yield Finding("demonstration, vLLM", good, measured | {"accuracy": seen[:1] + seen[-1:], "gate": gate_of(folder)})


def write_model(folder: Path, vocab: int, policy: torch.nn.Module) -> None:
    """``policy`` with a tokenizer of as many words."""
    policy.config.update({"pad_token_id": 0, "eos_token_id": EOS})
    policy.float().save_pretrained(folder)
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(10)), *(f"w{index}" for index in range(vocab - 13))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    made.save_pretrained(folder)


def preset(options: Options) -> Iterator[Finding]:
    """``grpo_gsm8k`` on one device, learner, vLLM and reference by turns: three whole steps, what takes the time.

    Random weights never end a response, so there are no checks, and responses have 256 tokens, GSM8K's usual length.
    """
    if find_spec("vllm") is None:
        return
    policy, folder, model = policy_of(options), options.out / "preset", options.out / "model"
    write_model(model, policy.config.vocab_size, policy)
    del policy
    torch.cuda.empty_cache()
    table, words = options.out / "table.jsonl", 20 if options.small else 110
    rows = [
        {"prompt": " ".join(f"w{7 * row + word}" for word in range(words)), "answer": "7"} for row in range(1024 // 8)
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = ("hardware=one_gpu", "inference_model.max_tokens=256", f"train.total_dialog_turns={3 * ROWS}")
    if options.small:
        batch = ("train.dialog_turns_per_batch=8", "train.optim_batch_size=8", "train.total_dialog_turns=24")
        size = (*batch, "inference_model.max_tokens=16")
    line = command(
        options, folder, "engine=vllm", f"model.name={model}", "env.dataset=table", f"env.dataset_path={table}",
        "env.num_heldout=8", "eval.mode=off", "train.checkpoint_frequency=0", "algorithm.entropy_coef=0.01",
        "check.mode=off", *size,
    )  # fmt: skip
    line[2:3] = ["--config-name=grpo_gsm8k"]
    process, shown, began = subprocess.Popen(line, start_new_session=True), 0, time.perf_counter()
    try:
        while True:
            ended = process.poll() is not None
            for row in [row for row in metrics(folder) if "reward" in row][
                shown:
            ]:  # each as it comes: a limit loses none
                times = {name: round(value, 3) for name, value in row.items() if name.startswith("time/") and value}
                yield Finding(f"grpo_gsm8k with vLLM, step {row['step']}", None, times)
                shown += 1
            if ended or time.perf_counter() - began > 400:
                break
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    yield Finding("grpo_gsm8k with vLLM", process.returncode == 0 and shown == 3, {"exit": process.returncode})


CHECKS = [vllm_engine, preset, demonstration]
