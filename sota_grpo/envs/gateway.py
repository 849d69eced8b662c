"""An HTTP server through which agents sample from the run's policy, as from OpenAI's or Anthropic's API.

Each sample has a :class:`Session` with its API key. A request is tokenised with the run's chat template. If it repeats
an earlier request of its session and the reply to it, and adds tool results or user turns, it continues the token ids
of both, which are never tokenised again; any other request begins a branch (:mod:`.token_tree`)::

    agent                                 session
    [user q]                              prompt  p q          sampled  a b
    [user q, assistant ab, tool r]        p q a b + r          sampled  d      continues the first
    [user q]                              p q                  sampled  c      a second branch (a retry)

The server listens on this machine only. Requests need the key of an open session; ``POST /v1/sessions`` needs the
queue's key (SOTA_GRPO_AGENTS_KEY).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from sota_grpo.engines import Engine
from sota_grpo.envs.chat_api import APIS, MODEL, BadRequest, ChatRequest, Reply
from sota_grpo.envs.chat_tokens import TurnTokens, prompt_tokens
from sota_grpo.envs.token_tree import TokenTree
from sota_grpo.envs.tool_calls import ToolCallReader
from sota_grpo.errors import UserError
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, sample_seed
from sota_grpo.rl.tool_schemas import ToolCall, call_id
from sota_grpo.text import one_line, sentence
from sota_grpo.workers.base import pending_future
from sota_grpo.workers.instances import Answer, InstanceLost, Opened

logger = logging.getLogger(__name__)

LARGEST_REQUEST = 8 << 20  # bytes of a request's body
MOST_CONTEXTS = 8  # a sample with more than this many times the policy's context in tokens gets no further response
_ATTEMPTS = 4  # responses that may be requested for each one that a sample may have; clients give up some
_MOST_CHARACTERS = 64  # for each token of the context: a longer request is refused before it is tokenised
PORT = "SOTA_GRPO_AGENTS_PORT"  # environment variable with the port for outside programs; not set: a free one
_START_S = 30.0
_LONG_POLL_S, _POLL_S = 20.0, 0.02  # of an outside program that requests an episode
_MOST_FORMS = 64  # cached ChatForms, one per set of tools


class ChatForm:
    """Renders requests with one set of tools as token ids, and parses the policy's replies.

    ``tools`` are JSON schemas. UserError if the chat template does not support tools.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]):
        kwargs = {**template_kwargs, **({"tools": [*tools]} if tools else {})}
        self.turns = TurnTokens(tokenizer, kwargs)
        self._reader = ToolCallReader(tokenizer, tools, template_kwargs) if tools else None
        self.prompt = prompt_tokens(tokenizer, kwargs)

    def reply(self, sample: Sample, num_calls: int, stop: Sequence[str]) -> Reply:
        """Parse a sampled response; a call without an id gets one from its number, counted from ``num_calls``.

        If a call cannot be parsed or its tool is unknown, the whole response is returned as text, without calls; a call
        whose arguments do not fit is returned as it is. The text ends before the first of the ``stop`` strings.
        """
        text, calls = str(self.turns.text(sample.token_ids)), tuple[ToolCall, ...]()
        turn = None if self._reader is None else self._reader.read(sample.token_ids.tolist())
        if turn is not None and turn.calls and all(call.error is None or call.is_misfit for call in turn.calls):
            text = turn.content
            calls = tuple(replace(call, id=call.id or call_id(at)) for at, call in enumerate(turn.calls, num_calls))
        for string in stop:
            text = text.partition(string)[0]
        return Reply(text, calls, sample.truncated, len(sample.token_ids))


