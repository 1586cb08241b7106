"""Requests that would miss their objectives are refused before an engine works for them."""

import asyncio
from dataclasses import replace

import aiohttp

from fulcrum_core.values import AdmissionMode
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.policy.admission import TierAdmission
from fulcrum_router.policy.latency_parts import LatencyPart
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    RunningRouter,
    run_router,
    settings_with_short_timeouts,
)
from tests.integration.router.test_waiting_room import predict_long_prefills, prefill_when
from tests.waiting import wait_until

BASE = settings_with_short_timeouts(prefill=20.0)
SETTINGS = replace(
    BASE,
    admission=AdmissionMode.ENFORCE,
    tiers={"premium": replace(BASE.tiers["premium"], admission=TierAdmission(sheddable=False))},
)


async def send(
    client: aiohttp.ClientSession, world: RunningRouter, tier: str = "default"
) -> tuple[int, dict[str, str], str]:
    async with client.post(world.url(), json=PROMPT, headers={"x-customer-tier": tier}) as response:
        return response.status, dict(response.headers), await response.text()


async def test_a_request_that_would_be_late_gets_a_429_that_says_when_to_come_back(
    client: aiohttp.ClientSession,
) -> None:
    free = asyncio.Event()
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        first = asyncio.ensure_future(send(client, world))
        await wait_until(lambda: bool(world["p1"].prefills), "the first request is sent")
        status, headers, text = await send(client, world)
        assert (status, headers["x-fulcrum-refused"], headers["Retry-After"]) == (429, "prefill_full", "60")
        assert '"type":"prefill_full"' in text
        tier = world.router.counters.get_tier("default")
        assert (tier.offered, tier.requests_by_outcome[RequestOutcome.REFUSED]) == (2, 1)
        assert tier.misses_by_part[LatencyPart.ADMISSION] == 1
        free.set()
        assert (await first)[0] == 200
        assert world.ledgers_are_empty()


async def test_a_tier_that_is_not_sheddable_is_served_however_late(client: aiohttp.ClientSession) -> None:
    free = asyncio.Event()
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=SETTINGS
    ) as world:
        predict_long_prefills(world)
        tasks = [asyncio.ensure_future(send(client, world, "premium")) for _ in range(2)]
        await wait_until(lambda: len(world["p1"].prefills) == 2, "both requests are sent")
        free.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]
