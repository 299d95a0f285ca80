"""Block sizes, warps and pipeline stages of the kernels: a table per card, and safe defaults.

``tuning/<card>.json`` maps a kernel's name to a list of entries, looked through in order; the first
whose ``when`` holds for the call's key is taken::

    {"int4_matmul": [{"when": {"m": [1, 1]}, "meta": {"BLOCK_N": 64}, "num_warps": 4,
                      "num_stages": 3}]}

A condition is a value that the key must equal, or ``[lowest, highest]`` for a number; beside what
the launcher names, the key has the device's ``capability`` (90 for compute capability 9.0). What a
card's table lacks comes from ``default.json``, whose entries ``compile_check`` has built for every
target, and end in one without conditions.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

Key = int | str
Condition = int | str | tuple[int, int]
_FOLDER = Path(__file__).parent / "tuning"
_target: contextvars.ContextVar[tuple[int, str | None] | None] = contextvars.ContextVar(
    "_target", default=None
)

CARD_CAPABILITIES = {"nvidia_h200": 90}
"""Of the cards that have a table, for building its entries where the card is not."""


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to launch a kernel."""

    meta: dict[str, int]
    """Its constexpr block sizes, by argument name; launchers may read others from here too."""
    num_warps: int
    num_stages: int


class _Entry(LaunchConfig, frozen=True, kw_only=True):
    when: dict[str, Condition] = {}

    def fits(self, key: dict[str, Key]) -> bool:
        return all(_holds(condition, key.get(name)) for name, condition in self.when.items())


_Table = dict[str, list[_Entry]]


def launch_config(kernel: str, **key: Key) -> LaunchConfig:
    """The entry of ``kernel`` for this device and ``key``.

    Raises:
        KeyError: No table has an entry for it.
    """
    target = _target.get()
    if target is not None:
        return config_of_card(target[1], kernel, capability=target[0], **key)
    if (capability := _capability()) is not None:
        key["capability"] = capability
    return config_of_card(card(), kernel, **key)


@functools.lru_cache(maxsize=4096)
def config_of_card(card_name: str | None, kernel: str, **key: Key) -> LaunchConfig:
    """The entry of ``kernel`` for the named card; None: no card in particular.

    Raises:
        KeyError: No table has an entry for it.
    """
    for table in (_table(card_name), _table("default")):
        for entry in table.get(kernel, ()):
            if entry.fits(key):
                return LaunchConfig(
                    meta=entry.meta, num_warps=entry.num_warps, num_stages=entry.num_stages
                )
    raise KeyError(f"no launch configuration of {kernel} for {key}")


@contextlib.contextmanager
def compiling_for(capability: int, card_name: str | None = None) -> Iterator[None]:
    """Within it, ``launch_config`` answers for a device that is not here."""
    token = _target.set((capability, card_name))
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def card() -> str | None:
    """Table name of the current device (``nvidia_h200``); None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return table_name(torch.cuda.get_device_name())


@functools.cache
def _capability() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def table_name(device_name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` → ``nvidia_h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def table_path(card_name: str) -> Path:
    """Where a card's table is, or would be."""
    return _FOLDER / f"{card_name}.json"


def known_cards() -> list[str]:
    """Names of the tables beside the default one."""
    return sorted(path.stem for path in _FOLDER.glob("*.json") if path.stem != "default")


@functools.cache
def _table(name: str | None) -> _Table:
    if name is None or not (path := table_path(name)).is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=_Table)


def _holds(condition: Condition, value: Key | None) -> bool:
    if isinstance(condition, tuple):
        return isinstance(value, int) and condition[0] <= value <= condition[1]
    return value == condition
