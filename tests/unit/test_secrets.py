"""A token among overrides reaches the environment of the run, and no file and no output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sota_grpo.cli import main
from sota_grpo.config.secrets import API_KEY, JUDGE_KEY, VARIABLE, key_of, require_tokens, without_tokens
from sota_grpo.errors import UserError
from tests.forked import ForkServer

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "0123456789abcdef" * 2  # of no account


@pytest.fixture(autouse=True)
def _no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (VARIABLE, API_KEY, JUDGE_KEY):
        monkeypatch.setenv(variable, "")


def test_tokens_leave_the_overrides_and_the_last_one_counts() -> None:
    for plus in ("", "+", "++"):
        assert without_tokens([f"{plus}model.hub_token=hf_a", "a=b", f"{plus}engine.api_key='sk-1'\n"]) == ["a=b"]
        assert (os.environ[VARIABLE], key_of(API_KEY)) == ("hf_a", "sk-1")
    assert without_tokens(["model.hub_token=hf_b", f"model.hub_token={TOKEN}", "model.hub_token=null"]) == []
    assert os.environ[VARIABLE] == TOKEN


@pytest.mark.parametrize("words", [["export", "no-run", "--to", "hf"], ["report", "no-run"], ["eval"]])
def test_every_command_takes_the_tokens_and_shows_none(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, f"model.hub_token={TOKEN}"])
    assert ended.value.code == 2
    assert os.environ[VARIABLE] == TOKEN
    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err
    assert "unrecognized" not in output.err


@pytest.mark.parametrize(
    "override",
    [
        f"model={{hub_token:{TOKEN}}}",
        f"+model={{name:x,'hub_token': {TOKEN}}}",
        f"~model.hub_token={TOKEN}",
        f"model.hub_token@x={TOKEN}",
        f"model.hub_token={TOKEN},{TOKEN}",
        f"model.hub_token=[{TOKEN}]",
        f"model.hub_token={TOKEN}é",
        f"engine={{name:vllm_server,api_key:{TOKEN}}}",
        f"reward.judge.api_key={TOKEN}",
        f"reward.judge.extra_body={{api_key: {TOKEN}}}",
    ],
)
def test_another_form_is_refused_without_repeating_it(override: str) -> None:
    expected = f"judge's key in {JUDGE_KEY}" if "judge" in override else ""
    with pytest.raises(UserError, match=expected) as refused:
        without_tokens([override])
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("value", [f"{TOKEN}\nx", f'"{TOKEN}"', f"Bearer {TOKEN}"])
def test_what_no_client_could_send_is_not_repeated(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [(name, lambda name=name: key_of(name)) for name in (API_KEY, JUDGE_KEY)]
    checks += [(VARIABLE, require_tokens), (API_KEY, require_tokens), (VARIABLE, lambda: without_tokens([]))]
    for variable, check in checks:  # by every command
        monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=variable) as refused:
            check()
        assert TOKEN not in str(refused.value)
        monkeypatch.setenv(variable, "")


def test_a_run_shows_no_token(tmp_path: Path) -> None:
    """A run that ends in its first checks: the model is not there. With a sweep, Hydra writes files of its own."""
    server = ForkServer(tmp_path, os.environ | {"HYDRA_FULL_ERROR": "1"})
    options = [f"model.hub_token={TOKEN}", f"engine.api_key={TOKEN}", f"model.name={tmp_path}/none", "seed=1,2", "-m"]
    command = [str(ROOT / "grpo.py"), "--config-name=grpo_cpu", f"hydra.sweep.dir={tmp_path}/runs", *options]
    for broken in ([], ["no.such=1"]):
        done = server.run([*command, *broken], cwd=tmp_path)
        assert done.code != 0
        assert broken or f"{tmp_path}/none" in done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    server.close()
