"""A task that swallows its cancellation still ends."""

from __future__ import annotations

import asyncio

from mesh.cancel import cancel_and_wait


async def test_task_that_swallows_cancellations_ends() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await cancel_and_wait(task)
    assert task.cancelled()
    assert swallowed == 3


async def test_error_of_the_task_is_not_raised() -> None:
    async def failing() -> None:
        raise ValueError("late")

    await cancel_and_wait(asyncio.create_task(failing()))
