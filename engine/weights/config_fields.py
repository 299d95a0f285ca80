"""Typed, checked access to an untrusted mapping of configuration values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mesh.errors import ConfigError


class ConfigFields:
    """Reads values by key, checks their type and remembers which keys were asked for.

    A value of None counts as absent, as Hugging Face writes it. Every error names the key.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Wrap ``values``; ``where`` says in errors which file or section they come from."""
        self._values = values
        self._where = where
        self._asked: set[str] = set()

    def error(self, key: str, problem: str) -> ConfigError:
        """Build the error for ``key``; the caller raises it."""
        return ConfigError(f"{self._where}: {key} {problem}")

    def has(self, key: str) -> bool:
        """Tell whether ``key`` has a value."""
        self._asked.add(key)
        return self._values.get(key) is not None

    def is_sequence(self, key: str) -> bool:
        """Tell whether ``key`` holds a list."""
        self._asked.add(key)
        return isinstance(self._values.get(key), list | tuple)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number in 0..2^31-1, or ``default``; without one the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise self.error(key, f"must be a whole number below 2^31: {_short(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, or ``default``; without one the key is required."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number: {_short(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(key, f"must be finite: {_short(value)}")
        return number

    def boolean(self, key: str, default: bool) -> bool:
        """Return a truth value, or ``default``."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false: {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or ``default``; without one the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string: {_short(value)}")
        return value

    def sequence(self, key: str) -> list[Any]:
        """Return a list; the key is required."""
        value = self._get(key, None)
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list: {_short(value)}")
        return list(value)

    def section(self, key: str) -> ConfigFields:
        """Return the mapping under ``key`` (an empty one where it is absent)."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object: {_short(value)}")
        return ConfigFields(value, f"{self._where}: {key}")

    def refuse(self, key: str, *neutral: object) -> None:
        """Raise unless ``key`` is absent or has one of the values that ask for nothing."""
        if self.has(key) and self._values[key] not in neutral:
            raise self.error(key, f"is not supported: {_short(self._values[key])}")

    def ignore(self, keys: Iterable[str]) -> None:
        """Mark keys as known to have no influence on the result."""
        self._asked.update(keys)

    def unread(self) -> list[str]:
        """List keys with a value that nobody asked for, sorted."""
        return sorted(
            key
            for key, value in self._values.items()
            if value is not None and key not in self._asked
        )

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
