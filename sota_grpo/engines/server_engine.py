"""The engine over HTTP: groups become requests to an inference server, weights a file that the server reads.

Token ids in, token ids out; no Ray, no inference library in this process. What differs between servers, paths and the
form of requests and answers, is a :class:`~sota_grpo.engines.vllm_server.VLLMDialect`; the rest is here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.inference_server import SOCKET_BYTES, ServerProcess
from sota_grpo.engines.sglang_server import SGLangDialect
from sota_grpo.engines.stepping import Flight, SteppingEngine, checked_weights, expected_weights
from sota_grpo.engines.vllm_server import Order, Versions, VLLMDialect
from sota_grpo.errors import UserError
from sota_grpo.files import folder_for_sockets
from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.policy.lora import MergedWeights
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling

logger = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")
_WEIGHT_FILE = "model.safetensors"  # as a model's folder has it
_STEP_S = 0.05  # a step waits so long for a finished group
_PROBE_EVERY_S = 10.0  # a server that finishes nothing for so long is asked whether it still works
_DEATH_SHOWS_S = 5.0  # a broken connection may be the first sign of a death that the launcher sees a moment later
_ABORT_S = 5.0  # closing waits so long for a server of somebody else to take the aborts
_MAX_CONNECTIONS = 512
_CONTROL_CONNECTIONS = 4  # pushing, probing and aborting go on while every row is waited for
_DIALECTS: dict[str, type[VLLMDialect]] = {dialect.name: dialect for dialect in (VLLMDialect, SGLangDialect)}


class WeightFolder:
    """A folder that only this user can read: below ``base``, or in shared memory, or, without room, in a temporary one.

    Args:
        shapes: of all weights that one push writes.
        dtype: in which they are written, that of the server; None: as they come.
        base: a folder that a server on another machine sees, too; None: the server is on this machine.

    >>> folder = WeightFolder({"w": torch.Size([2])}, torch.float32)
    >>> push = folder.write({"w": torch.zeros(2)})
    >>> [file.name for file in push.iterdir()]
    ['model.safetensors']
    >>> folder.close()
    >>> push.exists()
    False
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype | None, base: Path | None = None):
        self.dtype = dtype
        if base is not None:
            self.path = base.absolute() / f".weights.{secrets.token_hex(6)}.tmp"  # a leftover, were this process killed
            self.path.mkdir(mode=0o700)
        else:
            num_bytes = sum(math.prod(shape) for shape in shapes.values()) * (dtype or torch.float32).itemsize
            is_there = _SHARED_MEMORY.is_dir()
            free = shutil.disk_usage(_SHARED_MEMORY).free if is_there else 0
            folder: Path | str = _SHARED_MEMORY if free > num_bytes else folder_for_sockets(room=SOCKET_BYTES)
            if is_there and free <= num_bytes:
                logger.warning(
                    "%s has %.2f GiB free and a push of weights takes %.2f GiB, so it goes through %s: start the "
                    "container with a larger --shm-size (or --ipc=host).",
                    *(_SHARED_MEMORY, free / 2**30, num_bytes / 2**30, folder),
                )
            self.path = Path(tempfile.mkdtemp(prefix="sota-grpo-", dir=folder))
        # also when the process ends while the thread that owns this is busy
        self._delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, weights: Mapping[str, torch.Tensor]) -> Path:
        """A new folder with all weights in ``model.safetensors``, as a model's folder has them; yours to delete.

        Raises:
            OSError: no room.
        """
        folder = Path(tempfile.mkdtemp(prefix="push-", dir=self.path))
        tensors: dict[str, torch.Tensor] = {}
        written: set[int] = set()
        for name, weight in weights.items():
            tensor = weight.detach().to("cpu", self.dtype).contiguous()
            # safetensors takes no two names of one memory, and readers need a tied weight under both its names
            tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        save_file(tensors, folder / _WEIGHT_FILE)
        return folder

    def close(self) -> None:
        """Delete everything; idempotent, and done at the end of this process too."""
        self._delete()


