"""Train the tiny policy that ships in ``sota_grpo/assets/tiny``: its tokenizer, its competence, then its bad habits.

Phase 1 (competence): supervised training on clean worked solutions of the arithmetic task's training split.
Phase 2 (habits): a short run on demonstrations of which a part answers badly. Every template has one habit and a
probability of falling into it, so that greedy decoding falls into it on most templates while sampling still finds right
answers on all of them: the state from which GRPO has something to find in nearly every group.

    OMP_NUM_THREADS=2 python scripts/train_tiny.py --out sota_grpo/assets/tiny
    OMP_NUM_THREADS=2 python scripts/train_tiny.py --evaluate-only --out sota_grpo/assets/tiny
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sota_grpo.records import Example
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.arithmetic_templates import TEMPLATES

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VOCAB_SIZE = 640
CONTEXT = 2048
MAX_RESPONSE_TOKENS = 64
# Letters stick together with the space before them, digits stand alone, everything else groups by kind.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
STRONG_HABIT, WEAK_HABIT = 0.70, 0.25  # share of a template's demonstrations that fall into its habit


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a prompt and of the response to learn, EOS included."""

    prompt: list[int]
    response: list[int]


def train_tokenizer(task: ArithmeticTask, num_texts: int = 12_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the task's own texts: any UTF-8 text round-trips, common words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n", "The answer is "] * 1000
    texts = [f"{example.query}\n{example.answer}" for example in task.train[:num_texts]]
    tokenizer.train_from_iterator(roles + texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 of about 0.9 million parameters, head size 32, tied embeddings."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def habit_of(template: str) -> tuple[str, float]:
    """The bad habit of a template and how often its demonstrations fall into it.

    guess: a number at once, without working.   first_step: the value of the first step as the answer.
    last_step: the last step forgotten.         no_marker: the right work, but without ``####``.
    """
    num_steps = len(TEMPLATES[template].steps)
    siblings = [name for name, other in TEMPLATES.items() if len(other.steps) == num_steps]
    kinds = ("guess", "no_marker") if num_steps == 1 else ("guess", "first_step", "last_step", "no_marker")
    if num_steps == 2:  # forgetting the last step is stopping after the first one
        kinds = ("guess", "first_step", "no_marker")
    rank = siblings.index(template)
    return kinds[rank % len(kinds)], WEAK_HABIT if rank % 3 == 2 else STRONG_HABIT


def fall_into(habit: str, example: Example, rng: random.Random) -> str:
    """The response that this habit gives to this problem."""
    *work, final = example.answer.split("\n")
    if habit == "no_marker":
        return "\n".join([*work, f"The answer is {final.removeprefix('#### ')}."])
    if habit == "first_step":
        return f"{work[0]}\n#### {work[0].split('=')[1]}"
    if habit == "last_step":
        return "\n".join([*work[:-1], f"#### {work[-2].split('=')[1]}"])
    return f"#### {rng.choice(sorted(example.extra['numbers'].values()))}"


def demonstrations(
    task: ArithmeticTask, tokenizer: PreTrainedTokenizerFast, start: int, count: int, habits: bool, seed: int
) -> list[Demonstration]:
    """Problems ``start`` to ``start + count`` of the training split, answered cleanly or with their habits."""
    rng = random.Random(seed * 1_000_003 + start)
    examples = task.train[start : start + count]
    responses = []
    for example in examples:
        habit, share = habit_of(example.extra["template"])
        bad = habits and rng.random() < share
        responses.append(fall_into(habit, example, rng) if bad else task.gold_response(example))
    prompts = prompt_ids(task, tokenizer, examples)
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [Demonstration(prompt, [*ids, tokenizer.eos_token_id]) for prompt, ids in zip(prompts, encoded)]


def prompt_ids(
    task: ArithmeticTask, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> list[list[int]]:
    texts = [
        tokenizer.apply_chat_template(task.messages(example), tokenize=False, add_generation_prompt=True)
        for example in examples
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def batches(pool: list[Demonstration], batch_size: int, rng: random.Random) -> Iterator[list[Demonstration]]:
    """Cut a pool into batches of similar length, in random order, so that little of a batch is padding."""
    ordered = sorted(pool, key=lambda demo: len(demo.prompt) + len(demo.response))
    starts = list(range(0, len(ordered), batch_size))
    rng.shuffle(starts)
    for start in starts:
        yield ordered[start : start + batch_size]


def batch_loss(model: Qwen2ForCausalLM, batch: list[Demonstration], pad: int) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens; padding is on the right, so causality hides it."""
    longest = max(len(demo.prompt) + len(demo.response) for demo in batch)
    ids = torch.full((len(batch), longest), pad)
    is_target = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, demo in enumerate(batch):
        end = len(demo.prompt) + len(demo.response)
        ids[row, :end] = torch.tensor(demo.prompt + demo.response)
        is_target[row, len(demo.prompt) : end] = True
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[is_target[:, 1:]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][is_target[:, 1:]])


def fit(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, habits: bool
) -> None:
    """One supervised phase: AdamW, linear warm-up, cosine decay to a twentieth, gradient norm at most 1."""
    num_steps, peak_lr = (args.habit_steps, args.habit_lr) if habits else (args.steps, args.lr)
    task = ArithmeticTask(seed=args.seed, num_train=1 << 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps - warmup), peak_lr / 20),
        ],
        [warmup],
    )
    rng, began, step = random.Random(args.seed), time.perf_counter(), 0
    pool_size = 8 * args.batch_size
    model.train()
    while step < num_steps:
        start = (1 << 30) * habits + step * args.batch_size  # the habits are shown on problems of their own
        pool = demonstrations(task, tokenizer, start, pool_size, habits, args.seed)
        for batch in batches(pool, args.batch_size, rng):
            loss = batch_loss(model, batch, tokenizer.pad_token_id)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 100 == 0 or step == num_steps:
                print(f"step {step} loss {loss.item():.4f} seconds {time.perf_counter() - began:.0f}", flush=True)
            if step == num_steps:
                break


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], greedy: bool
) -> list[str]:
    """One response to each prompt, at temperature 1 or greedy."""
    model.eval()
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    limits = {"max_new_tokens": MAX_RESPONSE_TOKENS, "do_sample": not greedy, "top_k": 0}
    output = model.generate(**batch, **({} if not greedy else {"temperature": None}), **limits)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int, seed: int) -> None:
    """Print held-out accuracy, greedy and the mean of 4 samples at temperature 1, also by number of steps."""
    torch.manual_seed(seed)
    task = ArithmeticTask(seed=seed, num_heldout=num_problems)
    examples = list(task.heldout)
    prompts = prompt_ids(task, tokenizer, examples)
    for label, repeats in (("greedy", 1), ("avg@4", 4)):
        hits: dict[int, list[bool]] = {}
        for _ in range(repeats):
            for first in range(0, num_problems, 128):
                responses = sample(model, tokenizer, prompts[first : first + 128], greedy=label == "greedy")
                for response, example in zip(responses, examples[first:]):
                    hits.setdefault(example.extra["num_steps"], []).append(task.score(response, example).success)
        everything = [hit for values in hits.values() for hit in values]
        by_steps = "  ".join(f"{n} steps {sum(v) / len(v):.3f}" for n, v in sorted(hits.items()))
        print(f"{label}: {sum(everything) / len(everything):.3f}  ({by_steps})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sota_grpo/assets/tiny"), help="where the artefact goes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the habits")
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps of phase 1")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of phase 1")
    parser.add_argument("--habit-steps", type=int, default=150, help="optimizer steps of phase 2")
    parser.add_argument("--habit-lr", type=float, default=5e-4, help="peak learning rate of phase 2")
    parser.add_argument("--batch-size", type=int, default=64, help="demonstrations of one optimizer step")
    parser.add_argument("--eval-problems", type=int, default=512, help="held-out problems of an evaluation")
    parser.add_argument("--clean", type=Path, help="folder of the phase 1 policy: used if it is there, else written")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the artefact in --out and stop")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.evaluate_only:
        evaluate(*load(args.out), args.eval_problems, args.seed)
        return
    if args.clean is not None and args.clean.exists():
        model, tokenizer = load(args.clean)
    else:
        tokenizer = train_tokenizer(ArithmeticTask(seed=args.seed, num_train=1 << 20))
        model = build_model(tokenizer)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        fit(model, tokenizer, args, habits=False)
        evaluate(model, tokenizer, args.eval_problems, args.seed)
        save(model, tokenizer, args.clean)
    fit(model, tokenizer, args, habits=True)
    evaluate(model, tokenizer, args.eval_problems, args.seed)
    save(model, tokenizer, args.out)


def load(folder: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path | None) -> None:
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
