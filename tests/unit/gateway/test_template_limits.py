"""Chat templates cannot take the event loop, nor more time and memory than they are given."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

import msgspec
import pytest

from gateway.prompts import chat, chat_template
from gateway.prompts.chat_template import ChatTemplate, TemplateTimeout
from gateway.prompts.served_model import ServedModel
from gateway.server_state import ServerState
from mesh.errors import ConfigError, InvalidRequest
from tests.unit.gateway.client import CHAT, MESSAGES, Client
from tests.unit.gateway.scripted_cluster import Script, ScriptedCluster

RANGE = "range(100000)"
BIG = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(17) %}{% set ns.x = ns.x ~ ns.x %}"
BIG += "{% endfor %}"  # a megabyte
ENDLESS = [
    f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for a in {RANGE} recursive %}}{{% if loop.depth < 4 %}}{{{{ loop({RANGE}) }}}}"
    "{% endif %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    f"{{% for a in {RANGE} %}}{{{{ {RANGE}|map('string')|list|length }}}}{{% endfor %}}",
    f"{{% for a in {RANGE} %}}{{{{ {RANGE}|sort|length }}}}{{% endfor %}}",
    "{% macro m() %}{{ caller() }}{% endmacro %}"
    f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% call m() %}}{{% endcall %}}"
    "{% endfor %}{% endfor %}",
]
GROWING = [
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|string }}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ [1] * 10000000000 }}",
    "{{ 10 ** 10000000000 }}",
    "{{ '%10000000000d' % 5 }}",
    "{{ '%*d' % (1000000000, 5) }}",
    "{{ '%10000000000d'|format(5) }}",
    "{{ '{:>10000000000}'.format('a') }}",
    "{{ '{:{w}}'.format('a', w=1000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ 'a\\nb'|indent(10000000000) }}",
    "{{ [1]|tojson(indent=10000000000) }}",
    "{{ [1]|batch(10000000000, 'x')|list }}",
    "{{ [['a'], ['b']]|sum(start=[]) }}",
    BIG + "{{ ns.x.replace('a', ns.x) }}",
    BIG + "{{ ns.x|replace('a', ns.x) }}",
    BIG + "{{ ns.x.join(range(1000)|map('string')) }}",
    BIG + "{{ range(1000)|join(ns.x) }}",
    BIG + "{% for i in range(1000) %}{{ ns.x }}{% endfor %}",
    BIG + "{% for i in range(1000) %}{% set y = ns.x[1:] %}{% endfor %}",
    BIG + "{% macro m() %}{% for i in range(1000) %}{{ ns.x }}{% endfor %}{% endmacro %}{{ m() }}",
]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_end(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match=r"too long|too much"):
        template.render(MESSAGES, time_s=0.05)  # in hours, were it not for the bound


@pytest.mark.parametrize("source", GROWING)
def test_growing_templates_end_small(source: str) -> None:
    before_mib = peak_mib()
    with pytest.raises((InvalidRequest, ConfigError)):
        ChatTemplate(source).render(MESSAGES, time_s=2.0)
    assert peak_mib() - before_mib < 400


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'a'|center(9) }}", "{{ lipsum() }}", "{{ 'a'.format_map({}) }}"),
        *("{{ 'x'.__class__.mro() }}", "{{ cycler.__init__.__globals__ }}"),
    ],
)
def test_what_is_not_offered(source: str) -> None:
    with pytest.raises((InvalidRequest, ConfigError)):
        ChatTemplate(source).render(MESSAGES)


def test_the_source_is_bounded() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("a" * (chat_template.MAX_SOURCE_CHARS + 1))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'abcdef'[1:] }}{{ 'abcdef'[::-1] }}{{ 'abcdef'[:2] }}", "bcdeffedcbaab"),
        ("{{ messages[::-1][0].content }}", "hi"),
        ("{{ 'a' * 3 }}{{ 2 ** 10 }}{{ '%s-%02d' % ('x', 5) }}{{ 7 % 4 }}", "aaa1024x-053"),
        ("{{ '{}:{:>4}'.format('a', 'b') }}{{ '%s'|format(3) }}", "a:   b3"),
        ("{{ ['a', 'b']|join(', ') }}{{ ', '.join(['c', 'd']) }}", "a, bc, d"),
        ("{{ [1, 2]|map('string')|join }}{{ 'aa'.replace('a', 'b') }}", "12bb"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}b{% endset %}{{ y }}", "a1B"),
        ("{% filter upper %}abc{% endfilter %}{{ missing }}", "ABC"),
        ("{% for i in [1, 2] %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for i in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for i in range(5) if i % 2 %}{{ i }}{% endfor %}", "13"),
        (
            "{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}in{% endcall %}",
            "<1in>",
        ),
        ("{% for i in [[1], []] recursive %}{{ i }}{{ loop(i) if i }}{% endfor %}", None),
        ("{{ {'a': [1, 'é']}|tojson }}{{ [1]|tojson(indent=2) }}", '{"a": [1, "é"]}[\n  1\n]'),
        ("{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
    ],
)
def test_templates_mean_what_they_meant(source: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(InvalidRequest):
            ChatTemplate(source).render(MESSAGES)  # an int is not a list, as ever
        return
    assert ChatTemplate(source).render(MESSAGES) == expected


def slow_model(model: ServedModel) -> ServedModel:
    return msgspec.structs.replace(model, chat_template=ChatTemplate(ENDLESS[0]))


async def test_the_event_loop_goes_on_under_an_endless_template(
    cluster: ScriptedCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.pair(Script())
    await cluster.show_all()
    cluster.server.model = slow_model(cluster.model)
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.5)
    request = asyncio.create_task(client.post(CHAT, {"messages": MESSAGES}))
    gaps = []
    while not request.done():
        started_s = time.monotonic()
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - started_s)
    status, body = await request
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "too long" in body["error"]["message"]
    assert len(gaps) > 10, "the loop turned all the while"
    assert sum(gaps) > 0.4
    assert not any(worker.seen.requests for worker in cluster.workers)


async def test_a_template_that_is_slow_but_ends_is_served(
    cluster: ScriptedCluster, client: Client
) -> None:
    await cluster.pair(Script(answer=[28, 2]))
    await cluster.show_all()
    source = "{% for i in range(30000) %}{% endfor %}{{ messages[0].content }}"
    template = ChatTemplate(source)
    with pytest.raises(TemplateTimeout):
        template.render(MESSAGES, time_s=0.001)
    cluster.server.model = msgspec.structs.replace(cluster.model, chat_template=template)
    body = await client.chat(max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 1


async def test_template_variables(cluster: ScriptedCluster, client: Client) -> None:
    await cluster.pair(Script(answer=[28, 2]))
    await cluster.show_all()
    source = "{{ 'thinking' if enable_thinking else 'plain' }} {{ messages[0].content }}"
    server: ServerState = cluster.server
    server.model = msgspec.structs.replace(server.model, chat_template=ChatTemplate(source))
    decode = server.model.tokenizer.decode
    for variables, expected in (({}, "plain hi"), ({"enable_thinking": True}, "thinking hi")):
        fields: dict[str, Any] = {"chat_template_kwargs": variables, "max_tokens": 1}
        await client.chat(**fields)
        assert decode(cluster.workers[0].seen.requests[-1].token_ids) == expected
        _, body = await client.post(
            "/tokenize", {"messages": MESSAGES, "chat_template_kwargs": variables}
        )
        assert decode(body["tokens"]) == expected
