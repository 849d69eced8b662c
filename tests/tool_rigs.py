"""Tools in tests: calls as the embedded policy writes them, instances of a server, dialogs of a scripted policy."""

from __future__ import annotations

import builtins
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from unittest.mock import patch

from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs import PromptSource
from sota_grpo.envs.dialogs import DialogEngine, Rules, ToolResponder, TurnTokens
from sota_grpo.rl.records import Example, GroupRequest, Sample, Sampling
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.workers.instances import Answer, Instances

WAIT_S = 60.0


def written(name: str, **arguments: Any) -> str:
    """A call as the embedded template renders it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def executing_no_text(*more: str) -> Iterator[None]:
    """No text is evaluated, executed or run by a shell meanwhile; code of a file that is imported may be."""
    texts: list[str] = []

    def refusing(original: Callable[..., object]) -> Callable[..., object]:
        def refuse(*arguments: object, **options: object) -> object:
            if isinstance(arguments[0], str):
                texts.append(arguments[0])
                raise RuntimeError("not in this test")
            return original(*arguments, **options)

        return refuse

    with ExitStack() as stack:
        for module, name in ((os, "system"), *((builtins, name) for name in ("eval", "exec", *more))):
            stack.enter_context(patch.object(module, name, refusing(getattr(module, name))))
        yield
    assert not texts


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def started(server: str) -> Any:
    return closing(Instances(instance_spec(server, "factory"), timeout_s=WAIT_S))


def call(instances: Instances, key: int, name: str, **arguments: Any) -> Answer:
    return instances.call(key, [(name, arguments)]).result(WAIT_S)[0]


def dialog(env: PromptSource, instances: Instances, lines: Iterable[str], example: Example, **ids: int) -> Sample:
    """One dialog of a policy that says these lines, in up to four turns."""
    tokenizer, turns = env.tokenizer, iter(lines)
    options = {"eos_token_id": tokenizer.eos_token_id, "max_model_len": 4096, **ids}
    engine = ScriptedEngine(
        lambda request, sample, version: tokenizer(next(turns), add_special_tokens=False)["input_ids"], **options
    )
    rules = Rules(ToolResponder(env, instances), TurnTokens(tokenizer), 4, engine.max_model_len)
    request = GroupRequest(7, env.prompt_ids(example), 1, 5, example)
    ((sample,),) = [o.samples for o in DialogEngine(engine, {None: rules}).generate([request], Sampling(200))]
    return sample
