"""Containers for the tests that say so; everything else here reads files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.deploy.composed import Composed
from tests.deploy.docker_engine import DockerEngine, NoEngine
from tests.deploy.images import make_images
from tests.integration.running_cluster import RunningCluster

SWITCH = "PDMESH_DEPLOY_TESTS"
"""1: run containers. Not by default: it takes minutes, root, and gigabytes of disk."""


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """A Docker Engine; without one the tests that need it are skipped, loudly."""
    if os.environ.get(SWITCH) != "1":
        pytest.skip(f"containers are run with {SWITCH}=1 only")
    try:
        engine = DockerEngine()
    except NoEngine as error:
        pytest.skip(f"COMPOSE IS NOT TESTED: {error}")
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def composed(engine: DockerEngine) -> Iterator[Composed]:
    """The cluster of compose.yaml, one worker of each role, with nothing left at the end."""
    composed = Composed(engine, make_images(engine))
    try:
        composed.up()
        yield composed
    finally:
        composed.close()


@pytest.fixture(scope="session")
def cluster(composed: Composed) -> RunningCluster:
    """The same, ready, as its clients see it."""
    return RunningCluster(composed)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Any number of connections, and time enough for a slow machine."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=240)
    ) as session:
        yield session
