"""The dashboard's HTML, put together once from the files in ``gateway/pages/page``.

Style and scripts go into the document, and their hashes into its Content-Security-Policy: the page
loads nothing, runs nothing else, and speaks to its own gateway only.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("format.js", "charts.js", "workers.js", "requests.js", "main.js")
"""In this order, as one script."""


class Page(NamedTuple):
    """What is served."""

    body: bytes
    policy: str
    """Content-Security-Policy."""


@functools.cache
def load_page() -> Page:
    """Read the files, the first time."""
    style = _read("dashboard.css")
    script = "".join(map(_read, _SCRIPTS))
    page = _read("dashboard.html")
    page = page.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return Page(page.encode(), policy)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
