"""Real clusters, started when the first test needs them, and transformers as the reference.

A test that names ``cluster`` says with ``on`` on which kinds it runs. pytest sorts the tests by
that parameter, so that each kind starts once and at most one of them is alive.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from mesh.model_text.model_files import resolve_model
from tests.integration.prompts import BLOCK_SIZE
from tests.integration.reference import Reference
from tests.integration.running_cluster import RunningCluster
from tests.integration.up_process import Up

MAX_MODEL_LEN = 2560
CROWDED_STEP_TOKENS = 32
"""Most in a step of the kinds ``…-crowded``, whose KV pools hold little more than one request."""

_COMMON = (
    *("--port", "0"),
    *("--block-size", str(BLOCK_SIZE)),
    *("--max-model-len", str(MAX_MODEL_LEN)),
)
_CROWDED = (
    *("--decode", "2", "--kv-blocks", "16"),
    *("--max-batched-tokens", str(CROWDED_STEP_TOKENS), "--max-step-ms", "0"),
)
_KINDS = {
    "fp32-1p1d": ("--weights", "fp32", "--kv-memory-mib", "320"),
    "fp32-2p2d": ("--weights", "fp32", "--kv-memory-mib", "320", "--prefill", "2", "--decode", "2"),
    "int8-1p1d": ("--weights", "int8", "--kv-memory-mib", "128"),
    "int8-drill": (
        *("--weights", "int8", "--kv-memory-mib", "128"),
        *("--inject-faults", "0.05", "--lease-s", "1"),
    ),
    "fp32-crowded": ("--weights", "fp32", *_CROWDED),
    "int8-crowded": ("--weights", "int8", *_CROWDED),
    "int4-crowded": ("--weights", "int4", *_CROWDED),
}


_TIMEOUT_S = 600
"""Of a test here: its cluster may have to compile kernels first, on a slow machine for minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of real clusters more time than pyproject.toml gives all."""
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on these kinds of cluster."""
    return pytest.mark.parametrize("cluster", kinds, indirect=True)


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """One ready cluster of the kind that ``on`` gives."""
    up = Up(tmp_path_factory.mktemp(request.param), *_COMMON, *_KINDS[request.param])
    try:
        yield RunningCluster(up)
    finally:
        up.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Any number of connections, and time enough for a slow machine."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=500)
    ) as session:
        yield session


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The packaged model in transformers, float32."""
    file = resolve_model("").path
    return Reference(file.parent, gguf_file=file.name)


@pytest.fixture(scope="session")
def text_ids(reference: Reference) -> list[int]:
    """About 800 tokens of plain English."""
    return reference.encode((Path(__file__).parent / "perplexity.txt").read_text())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start ``pdmesh up`` with any flags; it is killed after the test."""
    started: list[Up] = []

    def run(*flags: str) -> Up:
        up = Up(tmp_path, *flags)
        started.append(up)
        return up

    yield run
    for up in started:
        up.close()
