"""Rollout engine that samples with an inference server over HTTP and passes new weights to the server as files.

Requests and responses are token ids; this process imports neither Ray nor an inference library. :class:`ServerEngine`
uses vLLM's HTTP interface; :class:`~sota_grpo.engines.sglang_server.SGLangEngine` overrides what differs in SGLang.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.stepping import Flight, SteppingEngine, checked_weights, expected_weights
from sota_grpo.engines.vllm_server import (
    KEY_VARIABLE,
    RequireKey,
    WeightSums,
    command_line,
    engine_arguments,
    sampling_parameters,
)
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.orphans import LAUNCHER_SAYS, launcher
from sota_grpo.policy.weight_pack import Checksum, WeightFolder, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling
from sota_grpo.text import one_line, sentence

logger = logging.getLogger(__name__)
_STEP_S = 0.05  # longest wait of a step for a finished group
_PROBE_EVERY_S = 10.0  # a server that finishes nothing for so long is probed
_DEATH_SHOWS_S = 5.0  # a broken connection may come a moment before the launcher sees the server's death
_ABORT_S = 5.0  # longest wait of close() until a server that was not started here has received the aborts
_GENERATE_S = 7200.0  # longest time for one group, including its time in the server's queue
_MAX_CONNECTIONS = 512
_CONTROL_CONNECTIONS = 4  # for pushes, probes and aborts while every row is being sampled
_NO_LOG_PROB = -9000.0  # vLLM writes -9999 where a log-prob is missing, infinite or NaN
_PORT_TRIES = 3
_POLL_S = 0.2
_KILL_S = 3.0
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): \S.*")
_LONGEST_ERROR = 300
# These describe this process and would mislead a server that has processes of its own.
_NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_UNKNOWN_FORM = (AttributeError, LookupError, TypeError, ValueError)  # raised where an answer is read
_NAME_PREFIX = "generate-tokens-"  # vLLM's endpoint puts it before request names


class ServerDied(RunFailed, RuntimeError):
    """The inference server's process has ended; the message quotes the cause, if its log has one."""


class ServerLate(RunFailed, TimeoutError):
    """The inference server's process was alive but not ready within the time limit for its start."""


