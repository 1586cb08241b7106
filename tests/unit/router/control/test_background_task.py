"""What goes on beside the serving: ended with it, and not without a word before."""

import asyncio

from structlog.testing import capture_logs

from fulcrum_router.control.background_task import beside


async def for_ever(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def fail() -> None:
    raise KeyError("type")


async def test_it_ends_with_what_it_goes_on_beside() -> None:
    ended = asyncio.Event()
    with capture_logs() as told:
        async with beside(for_ever(ended)):
            await asyncio.sleep(0)
    assert (ended.is_set(), told) == (True, [])


async def test_a_fault_is_told_while_the_rest_goes_on() -> None:
    with capture_logs() as told:
        async with beside(fail()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [(line["log_level"], repr(line["exc_info"])) for line in told] == [
                ("error", "KeyError('type')")
            ]
