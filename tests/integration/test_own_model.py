"""``./pdmesh up --model FOLDER`` with a Hugging Face folder made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.integration.own_model import save_own_model
from tests.integration.reference import Reference
from tests.integration.running_cluster import RunningCluster, ask
from tests.integration.up_process import Up

_TEXTS = ("The river", "snow lies until", "Zwölf 🚣 boats\n\n", "x" * 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ``save_own_model`` makes."""
    folder = tmp_path_factory.mktemp("own-model") / "River-Llama"
    save_own_model(folder)
    return folder


async def test_it_is_served_as_transformers_runs_it(
    start: Callable[..., Up], folder: Path, session: aiohttp.ClientSession
) -> None:
    reference = Reference(folder)
    up = start("--port", "0", "--model", str(folder), "--weights", "fp32", "--kv-blocks", "64")
    cluster = RunningCluster(up)
    assert cluster.model == "River-Llama"
    assert cluster.get("/v1/models")["data"][0]["max_model_len"] == 512
    prompts = [*_TEXTS, [{"role": "user", "content": "Where does the river begin?"}]]
    for prompt in prompts:
        answer = await ask(cluster, session, prompt, max_tokens=24)
        assert answer.prompt_ids == reference.encode(prompt)
        assert reference.mismatches(answer.prompt_ids, answer.token_ids) == []
    cluster.wait_idle()


async def test_it_is_served_with_the_default_flags(
    start: Callable[..., Up], folder: Path, session: aiohttp.ClientSession
) -> None:
    cluster = RunningCluster(start("--port", "0", "--model", str(folder)))
    answer = await ask(cluster, session, _TEXTS[0], max_tokens=24, ignore_eos=True)
    assert len(answer.token_ids) == 24
    cluster.wait_idle()