class Session:
    """The requests of one sample: a tree of their tokens, and for each known chat the tree position of its last token.

    Args:
        request, index: the group's request, and the index of the session's sample in the request, from 0.
        sampling, max_turns: sampling options of every request, and maximum number of responses of the session.

    Attributes:
        key: the API key of the session's requests.
        messages: the messages of the last answered request, and its first reply.
        failure: the last exception of the engine; None without one.
    """

    def __init__(self, gateway: Gateway, request: GroupRequest, index: int, sampling: Sampling, max_turns: int):
        self.key, self.tree, self.messages = f"sk-{secrets.token_urlsafe(24)}", TokenTree(), list[dict[str, Any]]()
        self.num_turns = self.num_calls = 0
        self._num_requested = self._num_pending = 0  # responses, of which clients may have given up some
        self.truncated = False  # the last response
        self.failure: Exception | None = None
        self._gateway, self._request, self.sampling, self._max_turns = gateway, request, sampling, max_turns
        self._seed = sample_seed(request.seed, request.first_sample + index)
        self._ends: dict[bytes, int] = {}  # digest of tools and messages -> position of the last token
        self._pending: set[Future[GroupOutput]] = set()
        self._lock = threading.Lock()
        self.is_open = True
        self.base_url = f"{gateway.url}/v1"  # of the server, for OpenAI's clients; Anthropic's take it without /v1

    @property
    def is_full(self) -> bool:
        """Whether the session has sampled as many responses as it may."""
        return self.num_turns >= self._max_turns

    async def complete(self, chat: ChatRequest) -> tuple[list[Reply], int]:
        """Sample the replies to a request; return them and the number of tokens of its prompt.

        BadRequest if the request cannot be answered, CancelledError if the session is closed meanwhile. Exceptions of
        the engine propagate; if the session is open, one after the submit is also the ``failure``.
        """
        tools, limit = json.dumps(chat.tools), self._gateway.max_model_len
        if len(tools) + len(json.dumps(chat.messages, ensure_ascii=False)) > _MOST_CHARACTERS * limit:
            raise BadRequest(
                f"messages and tools are too long for the policy's context of {limit} tokens "
                "(inference_model.max_model_len); send fewer or shorter ones.",
                code="context_length_exceeded",
            )
        form = self._gateway.form(tools)
        if unknown := [text for text in chat.stop if text not in self._gateway.stop]:
            raise BadRequest(
                f"stop={one_line(str(unknown[0]), 60)!r} is no stop string of the run; add it to inference_model.stop."
            )
        digest = hashlib.sha256(tools.encode()).digest()
        digests = [*itertools.accumulate(chat.messages, _next, initial=digest)]  # of each prefix of the chat
        with self._lock:
            prompt_ids = self._prompt_ids(form, chat, digests)
            if len(prompt_ids) >= limit:
                raise BadRequest(
                    f"the messages have {len(prompt_ids)} tokens, which leaves no room for a reply in the policy's "
                    f"context of {limit} (inference_model.max_model_len); send fewer or shorter ones.",
                    code="context_length_exceeded",
                )
            if (count := self.num_turns + self._num_pending) + chat.n > self._max_turns:
                raise BadRequest(
                    f"the sample has had {count} responses and this request asks for {chat.n} more, but at most "
                    f"{self._max_turns} are allowed; raise env.max_steps.",
                    code="too_many_responses",
                )
            if self._num_requested >= _ATTEMPTS * self._max_turns:
                raise BadRequest(
                    f"the client gave up {self._num_requested - count} responses before they were complete; raise its "
                    "timeout.",
                    code="too_many_responses",
                )
            if len(self.tree) > MOST_CONTEXTS * limit:
                raise BadRequest(
                    f"the episode has {len(self.tree)} tokens, more than {MOST_CONTEXTS} times the context of {limit}; "
                    "end it.",
                    code="too_many_tokens",
                )
            if not self.is_open:
                raise BadRequest("the session has ended.", 401)
            seed = sample_seed(self._seed, self._num_requested)
            most = min(self.sampling.max_tokens, chat.max_tokens or self.sampling.max_tokens)
            request = GroupRequest(self._request.group_id, tuple(prompt_ids), chat.n, seed)
            future = self._gateway.engine.submit(request, replace(self.sampling, max_tokens=most))
            self._pending.add(future)
            self._num_requested += chat.n
            self._num_pending += chat.n
        try:
            output = await asyncio.wrap_future(future)
        except BaseException as error:
            with self._lock:  # the client has left, or the engine failed: there is no response
                self._num_pending -= chat.n
            if self.is_open and isinstance(error, Exception):  # fails the group: no reward for the engine's failure
                self.failure = error
            raise
        finally:
            self._pending.discard(future)
        replies = []
        with self._lock:
            self._num_pending -= chat.n
            if not self.is_open:
                raise BadRequest("the session has ended.", 401)
            self.num_turns += chat.n
            node = self.tree.add_prompt(prompt_ids)
            for sample in output.samples:
                end = self.tree.add_response(node, sample)
                reply = form.reply(sample, self.num_calls, self._gateway.stop)
                self.num_calls += len(reply.calls)
                replies.append(reply)
                self._ends.setdefault(_next(digests[-1], reply.message), end)
            self.messages = [*chat.messages, replies[0].message]
            self.truncated = replies[-1].truncated
        return replies, len(prompt_ids)

    def _prompt_ids(self, form: ChatForm, chat: ChatRequest, digests: Sequence[bytes]) -> list[int]:
        """Return the prompt's token ids; if it continues an earlier request, only the new messages are tokenised."""
        try:
            for number in range(len(chat.messages) - 1, 0, -1):
                if (end := self._ends.get(digests[number])) is not None:
                    rest = chat.messages[number:]
                    if all(message["role"] in ("user", "tool") for message in rest):
                        ids = self.tree.path(end)
                        return [*ids, *form.turns.ids(rest, ids[-1])]
            return [*form.prompt.ids(chat.messages)]
        except UserError as error:
            raise BadRequest(f"{sentence(error)}") from error

    def close(self) -> None:
        """Refuse further requests, and cancel those in flight; idempotent."""
        with self._lock:
            self.is_open = False
            self._gateway.sessions.pop(self.key, None)
            pending = [*self._pending]
        for future in pending:
            future.cancel()


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _next(digest: bytes, message: Mapping[str, Any]) -> bytes:
    read = {name: value for name, value in message.items() if name != "name"}
    return hashlib.sha256(digest + json.dumps(read, sort_keys=True).encode()).digest()


