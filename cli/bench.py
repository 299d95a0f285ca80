"""``pdmesh bench NAME …`` runs ``benchmarks/NAME.py``, which has ``main(argv) -> int | None``."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

from mesh.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def run_bench(arguments: Sequence[str], folder: Path = _FOLDER) -> int:
    """Run the benchmark named first, or list all of them.

    Raises:
        ConfigError: there is no benchmark of that name.
    """
    found = benchmarks(folder)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: pdmesh bench NAME [arguments]\n\nbenchmarks:")
        for name, text in found.items():
            print(f"  {name:<20} {text}")
        return 0
    name, rest = arguments[0], list(arguments[1:])
    if name not in found:
        raise ConfigError(f"no benchmark {name!r}; there are: {', '.join(found) or 'none'}")
    result = importlib.import_module(f"benchmarks.{name}").main(rest)
    return int(result or 0)


def benchmarks(folder: Path) -> dict[str, str]:
    """Name and first docstring line of every module in ``folder`` that has a ``main``."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        # Parsed, not imported: listing must not need what the benchmarks need.
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
