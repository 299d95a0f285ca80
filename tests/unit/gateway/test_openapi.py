"""The OpenAPI document and its page are true to what is served; fuzzed with schemathesis."""

from __future__ import annotations

import collections
import html.parser
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openai import answer as answer_schema
from gateway.pages.openapi import OPERATIONS, Operation, build_document
from gateway.prompts.served_model import ServedModel
from gateway.request.decoding import refused_fields
from tests.unit.gateway.client import CHAT, COMPLETIONS, Client
from tests.unit.gateway.live_gateway import live_gateway
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NUM_EXAMPLES = 100


@pytest.fixture(scope="module")
def live(model: ServedModel) -> Iterator[ScriptedCluster]:
    ids = model.tokenizer.encode("Hello wörld 日本 😀 yes", add_special_tokens=False)
    with live_gateway(model, Script(answer=[*ids, 2]), max_model_len=64) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *((operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
        *((operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if operation.bodies),
    ],
    ids=lambda value: value.path if isinstance(value, Operation) else str(value),
)
def test_any_request_is_answered_as_the_document_says(
    live: ScriptedCluster, session: requests.Session, operation: Operation, mode: GenerationMode
) -> None:
    api = schemathesis.openapi.from_dict(build_document(live.model.name))
    statuses: collections.Counter[int] = collections.Counter()

    @settings(
        max_examples=NUM_EXAMPLES if operation.bodies else 3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[operation.path][operation.method.upper()].as_strategy(mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=live.url, session=session, timeout=100)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    check()
    assert sum(statuses.values()) >= (NUM_EXAMPLES if operation.bodies else 1)
    if mode is GenerationMode.POSITIVE and operation.path != "/v1/models/{id}":
        assert statuses[200], statuses
    give_up_s = time.monotonic() + 60
    while live.server.num_open_requests:  # a stream's client is done before its handler
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@pytest.fixture
async def ready(client: Client, cluster: ScriptedCluster, script: Script) -> Client:
    await cluster.pair(script)
    await cluster.show_all()
    return client


FORMS: list[dict[str, Any]] = [
    {},
    {"n": 2, "return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": True}},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_what_is_sent_has_the_documented_types(ready: Client, form: dict[str, Any]) -> None:
    """msgspec refuses a field that the type does not name."""
    whole = {name: value for name, value in form.items() if name != "stream_options"}
    for logprobs in (False, True):
        chat_fields = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
        fields = {"logprobs": 2} if logprobs else {}
        msgspec.convert(await ready.chat(**whole, **chat_fields), answer_schema.ChatAnswer)
        msgspec.convert(await ready.complete(**whole, **fields), answer_schema.CompletionAnswer)
        for chunk in await ready.stream_json(CHAT, **form, **chat_fields):
            msgspec.convert(chunk, answer_schema.ChatChunk)
        for chunk in await ready.stream_json(COMPLETIONS, **form, **fields):
            msgspec.convert(chunk, answer_schema.CompletionChunk)


async def test_every_route_is_documented(client: Client, cluster: ScriptedCluster) -> None:
    status, document = await client.get("/openapi.json")
    assert status == 200
    app = cluster.runner.app
    routes = {
        (route.method.lower(), route.resource.canonical.replace("{id:.+}", "{id}"))
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    documented = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    pages = {("get", "/openapi.json"), ("get", "/docs"), ("get", "/dashboard")}
    assert routes - documented == pages
    assert documented <= routes


def test_the_document_names_every_field_and_resolves() -> None:
    document = build_document("some-model")
    schemas = document["components"]["schemas"]
    for operation in OPERATIONS:
        for body in operation.bodies:
            properties = schemas[body.__name__]["properties"]
            assert set(properties) == {*body.__struct_fields__, *refused_fields(body)}
            assert schemas[body.__name__]["additionalProperties"] is False
    for text in json.dumps(document).split('"$ref": "')[1:]:
        name = text.partition('"')[0].removeprefix("#/components/schemas/")
        assert name in schemas
    assert properties["model"]["enum"] == ["some-model", None]


class _Page(html.parser.HTMLParser):
    """Collects what a browser would load, and the places one can link to."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)
        self.ids.add(found.get("id") or "")
        self.links.add(found.get("href") or "")


async def test_the_page_shows_everything_and_loads_nothing(client: Client) -> None:
    async with client.session.get(client.cluster.url + "/docs") as response:
        text = await response.text()
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    page = _Page()
    page.feed(text)
    assert page.loaded == []
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    for operation in OPERATIONS:
        assert f"{operation.method.upper()} {operation.path}" in text
    assert "continue_final_message" in text
    assert "token_id:17" in text, "the fields' docstrings"
