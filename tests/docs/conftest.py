"""The workshop in which the commands of the documents are run, one for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    opened = Workshop(tmp_path_factory.mktemp("documents"))
    yield opened
    opened.close()
