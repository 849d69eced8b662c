"""``sota-grpo export``: the model with its card, the adapter, and the folders for verl and TRL."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sota_grpo.cli import main
from sota_grpo.policy.load import resolve_model_path
from tests.e2e.conftest import metrics


def export(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert ended.value.code == 0


def logits(folder: Path, load=AutoModelForCausalLM) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder)("12 + 30 is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return load.from_pretrained(folder).eval()(ids).logits


def test_the_model_comes_with_a_card_that_the_hub_reads(run_dir: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    export(run_dir, "--to", "hf", "--out", tmp_path / "model")
    torch.testing.assert_close(logits(tmp_path / "model"), logits(run_dir / "hf"), rtol=0, atol=0)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert {"grpo", "reinforcement-learning"} <= set(card.data.tags)
    assert card.data.license is None
    last = [row for row in metrics(run_dir) if "eval/accuracy" in row][-1]
    assert f"| 2 | 16 | {100 * last['eval/accuracy']:.1f} ± {100 * last['eval/stderr']:.1f} % |" in card.text
    for written in ("train_model.lora.r", "AutoModelForCausalLM", "arithmetic", "algorithm.clip_low", "sota_grpo"):
        assert written in card.text
    assert str(run_dir) not in card.text


def test_an_earlier_step_is_made_from_its_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    export(run_dir, "--to", "hf", "--step", "1", "--out", tmp_path / "first")
    export(run_dir, "--to", "hf", "--step", "2", "--out", tmp_path / "second")
    torch.testing.assert_close(logits(tmp_path / "second"), logits(run_dir / "hf"), rtol=0, atol=0)
    assert not torch.equal(logits(tmp_path / "first"), logits(tmp_path / "second"))
    assert "| 2 |" not in (tmp_path / "first" / "README.md").read_text()  # what came later is not its result


def test_another_dtype_is_made_from_the_last_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    export(run_dir, "--to", "hf", "--dtype", "bfloat16", "--out", tmp_path / "half")
    half, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "half", run_dir / "hf"))
    assert half.keys() == whole.keys()
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in whole.items())


def test_the_adapter_computes_what_the_merged_model_does(run_dir: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    export(run_dir, "--to", "hf", "--adapter", "--out", tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    actual = logits(tmp_path / "adapter", AutoPeftModelForCausalLM)
    torch.testing.assert_close(actual, logits(run_dir / "hf"), rtol=1e-4, atol=1e-5)
    base = logits(Path(resolve_model_path("tiny")))
    assert (actual - base).abs().max() > 1e-3
    assert "library_name: peft" in (tmp_path / "adapter" / "README.md").read_text()


def test_verls_folder_is_whole_and_goes_beside_the_run(run_dir: Path) -> None:
    import pyarrow.parquet

    export(run_dir, "--to", "verl")
    folder = run_dir / "export" / "verl"
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    assert len(rows) == 40
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert len(pyarrow.parquet.read_table(folder / "heldout.parquet")) == 16
    script = folder / "run_verl.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "verl 0.9.0" in text
    assert "- device=cpu: verl needs accelerators." in text.replace("# ", "")
    code: dict = {"__file__": str(folder / "reward.py")}
    exec((folder / "reward.py").read_text(), code)
    row = rows[0]
    for text, reward in ((f"#### {row['extra_info']['answer'].rpartition('#### ')[2]}", 1.0), ("#### 0.123", 0.0)):
        actual = code["compute_score"](row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
        assert actual == {"score": reward, "acc": reward}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "--to", "hf"], "There is no run in nowhere"),
        (["RUN", "--to", "hf", "--step", "9"], "has no checkpoint after 9 steps; choose from 1, 2."),
        (["RUN", "--to", "verl", "--step", "1"], "--step is for --to hf"),
        (["RUN", "--to", "hf", "--adapter", "--dtype", "bfloat16"], "--dtype has no effect on --adapter"),
        (["PLAIN", "--to", "hf", "--adapter"], "trained all weights"),
        (["RUN", "--to", "verl", "--out", "PLAIN"], "is not an empty folder"),
    ],
)
def test_a_mistake_is_one_sentence(
    run_dir: Path, tmp_path: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: tiny}")
    paths = {"RUN": str(run_dir), "PLAIN": str(tmp_path)}
    with pytest.raises(SystemExit) as ended:
        main(["export", *[paths.get(one, one) for one in arguments]])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
