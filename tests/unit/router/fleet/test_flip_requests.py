"""Long polls for the applied assignment and for flip requests: ended by a change or by their time-out."""

import asyncio

import pytest

from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import Role
from fulcrum_router.fleet.flip_requests import AppliedAssignment, FlipRequests
from tests.waiting import run_pending_tasks

pytestmark = pytest.mark.looptime


async def test_waiting_for_an_applied_generation_returns_at_once() -> None:
    applied = AppliedAssignment()
    applied.advance(5, 1.0)
    assert await applied.wait_until_reached(5, 0.0)


async def test_a_waiter_wakes_when_its_generation_is_applied() -> None:
    applied = AppliedAssignment()
    waiting = asyncio.ensure_future(applied.wait_until_reached(2, 30.0))
    await run_pending_tasks()
    applied.advance(1, 1.0)
    await run_pending_tasks()
    assert not waiting.done()
    applied.advance(2, 2.0)
    assert await waiting


async def test_a_request_waits_for_the_next_assignment_or_its_time() -> None:
    applied = AppliedAssignment()
    waiting = asyncio.ensure_future(applied.wait_until_next(30.0))
    await run_pending_tasks()
    applied.advance(1, 1.0)
    assert await waiting
    assert not await applied.wait_until_next(0.01)


async def test_waiting_for_a_generation_times_out() -> None:
    assert not await AppliedAssignment().wait_until_reached(1, 0.01)


async def test_a_flip_request_wakes_the_long_poll_and_gets_the_next_number() -> None:
    flip_requests = FlipRequests()
    poll = asyncio.ensure_future(flip_requests.wait_after(0, 30.0))
    await run_pending_tasks()
    flip_requests.submit(Role.PREFILL, "SLO missed")
    assert await poll == FlipRequest(seq=1, role=Role.PREFILL, reason="SLO missed")
    assert await flip_requests.wait_after(1, 0.0) is None


async def test_a_flip_request_for_one_role_does_not_replace_that_for_the_other() -> None:
    flip_requests = FlipRequests()
    for role, reason in ((Role.PREFILL, "old"), (Role.PREFILL, "queue"), (Role.DECODE, "long context")):
        flip_requests.submit(role, reason)
    for_prefill = FlipRequest(seq=2, role=Role.PREFILL, reason="queue")
    for_decode = FlipRequest(seq=3, role=Role.DECODE, reason="long context")
    assert [await flip_requests.wait_after(seq, 0.0) for seq in range(4)] == [
        for_decode.model_copy(update={"other": for_prefill}),
        for_decode.model_copy(update={"other": for_prefill}),
        for_decode,
        None,
    ]
