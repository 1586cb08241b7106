"""Run many calls with bounded concurrency, so that a large service does not overload the API server.

`apply` writes objects with it and `leader` lists them. All calls are made; the first failure is raised at the
end.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

CONCURRENCY_MAX = 8


async def run_bounded(calls: Iterable[Awaitable[Any]]) -> None:
    """Await the calls, at most `CONCURRENCY_MAX` at a time, started in order.

    The first failure is raised after all calls have ended.
    """
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
