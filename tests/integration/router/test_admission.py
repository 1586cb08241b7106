"""Requests that would miss their objectives are refused before an engine works for them.

A router in the test's process, over fake engines; the decisions alone are tested in
`unit/router/policy/tiers`.
"""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from fulcrum_core.router_state import TenantState
from fulcrum_core.values import AdmissionMode, OverloadAction
from fulcrum_router.control.state_port import build_router_state
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.policy.predictions.latency_parts import LatencyPart
from fulcrum_router.policy.tiers.admission import TierAdmission
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
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
        assert (status, headers["x-fulcrum-refused"], headers["Retry-After"]) == (429, "prefill_full", "54")
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
        room = world.router.journeys.waiting_room
        await wait_until(
            lambda: len(world["p1"].prefills) == len(room) == 1, "one request is sent, and one waits"
        )
        free.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_degraded_request_asks_the_engine_for_less_and_the_client_is_told(
    client: aiohttp.ClientSession,
) -> None:
    degrade = TierAdmission(action=OverloadAction.DEGRADE, max_output_tokens=7)
    settings = replace(SETTINGS, tiers={}, default_tier=replace(BASE.default_tier, admission=degrade))
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings) as world:
        instance = world.router.fleet["d1"]
        limit = instance.decode_model.max_tokens(BASE.default_tier.slo.tpot_s)
        busy = instance.ledger.add_decode(tokens=int(0.9 * limit))
        body = {**PROMPT, "max_tokens": 500, "min_tokens": 20}
        async with client.post(world.url(), json=body) as response:
            assert (response.status, response.headers["x-fulcrum-degraded"]) == (200, "max_tokens=7")
        sent = world["d1"].decodes[0]
        assert (sent["max_tokens"], sent["min_tokens"], sent["prompt"]) == (7, 7, PROMPT["prompt"])
        busy.release()
        async with client.post(world.url(), json=body) as response:
            assert "x-fulcrum-degraded" not in response.headers
        assert world["d1"].decodes[1]["max_tokens"] == 500


USAGE = '{"prompt_tokens":4,"total_tokens":11,"completion_tokens":7}'


async def respond_with_usage(response: ResponseWriter) -> None:
    """Script of a decode leg whose response has a usage, as vLLM writes it."""
    if not response.request.body.get("stream"):
        return await response.json(200, {"choices": [{"text": '"usage":{'}], "usage": json.loads(USAGE)})
    await response.start_stream()
    await response.event('{"choices":[{"text":"a "}]}')
    if (response.request.body.get("stream_options") or {}).get("include_usage"):
        await response.event('{"choices":[],"usage":' + USAGE + "}")
    await response.event("[DONE]")
    await response.raw(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole"),
        pytest.param({"stream": True, "stream_options": {"include_usage": True}}, id="streamed"),
    ],
)
async def test_the_usage_of_a_degraded_answer_says_so(
    client: aiohttp.ClientSession, changes: dict[str, Any]
) -> None:
    degrade = TierAdmission(action=OverloadAction.DEGRADE, max_output_tokens=7)
    settings = replace(SETTINGS, tiers={}, default_tier=replace(BASE.default_tier, admission=degrade))
    engine = FakeEngine("d1", decode=respond_with_usage)
    async with run_router(FakeEngine("p1"), engine, settings=settings) as world:
        instance = world.router.fleet["d1"]
        limit = instance.decode_model.max_tokens(BASE.default_tier.slo.tpot_s)
        busy = instance.ledger.add_decode(tokens=int(0.9 * limit))
        usages = []
        for _ in range(2):
            async with client.post(world.url(), json={**PROMPT, "max_tokens": 500, **changes}) as response:
                text = await response.text()
            last = text.split("data: ")[-2] if changes else text
            usages.append(json.loads(last)["usage"])
            busy.release()
        assert usages == [json.loads(USAGE) | {"degraded_max_tokens": 7}, json.loads(USAGE)]


async def test_a_request_that_waits_in_vain_gets_a_429(client: aiohttp.ClientSession) -> None:
    free = asyncio.Event()
    patient = TierAdmission(action=OverloadAction.QUEUE, max_queue_s=70.0)
    settings = replace(
        SETTINGS, prefill_ahead_s=0.5, default_tier=replace(BASE.default_tier, admission=patient)
    )
    async with run_router(
        FakeEngine("p1", prefill=prefill_when(free)), FakeEngine("d1"), settings=settings
    ) as world:
        predict_long_prefills(world)
        first = asyncio.ensure_future(send(client, world, "premium"))
        await wait_until(lambda: bool(world["p1"].prefills), "the first request is sent")
        waiting = asyncio.ensure_future(send(client, world))
        room = world.router.journeys.waiting_room
        await wait_until(lambda: len(room) == 1, "the second request waits")
        room.tick(time.monotonic() + 71.0)
        status, headers, _ = await waiting
        assert (status, headers["x-fulcrum-refused"]) == (429, "waited_too_long")
        free.set()
        assert (await first)[0] == 200
        assert world.ledgers_are_empty()


async def test_a_tenant_over_its_rate_limit_gets_a_429_that_is_no_miss(client: aiohttp.ClientSession) -> None:
    settings = replace(
        SETTINGS,
        admission=AdmissionMode.OFF,
        default_tier=replace(BASE.default_tier, tokens_per_minute=1_000),
    )
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings) as world:
        body = {**PROMPT, "prompt": "word " * 800}
        for tenant, expected in (("acme", 200), ("acme", 429), ("globex", 200)):
            async with client.post(world.url(), json=body, headers={"x-tenant-id": tenant}) as response:
                assert response.status == expected
                if expected == 429:
                    assert response.headers["x-fulcrum-refused"] == "rate_limit"
                    assert 1 <= int(response.headers["Retry-After"]) <= 120
        state = build_router_state(world.router, now_s=0.0)
        assert state.tenants == (
            TenantState(name="acme", met=1, missed=0, refused=0, limited=1),
            TenantState(name="globex", met=1, missed=0, refused=0, limited=0),
        )
        assert state.tiers[0].wait_mean_s is not None
        outcomes = world.router.counters.get_tier("default").requests_by_outcome
        assert (outcomes[RequestOutcome.OK], outcomes[RequestOutcome.LIMITED]) == (2, 1)
        assert not any(world.router.counters.get_tier("default").misses_by_part.values())