class SessionQueue:
    """A queue of episodes for outside programs, which run them in place of agents in worker processes.

    It has the methods of :class:`~sota_grpo.workers.instances.Instances` that an episode calls. The server passes an
    episode to the next program that requests one (``POST /v1/sessions``), which ends the episode with a reward
    (``POST /v1/sessions/end``).

    Args:
        timeout_s: seconds from the program's request until an episode without a reward fails.
        key: API key with which programs request episodes.
    """

    schemas: tuple[dict[str, Any], ...] = ()
    has_reward = True

    def __init__(self, timeout_s: float, key: str):
        self.timeout_s, self.key = timeout_s, key
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._keys = itertools.count()
        self._waiting: dict[int, tuple[Mapping[str, Any], Future[list[Answer]]]] = {}  # in the order in which they came
        self._given: dict[str, Future[list[Answer]]] = {}  # by the key of its session

    def open(self, row: Mapping[str, Any]) -> Future[Opened]:
        """Store the row of an episode; return its key, in a future that is already resolved."""
        key, opened = next(self._keys), pending_future()
        self._rows[key] = row
        opened.set_result(Opened(key, None))
        return opened

    def call(self, key: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[list[Answer]]:
        """Queue an opened episode for :meth:`take`, with the arguments of its only call; return its reward's future.

        KeyError if the episode was not opened, is already queued, or was dropped.
        """
        ended: Future[list[Answer]] = pending_future()
        ((_, address),) = calls
        self._waiting[key] = {"row": self._rows.pop(key), **address}, ended
        return ended

    def take(self) -> Mapping[str, Any] | None:
        """Dequeue the next episode; return its ``row``, ``base_url`` and ``api_key``, or None if the queue is empty."""
        episode, ended = self._waiting.pop(next(iter([*self._waiting]), -1), ({}, None))
        if ended is None:
            return None
        self._given[episode["api_key"]] = ended
        return episode

    def end(self, api_key: str, result: Any) -> None:
        """End an episode of :meth:`take`; no-op if none is open. ``result``: its reward, or a dict with ``reward``."""
        _settle(self._given.pop(api_key, None), [Answer(json.dumps(result), is_error=False)])

    def expire(self, api_key: str) -> None:
        """Fail the episode with the key ``api_key``, whose program sent no reward in time; no-op if it has ended."""
        lost = InstanceLost(f"TimeoutError: the program sent no reward within {self.timeout_s:g} s")
        _settle(self._given.pop(api_key, None), lost)

    def wait_ready(self) -> None:
        """No-op: there are no workers to wait for; programs connect at any time."""

    def drop(self, key: int) -> None:
        """Remove an episode and fail its future; no-op if a program has begun the episode."""
        self._rows.pop(key, None)
        _settle(self._waiting.pop(key, (None, None))[1], InstanceLost("it was dropped"))

    def close(self) -> None:
        """Fail all episodes that have not ended; idempotent."""
        for ended in [*self._given.values(), *(ended for _, ended in self._waiting.values())]:
            _settle(ended, InstanceLost("the run has ended"))


def _settle(ended: Future[list[Answer]] | None, outcome: list[Answer] | InstanceLost) -> None:
    if ended is None or ended.done():
        return
    if isinstance(outcome, InstanceLost):
        ended.set_exception(outcome)
    else:
        ended.set_result(outcome)


class Gateway:
    """An HTTP server in a separate thread, through which agents on this machine sample from an engine.

    UserError if the package aiohttp is missing, OSError or ValueError if the port is taken or no number, TimeoutError
    if the server does not start within 30 s.

    Args:
        template_kwargs: further arguments of ``apply_chat_template``.
        stop: the run's stop strings; a request may name these only.
        queue: episodes for outside programs; None: agents run in worker processes. With a queue the server's port is
            that in :data:`PORT`, if set; else it is a free one.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        queue: SessionQueue | None = None,
    ):
        try:
            from aiohttp import web
        except ImportError as error:
            raise UserError(
                "env.agent needs the package aiohttp, which is not installed; install the extra agents "
                "(pip install -e '.[agents]')."
            ) from error
        self._web, self._queue = web, queue
        self.engine, self.max_model_len, self.stop = engine, engine.max_model_len, tuple(stop)
        self.sessions: dict[str, Session] = {}
        kwargs = dict(template_kwargs or {})
        self._form = lru_cache(maxsize=_MOST_FORMS)(lambda tools: ChatForm(tokenizer, json.loads(tools), kwargs))
        self._warned: set[str] = set()
        app = web.Application(client_max_size=LARGEST_REQUEST)
        posted: dict[str, Callable[[Any, Any, Any], Any]] = {**dict.fromkeys(APIS, self._complete)}
        posted |= {"/v1/sessions": self._next_session, "/v1/sessions/end": self._end_session}
        for path, answer in posted.items():
            app.router.add_post(path, partial(self._handle, answer))
        for path in ("/v1/models", "/v1/models/{name:.+}"):
            app.router.add_get(path, partial(self._handle, self._models))
        # a client that leaves ends its request, which is sampled no further
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._thread.start()
        try:
            self.url: str = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=_START_S)
        except BaseException:
            self.close()
            raise

    def form(self, tools: str) -> ChatForm:
        """Return the cached :class:`ChatForm` of ``tools`` (JSON); BadRequest if the tools cannot be used."""
        try:
            return self._form(tools)
        except (UserError, TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"the tools cannot be used: {sentence(error)}") from error

    def open(self, request: GroupRequest, index: int, sampling: Sampling, max_turns: int) -> Session:
        """Open and return the session of a request's sample ``index``, from 0."""
        session = Session(self, request, index, sampling, max_turns)
        self.sessions[session.key] = session
        return session

    def close(self) -> None:
        """End all sessions and the server, within 30 s; idempotent."""
        for session in [*self.sessions.values()]:
            session.close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join(timeout=_START_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _start(self) -> str:
        await self._runner.setup()
        port = int(os.environ.get(PORT, "0")) if self._queue is not None else 0
        await self._web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        try:
            await self._runner.cleanup()
        finally:
            self._loop.stop()

    async def _handle(self, answer: Callable[[Any, Any, Any], Any], request: Any) -> Any:
        """Check a request's API key, and respond with the JSON or server-sent events of ``answer``, or an error."""
        try:
            made = await answer(self._session(request), await self._body(request), request)
        except BadRequest as error:
            return self._failed(request, error)
        except asyncio.CancelledError:  # the session ended, or the run
            return self._failed(request, BadRequest("the session has ended.", 401))
        except ValueError as error:  # the engine refuses the prompt
            return self._failed(request, BadRequest(sentence(error)))
        except Exception as error:
            logger.exception("A request of an agent failed.", extra={"file_only": True})
            return self._failed(request, BadRequest(f"the run cannot answer: {sentence(error)}", 500, "server_error"))
        if isinstance(made, dict):
            return self._web.json_response(made)
        return self._web.Response(body="".join(made), content_type="text/event-stream")

    def _session(self, request: Any) -> Any:
        """Return the open session, or the queue, of a request's API key."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        given = [bearer, request.headers.get("x-api-key", "")]  # Anthropic's client may send both
        session: Any = next(filter(None, map(self.sessions.get, given)), None)
        if request.path == "/v1/sessions" and self._queue is not None:
            session = self._queue if secrets.compare_digest(_hash(bearer), _hash(self._queue.key)) else None
        if session is None:
            reason = "the API key is neither that of an open session nor, for /v1/sessions, SOTA_GRPO_AGENTS_KEY."
            raise BadRequest(reason, 401, "invalid_api_key")
        if request.path.startswith("/v1/sessions") and self._queue is None:
            raise BadRequest("the run has its own agents; use env.agent=sessions.", 404)
        return session

    async def _body(self, request: Any) -> Any:
        if request.method != "POST":
            return None
        try:
            return await request.json()
        except self._web.HTTPRequestEntityTooLarge:
            raise BadRequest(f"the request has more than {LARGEST_REQUEST} bytes.", 413) from None
        except (ValueError, RecursionError, LookupError) as error:
            raise BadRequest(f"the request is not JSON ({one_line(str(error), 200)}).") from error

    def _failed(self, request: Any, error: BadRequest) -> Any:
        is_anthropics = request.path == "/v1/messages"
        kinds = {401: "authentication_error", 500: "api_error" if is_anthropics else "server_error"}
        kind = kinds.get(error.status, "invalid_request_error")
        made = {"message": str(error), "type": kind, "code": error.code, "param": None}
        body = {"type": "error", "error": made} if is_anthropics else {"error": made}
        return self._web.json_response(body, status=error.status)

    async def _complete(self, session: Session, body: Any, request: Any) -> Any:
        parse, reply, events = APIS[request.path]
        chat = parse(body)
        for name in ("temperature", "top_p", "top_k"):
            value, given = getattr(session.sampling, name), body.get(name)
            if given is not None and given != value and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "An agent requests %s=%s, which has no effect: every response is sampled with the run's %s=%s, "
                    "because its log-probs are trained.",
                    *(name, one_line(str(given), 40), name, value),
                )
        made = reply(*await session.complete(chat))
        return events(chat, made) if chat.stream else made

    async def _next_session(self, queue: SessionQueue, body: Any, request: Any) -> dict[str, Any]:
        """Respond with the next episode, as JSON; with an empty object if none was queued for 20 s."""
        ends = self._loop.time() + _LONG_POLL_S
        while self._loop.time() < ends and request.transport is not None and not request.transport.is_closing():
            if (episode := queue.take()) is not None:
                self._loop.call_later(queue.timeout_s, queue.expire, episode["api_key"])
                return dict(episode)
            await asyncio.sleep(_POLL_S)
        return {}

    async def _end_session(self, session: Session, body: Any, request: Any) -> dict[str, Any]:
        assert self._queue is not None
        self._queue.end(session.key, body)
        return {}

    async def _models(self, session: Session, body: Any, request: Any) -> dict[str, Any]:
        name = request.match_info.get("name")  # any: requests may name any model
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "sota_grpo"}
        return model if name else {"object": "list", "data": [model]}
