"""One HTTP request's choices, run on the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from gateway.generation.choice import Choice, Delta
from mesh.errors import PdmeshError


class Answer:
    """Context manager that owns the generations of one HTTP request: leaving it aborts the rest."""

    def __init__(
        self,
        answer_id: str,
        choices: Sequence[Choice],
        *,
        samples_per_prompt: int,
        wake: asyncio.Event,
        shows_timing: bool = False,
    ) -> None:
        """Prepare; entering starts the generations.

        Args:
            answer_id: Unique in the cluster.
            choices: All of them, the samples of a prompt side by side.
            samples_per_prompt: How many each prompt has.
            wake: Set whenever a choice has something new.
            shows_timing: The client wants to see where the time went.
        """
        self.id = answer_id
        self.choices = choices
        self.samples_per_prompt = samples_per_prompt
        self.shows_timing = shows_timing
        self.created = int(time.time())
        self._wake = wake

    def __enter__(self) -> Self:
        """Start all generations.

        Raises:
            Unavailable, Overloaded, ContextTooLong: the cluster does not take them.
        """
        try:
            for choice in self.choices:
                choice.generation.start()
        except PdmeshError as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort whatever has not finished."""
        self._close(error)

    def fail(self, error: PdmeshError) -> None:
        """Abort whatever has not finished and end ``batches`` with ``error``."""
        for choice in self.choices:
            choice.generation.fail(error)

    def _close(self, error: BaseException | None) -> None:
        for choice in self.choices:
            choice.generation.close()
            if choice.finish_reason is not None:
                continue
            failure = choice.generation.error or error
            if isinstance(failure, PdmeshError):
                choice.failed(failure.code)
            else:
                choice.abandoned()

    async def batches(self) -> AsyncIterator[list[tuple[Choice, list[Delta]]]]:
        """What arrived, as it arrives, until every choice has finished.

        Raises:
            PdmeshError: a choice failed.
        """
        unfinished = list(self.choices)
        while unfinished:
            await self._wake.wait()
            self._wake.clear()
            batch = []
            failure: PdmeshError | None = None
            for choice in unfinished:
                try:
                    deltas = choice.read()
                except PdmeshError as error:
                    failure = error
                    continue
                if deltas:
                    batch.append((choice, deltas))
                if choice.generation.error is not None:
                    self._wake.set()  # its error comes after its last tokens
            if batch:
                yield batch
            if failure is not None:
                raise failure
            unfinished = [choice for choice in unfinished if choice.finish_reason is None]

    def timing(self) -> list[dict[str, Any]]:
        """Where the time of each choice went; call once all have finished."""
        return [{"index": choice.index} | choice.timing() for choice in self.choices]

    async def collect(self) -> list[list[Delta]]:
        """All deltas of every choice.

        Raises:
            PdmeshError: a choice failed.
        """
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        async for batch in self.batches():
            for choice, new in batch:
                deltas[choice.index] += new
        return deltas
