"""A token given in any way reaches the environment of the run, and no file, no output and no process list."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra._internal.utils import get_args_parser

from sota_grpo.config.secrets import API_KEY, VARIABLE, api_key, protect_token, split_tokens, use_config_token
from sota_grpo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "0123456789abcdef" * 2  # of no account

NO_TOKENS = SimpleNamespace(model=SimpleNamespace(hub_token=None), engine=SimpleNamespace(api_key=None))

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from sota_grpo.errors import UserError
from sota_grpo.config.secrets import protect_token, use_config_token

try:
    sys.argv[1:] = protect_token(sys.argv[1:])
except UserError as error:
    sys.exit(f"refused: {error}")

import hashlib, os, hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="main")
def job(composed):
    parts = OmegaConf.to_container(composed, resolve=True)
    config = SimpleNamespace(**{name: SimpleNamespace(**parts[name]) for name in ("model", "engine")})
    use_config_token(config)
    assert config.model.hub_token is None and config.engine.api_key is None
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    (run_dir / "resolved.yaml").write_text(repr(config))
    (run_dir / "command").write_bytes(Path("/proc/self/cmdline").read_bytes())
    (run_dir / "argv").write_text(repr(sys.argv))
    for name, variable in (("digest", "HF_TOKEN"), ("key_digest", "SOTA_GRPO_API_KEY")):
        (run_dir / name).write_text(hashlib.sha256(os.environ.get(variable, "").encode()).hexdigest())
    print("the job ran, seed", composed.seed)
    if composed.seed == 9:
        raise RuntimeError("a run that fails")

job()
"""


