"""Which requests meet the SLO by the router's counters: whole responses, streams, clients that disconnect.

An objective of 0 s is always missed, one of 60 s never.
"""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from fulcrum_core.values import Slo
from fulcrum_router.counters import RequestOutcome, TierCounters
from fulcrum_router.policy.demand import DEFAULT_OUTPUT_TOKENS
from fulcrum_router.settings import ServiceSettings, Tier
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    build_post,
    never_respond,
    run_router,
    settings_with_short_timeouts,
    stream_tokens_then,
)
from tests.waiting import wait_until

NEVER_S, ALWAYS_S = 0.0, 60.0


def settings_with_slo(ttft_s: float, tpot_s: float) -> ServiceSettings:
    tier = Tier("default", Slo(ttft_s=ttft_s, tpot_s=tpot_s))
    return replace(settings_with_short_timeouts(), default_tier=tier)


def count(world: RunningRouter) -> TierCounters:
    return world.router.counters.get_tier("default")


def find_outcomes(world: RunningRouter) -> dict[str, int]:
    return {outcome.value: n for outcome, n in count(world).requests_by_outcome.items() if n}


def respond_whole(completion_tokens: int | None) -> Script:
    async def script(response: ResponseWriter) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
        await response.json(
            200, {"choices": [{"text": "a"}], **({} if completion_tokens is None else {"usage": usage})}
        )

    return script


def stream_events(events: int, *, tokens: int | None) -> Script:
    """Stream `events` events; then the usage with `tokens` output tokens if it is requested."""

    async def script(response: ResponseWriter) -> None:
        await stream_tokens_then(events, _do_nothing)(response)
        if tokens is not None and (response.request.body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": tokens}
            await response.event(json.dumps({"choices": [], "usage": usage}, separators=(",", ":")))
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    return script


async def _do_nothing(_: ResponseWriter) -> None:
    return


@pytest.mark.parametrize(
    ("tokens", "fields", "met"),
    [
        pytest.param(2, {}, 1, id="two tokens have the time of one TPOT more"),
        pytest.param(1, {}, 0, id="one token has the TTFT alone"),
        pytest.param(None, {}, 0, id="without a usage one token is assumed"),
        pytest.param(2, {"n": 2}, 0, id="two choices of one token have the TTFT alone"),
        pytest.param(4, {"prompt": ["a", "b"]}, 1, id="two prompts of two tokens"),
    ],
)
async def test_a_whole_response_meets_its_slo_within_the_ttft_and_the_tpot_of_its_further_tokens(
    client: aiohttp.ClientSession, tokens: int | None, fields: dict[str, Any], met: int
) -> None:
    settings = settings_with_slo(NEVER_S, ALWAYS_S)
    engine = FakeEngine("d1", decode=respond_whole(tokens))
    async with run_router(FakeEngine("p1"), engine, settings=settings) as world:
        async with client.post(world.url(), json={**PROMPT, **fields}) as response:
            assert response.status == 200
        counters = count(world)
        assert (counters.slo_met, find_outcomes(world)) == (met, {"ok": 1})
        assert (sum(counters.response.counts), sum(counters.ttft.counts)) == (1, 0), "it has no TTFT"
        assert sum(counters.seconds_by_part) == pytest.approx(counters.response.sum)
        assert sum(counters.misses_by_part.values()) == 1 - met
        assert world.router.counters.output_tokens == (tokens or 1)


@pytest.mark.parametrize(
    ("path", "tokens", "counted"),
    [
        pytest.param("/v1/completions", 160, 160, id="several tokens in an event"),
        pytest.param("/v1/completions", None, 10, id="no usage: a token in each event"),
        pytest.param("/v1/chat/completions", None, 9, id="no usage in a chat: the first event is the role"),
    ],
)
async def test_the_tokens_of_a_stream_are_those_of_its_usage(
    client: aiohttp.ClientSession, path: str, tokens: int | None, counted: int
) -> None:
    engine = FakeEngine("d1", decode=stream_events(10, tokens=tokens))
    async with run_router(FakeEngine("p1"), engine, settings=settings_with_slo(60.0, 60.0)) as world:
        began_s = time.monotonic()
        async with client.post(
            world.url(path), json={**PROMPT, "max_tokens": 200, "stream": True}
        ) as response:
            received = await response.read()
        took_s = time.monotonic() - began_s
        assert (b'"usage"' in received, world.router.counters.output_tokens) == (False, counted)
        counters = count(world)
        assert 0 < counters.tpot.sum * (counted - 1) < took_s
        in_parts = counters.ttft.sum + counters.tpot.sum * (counted - 1)
        assert sum(counters.seconds_by_part[:-1]) == pytest.approx(in_parts), "the last part is a slow client"
        assert (sum(counters.tpot.counts), sum(counters.ttft.counts), counters.slo_met) == (1, 1, 1)


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        pytest.param(respond_whole(10**7), False, id="whole"),
        pytest.param(stream_events(10, tokens=10**7), True, id="stream"),
    ],
)
async def test_an_engine_that_claims_more_tokens_than_were_asked_for_meets_no_slo_by_that(
    client: aiohttp.ClientSession, script: Script, stream: bool
) -> None:
    settings = settings_with_slo(NEVER_S if not stream else ALWAYS_S, 1e-6)
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=script), settings=settings) as world:
        body = {**PROMPT, "max_tokens": 20, "stream": stream}
        async with client.post(world.url(), json=body) as response:
            await response.read()
        assert (world.router.counters.output_tokens, count(world).slo_met) == (20, 0)


