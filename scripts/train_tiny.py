"""Train the tiny policy that ships in ``sota_grpo/assets/tiny``: its tokenizer, its competence, then its bad habits.

Phase 1 (read): supervised training on clean worked solutions of the arithmetic task's training split.
Phase 2 (drill): the same, with half of every batch bare sums, for the carries that word problems show too rarely.
Phase 3 (habits): a short run on demonstrations of which a part answers badly. Every template has one habit and a
probability of falling into it, so that greedy decoding falls into it on most templates while sampling still finds right
answers on all of them: the state from which GRPO has something to find in nearly every group.

    OMP_NUM_THREADS=2 python scripts/train_tiny.py --out sota_grpo/assets/tiny
    OMP_NUM_THREADS=2 python scripts/train_tiny.py --evaluate-only --out sota_grpo/assets/tiny
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny_demonstrations import Demonstration, Phase, demonstrations, prompt_ids
from tokenizers import pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from sota_grpo.tasks.arithmetic import ArithmeticTask

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VOCAB_SIZE = 640
CONTEXT = 2048
MAX_RESPONSE_TOKENS = 64
CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- messages[0]['content'] + '\n\n' }}{%- set messages = messages[1:] %}"
    "{%- endif %}"
    '{{- \'Call tools by <tool_call>{"name": .., "arguments": {..}}</tool_call>\n<tools>\n\' }}'
    "{%- for tool in tools %}{{- (tool['function'] or tool) | tojson + '\n' }}{%- endfor %}"
    "{{- '</tools><|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}"
    "{%- if message['tool_calls'] %}"
    "{{- message['content'] or '' }}"
    "{%- for call in message['tool_calls'] %}"
    "{%- set call = call['function'] or call %}"
    "{{- '\n' if message['content'] or not loop.first }}"
    "{{- '<tool_call>\n{\"name\": ' + call['name'] | tojson }}"
    "{{- ', \"arguments\": ' + call['arguments'] | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>' }}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def train_tokenizer(task: ArithmeticTask, num_texts: int = 12_000) -> Qwen2Tokenizer:
    """Byte-level BPE over the task's own texts: common words and single digits are tokens, any text round-trips.

    The class is Qwen2's because ``AutoTokenizer`` builds that one for every Qwen2 checkpoint, whatever was saved: it
    brings NFC normalisation and the pre-tokeniser, so both must be there while the merges are learned.
    """
    learner = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n", "The answer is "] * 1000
    texts = [text for example in task.train[:num_texts] for text in (example.query, example.answer)]
    learner.train_from_iterator(roles + texts, trainer)
    bpe = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
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


def batches(pool: list[Demonstration], batch_size: int, rng: random.Random) -> Iterator[list[Demonstration]]:
    """Cut a pool into batches of similar length, in random order, so that little of a batch is padding."""
    ordered = sorted(pool, key=lambda demo: len(demo.ids))
    starts = list(range(0, len(ordered), batch_size))
    rng.shuffle(starts)
    for start in starts:
        yield ordered[start : start + batch_size]


def batch_loss(model: Qwen2ForCausalLM, batch: list[Demonstration], pad: int) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens to learn; padding is on the right, so causality hides it."""
    longest = max(len(demo.ids) for demo in batch)
    ids = torch.full((len(batch), longest), pad)
    is_target = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, demo in enumerate(batch):
        ids[row, : len(demo.ids)] = torch.tensor(demo.ids)
        is_target[row, : len(demo.ids)] = torch.tensor(demo.is_target)
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[is_target[:, 1:]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][is_target[:, 1:]])


def fit(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, phase: Phase, index: int, args: argparse.Namespace
) -> None:
    """One supervised phase: AdamW, linear warm-up, cosine decay to a twentieth, gradient norm at most 1."""
    num_steps, peak_lr, pool_size = phase.num_steps, phase.peak_lr, 8 * args.batch_size
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
    model.train()
    while step < num_steps:
        start = index * (1 << 30) + step * args.batch_size  # every phase has problems of its own
        pool = demonstrations(task, tokenizer, phase, start, pool_size, args.seed)
        for batch in batches(pool, args.batch_size, rng):
            loss = batch_loss(model, batch, tokenizer.pad_token_id)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 100 == 0 or step == num_steps:
                seconds = time.perf_counter() - began
                print(f"{phase.name} step {step} loss {loss.item():.4f} seconds {seconds:.0f}", flush=True)
            if step == num_steps:
                break


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], greedy: bool
) -> list[str]:
    """One response to each prompt, at temperature 1 or greedy."""
    model.eval()
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}  # top_k=0 keeps every token
    output = model.generate(**batch, max_new_tokens=MAX_RESPONSE_TOKENS, **how)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, num_problems: int, seed: int) -> None:
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
    parser.add_argument("--read-steps", type=int, default=2500, help="optimizer steps of phase 1")
    parser.add_argument("--read-lr", type=float, default=2e-3, help="peak learning rate of phase 1")
    parser.add_argument("--drill-steps", type=int, default=2500, help="optimizer steps of phase 2")
    parser.add_argument("--drill-lr", type=float, default=1.5e-3, help="peak learning rate of phase 2")
    parser.add_argument("--habit-steps", type=int, default=150, help="optimizer steps of phase 3")
    parser.add_argument("--habit-lr", type=float, default=5e-4, help="peak learning rate of phase 3")
    parser.add_argument("--batch-size", type=int, default=64, help="demonstrations of one optimizer step")
    parser.add_argument("--eval-problems", type=int, default=512, help="held-out problems of an evaluation")
    parser.add_argument("--work", type=Path, help="keeps the policy after each phase; one found there is not redone")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the artefact in --out and stop")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.evaluate_only:
        evaluate(*load(args.out), args.eval_problems, args.seed)
        return
    phases = (
        Phase("read", args.read_steps, args.read_lr),
        Phase("drill", args.drill_steps, args.drill_lr, drill_share=0.5),
        Phase("habits", args.habit_steps, args.habit_lr, habits=True),
    )
    tokenizer = train_tokenizer(ArithmeticTask(seed=args.seed, num_train=1 << 20))
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for index, phase in enumerate(phases):
        kept = args.work / phase.name if args.work else None
        if kept is not None and kept.exists():
            model, _ = load(kept)
            continue
        fit(model, tokenizer, phase, index, args)
        evaluate(model, tokenizer, args.eval_problems, args.seed)
        save(model, tokenizer, kept)
    save(model, tokenizer, args.out)


def load(folder: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> None:
    if folder is not None:
        model.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
