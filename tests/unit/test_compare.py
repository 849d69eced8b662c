"""Objectives side by side: every figure is that of the learner's own gradient, and scale makes no difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from sota_grpo import keys
from sota_grpo.assembly import compare
from sota_grpo.assembly.compare import Gradients, compared
from sota_grpo.assembly.compose import CONFIG_DIR, compose, preset_names
from sota_grpo.assembly.replay import replayed
from sota_grpo.cli import main
from sota_grpo.errors import UserError
from sota_grpo.functional.surrogates import SURROGATES
from sota_grpo.recording.stored_steps import StoredStep, read_step, stored_steps
from sota_grpo.report.compare import page, write_comparison
from sota_grpo.rl.coefficients import CoefficientLoss
from sota_grpo.run.app import train
from tests.report_rigs import HOSTILE
from tests.unit.test_replay import SMALL
from tests.unit.test_report_page import Reader

TWO_STEPS = "train.optim_batch_size=8"
SHORT = "inference_model.max_tokens=16"  # some responses are cut
PRESETS = [name for name in preset_names(CONFIG_DIR / "algorithm") if name != "gdpo"]
SCALED = """
def halved(log_ratio, advantage, clip_low, clip_high):
    ratio = log_ratio.exp()
    return -0.5 * (ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)