@pytest.fixture
def launch(tmp_path: Path):
    """Run the program with a config file that holds ``hub_token``; returns the process and the directories of its runs.

    Whatever it leaves behind, the config file aside, is searched for the token first.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "conf").mkdir()
    config, runs = tmp_path / "conf" / "main.yaml", tmp_path / "runs"

    def run(*arguments: str, in_file: str = "null", key: str = "null", env: dict[str, str] | None = None):
        model, engine = f"{{name: gated, hub_token: {in_file!r}}}", f"{{name: vllm_server, api_key: {key!r}}}"
        config.write_text(f"seed: 1\nmodel: {model}\nengine: {engine}\n".replace("'null'", "null"))
        inherited = {name: value for name, value in os.environ.items() if name not in (VARIABLE, API_KEY)}
        places = [f"hydra.run.dir={runs}/one", f"hydra.sweep.dir={runs}/sweep"]
        done = subprocess.run(
            [sys.executable, "program.py", *places, *arguments],
            cwd=tmp_path,
            env=inherited | {"PYTHONPATH": str(ROOT)} | (env or {}),
            capture_output=True,
            text=True,
        )
        assert TOKEN not in done.stdout + done.stderr
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path != config]
        leaked = [path for path in files if TOKEN.encode() in path.read_bytes()]
        assert not leaked
        assert not [path for path in tmp_path.rglob("*") if TOKEN in path.name]
        return done, sorted(path.parent for path in runs.rglob("digest"))

    return run


def holds(run_dir: Path, token: str, name: str = "digest") -> bool:
    return (run_dir / name).read_text() == hashlib.sha256(token.encode()).hexdigest()


def test_a_token_of_the_command_line_reaches_the_run_and_nothing_else(launch) -> None:
    done, (run_dir,) = launch(f"++model.hub_token={TOKEN}", f"++engine.api_key={TOKEN}")
    assert done.returncode == 0, done.stderr
    assert holds(run_dir, TOKEN)
    assert holds(run_dir, TOKEN, "key_digest")
    assert b"program.py" in (run_dir / "command").read_bytes()  # which the fixture has searched
    assert "hub_token=null" in (run_dir / ".hydra" / "overrides.yaml").read_text()


def test_a_token_of_the_command_line_reaches_every_run_of_a_sweep(launch) -> None:
    done, run_dirs = launch(f"model.hub_token={TOKEN}", "seed=1,2", "--multirun")
    assert done.returncode == 0, done.stderr
    assert len(run_dirs) == 2
    assert all(holds(run_dir, TOKEN) for run_dir in run_dirs)


@pytest.mark.parametrize("sweep", [(), ("seed=1,2", "--multirun")], ids=["run", "sweep"])
def test_a_token_of_a_file_reaches_the_run_and_stays_in_that_file(sweep: tuple[str, ...], launch) -> None:
    done, run_dirs = launch(*sweep, in_file=TOKEN, key=TOKEN)
    assert done.returncode == 0, done.stderr
    assert len(run_dirs) == (2 if sweep else 1)
    assert all(holds(run_dir, TOKEN) and holds(run_dir, TOKEN, "key_digest") for run_dir in run_dirs)
    for run_dir in run_dirs:
        assert "hub_token: null" in (run_dir / ".hydra" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("in_file", "broken"),
    [
        ("null", (f"model.hub_token={TOKEN}", "seed=9")),
        (TOKEN, ("seed=9,2", "--multirun")),
        (TOKEN, ("no.such=1,2", "--multirun")),
        ("null", (f"+model.hub_token={TOKEN}", "no=1")),
    ],
)
def test_a_run_that_fails_tells_no_token(in_file: str, broken: tuple[str, ...], launch) -> None:
    done, _ = launch(*broken, in_file=in_file, env={"HYDRA_FULL_ERROR": "1"})
    assert done.returncode != 0


@pytest.mark.parametrize(("in_file", "show"), [(TOKEN, ("--cfg", "job")), ("${oc.env:MINE}", ("-iconfig",)),
                                               ("null", ("model.hub_token=${oc.env:MINE}", "-mh"))])  # fmt: skip
def test_a_config_that_is_shown_shows_no_token(in_file: str, show: tuple[str, ...], launch) -> None:
    """Every other form of these options: the next test."""
    done, _ = launch(*show, in_file=in_file, env={"MINE": TOKEN})
    assert done.returncode == 0, done.stderr
    assert "hub_token: null" in done.stdout


def test_the_token_of_a_file_is_taken_back_exactly_where_hydra_shows_a_config() -> None:
    """In every form that Hydra's own parser accepts: options cut short, with a value attached, several in one."""
    words = [option for action in get_args_parser()._actions for option in action.option_strings]
    values = ["", "job", "hydra", "all", "config", "defaults", "plugins"]
    forms = {word[:end] for word in words for end in range(2, len(word) + 1)} - {"--"}
    forms |= {f"-{flags}{last}" for flags in ("r", "m", "h", "rm", "hh", "mh") for last in ("h", "c", "i", "r", "sc")}
    counts = {True: 0, False: 0}
    for form, value in product(sorted(forms), values):
        for arguments in ([form, value] if value else [form], [f"{form}={value}"], [f"{form}{value}"]):
            try:
                with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
                    told = get_args_parser().parse_args(arguments)
            except SystemExit:  # Hydra refuses it, or shows its version
                continue
            shows = bool(told.help or told.cfg is not None or told.info is not None)
            assert ("model.hub_token=null" in protect_token(arguments)) == shows, arguments
            counts[shows] += 1
    assert min(counts.values()) > 100


def test_a_token_of_the_environment_needs_nothing_and_an_interpolation_is_resolved_nowhere_but_there(launch) -> None:
    done, (run_dir,) = launch(env={VARIABLE: TOKEN})
    assert done.returncode == 0, done.stderr
    assert holds(run_dir, TOKEN)
    done, (run_dir,) = launch("model.hub_token=${oc.env:MINE}", env={"MINE": TOKEN})
    assert done.returncode == 0, done.stderr
    assert holds(run_dir, TOKEN)
    done, _ = launch(in_file="${oc.env:MINE}")
    assert done.returncode != 0
    assert "'MINE' not found" in done.stderr
    assert "Callback" not in done.stderr


