"""What follows from cached tokens that an engine reports: where the next requests go, and what is learned."""

import time
from dataclasses import replace

import aiohttp
import pytest

from fulcrum_core.latency import PrefillModel
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    ResponseWriter,
    make_kv_transfer_params,
    run_router,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until_time

PROMPT = "The same long beginning. " * 400
TOKENS, CACHED = 2_000, 1_900
USUAL, SLOW = PrefillModel(c0=0.0, c1=2e-5, c2=0.0), PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)


async def report_cached_tokens(response: ResponseWriter) -> None:
    """Script of a prefill leg that reports cached tokens."""
    details = {"prompt_tokens_details": {"cached_tokens": CACHED}}
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 1, "total_tokens": TOKENS + 1, **details}
    params = make_kv_transfer_params(response.engine)
    await response.json(200, {"choices": [{}], "kv_transfer_params": params, "usage": usage})


async def test_cached_tokens_of_a_prefill_response_do_not_count_as_computed(
    client: aiohttp.ClientSession,
) -> None:
    """The duration of one response is compared with two predictions: for the whole prompt, by the metric of
    the TTFT, and for what was computed, by the drift of the predictor that learns."""

    async def compute_and_report(response: ResponseWriter) -> None:
        await wait_until_time(time.monotonic() + 0.05, "pauses of the machine are short compared with it")
        await report_cached_tokens(response)

    async with run_router(FakeEngine("p1", prefill=compute_and_report), FakeEngine("d1")) as world:
        instance = world.router.fleet["p1"]
        instance.start_from(PrefillModel(c0=0.0, c1=1e-9, c2=0.0), None)
        async with client.post(world.url(), json={"prompt": [7] * TOKENS, "max_tokens": 2}) as response:
            assert (response.status, response.headers["x-fulcrum-prefill"]) == (200, "p1")
        whole, [computed, _] = world.router.ttft_errors.prefill_leg.value, instance.drift
        assert whole is not None
        assert computed is not None
        share = computed / (1.0 + whole)
        assert share == pytest.approx((TOKENS - CACHED) / TOKENS, rel=0.5)


async def test_a_prompt_goes_where_its_beginning_is_until_the_salt_is_rotated(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine(name, prefill=report_cached_tokens) for name in ("p1", "p2")]
    settings = replace(settings_with_short_timeouts(), prefix_aware=True)
    async with run_router(*engines, FakeEngine("d1"), settings=settings) as world:
        fleet, index = world.router.fleet, world.router.journeys.prefix_index

        async def find_instance(prompt: str, *, first: PrefillModel = USUAL) -> str:
            fleet["p1"].prefill_model, fleet["p2"].prefill_model = first, USUAL  # not what they have learned
            body = {"model": "m", "prompt": prompt, "max_tokens": 2}
            async with client.post(world.url(), json=body) as response:
                assert response.status == 200
                return response.headers["x-fulcrum-prefill"]

        chosen = [await find_instance(PROMPT, first=SLOW)]
        chosen += [await find_instance("Another one. " * 800), await find_instance(PROMPT + "And more.")]
        world.router.rotate_cache_salt(fleet["p2"], fleet["p2"].cache_salt)
        chosen.append(await find_instance(PROMPT))
        assert chosen == ["p2", "p1", "p2", "p1"]
        assert index is not None
        assert index.predicted_tokens > 0.9 * CACHED
