"""``benchmarks.laws``: ours keeps every law, a fault planted in ours breaks each, and docs/laws.md says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.laws import page, wheels
from benchmarks.laws.adapter import Adapter
from benchmarks.laws.adapters import NAMES, load, ours
from benchmarks.laws.laws import FAILS, HOLDS, LAWS, REFUSES
from sota_grpo import keys
from sota_grpo.functional.loss_terms import KL_ESTIMATORS, SURROGATES
from sota_grpo.rl import objectives, transforms
from sota_grpo.rl.objectives import GRPOLoss, LossTokens

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "laws.md").read_text()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Adapter:
    return load("ours", tmp_path_factory.mktemp("wheels"))


Plant = Callable[[pytest.MonkeyPatch], None]


def surrogate(name: str, loss: Callable[..., Tensor]) -> Plant:
    return lambda patch: patch.setitem(SURROGATES, name, replace(SURROGATES[name], loss=loss, clipped=None))


def estimator(name: str, kl: Callable[[Tensor], Tensor]) -> Plant:
    """Of d = log p - log p_ref."""
    return lambda patch: patch.setitem(KL_ESTIMATORS, name, lambda log_prob, ref: kl(log_prob - ref))


def reduction(reduce: Callable[[Tensor, LossTokens], Tensor]) -> Plant:
    return lambda patch: patch.setattr(GRPOLoss, "_reduce", lambda self, values, tokens: reduce(values, tokens))


def advantages(formula: Callable[[Tensor], Tensor]) -> Plant:
    """Of rewards ``[groups, size]``, for the groups of four or of the law's size."""

    def planted(rewards: Tensor, ids: Tensor, **_: object) -> Tensor:
        return formula(rewards.view(len(ids.unique()), -1)).flatten()

    return lambda patch: patch.setattr(transforms, "group_advantages", planted)


