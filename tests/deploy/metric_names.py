"""Names of metrics: those the processes have, and those that a query asks for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PACKAGES = ("mesh", "gateway", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker")
_NAME = re.compile(r"(?:vllm|pdmesh):[a-z0-9_]+")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")


def in_source() -> set[str]:
    """Every whole string constant that is a metric's name."""
    return {
        node.value
        for package in _PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _NAME.fullmatch(node.value)
    }


def in_query(text: str) -> set[str]:
    """The metrics that a PromQL expression names, without the suffixes of their samples."""
    return {_SUFFIX.sub("", name) for name in _NAME.findall(text)}