def tripled(log_ratio, advantage, clip_low, clip_high):
    return 6 * halved(log_ratio, advantage, clip_low, clip_high)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one training step, two optimizer steps, without a reference."""
    run_dir = tmp_path_factory.mktemp("compared") / "run"
    train(compose("grpo_cpu", [*SMALL, TWO_STEPS, "train.total_dialog_turns=16", SHORT]), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def stored(run_dir: Path) -> StoredStep:
    (path,) = stored_steps(run_dir)
    return read_step(path)


@pytest.fixture(scope="module")
def presets(run_dir: Path) -> dict[str, Any]:
    """All presets but the one whose reward terms the run had to weigh, at the last optimizer step."""
    with pytest.raises(UserError, match=r"algorithm.decouple_terms=true needs the weights of the reward terms"):
        compared(run_dir, 0, ["run", "gdpo"])
    return compared(run_dir, 0, ["run", *PRESETS])


def test_every_preset_is_compared_with_the_run(presets: dict[str, Any], stored: StoredStep) -> None:
    algorithms = presets["algorithms"]
    assert (presets["optimizer_step"], presets["optimizer_steps"], presets["samples"]) == (2, 2, 8)
    assert presets["ess"] < 1 - 1e-6  # the first optimizer step has moved the policy
    for name, values in algorithms.items():
        assert 0 <= values["clipped"] + values["masked"] + values["without_advantage"] <= 1, name
        if values["grad_norm"] == 0:  # a preset may find nothing in so few groups
            assert (values["ess"], set(presets["cosines"][name].values())) == (None, {None}), name
            continue
        assert 0 < values["ess"] <= 1, name
        for other, cosine in presets["cosines"][name].items():
            assert cosine == presets["cosines"][other][name]
            assert cosine is None or abs(cosine) <= 1 + 1e-12
    assert algorithms["gspo"]["clipped"] > algorithms["grpo"]["clipped"]
    assert algorithms["rloo"]["mean_weight"] == pytest.approx(1, rel=1e-6)  # it is REINFORCE
    assert any(note.startswith("rloo reads no ratio") for note in presets["notes"])
    assert any(note.startswith("dapo: algorithm.dynamic_sampling") for note in presets["notes"])
    assert json.loads(json.dumps(presets, allow_nan=False)) == presets


def test_an_algorithm_is_its_own_twin_exactly(run_dir: Path) -> None:
    """The run is one of grpo."""
    found = compared(run_dir, 0, ["run", "grpo"])
    assert found["cosines"] == {one: {"run": 1.0, "grpo": 1.0} for one in ("run", "grpo")}
    assert found["algorithms"]["run"] == found["algorithms"]["grpo"]
    assert (found["largest_difference"], found["tokens"], found["texts"]) == (0.0, [], [])
    assert "differ by more than rounding" in page(found)


def test_a_factor_scales_the_norm_and_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(SCALED)
    halved, tripled = f"{mine}:halved", f"{mine}:tripled"
    found = compared(run_dir, 0, ["grpo", halved, tripled])
    own, half, triple = (found["algorithms"][name] for name in ("grpo", halved, tripled))
    assert half["grad_norm"] / own["grad_norm"] == pytest.approx(0.5, rel=1e-6)
    assert triple["grad_norm"] / own["grad_norm"] == pytest.approx(3, rel=1e-6)
    assert found["cosines"]["grpo"][halved] == pytest.approx(1, abs=1e-9)
    assert found["cosines"][halved][tripled] == pytest.approx(1, abs=1e-9)
    assert found["largest_difference"] < 1e-5
    assert not found["tokens"]
    for values, factor in ((half, 0.5), (triple, 3)):
        assert values["mean_weight"] == pytest.approx(factor * own["mean_weight"], rel=1e-5)
        assert values["ess"] == pytest.approx(own["ess"], rel=1e-5)
        assert values["clipped"] == own["clipped"]


def test_the_optimizer_steps_are_those_of_a_replay(run_dir: Path, presets: dict[str, Any]) -> None:
    first = compared(run_dir, 0, ["run"], optimizer_step=1)
    figures = replayed(run_dir, 0)["figures"]
    steps = [found["algorithms"]["run"] for found in (first, presets)]
    norms = [step["grad_norm"] for step in steps]
    assert norms[0] != norms[1]
    assert sum(norms) / 2 == pytest.approx(figures["grad_norm"]["replayed"], rel=1e-6)
    losses = [step["losses"]["loss/objective"] for step in steps]
    assert sum(losses) / 2 == pytest.approx(figures["loss/objective"]["replayed"], rel=1e-5, abs=1e-8)
    assert first["ess"] == pytest.approx(1, abs=1e-6)
    assert any(note.startswith("Every ratio is 1") for note in first["notes"])
    assert list(first["cosines"]) == ["run"]  # a table of one
    assert first["tokens"][0]["difference"] == max(abs(t["algorithms"]["run"]["coefficient"]) for t in first["tokens"])


def test_dropped_samples_are_masked(run_dir: Path, stored: StoredStep) -> None:
    """By hand: tokens of truncated responses that have an advantage."""
    options = ["algorithm.drop_truncated=true", "train.optim_batch_size=16"]
    found = compared(run_dir, 0, ["grpo"], options)
    assert (found["optimizer_steps"], found["samples"]) == (1, 16)
    counts = {True: 0, False: 0}
    still = 0
    for row in stored.rows:
        tokens, moves = int(row.get(keys.ASSISTANT_MASK).sum()), float(row.get(keys.ADVANTAGE).reshape(())) != 0
        counts[bool(row.get(keys.TRUNCATED).any()) and moves] += tokens
        still += 0 if moves else tokens
    values = found["algorithms"]["grpo"]
    assert found["num_tokens"] == sum(counts.values())
    assert counts[True] > 0
    assert values["masked"] == pytest.approx(counts[True] / sum(counts.values()))
    assert values["without_advantage"] == pytest.approx(still / sum(counts.values()))


def test_tokens_stand_in_their_text(presets: dict[str, Any], stored: StoredStep) -> None:
    texts = {(int(r.get(keys.GROUP_ID)), int(r.get(keys.SAMPLE_ID))): p for r, p in zip(stored.rows, stored.pieces)}
    assert len(presets["tokens"]) == 20
    for token in presets["tokens"]:
        pieces = texts[token["group_id"], token["sample_id"]]
        assert token["text"] == pieces[token["position"]]
        assert token["before"] + token["text"] + token["after"] in "".join(pieces)
        values = [each["coefficient"] for each in token["algorithms"].values()]
        assert token["difference"] == max(values) - min(values)
    gaps = [token["difference"] for token in presets["tokens"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == presets["largest_difference"]
    for text in presets["texts"]:
        assert text["pieces"] == texts[text["group_id"], text["sample_id"]]
    coloured = presets["texts"][0]["coefficients"]["gspo"]
    (top,) = [t for t in presets["tokens"] if t["difference"] == gaps[0]][:1]
    if (top["group_id"], top["sample_id"]) == (presets["texts"][0]["group_id"], presets["texts"][0]["sample_id"]):
        assert coloured[top["position"]] == pytest.approx(top["algorithms"]["gspo"]["coefficient"], abs=1e-6)


def test_the_command_prints_and_leaves_a_record(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[str, int]:
        return {str(p.relative_to(run_dir)): p.stat().st_mtime_ns for p in run_dir.rglob("*") if p.suffix != ".log"}

    before = files()
    command = ["compare", str(run_dir), "--step", "0", "algorithm=grpo,gspo", "--tokens", "3"]
    printed, records, page_alone = [], [], tmp_path / "page.html"
    for extra in ([], ["--json"], ["--out", str(page_alone)]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, *extra])
        printed.append(capsys.readouterr().out)
        written = set((run_dir / "comparisons").iterdir())
        records += [record.read_text() for record in written]
        shutil.rmtree(run_dir / "comparisons") if len(records) == 1 else None
    assert len(records) == 3  # a page of its own writes none
    assert len(set(records)) == 1  # it is deterministic
    shutil.rmtree(run_dir / "comparisons")
    assert files() == before
    assert all(word in printed[0] for word in ("gradient norm", "cosine", "difference", "sota-grpo report"))
    assert "Cosines between gradients" in page_alone.read_text()
    found = json.loads(printed[1])
    assert len(found["tokens"]) == 3
    assert list(found["algorithms"]) == ["grpo", "gspo"]


@pytest.mark.parametrize(
    ("algorithms", "options", "sentence"),
    [
        (["unheard"], [], r"There is no algorithm=unheard; the presets are"),
        (["/nowhere/mine.py:sapo"], [], r"There is no file /nowhere/mine\.py"),
        (["grpo"], ["optimizer.lr=1"], r"optimizer\.lr=1 cannot change a step whose responses"),
        (
            ["grpo"],
            ["policy.kl_coef=0.1"],
            r"policy\.kl_coef=0\.1 needs the reference's log-probs, and step 0 has none",
        ),
        (["grpo"], ["train.epochs=0"], r"train\.epochs=0 must be above 0"),
        (["rloo"], ["algorithm.clip_high=0.3"], r"rloo: algorithm\.clip_high=0\.3 has no effect"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_a_sentence(algorithms, options, sentence: str, run_dir: Path) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        compared(run_dir, 0, algorithms, options)
    assert "\n" not in str(refused.value)


def test_a_step_that_is_not_there_is_a_sentence(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Step 5 of .* is not stored; steps that can be replayed: 0"):
        compared(run_dir, 5, ["grpo"])
    with pytest.raises(UserError, match=r"Step 0 has 2 optimizer steps, and --optimizer-step 9 is none of them"):
        compared(run_dir, 0, ["grpo"], optimizer_step=9)
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    with pytest.raises(UserError, match=r"There is no stored step in"):
        compared(tmp_path, None, ["grpo"])
    (tmp_path / "config.yaml").write_text("model: {name: tiny}\nalgorithm: {objective: '/nowhere/mine.py:sapo'}")
    with pytest.raises(UserError, match=r"asks to run /nowhere/mine\.py \(algorithm\.objective\)"):
        compared(tmp_path, None, ["grpo"])


def test_no_room_for_gradients_is_a_sentence(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr(compare.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(UserError, match=r"^2 gradients take 0\.\d GiB, and .* name fewer algorithms, or set TMPDIR"):
        compared(run_dir, 0, ["grpo", "gspo"])


def test_products_of_gradients_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK", 7)
    parameters = [torch.zeros(shape, requires_grad=True) for shape in ((3, 5), (1,), (4,))]
    vectors = []
    with Gradients(3, parameters) as gradients:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            parameters[1].grad = None
            vectors.append(
                torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in parameters])
            )
            gradients.add()
            assert all(parameter.grad is None for parameter in parameters)
        found = torch.tensor(gradients.products(), dtype=torch.float64)
    stacked = torch.stack(vectors)
    torch.testing.assert_close(found, stacked @ stacked.T)


class Logits(torch.nn.Module):
    """A policy of one free distribution per slot, in float64."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(*tokens.shape, 5, dtype=torch.float64))
        self.tokens = tokens

    def log_probs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def forward(self, td: TensorDict) -> TensorDict:
        return td.set(keys.LOG_PROBS, self.log_probs())