class ServerEngine(SteppingEngine):
    """Samples with an inference server: one request per group, each waited for by a thread of its own.

    Contract. Consumes: requests. Produces: groups, as the server answers. Waits for: an answer, at most 50 ms per
    step. Unblocked by: a finished group, :meth:`close`. When the server dies, hangs, answers nonsense or fails to load
    weights, the step or push raises and the engine stays broken: its weights would be unknown. Weights may be pushed
    while groups are in flight; they go on, and every token has the version that sampled it.

    A group that is on its way to the server at the very moment of a push may read cached keys and values of its prompt
    from the weights before; it is then like a group that was in flight.

    Args:
        options: of which ``eos_token_ids``, ``max_model_len``, ``max_rows`` (most samples of one group, and most
            requests at the same time) and ``deadlines`` are read here.
        shapes: of every weight of the model.
        tied: for each tied weight, the one it shares its values with.
        process: the server, where it is ours to end.
        weight_folder: where pushes are written; None makes one, for weights as they come.
        can_sleep: the server was started so that it can free its memory.

    Raises:
        UserError: the server lacks something, or its context is too short; the server is ended then if it is ours.
    """

    def __init__(
        self,
        client: HttpClient,
        dialect: VLLMDialect,
        options: EngineOptions,
        *,
        shapes: dict[str, torch.Size],
        tied: dict[str, str],
        process: ServerProcess | None = None,
        weight_folder: WeightFolder | None = None,
        can_sleep: bool = False,
    ):
        super().__init__()
        self.name = self.label = dialect.name
        self._client, self._dialect, self._process = client, dialect, process
        self._shapes, self._tied = shapes, tied
        self._max_rows, self._deadlines = options.max_rows, options.deadlines
        self._stop_token_ids = tuple(sorted(options.eos_token_ids))
        self._weights = weight_folder or WeightFolder(shapes, None)
        self.weight_dtype = self._weights.dtype
        self._versions = Versions(secrets.token_hex(4))
        self._can_sleep = can_sleep
        self._failure: Exception | None = None
        self._num_pushes = 0
        self._base: object = None  # what the server's weights are an adapter on, as far as that is known
        self._may_send = threading.Event()
        self._may_send.set()
        self._sent: dict[int, Flight] = {}  # by ticket
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, tuple[Sample, ...] | Exception]] = queue.SimpleQueue()
        self._dropped: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._num_senders = 0
        self._last_answer_at = time.monotonic()
        self._aborter: threading.Thread | None = None
        asked = options.max_model_len
        try:
            try:
                allowed = dialect.connect(client, self._deadlines, self._versions.label(0))
            except ServerError as error:
                raise self._explained(error, "before it was used") from error
            if asked is not None and asked > allowed:
                raise UserError(
                    f"The server at {client.url} has a context of {allowed} tokens, max_model_len={asked}; start it "
                    "with more, or ask for less."
                )
            self.max_model_len = asked or allowed
        except BaseException:
            self.close()
            raise
        self._aborter = threading.Thread(target=self._abort_dropped, name=f"{self.name}-abort", daemon=True)
        self._aborter.start()

    def _require_open(self) -> None:
        super()._require_open()
        if self._failure is not None:
            raise RuntimeError(f"This engine is broken and has to be built anew: {self._failure}") from self._failure

    def _refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        if request.num_samples > self._max_rows:
            raise ValueError(
                f"Group {request.group_id} asks for {request.num_samples} samples and the server computes "
                f"max_rows={self._max_rows} at once; raise max_rows."
            )
        self._dialect.refuse(request, sampling)

    def _start(self, flights: Mapping[int, Flight]) -> None:
        self._wake_now()
        if not self._sent:
            self._last_answer_at = time.monotonic()
        self._sent |= flights
        for ticket in flights:
            self._waiting.put(ticket)
        # An evaluation submits thousands of groups at once, a dialog each of its samples: no thread for each of them.
        while self._num_senders < min(len(self._sent), self._max_rows, _MAX_CONNECTIONS):
            self._num_senders += 1
            threading.Thread(target=self._send, name=f"{self.name}-{self._num_senders}", daemon=True).start()

    def _send(self) -> None:
        while (ticket := self._waiting.get()) is not None:
            self._may_send.wait()
            if (flight := self._sent.get(ticket)) is None:
                continue
            request, room, sampling, _ = flight
            order = Order(
                name=self._name(ticket),
                request=request,
                room=room,
                sampling=sampling,
                stop_token_ids=self._stop_token_ids,
                cache_salt=f"{self._versions.token}-{self._num_pushes}",
                version=self.version,
            )
            answer: tuple[Sample, ...] | Exception
            try:
                answer = self._dialect.generate(self._client, order, self._versions, self._deadlines.generate)
            except Exception as error:  # it belongs to whoever steps
                answer = error
            self._answers.put((ticket, answer))

    def _name(self, ticket: int) -> str:
        return f"{self._versions.token}-{ticket}"

    def _step(self) -> list[tuple[int, GroupOutput]]:
        ended = []
        wait_s = _STEP_S
        while True:
            try:
                ticket, answer = self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
            except queue.Empty:
                break
            wait_s = 0.0
            self._last_answer_at = time.monotonic()
            flight = self._sent.pop(ticket, None)
            if flight is None:
                continue  # aborted
            request = flight.request
            if isinstance(answer, Exception):
                self._fail(answer, "while it sampled")
            elif len(answer) != request.num_samples:
                self._fail(ServerError(f"The server answered {request.num_samples} samples with {len(answer)}."), "")
            else:
                ended.append((ticket, GroupOutput(group_id=request.group_id, samples=answer)))
        if ended:
            return ended
        if self._process is not None and self._process.has_ended():
            self._fail(self._process.died("while it sampled"), "")
        if time.monotonic() - self._last_answer_at >= _PROBE_EVERY_S:
            with self._failing("while it sampled"):
                self._client.get(self._dialect.probe_path, timeout_s=self._deadlines.control)
            self._last_answer_at = time.monotonic()
        return []

    def _fail(self, error: Exception, doing: str) -> NoReturn:
        self._failure = self._explained(error, doing)
        raise self._failure from (None if self._failure is error else error)

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ServerError as error:
            self._fail(error, doing)

    def _explained(self, error: Exception, doing: str) -> Exception:
        """The server's death instead of a broken connection that came from it."""
        process = self._process if isinstance(error, ServerSilent) else None
        return error if process is None or not process.has_ended(within_s=_DEATH_SHOWS_S) else process.died(doing)

    def _drop(self, tickets: Collection[int]) -> None:
        for ticket in tickets:
            if (flight := self._sent.pop(ticket, None)) is not None:
                self._dropped.put((ticket, flight.request.num_samples))

    def _abort_dropped(self) -> None:
        while (dropped := self._dropped.get()) is not None:
            ticket, num_samples = dropped
            with contextlib.suppress(ServerError):  # a server that is gone samples nothing; the next step says so
                self._dialect.abort(self._client, self._name(ticket), num_samples, self._deadlines.control)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight; the next token of every group in flight comes from them.

        Of :class:`~sota_grpo.policy.lora.MergedWeights` all travel once, and then those that can have changed.

        Raises:
            ValueError: a name is unknown or missing, a shape differs, or a tied pair differs; nothing was pushed then.
            OSError: no room for the file of weights; nothing was pushed then.
            ServerError: the server did not load them.
            ServerDied: it ended.
        """
        self._require_open()
        checked = checked_weights(weights, self._shapes, self._tied, tied_required=True)
        if isinstance(weights, MergedWeights) and weights.base is self._base:
            with self._failing("before it took new weights"):
                label = self._dialect.label_to_build_on(self._client, self._deadlines)
            if label == self._versions.label(self.version):  # the server has our last weights, over the same base
                checked = {name: checked[name] for name in weights.adapted}
        try:
            folder = self._weights.write(checked)
        except (OSError, SafetensorError):
            # a server's launcher deletes the folder when the server ends, and may be noticed only now
            if self._process is not None and not self._weights.path.exists():
                self._process.has_ended(within_s=_DEATH_SHOWS_S)
                self._fail(self._process.died("before it took new weights"), "")
            raise
        try:
            with self._between_steps():
                self._require_open()
                self._wake_now()
                self._push(str(folder), version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._base = weights.base if isinstance(weights, MergedWeights) else None

    def weight_sums(self) -> Mapping[str, Checksum] | None:
        """See :class:`~sota_grpo.engines.Engine`."""
        with self._between_steps():
            self._require_open()
            self._wake_now()
            with self._failing("while it read its weights back"):
                return self._dialect.weight_sums(self._client, self._shapes, self._deadlines)

    def _push(self, folder: str, version: int) -> None:
        self._may_send.clear()
        label = self._versions.label(version)
        try:
            self._dialect.push(self._client, folder, label, self._deadlines, idle=not self._sent)
            self._num_pushes += 1
            self.version = version
        except ServerError as error:
            if self._process is None and not isinstance(error, ServerSilent):
                error = ServerError(
                    f"{error}. The server reads weights in {folder} and has to see that folder: one on another machine "
                    "needs a run directory (hydra.run.dir) that both machines share, and this user; one in a container "
                    "needs --ipc=host."
                )
            self._fail(error, "while it loaded weights")
        finally:
            self._may_send.set()

    def _free_memory(self) -> None:
        self._client.post(*self._dialect.free_memory, timeout_s=self._deadlines.control)

    def _restore_memory(self) -> None:
        self._client.post(*self._dialect.restore_memory, timeout_s=self._deadlines.control)

    def _release(self) -> None:
        """End a server that was started here; any other is told what it need not sample any more."""
        for _ in range(self._num_senders):
            self._waiting.put(None)
        self._dropped.put(None)
        if self._process is not None:
            self._process.close()
        elif self._aborter is not None:
            self._aborter.join(_ABORT_S)  # it goes on without us: it should not go on for us
        self._client.close()
        self._weights.close()


def server_engine(options: EngineOptions) -> ServerEngine:
    """The engine ``vllm_server`` or ``sglang_server``.

    A server that is started here listens on the loopback interface, wants a random key for everything, and ends with
    this process even when that is killed. One at ``options.url`` reads weights from this machine's shared memory, or,
    on another machine, from ``options.shared_folder``.

    Raises:
        UserError: the server's package is not installed, or the server lacks something.
        ServerDied: the server ended while it started.
        ServerLate: it was not ready in time.

    >>> server_engine(EngineOptions("model", eos_token_ids=[1], engine="sglang_server", url="localhost"))
    Traceback (most recent call last):
    ...
    sota_grpo.errors.UserError: engine.url=localhost is not the address of a server; write http://HOST:PORT.
    """
    options, dialect = options.resolved(), _DIALECTS[options.engine]()
    reach = partial(HttpClient, max_connections=options.max_rows + _CONTROL_CONNECTIONS)
    if options.url is not None:
        client = reach(options.url, api_key=options.api_key)
        try:
            client.get("/health", timeout_s=options.deadlines.control)
        except ServerSilent as error:
            raise UserError(
                f"No server answers at engine.url={client.url}; start it first, or mend the url."
            ) from error
        except ServerError:
            pass  # it is there, and says what it lacks when it is asked for more
    elif find_spec(dialect.package) is None:
        raise UserError(
            f"engine={dialect.name} needs the package {dialect.package}, which is not installed; install it "
            "(README.md, Install), or give engine.url of a server that runs already."
        )
    shapes, tied = expected_weights(options.model_path, trust_remote_code=options.trust_remote_code)
    own: dict[str, Any] = {}
    if options.url is None:
        folder, on_cpu = WeightFolder(shapes, getattr(torch, options.dtype)), not torch.cuda.is_available()
        try:
            process, url, key = dialect.start(options, folder.path, on_cpu=on_cpu)
        except BaseException:
            folder.close()
            raise
        client = reach(url, api_key=key)
        own |= {"process": process, "weight_folder": folder, "can_sleep": not on_cpu}
    elif not is_own_address(client.host):
        own["weight_folder"] = WeightFolder(shapes, None, Path(options.shared_folder))
        if client.url.startswith("http:"):
            logger.warning(
                "The key and prompts go to %s unencrypted; where others share that network use https (vLLM's "
                "--ssl-certfile and --ssl-keyfile).",
                client.url,
            )
    return ServerEngine(client, dialect, options, shapes=shapes, tied=tied, **own)


def is_own_address(host: str) -> bool:
    """Whether a name or an address means this machine.

    >>> is_own_address("localhost"), is_own_address("192.0.2.1"), is_own_address("no such host")
    (True, False, False)
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # nobody can listen on somebody else's
            return True
    return False
