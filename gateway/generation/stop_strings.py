"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string completes.

    The result does not depend on how the text is cut: the stop string that completes first wins
    (of those, the one that started first). Text is held back while it may still become one.

        text so far   … t h e   e n d \\n U s
                                     └─────┘ held back: prefix of "\\nUser:"
    """

    __slots__ = ("_held", "_include", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Watch for ``stops``.

        Args:
            stops: Not empty strings.
            include: Keep the matched stop string in the text.
        """
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that completed."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string completed."""
        buffer = self._held + text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                self.found = stop
        if best is not None:
            self._held = ""
            return buffer[: best[0] if self._include else best[1]], True
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def finish(self) -> str:
        """The output ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            size = min(len(stop) - 1, len(buffer))
            while size > longest and not buffer.endswith(stop[:size]):
                size -= 1
            longest = max(longest, size)
        return longest