@pytest.mark.parametrize(
    ("script", "fields", "learned"),
    [
        pytest.param(respond_whole(11), {}, 11, id="whole"),
        pytest.param(respond_whole(22), {"n": 2}, 11, id="two choices"),
        pytest.param(respond_whole(None), {}, DEFAULT_OUTPUT_TOKENS, id="whole, without a usage"),
        pytest.param(stream_events(10, tokens=160), {"stream": True}, 160, id="stream"),
    ],
)
async def test_output_lengths_are_learned_from_the_usage(
    client: aiohttp.ClientSession, script: Script, fields: dict[str, Any], learned: float
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=script)) as world:
        async with client.post(world.url(), json=PROMPT | {"max_tokens": 200} | fields) as response:
            await response.read()
        await wait_until(world.ledgers_are_empty, "the request has ended")
        assert world.router.journeys.demand.lengths.predict("another", 1) == learned


async def send_error_event(response: ResponseWriter) -> None:
    await response.event(json.dumps({"error": {"message": "no", "code": 400}}))
    await response.event("[DONE]")
    await response.raw(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("tokens", "outcome"),
    [
        pytest.param(0, "invalid", id="before the first token the request is rejected"),
        pytest.param(2, "broken", id="after it the response is broken"),
    ],
)
async def test_an_error_event_with_status_400(
    client: aiohttp.ClientSession, tokens: int, outcome: str
) -> None:
    engine = FakeEngine("d1", decode=stream_tokens_then(tokens, send_error_event))
    async with run_router(FakeEngine("p1"), engine) as world:
        async with client.post(world.url(), json=PROMPT | {"stream": True}) as response:
            assert b'"code": 400' in await response.read()
        await wait_until(world.ledgers_are_empty, "the request has ended")
        assert find_outcomes(world) == {outcome: 1}


@pytest.mark.parametrize(
    ("slo", "fields", "decode", "outcome"),
    [
        pytest.param(
            (ALWAYS_S, ALWAYS_S),
            {"stream": True},
            never_respond,
            "cancelled",
            id="before the TTFT has passed",
        ),
        pytest.param(
            (NEVER_S, ALWAYS_S), {"stream": True}, never_respond, "left_late", id="after the TTFT has passed"
        ),
        pytest.param(
            (ALWAYS_S, NEVER_S),
            {"stream": True},
            stream_tokens_then(2, never_respond),
            "cancelled",
            id="during a stream that began in time",
        ),
        pytest.param(
            (NEVER_S, ALWAYS_S),
            {"stream": True},
            stream_tokens_then(2, never_respond),
            "left_late",
            id="during a stream that began late",
        ),
        pytest.param(
            (NEVER_S, ALWAYS_S), {"max_tokens": 2}, never_respond, "cancelled", id="a whole response in time"
        ),
        pytest.param(
            (NEVER_S, ALWAYS_S), {"max_tokens": 1}, never_respond, "left_late", id="a whole response too late"
        ),
    ],
)
async def test_a_client_that_disconnects_counts_as_a_miss_only_after_its_slo_was_missed(
    slo: tuple[float, float], fields: dict[str, Any], decode: Script, outcome: str
) -> None:
    async with run_router(
        FakeEngine("p1"), FakeEngine("d1", decode=decode), settings=settings_with_slo(*slo)
    ) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_post(json.dumps({**PROMPT, **fields}).encode()))
        if decode is never_respond:
            await wait_until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        else:
            await reader.readuntil(b"word ")
        writer.transport.abort()
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")
        assert (find_outcomes(world), count(world).slo_met) == ({outcome: 1}, 0)


async def test_each_offered_request_ends_in_one_outcome_and_no_count_ever_decreases(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        offered: list[int] = []
        bodies: tuple[object, ...] = (PROMPT, {**PROMPT, "stream": True}, [])
        for body in bodies:
            async with client.post(world.url(), json=body):
                offered.append(count(world).offered)
        world.router.fleet.keep_only(())
        async with client.post(world.url(), json=PROMPT) as response:
            assert response.status == 503
        offered.append(count(world).offered)
        assert (offered, find_outcomes(world)) == ([1, 2, 3, 4], {"ok": 2, "invalid": 1, "failed": 1})
        assert sum(count(world).requests_by_outcome[o] for o in RequestOutcome) == 4
