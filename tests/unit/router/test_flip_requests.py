"""Long polls: told at once, or at the end of their patience."""

import asyncio

from fulcrum_core.state import FlipWanted
from fulcrum_core.values import Role
from fulcrum_router.flip_requests import Epoch, FlipBoard


async def test_a_generation_reached_already_is_answered_at_once() -> None:
    epoch = Epoch()
    epoch.advance(5, 1.0)
    assert await epoch.reached(5, 0.0)


async def test_who_waits_for_a_generation_is_told_at_once() -> None:
    epoch = Epoch()
    waiting = asyncio.ensure_future(epoch.reached(2, 30.0))
    await asyncio.sleep(0)
    epoch.advance(1, 1.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    epoch.advance(2, 2.0)
    assert await waiting


async def test_a_generation_that_does_not_come_is_told_at_the_end() -> None:
    assert not await Epoch().reached(1, 0.01)


async def test_a_wish_wakes_the_long_poll_and_is_counted() -> None:
    board = FlipBoard(Epoch())
    poll = asyncio.ensure_future(board.after(0, 30.0))
    await asyncio.sleep(0)
    await board.ask(Role.PREFILL, "late")
    assert await poll == FlipWanted(seq=1, role=Role.PREFILL, reason="late")
    assert await board.after(1, 0.0) is None


async def test_a_request_waits_for_its_flip_only_where_somebody_grants_it() -> None:
    epoch = Epoch()
    board = FlipBoard(epoch)
    await board.ask(Role.DECODE, "nobody acts")  # would hang without a time-out if it waited
    board.wait_for_grant = True
    asked = asyncio.ensure_future(board.ask(Role.DECODE, "somebody acts"))
    await asyncio.sleep(0)
    assert not asked.done()
    epoch.advance(1, 1.0)
    await asked


async def test_after_a_wait_in_vain_the_next_request_does_not_wait() -> None:
    board = FlipBoard(Epoch())
    board.wait_for_grant = True
    await board.ask(Role.DECODE, "not granted within the patience")
    asked = asyncio.ensure_future(board.ask(Role.DECODE, "at once"))
    await asyncio.sleep(0)
    assert (asked.done(), board.seq) == (True, 2)