def mean_over(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def masked_by_product(patch: pytest.MonkeyPatch) -> None:
    """The mask multiplies the loss in place of selecting the log-probs before it."""
    real = GRPOLoss._tokens

    def unmasked(self, entries):
        old = entries["behaviour"]
        given = {"log_prob": entries["log_prob"], "advantage": entries["advantage"].expand(old.shape)}
        return real(self, entries)._replace(behaviour=old, old=old, **given)

    patch.setattr(GRPOLoss, "_tokens", unmasked)
    reduction(lambda values, tokens: (tokens.weight * values).sum())(patch)


def a_mask_forgotten(patch: pytest.MonkeyPatch) -> None:
    masked_by_product(patch)
    reduction(lambda values, tokens: values.mean())(patch)


def a_sum_in_place_of_the_mean(log_prob: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (log_prob - old).where(mask, 0.0).sum(-1, keepdim=True).expand(mask.shape)


def unbounded(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -torch.min(log_ratio.exp() * advantage, log_ratio.exp().clamp(1 - clip_low, 1 + clip_high) * advantage)


def mean_of_rows(values: Tensor, tokens: LossTokens) -> Tensor:
    return (values.where(tokens.mask, 0.0).sum(-1) / tokens.mask.sum(-1)).mean()


def mean_of_the_micro_batch(values: Tensor, tokens: LossTokens) -> Tensor:
    return values.where(tokens.mask, 0.0).sum() / tokens.mask.sum()


def weighted_by_position(values: Tensor, tokens: LossTokens) -> Tensor:
    return (torch.arange(len(values))[:, None] * tokens.weight * values).sum()


#: For each law a fault of the kind that it is there to find.
FAULTS: dict[str, Plant] = {
    "clip": surrogate("clipped", lambda log_ratio, advantage: -advantage * log_ratio.exp()),
    "on_policy": surrogate("clipped", lambda log_ratio, advantage: advantage * log_ratio.exp()),
    "dual_clip": surrogate("clipped", unbounded),
    "cispo": surrogate(
        "cispo", lambda log_ratio, advantage, clip_high: -advantage * log_ratio.exp().clamp(max=1 + clip_high)
    ),
    "gspo": lambda patch: patch.setattr(objectives, "sequence_log_ratio", a_sum_in_place_of_the_mean),
    "k1": estimator("k1", lambda gap: -gap),
    "k2": estimator("k2", lambda gap: gap.square()),
    "k3": estimator("k3", lambda gap: gap.exp() - gap - 1),
    "kl_pull": estimator("k3", lambda gap: ((-gap).exp() + gap - 1).clamp(max=10)),
    "masked_garbage": a_mask_forgotten,
    "masked_inf": masked_by_product,
    "masked_nan": masked_by_product,
    "empty_row": reduction(mean_of_rows),
    "padding": reduction(lambda values, tokens: values.where(tokens.mask, 0.0).mean()),
    "padding_kl": reduction(lambda values, tokens: values.where(tokens.mask, 0.0).mean()),
    "row_order": reduction(weighted_by_position),
    "equal_split": reduction(mean_of_the_micro_batch),
    "uneven_split": reduction(mean_of_the_micro_batch),
    "kl_split": reduction(mean_of_the_micro_batch),
    "far_token": surrogate("clipped", unbounded),
    "overflow": surrogate("clipped", unbounded),
    "zero_advantage": surrogate("clipped", lambda log_ratio, advantage: -(advantage + 0.01) * log_ratio.exp()),
    "advantage_form": advantages(lambda rewards: rewards - 0.5),
    "equal_rewards": advantages(mean_over),
    "group_of_one": lambda patch: patch.setattr(
        ours, "GroupAdvantage", lambda: lambda rows: {keys.ADVANTAGE: rows["next", "reward"]}
    ),
    "nan_reward": advantages(mean_over),
    "other_groups": advantages(lambda rewards: rewards - rewards.mean()),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_planted_fault_breaks_the_law(name: str, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    assert LAWS[name](adapter).verdict == FAILS


def column(name: str) -> dict[str, str]:
    """The marks of one trainer on the page, by law."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    head = next(row for row in rows if row[1] == page.title("ours"))
    found = {row[0].strip("`"): row for row in rows if len(row) == len(head)}
    return {law: found[law][head.index(page.title(name))] for law in LAWS}


def judged_here(name: str) -> bool:
    """Whether the version on the page is the one that is installed."""
    package = wheels.PACKAGES[name]
    try:
        return f"{package.name} {metadata.version(package.name)} |" in PAGE
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize(
    "name",
    ["ours", "torchrl", pytest.param("trl", marks=pytest.mark.bench), pytest.param("verl", marks=pytest.mark.bench)],
)
def test_the_page_says_what_the_laws_say_now(name: str, adapter: Adapter, tmp_path: Path) -> None:
    if name != "ours" and not judged_here(name):
        pytest.skip(f"the page is about another version of {name}")
    if name != "ours":
        try:
            adapter = load(name, tmp_path)
        except wheels.NotInstalled as error:
            pytest.skip(str(error))
    found = {law: page.mark(check(adapter).verdict, law, adapter.unmet) for law, check in LAWS.items()}
    assert column(name) == found
    assert name != "ours" or set(found.values()) == {page.MARKS[HOLDS]}


def test_the_page_judges_at_least_eight_trainers_and_explains_every_failure() -> None:
    assert sum(set(column(name).values()) >= {page.MARKS[HOLDS]} for name in NAMES if page.title(name) in PAGE) >= 9
    explained = PAGE.partition("## What does not hold")[2].partition("\n## ")[0]
    for name in NAMES:
        part = explained.partition(f"### {page.title(name)}\n")[2].partition("\n### ")[0]
        failed = {law for law, mark in column(name).items() if mark in (page.MARKS[FAILS], page.UNMET)}
        lines = [line for line in part.splitlines() if line.startswith("- ")]
        assert failed == set(re.findall(r"`(\w+)`: ", part))
        assert all(len(line.split(". ", 1)[-1]) > 40 for line in lines), "a failure without its sentence"


SOURCE = """
from nowhere import anything

LIMIT = 3

@register("b")
def inner(x: anything.Tensor) -> int:
    return x + LIMIT

class Outer:
    def long(self, x):
        y = x + 1
        z = y * 2
        return unreachable(z)
"""


def test_members_are_executed_without_the_imports_of_their_file(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    found = wheels.members(file, "LIMIT", "inner", register=lambda name: lambda function: function)
    assert found.inner(2) == 5
    run = wheels.statements(file, "Outer.long", "y = ", "z = ")
    assert run(x=4)["z"] == 10
    with pytest.raises(wheels.NotInstalled, match=r"module\.py has no missing"):
        wheels.members(file, "missing")


def test_what_a_trainer_raises_is_its_answer_and_no_pass(adapter: Adapter) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no")

    assert LAWS["clip"](replace(adapter, step=broken)) == (REFUSES, "RuntimeError: no")
