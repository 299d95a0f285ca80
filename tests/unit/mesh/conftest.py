"""A real Valkey server on a loopback port for the registry's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.embedded_valkey import EmbeddedValkey


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path)
    server.start()
    yield server
    server.stop()
