"""Many calls of one kind, a few at a time: an API server, and a lease to be renewed, have to stand it."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

CONCURRENCY_MAX = 8


async def run_bounded(calls: Iterable[Awaitable[Any]]) -> None:
    """Begin them in order; a failure is raised once all have come to their end."""
    waiting = iter(calls)
    failures: list[Exception] = []

    async def work() -> None:
        for call in waiting:
            try:
                await call
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY_MAX)))
    if failures:
        raise failures[0]
