"""Thread settings before torch is loaded, and one tiny Llama for all tests of the loops."""

from __future__ import annotations

from mesh.threads import configure_threads

configure_threads()  # torch reads them when it is loaded

import pytest  # noqa: E402

from tests.unit.engine.tiny_llama import TinyLlama  # noqa: E402


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("tiny-llama"))
