"""How documents are read and what becomes of their commands, on documents made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import Command, blocks, commands
from tests.docs.rules import SIZES, estimated, is_of_the_shell, is_slow, needs_gpu, small, why_not_run
from tests.docs.workshop import typed

DOCUMENT = """
Text, and `code` in it.

<!-- needs: gpu, 180 GiB -->
```bash
A=1 python grpo.py \\
  seed=1 # a comment
.venv/bin/pip install -e ".[ray]"
python -c "
print('# no comment')
"
```

```
a picture
```
"""


def read(folder: Path, text: str) -> list[Command]:
    (folder / "demo.md").write_text(text)
    return [command for block in blocks(folder / "demo.md") for command in commands(block)]


def test_commands_are_what_a_shell_would_read(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, DOCUMENT)[:3]
    assert (first.words, first.environment, first.line) == (("python", "grpo.py", "seed=1"), (("A", "1"),), 6)
    assert (second.words, second.line) == (("pip", "install", "-e", ".[ray]"), 8)
    assert third.words[:2] == ("python", "-c")
    assert "# no comment" in third.words[2]
    assert str(third) == "demo.md:9"


def test_a_comment_counts_for_the_block_below_it_alone(tmp_path: Path) -> None:
    (tmp_path / "demo.md").write_text(DOCUMENT)
    first, second = blocks(tmp_path / "demo.md")
    assert (first.language, first.needs, first.gpu_gib) == ("bash", ("gpu",), "180")
    assert (second.language, second.needs) == ("", ())


def test_a_block_that_is_not_closed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not closed"):
        read(tmp_path, "```bash\nmake demo\n")


@pytest.mark.parametrize("text", ["rm -rf outputs", "python other.py", "conda install torch"])
def test_a_command_that_no_rule_knows_fails(text: str) -> None:
    with pytest.raises(AssertionError, match="no rule knows"):
        why_not_run(typed(text))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("make demos", "make demos does not exist"),
        ("pip install 'sota-grpo[rays]'", "rays"),
        ("python scripts/train_tiny.py --outs tiny", "--outs"),
    ],
)
def test_what_is_not_run_must_name_what_exists(text: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        why_not_run(typed(text))


def test_only_sizes_and_the_model_are_added() -> None:
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    assert small(typed("python grpo.py optimizer.lr=1e-5")) == ["optimizer.lr=1e-5", *sizes, "model.name=tiny"]
    assert small(typed("python grpo.py model.size=4B")) == [*sizes, "model.name=tiny"]
    assert small(typed("python grpo.py model.name=path/to/your/model"))[-1] != "model.name=tiny"
    assert small(typed("python grpo.py --help")) == ["--help"]


def test_a_sweep_is_estimated_by_its_first_run() -> None:
    sweep = typed(
        "python grpo.py --multirun optimizer.lr=1e-4,1e-5 'policy.kl_coef=choice(0.0, 0.1)' hydra.sweep.dir=x"
    )
    assert estimated(sweep) == ["mode=sync", "optimizer.lr=1e-4", "policy.kl_coef=0.0"]


def test_a_gpu_is_needed_where_neither_cpu_nor_the_embedded_policy_is_asked_for() -> None:
    assert needs_gpu(typed("python grpo.py"))
    assert not needs_gpu(typed("python grpo.py --config-name grpo_cpu"))
    assert not needs_gpu(typed("python grpo.py device=cpu model.name=tiny"))


def test_workers_servers_and_sweeps_are_slow_and_pipes_are_of_the_shell() -> None:
    slow = ("python grpo-async.py", "python grpo.py --multirun seed=1,2", "sota-grpo train --async")
    assert all(is_slow(typed(text)) for text in slow)
    assert is_slow(typed("python grpo.py engine=vllm_server"))
    assert not is_slow(typed("python grpo.py train_model.num_devices=1"))
    assert is_of_the_shell(typed("echo '{}' | sota-grpo score --task math --input -"))
    assert not is_of_the_shell(typed("python grpo.py 'optimizer.lr=tag(log, interval(1, 2))'"))
