"""The page `/requests` of the metrics port: the flight recorder's requests as JSON, for `fulcrum regret`.

`metrics_port` serves it. A full recorder takes about 0.2 s to write out, and 10 MB. It is written in slices
with turns of the event loop between them, and at most once in `MIN_INTERVAL_S`: all who ask meanwhile get the
same page. As long as somebody reads a page, others get it, too, for `MAX_AGE_S`: slow readers keep few pages
in memory.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator

import orjson
from aiohttp import web

from fulcrum_core.values import Role
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.policy.flight_recorder import RequestRecord
from fulcrum_router.router import Router

MIN_INTERVAL_S = 5.0
"""Time for which a page is kept, in seconds."""
MAX_AGE_S = 60.0
"""Time for which a page that somebody still reads is kept, in seconds."""
_SLICE_RECORDS = 1_000
_READ_TIMEOUT_S = 60.0
"""Time in which the page must have been read; a slower reader gets no more of it."""


def build_page(router: Router, now_s: float) -> Iterator[bytes]:
    """The page in slices; `now_s` is the Unix time.

    It names the service, its objectives and its serving instances, too, so that the page is all that a replay
    needs to know about the service.
    """
    recorder, settings = router.flight_recorder, router.settings
    serving = [instance.role for instance in router.fleet.instances if instance.serving]
    slo = settings.default_tier.slo if settings else None
    head = {
        "service": settings.service if settings else "",
        "at_s": now_s,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s} if slo else None,
        "prefill_instances": serving.count(Role.PREFILL),
        "decode_instances": serving.count(Role.DECODE),
        "outcomes": list(RequestOutcome),
        "tiers": recorder.tiers,
        "fields": RequestRecord._fields,
    }
    yield orjson.dumps(head)[:-1] + b',"requests":['
    comma = b""
    for records in recorder.read(now_s, slice_records=_SLICE_RECORDS):
        rows = orjson.dumps([tuple(record) for record in records])[1:-1]  # orjson writes no named tuples
        yield comma + rows if rows else b""
        comma = b"," if rows else comma
    yield b"]}"


class RequestsPage:
    """The page of one router; `clock` is monotonic time in seconds."""

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._router, self._clock = router, clock
        self._slices: list[bytes] = []
        """The last page, for those who ask soon after; empty: none is kept."""
        self._built_s = -math.inf
        self._readers = 0
        """Responses under way."""
        self._building = asyncio.Lock()

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Send the page; one that is younger than `MIN_INTERVAL_S`, or being read, is sent again."""
        async with self._building:
            kept_s = MAX_AGE_S if self._readers else MIN_INTERVAL_S
            if not self._slices or self._clock() >= self._built_s + kept_s:
                await self._build()
            slices = self._slices
        response = web.StreamResponse(headers={"content-type": "application/json"})
        self._readers += 1
        try:
            await response.prepare(request)
            with contextlib.suppress(ConnectionError, TimeoutError):  # the reader has left, or is too slow
                async with asyncio.timeout(_READ_TIMEOUT_S):
                    for text in slices:
                        await response.write(text)
        finally:
            self._readers -= 1
            self._forget_outdated()
        return response

    async def _build(self) -> None:
        slices = []
        for text in build_page(self._router, time.time()):
            slices.append(text)
            await asyncio.sleep(0)
        self._slices, self._built_s = slices, self._clock()
        asyncio.get_running_loop().call_later(MIN_INTERVAL_S, self._forget_outdated)

    def _forget_outdated(self) -> None:
        """Free the memory of a page that nobody else gets."""
        if not self._readers and self._clock() >= self._built_s + MIN_INTERVAL_S:
            self._slices = []
