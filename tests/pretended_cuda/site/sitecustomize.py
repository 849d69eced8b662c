"""A Python process that is started with this folder on its path pretends as soon as it imports torch."""

from tests.pretended_cuda import imports


def _load_guard() -> None:
    from tests.pretended_cuda import guard

    guard.load()


def _pretend(torch: object) -> None:
    from tests.pretended_cuda.host import install

    install()


imports.around("torch", before=_load_guard, after=_pretend)