def batch_of(tokens: torch.Tensor, log_probs: torch.Tensor) -> TensorDict:
    """Three rows; the second has no advantage, the last slot of the third is padding."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    near = log_probs.detach() + 0.6 * torch.rand_like(log_probs) - 0.3
    batch = TensorDict(batch_size=[3])
    for key, value in {
        keys.GROUP_ID: torch.tensor([4, 4, 5]),
        keys.SAMPLE_ID: torch.tensor([0, 1, 0]),
        keys.FULL_TOKENS: tokens,
        keys.ASSISTANT_MASK: mask,
        keys.ADVANTAGE: torch.tensor([0.7, 0.0, -1.3], dtype=torch.float64).reshape(3, 1, 1),
        keys.LOG_PROBS: near,
        keys.PROXIMAL_LOG_PROBS: near + 0.02,
        keys.REF_LOG_PROBS: near - 0.1,
        keys.LOSS_WEIGHT: mask * torch.rand(3, 4, dtype=torch.float64),
    }.items():
        batch.set(key, value)
    return batch


def losses(out: Any) -> torch.Tensor:
    return torch.stack([value for name, value in out.items() if name.startswith("loss_")]).sum()


@pytest.mark.parametrize("objective", SURROGATES)
@pytest.mark.parametrize("beside", [{}, {"kl_to_ref_coeff": 0.3, "correction": "token"}], ids=["alone", "kl"])
def test_the_coefficients_times_the_gradients_of_the_log_probs_are_the_step(objective: str, beside: dict) -> None:
    tokens = torch.randint(5, (3, 4))
    policy = Logits(tokens)
    if beside and getattr(SURROGATES[objective], "weighs_rows", False):  # it takes no correction
        beside = {"kl_to_ref_coeff": 0.3}
    loss = CoefficientLoss(policy, objective=objective, entropy_bonus=False, **beside)
    total = losses(loss(batch_of(tokens, policy.log_probs())))
    (gradient,) = torch.autograd.grad(total, policy.logits)
    coefficients = torch.stack([row.coefficient for row in loss.rows.values()])
    assert list(loss.rows) == [(4, 0), (4, 1), (5, 0)]
    assert coefficients.dtype == torch.float64
    (by_hand,) = torch.autograd.grad((coefficients * policy.log_probs()).sum(), policy.logits)
    torch.testing.assert_close(-gradient, by_hand)
    surrogate = torch.stack([row.surrogate for row in loss.rows.values()])
    assert not surrogate[1].any()  # no advantage
    assert coefficients[1].any() == bool(beside)
    assert (coefficients[:, 0] == 0).all()  # the prompt
    assert coefficients[2, 3] == 0  # padding
    if not beside:
        assert torch.equal(surrogate, coefficients)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_coefficient_is_the_slope_of_the_loss(ratio: str) -> None:
    """By finite differences, with weights equal within a row, as GSPO's token form has them."""

    class Given(torch.nn.Module):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__()
            self.values = values

        def forward(self, td: TensorDict) -> TensorDict:
            return td.set(keys.LOG_PROBS, self.values)

    tokens = torch.randint(5, (3, 4))
    values = -torch.rand(3, 4, dtype=torch.float64) - 0.5
    batch = batch_of(tokens, values)
    batch.set(keys.LOSS_WEIGHT, batch.get(keys.ASSISTANT_MASK) * torch.tensor([[0.2], [0.3], [0.5]]).double())
    options = {"ratio": ratio, "clip_epsilon": 0.1, "kl_to_ref_coeff": 0.2, "entropy_bonus": False}

    def total(changed: torch.Tensor) -> float:
        return float(losses(CoefficientLoss(Given(changed), **options)(batch)))

    loss = CoefficientLoss(Given(values.clone().requires_grad_()), **options)
    loss(batch)
    for row, slot in ((0, 1), (0, 3), (1, 2), (2, 1), (2, 2), (2, 3)):
        change = torch.zeros_like(values)
        change[row, slot] = 1e-6
        slope = (total(values + change) - total(values - change)) / 2e-6
        found = list(loss.rows.values())[row].coefficient[slot]
        assert -found == pytest.approx(slope, abs=1e-7), (row, slot)


def test_hostile_text_is_no_markup(presets: dict[str, Any], tmp_path: Path) -> None:
    token, text = presets["tokens"][0], presets["texts"][0]
    hostile = [{**token, "before": one, "text": one, "after": one} for one in HOSTILE]
    whole = [{**text, "pieces": list(HOSTILE), "coefficients": {one: [1.0, -1.0, 0.0, None] for one in HOSTILE}}]
    found = {**presets, "run": HOSTILE[0], "tokens": hostile, "texts": whole, "notes": list(HOSTILE)}
    for key in ("algorithms", "cosines"):
        found[key] = {f"{HOSTILE[0]}{name}": value for name, value in presets[key].items()}
    written = write_comparison(found, tmp_path / "compare.html").read_text(encoding="utf-8")
    reader = Reader(written)
    assert not reader.scripts
    assert not reader.addresses
    assert not reader.handlers
    assert "default-src 'none'" in reader.policy
    assert "<b>bold" not in written
    assert not set("\u202e\u200f\x1b\x00\u2028") & set(written)
    assert "🙂" in written


def test_a_page_that_cannot_be_written_is_a_sentence(presets: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        write_comparison(presets, tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_comparison(presets, tmp_path / "nowhere" / "compare.html")
