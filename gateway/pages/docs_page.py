"""GET /docs: the OpenAPI document as one HTML page, without scripts or anything from outside."""

from __future__ import annotations

import html
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem } code { font-family: ui-monospace, monospace; font-size: 13px }
table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid #8884; padding: .3rem .6rem; text-align: left; vertical-align: top }
:root { color-scheme: light dark }
"""


def render(document: dict[str, Any]) -> str:
    """The page; every text from ``document`` is escaped."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{_text(info['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(info['title'])}</h1><p>{_text(info['description'])} ",
        'The same as a document: <a href="openapi.json">openapi.json</a></p>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h1>Types</h1>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(_schema(name, schema))
    return "".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [
        f"<h2><code>{_text(method.upper())} {_text(path)}</code></h2>",
        f"<p>{_text(operation['summary'])}</p>",
    ]
    body = operation.get("requestBody")
    if body is not None:
        [content] = body["content"].values()
        parts.append(f"<p>Body: {_type(content['schema'])}</p>")
    rows = []
    for status, answer in operation["responses"].items():
        forms = [
            f"{_text(media)}: {_content(content)}" for media, content in answer["content"].items()
        ]
        rows.append(
            f"<tr><td>{_text(status)}</td><td>{_text(answer['description'])}</td>"
            f"<td>{'<br>'.join(forms)}</td></tr>"
        )
    return "".join([*parts, "<table>", *rows, "</table>"])


def _content(content: dict[str, Any]) -> str:
    if "itemSchema" not in content:
        return _type(content["schema"])
    data = content["itemSchema"]["properties"]["data"]
    return "events of " + _type(data)


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for field, described in schema.get("properties", {}).items():
        default = "required" if field in required else _default(described)
        rows.append(
            f"<tr><td><code>{_text(field)}</code></td><td>{_type(described)}</td>"
            f"<td>{default}</td><td>{_text(described.get('description', ''))}</td></tr>"
        )
    head = "<tr><th>field</th><th>type</th><th>default</th><th></th></tr>"
    return (
        f'<h2 id="{_text(name)}"><code>{_text(name)}</code></h2>'
        f"<p>{_text(schema.get('description', ''))}</p><table>{head}{''.join(rows)}</table>"
    )


def _default(schema: dict[str, Any]) -> str:
    return f"<code>{_text(repr(schema['default']))}</code>" if "default" in schema else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{_text(name)}">{_text(name)}</a>'
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(_type(one) for one in schema[key])
    if "enum" in schema:
        return " | ".join(f"<code>{_text(repr(one))}</code>" for one in schema["enum"])
    if "const" in schema:
        return f"<code>{_text(repr(schema['const']))}</code>"
    kind = _text(str(schema.get("type", "any")))
    if "items" in schema and isinstance(schema["items"], dict):
        kind = f"array of {_type(schema['items'])}"
    limits = {
        "minimum": "≥", "maximum": "≤", "exclusiveMinimum": "&gt;", "exclusiveMaximum": "&lt;",
        "minLength": "length ≥", "maxLength": "length ≤", "minItems": "items ≥",
        "maxItems": "items ≤", "maxProperties": "entries ≤",
    }  # fmt: skip
    for key, sign in limits.items():
        if key in schema:
            kind += f" {sign} {_text(str(schema[key]))}"
    return kind


def _text(value: str) -> str:
    return html.escape(value)
