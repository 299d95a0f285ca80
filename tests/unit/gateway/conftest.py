"""A gateway over HTTP, real links, scripted workers; a blocking call in the loop is an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from gateway.prompts.served_model import ServedModel, load_served_model
from mesh.model_text.model_files import resolve_model
from tests.unit.gateway.client import Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

StartCluster = Callable[..., Awaitable[ScriptedCluster]]


@pytest.fixture(scope="session")
def model() -> ServedModel:
    """The packaged SmolLM2: a real tokenizer and chat template."""
    return load_served_model(resolve_model(""))


@pytest.fixture
def blockbuster() -> Iterator[BlockBuster]:
    with blockbuster_ctx() as guard:
        yield guard


@pytest.fixture
async def cluster(model: ServedModel, blockbuster: BlockBuster) -> AsyncIterator[ScriptedCluster]:
    """A gateway without workers."""
    cluster = ScriptedCluster(model)
    await cluster.start()
    yield cluster
    await cluster.close()


@pytest.fixture
async def client(cluster: ScriptedCluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(cluster, session)


@pytest.fixture
def script(model: ServedModel) -> Script:
    """What the workers answer: text in several scripts, then the end-of-turn token."""
    ids = model.tokenizer.encode("Hello wörld 日本 😀 yes", add_special_tokens=False)
    return Script(answer=[*ids, *model.eos_token_ids])