def test_the_command_line_outranks_the_file_and_the_file_the_environment(launch) -> None:
    done, (run_dir,) = launch(f"model.hub_token={TOKEN}", in_file="hf_of_the_file", env={VARIABLE: "hf_of_the_shell"})
    assert done.returncode == 0, done.stderr
    assert holds(run_dir, TOKEN)
    _, (run_dir,) = launch(in_file=TOKEN, env={VARIABLE: "hf_of_the_shell"})
    assert holds(run_dir, TOKEN)
    _, (run_dir,) = launch("model.hub_token=null", in_file="hf_of_the_file", env={VARIABLE: TOKEN})
    assert holds(run_dir, TOKEN)


@pytest.mark.parametrize(
    "argument",
    [
        f"model={{hub_token:{TOKEN}}}",
        f"+model={{name:x,'hub_token': {TOKEN}}}",
        f"~model.hub_token={TOKEN}",
        f"model.hub_token@x={TOKEN}",
        f"model.hub_token ={TOKEN}",
        f"model.hub_token={TOKEN},{TOKEN}",
        f"model.hub_token=choice({TOKEN})",
        f"model.hub_token=[{TOKEN}]",
        f"model.hub_token={TOKEN}é",
        f"engine={{name:vllm_server,api_key:{TOKEN}}}",
        f"engine.api_key={TOKEN},{TOKEN}",
    ],
)
def test_a_token_in_another_form_is_refused_without_repeating_it(argument: str) -> None:
    with pytest.raises(UserError) as refused:
        split_tokens([argument])
    assert TOKEN not in str(refused.value)
    assert ("server's key" if "api_key" in argument else "hub's token") in str(refused.value)


def test_quotes_go_the_last_one_counts_and_null_takes_it_back() -> None:
    for plus in ("", "+", "++"):
        assert split_tokens([f"{plus}model.hub_token={TOKEN}"]) == ([f"{plus}model.hub_token=null"], {VARIABLE: TOKEN})
    assert split_tokens([f"model.hub_token='{TOKEN}'\n"]) == (["model.hub_token=null"], {VARIABLE: TOKEN})
    assert split_tokens(["model.hub_token=hf_a", "a=b", f"model.hub_token={TOKEN}"]) == (
        ["model.hub_token=null", "a=b", "model.hub_token=null"],
        {VARIABLE: TOKEN},
    )
    assert split_tokens([f"model.hub_token={TOKEN}", "model.hub_token=null"])[1] == {}
    assert split_tokens(["~model.hub_token", "model.name=hub_token"])[0] == ["~model.hub_token", "model.name=hub_token"]


def test_another_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hf_before")
    kept = protect_token([f"model.hub_token={TOKEN}", "seed=2"])  # would not come back
    assert os.environ[VARIABLE] == TOKEN
    assert kept[1:] == ["model.hub_token=null", "seed=2"]


def test_the_token_of_a_config_object_moves_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hf_before")
    monkeypatch.setenv(API_KEY, "before")
    config = SimpleNamespace(model=SimpleNamespace(hub_token=TOKEN), engine=SimpleNamespace(api_key="sk-1"))
    use_config_token(config)
    assert (config.model.hub_token, os.environ[VARIABLE]) == (None, TOKEN)
    assert (config.engine.api_key, api_key()) == (None, "sk-1")
    use_config_token(config)
    assert os.environ[VARIABLE] == TOKEN


@pytest.mark.parametrize("value", [f"{TOKEN}\nx", f'"{TOKEN}"', f"Bearer {TOKEN}"])
def test_what_no_client_could_send_is_told_without_repeating_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UserError) as refused:
        use_config_token(NO_TOKENS)
    assert TOKEN not in str(refused.value)


def test_without_a_token_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    use_config_token(NO_TOKENS)
    assert VARIABLE not in os.environ