class ServerProcess:
    """An inference server, its workers and its launcher: subprocesses that Ctrl-C in this terminal does not reach.

    The launcher ends the server when this process ends, even by SIGKILL; then it deletes the folder ``scratch``.

    Args:
        environment: variables of the server, added to those of this process.
        log_path: the server's output is appended to this file, whose folder is created.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, scratch: Path):
        self.log_path = log_path
        self._ended = False
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        package_root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, [package_root, inherited.get("PYTHONPATH")]))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._launcher = subprocess.Popen(
                [*launcher(scratch), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | {"PYTHONPATH": python_path} | dict(environment),
                start_new_session=True,
            )
        self.pid = self._launcher.pid  # leads the group of all processes of the server

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Return whether the server has ended; wait at most ``within_s`` seconds for its end."""
        if not self._ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(within_s)
                self._ended = True
                self._kill_group()  # leaves nothing to do, unless the launcher itself was killed
        return self._ended

    def _kill_group(self) -> None:
        """Kill the server's remaining processes and wait until they are gone (zombies may stay in a container)."""
        deadline = time.monotonic() + _KILL_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            self._launcher.wait()
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)

    def log_text(self) -> str:
        """Return the output that the server has logged since it was started."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def died(self, doing: str) -> ServerDied:
        """Return the error to raise after the server has ended; ``doing`` says when: "while it sampled"."""
        lines = self.log_text().splitlines()
        ended = next((line.partition(": ")[2] for line in lines if line.startswith(LAUNCHER_SAYS)), "")
        # The cause is often logged by a process that ended first, far above the last lines; warnings quote errors too.
        errors = (match[0] for line in lines if "WARNING" not in line and (match := _ERROR.search(line)))
        error = one_line(next(errors, ""), _LONGEST_ERROR).rstrip(".")
        cause = ", ".join(filter(None, [ended, error])) or "it and its launcher were killed"
        return ServerDied(f"The inference server ended {doing} ({cause}); see its output in {self.log_path}.")

    def close(self, *, grace_s: float = 10.0) -> None:
        """Terminate the server; kill its processes if it still runs after ``grace_s`` seconds. Idempotent."""
        if self.has_ended():
            return
        self._launcher.terminate()
        if not self.has_ended(within_s=grace_s):
            self._kill_group()
            self._ended = True


class ServerEngine(SteppingEngine):
    """Rollout engine on a vLLM server: one HTTP request per group, sent by a thread that waits for the response.

    A group is sampled through vLLM's token-in token-out endpoint, which returns token ids, log-probs and, per span of
    tokens, the label of the weights that sampled it. Weights are loaded through ``/pause?mode=keep``, the workers'
    ``reload_weights`` and ``/resume``: groups in flight continue. A label is ``TOKEN:VERSION`` with a random token per
    engine, so that a push of weights to the same server by another trainer is detected.

    If the server dies, hangs, sends a malformed response or fails to load weights, the running call raises, and so does
    every later submission or push, because the server's weights are unknown. A request that is sent during a push may
    reuse its prompt's cached keys and values of the previous weights, as a group in flight does.

    Args:
        client: sends requests to the server; :meth:`close` closes it.
        options: ``eos_token_ids``, ``max_model_len``, ``max_rows`` (most samples of one group, and most concurrent
            requests, of which there are at most 512) and ``timeout_s`` are read.
        shapes: shape of every weight of the model, by name.
        tied: for each tied weight, the name of the weight whose values it shares.
        process: the server's process if it was started here, else None; :meth:`close` ends it.
        weight_folder: folder for pushed weights, which :meth:`close` deletes.

    Attributes:
        package: name of the Python package that provides the server.
        remedy: advice in the message about a missing endpoint.
        probe_path: path of a cheap request that succeeds only if the server's workers respond.
        pause, resume, free_memory, restore_memory: path and JSON body of these requests.

    UserError if the server cannot be used; ``process`` is then ended, ``weight_folder`` deleted and ``client`` closed.
    """

    name, package = "vllm_server", "vllm"
    takes_adapters = True  # it writes only the weights that the adapter changes
    remedy = (
        "start it with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm "
        "--logprobs-mode processed_logprobs`"
    )
    generate_path = "/inference/v1/generate"
    probe_path = "/weight_info"
    pause: ClassVar[tuple[str, Any]] = ("/pause?mode=keep&clear_cache=false", None)
    resume: ClassVar[tuple[str, Any]] = ("/resume", None)
    free_memory: ClassVar[tuple[str, Any]] = ("/sleep?level=1", None)
    restore_memory: ClassVar[tuple[str, Any]] = ("/wake_up", None)

    def __init__(
        self,
        client: HttpClient,
        options: EngineOptions,
        *,
        shapes: dict[str, torch.Size],
        tied: dict[str, str],
        process: ServerProcess | None,
        weight_folder: WeightFolder,
    ):
        super().__init__()
        self._client, self._process = client, process
        self._shapes, self._tied = shapes, tied
        self._max_rows, self._timeout_s, self._load_s = options.max_rows, options.timeout_s, options.load_s
        self._stop_token_ids = sorted(options.eos_token_ids)
        self._weights, self.weight_dtype = weight_folder, weight_folder.dtype
        self._token = secrets.token_hex(4)
        self._can_sleep = process is not None and torch.cuda.is_available()  # a server from here has the option
        self._failure: Exception | None = None
        self._num_pushes = 0
        self._merged_into: object = None  # the `base` that the server's adapter was merged into; None: unknown
        self._may_send = threading.Event()
        self._may_send.set()
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Sequence[Sample] | Exception]] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._num_senders = 0
        self._last_answer_at = time.monotonic()
        self._aborter = threading.Thread(target=self._send_aborts, name=f"{self.name}-abort", daemon=True)
        try:
            with self._breaking("before it was used"):
                allowed, requested = self._connect(), options.max_model_len
            if requested is not None and requested > allowed:
                raise UserError(
                    f"The server at {client.url} has a context of {allowed} tokens, fewer than max_model_len="
                    f"{requested}; start the server with a longer context, or reduce max_model_len."
                )
            self.max_model_len = requested or allowed
        except BaseException:
            self.close()
            raise
        self._aborter.start()

    @staticmethod
    def command(options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """Return the command that starts a server on loopback ``port``, without ``key``, which all users could read."""
        return [
            # The script `vllm` looks up the distribution `vllm`, which the CPU build is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "policy", "--tokens-only", "--disable-uvicorn-access-log"),
            *("--model", options.model_path, "--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"),
            *("--worker-extension-cls", f"{WeightSums.__module__}.{WeightSums.__name__}"),
            *command_line(engine_arguments(options, on_cpu=on_cpu)),
        ]

    @staticmethod
    def environment(options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """Return the server's environment variables in addition to those of this process; ``key`` is its API key."""
        common = {KEY_VARIABLE: key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if not on_cpu:
            return common
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.tensor_parallel_size == 1 else {}
        cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        return common | threads | alone | cache | {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1"}

    @classmethod
    def start(cls, options: EngineOptions, scratch: Path, *, on_cpu: bool) -> tuple[ServerProcess, HttpClient]:
        """Start a server on a free port of the loopback interface and wait until ``/health`` answers.

        The existing folder ``scratch`` is deleted when the server ends. Return the process and a client with the
        server's random key. Raise ServerDied if it ends before it answers, ServerLate if it does not answer within
        ``options.load_s``.
        """
        log_path, start_s = Path(options.log_path), options.load_s
        logger.info("Starting an inference server; its output goes to %s.", log_path)
        # A killed server leaves sockets and rendezvous files. On a GPU the temporary folder keeps compiled code too.
        leavings = {"TMPDIR" if on_cpu else "VLLM_RPC_BASE_PATH": str(scratch)}
        for attempt in range(1, _PORT_TRIES + 1):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port, key = int(probe.getsockname()[1]), secrets.token_urlsafe(32)
            environment = {**leavings, **cls.environment(options, key, on_cpu=on_cpu), **options.environment}
            process = ServerProcess(
                cls.command(options, port, key, scratch, on_cpu=on_cpu), environment, log_path, scratch
            )
            client, deadline = _client(options, f"http://127.0.0.1:{port}", key), time.monotonic() + start_s
            try:
                while not process.has_ended():
                    try:
                        client.get("/health", timeout_s=5.0)
                    except ServerError as error:  # not listening yet, or still loading
                        if time.monotonic() > deadline:
                            raise ServerLate(
                                f"The inference server was not ready after {start_s:g} s ({str(error).rstrip('.')}); "
                                f"see its output in {log_path}, or raise ray.timeout_s."
                            ) from error
                        time.sleep(_POLL_S)
                    else:
                        return process, client
            except BaseException:
                process.close()
                raise
            if attempt == _PORT_TRIES or "address already in use" not in process.log_text().lower():
                break
            logger.warning("Another program took port %d before the server did; trying another port.", port)
            scratch.mkdir(mode=0o700, exist_ok=True)
        raise process.died("before it was ready")

    def _connect(self) -> int:
        """Check the server's endpoints and log-probs, label its weights version 0, and return its context in tokens."""
        try:
            models = self._get("/v1/models")
            self._post(*self.resume)  # a trainer that died may have left it paused
            self._set_label(self._label(0))
            self._check_sampling()
            return int(models["data"][0]["max_model_len"])
        except _UNKNOWN_FORM as error:
            raise UserError(
                f"The server at {self._client.url} answers in an unknown form ({sentence(error).rstrip('.')}); "
                f"{self.remedy}."
            ) from error
        except ServerError as error:
            url = self._client.url
            if error.status == 401:
                raise UserError(
                    f"The server at {url} rejected the API key; set engine.api_key or SOTA_GRPO_API_KEY to its key."
                ) from error
            if error.status not in (403, 404, 405):
                raise
            raise UserError(
                f"The server at {url} refuses or lacks an endpoint for training ({str(error).rstrip('.')}); "
                f"{self.remedy}."
            ) from error

    def _check_sampling(self) -> None:
        """Raise UserError unless a token sampled with top_k=1 has log-prob 0, as in the processed distribution."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "seed": 0, "logprobs": 0, "detokenize": False}
        # Not token 0: it is often the padding token, whose embedding is 0, and top_k=1 keeps all of many equal logits.
        body = {"token_ids": [1, 2, 3], "sampling_params": params}
        answer = self._client.post(self.generate_path, body, timeout_s=self._load_s)
        log_prob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        if log_prob != 0:
            raise UserError(
                f"With top_k=1 the sampled token must have log-prob 0, but the server at {self._client.url} returned "
                f"{log_prob}: it reports log-probs before temperature, top-k and top-p are applied; start it with "
                "--logprobs-mode processed_logprobs."
            )

    def _get(self, path: str) -> Any:
        return self._client.get(path, timeout_s=self._timeout_s)

    def _post(self, path: str, body: Any) -> Any:
        return self._client.post(path, body, timeout_s=self._timeout_s)

    @contextlib.contextmanager
    def _breaking(self, doing: str, kind: type[Exception] = Exception) -> Iterator[None]:
        """Record an error of the block as the engine's failure; if the server has ended, raise ServerDied instead."""
        try:
            yield
        except kind as error:
            self._failure, process = error, self._process
            if isinstance(error, ServerSilent) and process and process.has_ended(within_s=_DEATH_SHOWS_S):
                self._failure = process.died(doing)
                raise self._failure from error
            raise

    def _require_open(self) -> None:
        super()._require_open()
        if self._failure is not None:
            raise RuntimeError(f"This engine failed ({self._failure}); build a new one.") from self._failure

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        if request.num_samples > self._max_rows:
            raise ValueError(
                f"Group {request.group_id} requests {request.num_samples} samples, more than the max_rows="
                f"{self._max_rows} that the server samples at once; raise max_rows (inference_model.max_num_seqs)."
            )
        return super().submit(request, sampling)

    def _start(self, flights: Mapping[int, Flight]) -> None:
        if len(self._flights) == len(flights):
            self._last_answer_at = time.monotonic()
        for ticket in flights:
            self._waiting.put(ticket)
        # An evaluation submits thousands of groups at once, a dialog each of its samples: no thread for each of them.
        while self._num_senders < min(len(self._flights), self._max_rows, _MAX_CONNECTIONS):
            self._num_senders += 1
            threading.Thread(target=self._send, name=f"{self.name}-{self._num_senders}", daemon=True).start()

    def _send(self) -> None:
        while (ticket := self._waiting.get()) is not None:
            self._may_send.wait()
            if (flight := self._flights.get(ticket)) is None:  # dropped
                continue
            result: Sequence[Sample] | Exception
            try:
                body, version = self._body(ticket, flight), self.version
                answer = self._client.post(self.generate_path, body, timeout_s=_GENERATE_S)
                try:
                    result = self._samples(answer, flight, version)
                except _UNKNOWN_FORM as error:
                    raise ServerError(
                        f"POST {self._client.url}{self.generate_path} returned a response of an unknown form "
                        f"({error!r}): {str(answer)[:300]}"
                    ) from error
            except Exception as error:  # raised by the next step
                result = error
            self._answers.put((ticket, result))

    def _request_name(self, ticket: int) -> str:
        return f"{self._token}-{ticket}"

    @property
    def _cache_salt(self) -> str:
        """Salt of the prefix cache: only requests of one salt share cached prompts, and every push changes it."""
        return f"{self._token}-{self._num_pushes}"

    def _body(self, ticket: int, flight: Flight) -> dict[str, Any]:
        """Return the JSON body of the request for one group."""
        return {
            "request_id": self._request_name(ticket),
            "token_ids": list(flight.request.prompt_ids),
            "cache_salt": self._cache_salt,
            "sampling_params": sampling_parameters(flight.request, flight.sampling, flight.room, self._stop_token_ids),
        }

    def _samples(self, answer: Any, flight: Flight, version: int) -> Sequence[Sample]:
        """Return the samples of a response ``answer``; its request was sent with the server at weights ``version``."""
        samples = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            tokens = [(token["token_id"], token["logprob"]) for token in choice["logprobs"]["content"]]
            samples.append(self._sample(tokens, choice["finish_reason"], choice["weight_versions"]))
        return samples * flight.request.num_samples if flight.sampling.temperature == 0 else samples

    def _sample(self, tokens: Sequence[tuple[int, float]], reason: str, spans: Sequence[Mapping[str, Any]]) -> Sample:
        """Return a sample of ``(id, log-prob)`` pairs; ``{version, start, end}`` labels a span with its weights."""
        if reason not in ("stop", "length"):
            raise ServerError(f"The server ended a sample by finish_reason={reason}, not stop or length; see its log.")
        versions: list[int] = []
        for span in spans:
            token, _, version = span["version"].rpartition(":")
            if token != self._token:
                raise RuntimeError(
                    f"The server's weights have the label {span['version']}, and this engine's labels are "
                    f"{self._token}:VERSION: another trainer pushed weights to this server; use one server per trainer."
                )
            versions += [int(version)] * (span["end"] - span["start"])
        if len(versions) != len(tokens):
            raise ServerError(f"The server returned weight versions for {len(versions)} of {len(tokens)} tokens.")
        token_ids, log_probs = zip(*tokens)
        if not all(math.isfinite(log_prob) and log_prob > _NO_LOG_PROB for log_prob in log_probs):
            raise ServerError("The server returned no finite log-prob for a sampled token; look at its log.")
        return Sample(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.tensor(log_probs, dtype=torch.float32),
            torch.tensor(versions, dtype=torch.int64),
            truncated=reason == "length",
        )

    def _label(self, version: int) -> str:
        return f"{self._token}:{version}"

    def _step(self) -> list[tuple[int, GroupOutput]]:
        ended, may_wait = [], True
        with self._breaking("while it sampled"):
            with contextlib.suppress(queue.Empty):
                while True:
                    ticket, answer = self._answers.get(may_wait, _STEP_S)
                    may_wait, self._last_answer_at = False, time.monotonic()
                    if (flight := self._flights.get(ticket)) is None:
                        continue  # dropped
                    if isinstance(answer, Exception):
                        raise answer
                    if len(answer) != (count := flight.request.num_samples):
                        raise ServerError(f"The server returned {len(answer)} samples for a request of {count}.")
                    ended.append((ticket, GroupOutput(flight.request.group_id, tuple(answer))))
            if ended:
                return ended
            if self._process is not None and self._process.has_ended():
                raise self._process.died("while it sampled")
            if time.monotonic() - self._last_answer_at >= _PROBE_EVERY_S:
                self._get(self.probe_path)
                self._last_answer_at = time.monotonic()
        return []

    def _drop(self, flights: Mapping[int, Flight]) -> None:
        for ticket, flight in flights.items():
            self._aborts.put((ticket, flight.request.num_samples))

    def _send_aborts(self) -> None:
        while (dropped := self._aborts.get()) is not None:
            with contextlib.suppress(ServerError):  # a dead server samples nothing; the next step reports it
                self._abort(*dropped)

    def _abort(self, ticket: int, num_samples: int) -> None:
        """Abort a request on the server; a request that the server does not know is no error."""
        self._post("/inference/v1/abort_requests", {"request_ids": [_NAME_PREFIX + self._request_name(ticket)]})

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight (an adapter is merged into :attr:`base`); groups in flight continue with the new ones.

        Raises:
            ValueError: names, shapes or tied weights do not fit, or ``base`` is missing; nothing was pushed then.
            OSError, SafetensorError: the file of weights cannot be written; nothing was pushed then.
            ServerError, ServerDied: the server did not load the weights.
            RuntimeError: the engine is closed or has failed.
        """
        self._require_open()
        adapted = weights.scales if isinstance(weights, WeightPack) else {}
        checked = checked_weights(self.whole(weights), self._shapes, self._tied, tied_required=True)
        if adapted and self.base is self._merged_into:
            with self._breaking("before it took new weights"):
                label = self._served_label()
            if label == self._label(self.version):  # the server has our last weights, over the same base
                checked = {name: checked[name] for name in adapted}
        try:
            folder = self._weights.write(checked)
        except (OSError, SafetensorError):
            # a server's launcher deletes the folder when the server ends, which may not have been noticed yet
            if self._process is not None and not self._weights.path.exists():
                self._process.has_ended(within_s=_DEATH_SHOWS_S)
                with self._breaking("before it took new weights"):
                    raise self._process.died("before it took new weights") from None
            raise
        try:
            with self._between_steps():
                self._require_open()
                self._wake_now()
                self._may_send.clear()
                with self._breaking("while it loaded weights"):
                    self._push(str(folder), version)
        finally:
            self._may_send.set()
            shutil.rmtree(folder, ignore_errors=True)
        self._merged_into = self.base if adapted else None

    def _push(self, folder: str, version: int) -> None:
        try:
            self._post(*self.pause)
            try:
                self._load(folder, self._label(version))
            except ServerError:
                with contextlib.suppress(ServerError):  # the first error is the cause
                    self._post(*self.resume)
                raise
            self._post(*self.resume)
        except ServerError as error:
            if self._process is None and not isinstance(error, ServerSilent):
                raise ServerError(
                    f"{str(error).rstrip('.')}. The server must be able to read the weights in {folder}: on another "
                    "machine, run it as this user, with a run directory (hydra.run.dir) that both machines share; in a "
                    "container, start it with --ipc=host."
                ) from error
            raise
        self._num_pushes += 1
        self.version = version

    def _load(self, folder: str, label: str) -> None:
        """Make the paused server load the weights in ``folder`` and label them; the new cache salt drops old ones."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._client.post("/collective_rpc", load, timeout_s=self._load_s)
        self._set_label(label)

    def _set_label(self, label: str) -> None:
        self._post("/update_weight_version", {"new_version": label})

    def _served_label(self) -> str | None:
        """Return the label of the server's weights; None if every push must contain all weights."""
        return str(self._get("/weight_info")["weight_version"])

    def weight_sums(self) -> Mapping[str, Mapping[str, Checksum]] | None:
        """Return ``{engine's name: {weight's name: checksum}}`` of the weights that can be read; wake the engine.

        None if the server lacks :class:`~sota_grpo.engines.vllm_server.WeightSums` or uses several GPUs. ServerError if
        the request fails, RuntimeError if the engine is closed or has failed.
        """
        shapes = {name: list(dims) for name, dims in self._shapes.items()}
        body = {"method": "weight_sums", "kwargs": {"shapes": shapes, "turn": self.version}}
        with self._between_steps():
            self._require_open()
            self._wake_now()
            try:
                with self._breaking("while it read its weights back", ServerSilent):
                    results = self._client.post("/collective_rpc", body, timeout_s=self._load_s)["results"]
            except ServerError as error:
                if self._failure is not None or error.status not in (404, 500, 501):
                    raise
                return None  # the server has no such method, of which vLLM says 500
        if len(results) > 1:  # each has a shard of most weights
            return None
        sums = {
            name: Checksum(getattr(torch, dtype), total, by_row, columns and tuple(columns))
            for name, (dtype, total, by_row, columns) in results[0].items()
        }
        return {self.name: sums}

    def _free_memory(self) -> None:
        self._post(*self.free_memory)

    def _restore_memory(self) -> None:
        self._post(*self.restore_memory)

    def _release(self) -> None:
        for _ in range(self._num_senders):
            self._waiting.put(None)
        self._aborts.put(None)
        if self._process is not None:
            self._process.close()
        elif self._aborter.is_alive():
            self._aborter.join(_ABORT_S)  # a server that was not started here must not continue sampling for us
        self._client.close()
        self._weights.close()


def server_engine(options: EngineOptions) -> ServerEngine:
    """Build the engine ``sglang_server`` if that is ``options.engine``, else ``vllm_server``; UserError if unusable.

    A server that is started here listens on the loopback interface, requires a random key, and ends with this process
    even if this process is killed. A running server at ``options.url`` reads weights from this machine's shared memory
    or, if it is on another machine, from ``options.shared_folder``.

    >>> server_engine(EngineOptions("model", eos_token_ids=[1], engine="sglang_server", url="localhost"))
    Traceback (most recent call last):
    ...
    sota_grpo.errors.UserError: engine.url=localhost is not the address of a server; write http://HOST:PORT.
    """
    from sota_grpo.engines.sglang_server import SGLangEngine

    options = options.resolved()
    engine = SGLangEngine if options.engine == SGLangEngine.name else ServerEngine
    shared_folder, process = None, None
    if (url := options.url) is not None:
        client = _client(options, url, options.api_key)
        try:
            client.get("/health", timeout_s=options.timeout_s)
        except ServerSilent as error:
            raise UserError(
                f"No server answers at engine.url={client.url}; start the server first, or correct engine.url."
            ) from error
        except ServerError:
            pass  # it answers; what it lacks is found when the engine connects
        if not is_own_address(client.host):
            shared_folder = Path(options.shared_folder)
            if client.url.startswith("http:"):
                logger.warning(
                    "The API key and the prompts are sent to %s unencrypted; if other people use that network, use "
                    "https (start vLLM with --ssl-certfile and --ssl-keyfile).",
                    client.url,
                )
    elif find_spec(engine.package) is None:
        raise UserError(
            f"engine={engine.name} needs the package {engine.package}, which is not installed; install it "
            "(README.md, Install), or set engine.url to a running server."
        )
    shapes, tied = expected_weights(options.model_path, trust_remote_code=options.trust_remote_code)
    folder = WeightFolder(shapes, None if url is not None else getattr(torch, options.dtype), shared_folder)
    if url is None:
        try:
            process, client = engine.start(options, folder.path, on_cpu=not torch.cuda.is_available())
        except BaseException:
            folder.close()
            raise
    return engine(client, options, shapes=shapes, tied=tied, process=process, weight_folder=folder)


def _client(options: EngineOptions, url: str, key: str | None) -> HttpClient:
    return HttpClient(url, api_key=key, max_connections=options.max_rows + _CONTROL_CONNECTIONS)


def is_own_address(host: str) -> bool:
    """Return whether a host name or address is this machine's, by binding a socket to it.

    >>> is_own_address("localhost"), is_own_address("192.0.2.1"), is_own_address("no such host")
    (True, False, False)
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
            return True
    return False
