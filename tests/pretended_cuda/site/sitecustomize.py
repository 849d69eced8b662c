"""A Python process that is started with this folder on its path pretends as soon as it imports torch."""

from typing import Any

from tests.pretended_cuda import imports


def _load_guard() -> None:
    from tests.pretended_cuda import guard

    guard.load()


def _pretend(torch: object) -> None:
    from tests.pretended_cuda.host import install

    install()


def _with_a_gpu(cuda: Any) -> None:
    cuda.has_no_gpu = lambda: False


imports.around("torch", before=_load_guard, after=_pretend)
imports.around("sota_grpo.assembly.preflight", after=_with_a_gpu)
