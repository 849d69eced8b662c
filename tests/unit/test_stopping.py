"""SIGTERM lets the step at hand finish, but not longer than the grace time; several Ctrl-C end a run as one does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sota_grpo.stopping import StopRequest

PROGRAM = """
import signal, sys, time
from sota_grpo.stopping import StopRequest
try:
    with StopRequest(grace_s=float(sys.argv[1])) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        time.sleep(float(sys.argv[2]))
        print("step finished", flush=True)
except KeyboardInterrupt:
    print("given up", flush=True)
time.sleep(float(sys.argv[3]))
print("end", flush=True)
"""


def run(program: str, *arguments: object) -> tuple[str, int]:
    """What it prints, and its exit code."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done.stdout, done.returncode


def test_a_step_within_the_grace_time_is_finished_and_the_clock_stops_with_it() -> None:
    assert run(PROGRAM, 1.5, 0.01, 1.8) == ("step finished\nend\n", 0)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_step_beyond_the_grace_time_is_given_up(name: str) -> None:
    assert run(PROGRAM.replace("SIGTERM", name), 0.2, 3600, 0) == ("given up\nend\n", 0)


def test_the_process_ends_itself_when_even_that_is_not_heeded() -> None:
    loop = "while True:\n            try: time.sleep(99)\n            except KeyboardInterrupt: pass"
    deaf = PROGRAM.replace("time.sleep(float(sys.argv[2]))", loop)
    assert run("import sota_grpo.stopping as s\ns._LAST_S = 0.1\n" + deaf, 0.1, 0, 0) == ("", 143)


BURST = """
import signal, sys
import sota_grpo.stopping as stopping
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes begin with it ignored
stopping._LAST_S = float(sys.argv[1])
stopping.interrupt_once()
try:
    with stopping.StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(getattr(signal, sys.argv[2]))
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGINT)
    print("closed", flush=True)
"""


def test_a_handler_of_c_code_gives_way_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot name such a handler: it is None."""
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", lambda number, handler: None)
        stop.__enter__()
    stop._before = {signal.SIGTERM: stop._before[signal.SIGTERM]}
    try:
        stop.__exit__(None, None, None)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_further_interrupts_do_not_disturb_what_is_being_closed_until_they_are_meant() -> None:
    closed = ("closed\n", 0)
    for wait_s, second, expected in ((60, "SIGINT", closed), (60, "SIGTERM", closed), (-1, "SIGINT", ("", 130))):
        assert run(BURST, wait_s, second) == expected


HANGUP = """
import signal, sys
from sota_grpo.stopping import StopRequest
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequest(grace_s=0.2) as stop:
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)  # a shell that ends passes it on, and the system sends it again
    print(stop.requested, flush=True)
"""


def test_a_terminal_that_goes_away_asks_once_unless_nohup_says_otherwise() -> None:
    for how, printed in (("plain", "True\n"), ("nohup", "False\n")):
        assert run(HANGUP, how) == (printed, 0)
