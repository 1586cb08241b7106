"""Steps of a journey that are the same for each API: its waits, and the error if no instance can serve it.

`exchange` and `pass_through` carry out their journeys with them; what is waited for, and whether, is the
journey's choice.
"""

import time

from fulcrum_router.counters import RequestOutcome
from fulcrum_router.data_path.request import find_error_status
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1 import responses
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.http1.inline_task import Completion, run_in_asyncio_task
from fulcrum_router.policy.faults.blame import SHED_STATUSES
from fulcrum_router.policy.journey import Action, Journey, StopReason
from fulcrum_router.policy.tiers.admission import RefusalReason
from fulcrum_router.router import Router

_FAILS_AGAIN = (StopReason.QUERY_OF_DEATH, StopReason.TOO_LONG)
"""Reasons for which a request would fail again."""


async def wait_for_flip(router: Router, journey: Journey[Instance]) -> Action:
    """Publish the flip that the journey asks for, and wait for the next assignment as long as it says."""
    if journey.proposal is not None:
        router.request_flip(journey.proposal)
    wait_s = journey.wait_until_s - time.monotonic()
    if wait_s > 0 and await run_in_asyncio_task(router.applied_assignment.wait_until_next(wait_s)):
        return journey.flip_done(time.monotonic())
    return journey.flip_wait_ended(max(journey.wait_until_s, time.monotonic()))


async def wait_in_room(journey: Journey[Instance]) -> Action:
    """Wait until the request leaves the waiting room."""
    moved: Completion[Action] = Completion()
    journey.on_moved = moved.set_result
    return await moved


def build_failure_response(
    router: Router, journey: Journey[Instance], failed: LegFailed | None, *, close: bool
) -> tuple[RequestOutcome, bytes]:
    """Count a request that no instance could serve, and build the error for its client."""
    reason, refusal = journey.stop_reason, journey.refusal
    if reason is not None:
        router.counters.stopped_requests[reason] += 1
    if refusal is not None:
        limited = refusal.reason is RefusalReason.RATE_LIMIT
        outcome = RequestOutcome.LIMITED if limited else RequestOutcome.REFUSED
        return outcome, responses.build_refusal_response(
            refusal.reason, refusal.message, retry_after_s=refusal.retry_after_s, close=close
        )
    if reason is StopReason.FULL:
        status = 503
        message = f"{len(router.journeys.waiting_room)} requests wait: the waiting room is full"
    elif failed is None or failed.status in SHED_STATUSES:
        message = "no decode instance is available" if failed is None else failed.detail
        status = 503
    else:
        message = f"no decode instance responded: {failed.detail}"
        if reason is StopReason.QUERY_OF_DEATH:
            message = f"two engines failed on this request: {failed.detail}"
        status = find_error_status(failed)
    lines = responses.DO_NOT_RETRY if reason in _FAILS_AGAIN else b""
    return RequestOutcome.FAILED, responses.build_error_response(
        status, message, header_lines=lines, close=close
    )
