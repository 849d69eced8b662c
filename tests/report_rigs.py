"""Run directories as the trainer leaves them, made in an instant: the product's own writers, hand-made numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from sota_grpo import keys
from sota_grpo.config import Config
from sota_grpo.recording.run_log import RunLog
from sota_grpo.recording.stored_steps import Origin, StoredStep, save_step
from sota_grpo.rl.table import RowTable

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'><b>bold?</b> &lt;i&gt; ]]> <!-- ${7*7}",
    "left \u202eright to left\u202c \u200f\x00\x1b[31m \u2028 half \ud800 end",
    "שלום עולם, مرحبا, 你好, 🙂",
)
WORDS = ("So", " 2", " +", " 2", " =", " 4", "\n", "####", " 4")


def write_run(
    run_dir: Path,
    *,
    steps: int = 12,
    groups: int = 3,
    siblings: int = 4,
    seed: int = 0,
    eval_every: int = 4,
    finished: bool = True,
    num_steps: int | None = None,
    metrics: Callable[[int], dict[str, float | None]] | None = None,
    response: Callable[[int, int, int], str] | None = None,
    fields: Callable[[int, int, int], dict[str, Any]] | None = None,
    options: Sequence[str] = (),
    stored: Sequence[int] = (),
) -> Path:
    """A run of so many steps. Group 0 of a step has zero advantage; the first sample of group 1 is truncated.

    Args:
        metrics: of a step, beside those that every step has.
        response: the text of a sample, from step, group of the step, and sample.
        fields: other fields of a sample's row, from the same.
        options: overrides of the default config.
        stored: steps of which ``steps/`` has everything.
    """
    with RunLog(run_dir) as log:
        for step in range(steps):
            if step % eval_every == 0:
                log.write_step(step, evaluation(step, seed))
            actual = step_metrics(step, seed, groups, siblings) | (metrics(step) if metrics else {})
            rows = [row for group in range(groups) for row in group_rows(step, group, groups, siblings, response)]
            for row in rows if fields else ():
                row |= fields(step, row["group_id"] % groups, row["sample_id"])
            log.write_step(step, actual)
            log.write_rollouts(step, rows)
            if step in stored:
                store(run_dir, step, actual, rows)
        if finished:
            log.write_step(steps, evaluation(steps, seed))
    (run_dir / "config.yaml").write_text(config_text(seed, *options))
    record = {"signature": "0", "num_steps": steps if num_steps is None else num_steps, "finished": finished}
    (run_dir / "run.json").write_text(json.dumps(record))
    return run_dir


@cache
def config_text(seed: int, *options: str) -> str:
    config = OmegaConf.merge(OmegaConf.structured(Config(seed=seed)), OmegaConf.from_dotlist(list(options)))
    return OmegaConf.to_yaml(config)


def evaluation(step: int, seed: int) -> dict[str, float | None]:
    """Held-out accuracy of a policy that has done so many steps."""
    accuracy = 0.25 + 0.5 * step / (step + 20) + 0.01 * seed
    stderr = math.sqrt(accuracy * (1 - accuracy) / 256)
    return {"eval/accuracy": accuracy, "eval/stderr": stderr, "eval/num_samples": 256, "time/eval_s": 1.5}


def step_metrics(step: int, seed: int, groups: int, siblings: int) -> dict[str, float | None]:
    """What one step measures; reward rises with the step, and by 0.01 with the seed."""
    reward = 0.2 + 0.6 * step / (step + 10) + 0.01 * seed + 0.05 * math.sin(2.1 * step)
    return {
        **{"reward": reward, "reward/std": 0.4, "success": 0.5, "reward/correct": reward, "advantage": 0.7},
        **{"kl": 1e-3 * (1 + step), "entropy": 1 / (1 + 0.1 * step), "clip_fraction": 0.01, "ess": 0.99},
        **{"response_tokens/mean": 20.0 + step, "response_tokens/max": 64.0, "truncated": 0.1},
        **{"groups/zero_advantage": 1, "groups/trained": groups, "policy_age/mean": 0.5, "policy_age/max": 1},
        **{"grad_norm": 1.0 / (1 + step), "lr": 1e-6, "loss/objective": -0.01 * reward, "reward_errors": 0},
        **{"time/generate_s": 5.0, "time/score_s": 0.5, "time/learn_s": 3.0, "time/publish_s": 0.1},
        **{"time/step_s": 9.0, "tokens_per_s": 1000.0 + step, "dialog_turns": (step + 1) * groups * siblings},
    }


def group_rows(
    step: int, group: int, groups: int, siblings: int, response: Callable[[int, int, int], str] | None = None
) -> list[dict[str, Any]]:
    """The samples of one group, with the fields of ``rollouts.jsonl``; the policy is a version old in odd steps."""
    rewards = [1.0 if group == 0 else float(sample % 2) for sample in range(siblings)]
    mean = sum(rewards) / siblings
    text = response or (lambda *place: "".join(WORDS))
    return [
        {
            "group_id": step * groups + group,
            "sample_id": sample,
            "query": f"What is 2 + 2? (group {group})",
            "answer": "#### 4",
            "prompt": f"user: What is 2 + 2? (step {step}, group {group})\nassistant:",
            "response": text(step, group, sample),
            "response_tokens": len(WORDS),
            "success": rewards[sample] == 1.0,
            "reward": rewards[sample],
            "reward_terms": {"correct": rewards[sample]},
            "reward_info": {"note": "checked", "acc": 1},
            "advantage": rewards[sample] - mean,
            "truncated": group == 1 and sample == 0,
            "policy_version": max(0, step - step % 2),
        }
        for sample in range(siblings)
    ]


def store(run_dir: Path, step: int, metrics: dict[str, float | None], fields: list[dict[str, Any]]) -> None:
    """A stored step whose token ``i`` has entropy i, log-probs -1 (engine), -1 + 0.11 i (trainer), -0.5 (reference)."""
    count, prompt = len(WORDS), 3
    steps = torch.arange(count).float()
    rows, measured = [], []
    for field in fields:
        off = torch.zeros(prompt)
        rows.append(
            {
                keys.FULL_TOKENS: torch.arange(prompt + count),
                keys.PROMPT_TOKENS: torch.arange(prompt),
                keys.RESPONSE_TOKENS: torch.arange(prompt, prompt + count),
                keys.ASSISTANT_MASK: torch.arange(prompt + count) >= prompt,
                keys.LOG_PROBS: torch.cat([off, torch.full((count,), -1.0)]),
                keys.REF_LOG_PROBS: torch.cat([off, torch.full((count,), -0.5)]),
                keys.GROUP_ID: torch.tensor(field["group_id"]),
            }
        )
        measured.append(torch.stack([torch.cat([off, -1 + 0.11 * steps]), torch.cat([off, steps])]))
    origin = Origin(device="cpu", precision="fp32", num_ranks=0, num_threads=1, rng=torch.zeros(1, dtype=torch.uint8))
    pieces = [list(WORDS) for _ in rows]
    save_step(run_dir, StoredStep(step, metrics, RowTable.of(rows), fields, pieces, measured, origin))


def replay_record(names: Sequence[str] = ("grpo", "gspo"), **changes: Any) -> dict[str, Any]:
    """What ``sota-grpo replay`` leaves of a step under these algorithms."""
    figures = [["", "stored", *names], ["grad_norm", "0.5", *("0.25" for _ in names)]]
    cosines = [["cosine of gradients", *names], *([name, *("0.75" for _ in names)] for name in names)]
    return {"title": "Step 0, 8 samples", "tables": [figures, cosines], "notes": ["A note."], **changes}


ODD: tuple[Any, ...] = (None, True, -1, 10**400, 1e300, "", "x" * 100_000, [], [1, [None, 5]], {}, {"turns": 7})


def damaged(value: Any, share: float) -> Any:
    """The value with about this share of what is in it, itself included, replaced by something odd."""
    if random.random() < share:
        return random.choice(ODD)
    if isinstance(value, dict):
        return {name: damaged(each, share) for name, each in value.items()}
    return [damaged(each, share) for each in value] if isinstance(value, list) else value
