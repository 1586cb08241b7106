"""The work queue handles keys, retries and resyncs at the right times, on a virtual clock."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from fulcrum_core.errors import Conflict, StoreUnavailable
from fulcrum_operator.controller.work_queue import (
    CONFLICT_DELAY_MAX_S,
    CONFLICT_DELAY_MIN_S,
    WorkQueue,
    backoff_s,
)
from tests.waiting import advance

pytestmark = pytest.mark.looptime


class RecordingHandler:
    """Records the start of each call; a call takes `duration_s` and raises the next of `errors`, if any."""

    def __init__(self) -> None:
        self.started_at_s: dict[str, list[float]] = defaultdict(list)
        self.errors: list[Exception] = []
        self.duration_s = 0.0
        self.requeue_after_s: float | None = None
        self.running = 0
        self.running_max = 0

    async def __call__(self, key: str) -> float | None:
        self.started_at_s[key].append(round(asyncio.get_running_loop().time(), 6))
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        await advance(self.duration_s)
        self.running -= 1
        if self.errors:
            raise self.errors.pop()
        requeue_after_s, self.requeue_after_s = self.requeue_after_s, None
        return requeue_after_s


@pytest.fixture
def handler() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
async def queue(handler: RecordingHandler) -> AsyncIterator[WorkQueue[str]]:
    created = WorkQueue[str](handler, resync_s=100.0)
    yield created
    await created.aclose()


async def test_a_key_added_while_it_runs_is_handled_once_more(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    for _ in range(3):
        queue.add("a")
    await advance(1)
    assert handler.started_at_s == {"a": [0.0, 0.0]}


async def test_a_key_is_never_handled_twice_at_the_same_time(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.duration_s = 2.0
    queue.add("a")
    await advance(1)
    queue.add("a")
    queue.add("a")
    await advance(10)
    assert (handler.started_at_s, handler.running_max) == ({"a": [0.0, 2.0]}, 1)


async def test_different_keys_are_handled_concurrently(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.duration_s = 2.0
    queue.add("a")
    queue.add("b")
    await advance(1)
    assert (handler.started_at_s, handler.running_max) == ({"a": [0.0], "b": [0.0]}, 2)


async def test_a_key_is_handled_again_after_its_requeue_time(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.requeue_after_s = 5.0
    queue.add("a")
    await advance(50)
    assert handler.started_at_s == {"a": [0.0, 5.0]}


async def test_an_event_replaces_a_later_requeue(queue: WorkQueue[str], handler: RecordingHandler) -> None:
    handler.requeue_after_s = 5.0
    queue.add("a")
    await advance(2)
    queue.add("a")
    await advance(50)
    assert handler.started_at_s == {"a": [0.0, 2.0]}


async def test_every_key_is_handled_again_after_the_resync_period(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    queue.add("a")
    await advance(201)
    assert handler.started_at_s == {"a": [0.0, 100.0, 200.0]}


async def test_the_earliest_requeue_time_wins(queue: WorkQueue[str], handler: RecordingHandler) -> None:
    queue.add_after("a", 5.0)
    queue.add_after("a", 3.0)
    queue.add_after("a", 9.0)
    await advance(50)
    assert handler.started_at_s == {"a": [3.0]}


async def test_a_failing_key_is_retried_with_doubling_delays(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.errors = [ValueError("broken")] * 3
    queue.add("a")
    await advance(1)
    assert handler.started_at_s == {"a": [0.0, 0.05, 0.15, 0.35]}


async def test_a_success_resets_the_retry_delay(queue: WorkQueue[str], handler: RecordingHandler) -> None:
    handler.errors = [ValueError("broken")] * 2
    queue.add("a")
    await advance(1)
    handler.errors = [ValueError("broken")]
    queue.add("a")
    await advance(1)
    assert handler.started_at_s == {"a": [0.0, 0.05, 0.15, 1.0, 1.05]}


async def test_a_conflict_is_retried_sooner_than_a_failure(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.errors = [Conflict("changed")] * 3
    queue.add("a")
    await advance(1)
    assert handler.started_at_s == {"a": [0.0, *(round(CONFLICT_DELAY_MIN_S * n, 6) for n in (1, 3, 7))]}


async def test_repeated_conflicts_back_off_to_the_maximum_delay(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.errors = [Conflict("changed")] * 1000
    queue.add("a")
    await advance(20)
    gaps = [b - a for a, b in pairwise(handler.started_at_s["a"])]
    assert max(gaps) == pytest.approx(CONFLICT_DELAY_MAX_S)
    assert len(handler.started_at_s["a"]) < 60


async def test_a_key_whose_handler_returns_infinity_is_not_requeued(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.requeue_after_s = math.inf
    queue.add("a")
    await advance(1000)
    before = list(handler.started_at_s["a"])
    queue.add("a")
    await advance(1)
    assert (before, handler.started_at_s["a"]) == ([0.0], [0.0, 1000.0])


async def test_the_retry_waits_as_long_as_the_store_asks(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.errors = [StoreUnavailable("busy", retry_after_s=3.0)]
    queue.add("a")
    await advance(10)
    assert handler.started_at_s == {"a": [0.0, 3.0]}


async def test_a_closed_queue_cancels_running_keys_and_ignores_new_ones(
    queue: WorkQueue[str], handler: RecordingHandler
) -> None:
    handler.duration_s = 10.0
    queue.add("a")
    queue.add_after("b", 1.0)
    await advance(0.5)
    await queue.aclose()
    queue.add("c")
    queue.add_after("d", 1.0)
    await advance(50)
    assert handler.started_at_s == {"a": [0.0]}


def test_the_retry_delay_is_bounded() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 50)] == [0.05, 0.1, 0.2, 5.0]
