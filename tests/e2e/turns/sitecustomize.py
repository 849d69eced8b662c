"""A Python process that is started with this folder on its path writes down when its engine, rank or reference works.

One line to the file ``TURNS``: what, begin and end (nanoseconds of a clock that all processes of a machine share), pid.
Engines without a GPU free nothing; here they go through the motions.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from tests.pretended_cuda import imports

LOG = os.open(os.environ["TURNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return function(*args, **options)
        finally:
            os.write(LOG, f"{what} {began} {time.monotonic_ns()} {os.getpid()}\n".encode())

    return call


def watch(of: Any, what: str, *methods: str) -> None:
    for name in methods:
        setattr(of, name, noted(what, getattr(of, name)))


def watch_engine(module: Any) -> None:
    engine = module.TransformersEngine
    engine._can_sleep = property(lambda self: True, lambda self, value: None)
    watch(engine, "step", "_step")
    watch(engine, "sleep", "_free_memory")
    watch(engine, "wake", "_restore_memory")


def watch_learner(module: Any) -> None:
    watch(module.Learner, "rank", "update_share", "measured", "diagnose", "gradient_gap")


imports.around("sota_grpo.engines.transformers_engine", after=watch_engine)
imports.around("sota_grpo.training.learner", after=watch_learner)
imports.around("sota_grpo.workers.reference", after=lambda module: watch(module.ReferenceWorker, "reference", "run"))
