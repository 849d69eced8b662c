"""The transformers engine against transformers' own ``generate``: ``python -m benchmarks.generation --times 8``.

``generate`` is called as TRL 1.16's GRPOTrainer calls it: every prompt once per sample, left-padded, temperature 1. It
continues until every row has ended, so practically to the last token. Both sample to the same ragged prompts (60 to 180
tokens, ``--times`` as long) from the same random Qwen2 of 1.3 million parameters, in turns, in one process; one JSON
line has the medians. With ``--cpu`` the process's CPU time counts, which other programs disturb less: for one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.rl.records import GroupRequest, Sampling

EOS, PAD = 1, 0


def make_model(vocab_size: int, context: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(groups: int, times: int, vocab_size: int) -> list[list[int]]:
    stream = torch.Generator().manual_seed(1)
    lengths = torch.randint(60, 180, (groups,), generator=stream) * times
    return [torch.randint(2, vocab_size, (length,), generator=stream).tolist() for length in lengths.tolist()]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of both, and their ratio."""
    prompts = make_prompts(options.groups, options.times, options.vocab)
    model = make_model(options.vocab, context=180 * options.times + options.tokens)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, max_rows=options.groups * options.size)
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts for _ in range(options.size)])
    config = GenerationConfig(
        max_new_tokens=options.tokens,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        disable_compile=True,
    )
    sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)

    @torch.no_grad()
    def generate(turn: int) -> None:
        model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config)

    def decode(turn: int) -> None:
        requests = [
            GroupRequest(number, tuple(prompt), options.size, seed=1000 * turn + number)
            for number, prompt in enumerate(prompts)
        ]
        for _ in engine.generate(requests, sampling):
            pass

    clock = time.process_time if options.cpu else time.perf_counter
    seconds: dict[str, list[float]] = {"generate_s": [], "engine_s": []}
    for turn in range(options.repeat + 1):  # the first warms up
        for name, work in zip(seconds, (generate, decode)):
            began = clock()
            work(turn)
            if turn:
                seconds[name].append(clock() - began)
    medians = {name: statistics.median(measured) for name, measured in seconds.items()}
    return {**medians, "times_as_fast": medians["generate_s"] / medians["engine_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8, help="responses per group")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every response")
    parser.add_argument("--times", type=int, default=1, help="length of the prompts")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(vars(options) | {name: round(value, 3) for name, value in measure(options).items()}))


if __name__ == "__main__":
    main()
