"""Verification of KV transfers by the usage, and correct text however late the KV is fetched."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from fulcrum_router.policy import PairKey
from fulcrum_router.policy.journey import LocalPrefillReason
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    frame_event,
    route_to_servers,
    run_router,
    settings_with_short_timeouts,
)
from tests.integration.simulator.servers import (
    BLOCK_TOKENS,
    BLOCKS,
    DEADLINE_S,
    MODEL,
    Client,
    expected_text,
    fill_cache,
    launch,
    prompt_of,
    ready,
)
from tests.integration.simulator.servers import Server as Engine
from tests.waiting import run_pending_tasks, wait_until

CHUNKS = [
    frame_event(json.dumps({"choices": [{"text": word}], "usage": None}, separators=(",", ":")))
    for word in ("a ", 'a "usage":{"prompt_tokens":9} \\"choices\\":[] ', "c ")
]
DONE = frame_event("[DONE]")


def build_usage(cached: int | None, *, details: bool = True) -> dict[str, Any]:
    """The usage of a 100-token prompt."""
    details_object = {"cached_tokens": cached} if cached is not None else None
    return {
        "prompt_tokens": 100,
        "total_tokens": 103,
        "completion_tokens": 3,
        **({"prompt_tokens_details": details_object} if details else {}),
    }


def build_usage_event(usage: dict[str, Any]) -> str:
    return json.dumps({"id": "x", "choices": [], "usage": usage}, separators=(",", ":"))


def send_text_and_usage(
    usage: dict[str, Any] | None, *, usage_with_done: bool = False, pieces: int | None = None
) -> Script:
    """Respond with three words and, if requested, the usage: in its own chunk or in one with `[DONE]`."""

    async def script(response: ResponseWriter) -> None:
        body = response.request.body
        if not body.get("stream"):
            payload = {"choices": [{"text": "a b c "}], **({"usage": usage} if usage else {})}
            return await response.json(200, payload)
        await response.start_stream()
        reports_usage = usage and (body.get("stream_options") or {}).get("include_usage")
        end = DONE
        if reports_usage and usage is not None:
            event = build_usage_event(usage)
            end = frame_event(f"{event}\n\ndata: [DONE]") if usage_with_done else frame_event(event) + DONE
        framed = b"".join((*CHUNKS, end, b"0\r\n\r\n"))
        for start in range(0, len(framed), pieces or len(framed)):
            await response.raw(framed[start : start + (pieces or len(framed))])
            await run_pending_tasks()  # so that the router reads the pieces apart

    return script


async def read_raw_response(client: aiohttp.ClientSession, world: RunningRouter, **fields: Any) -> bytes:
    async with client.post(world.url(), json={**PROMPT, **fields}) as response:
        assert response.status == 200
        return await response.read()


def read_outcome_counts(
    world: RunningRouter, prefill: str = "p1", decode: str = "d1"
) -> tuple[int, int, int, str]:
    """Counts of verified, recomputed and unknown transfers, and the pair's reason."""
    pair = world.router.pairs[PairKey(prefill, decode)]
    return (*pair.counts.values(), pair.reason)  # type: ignore[return-value]


def build_events(*events: str) -> bytes:
    return b"".join(f"data: {event}\n\n".encode() for event in events)


TEXT_EVENTS = b"".join(chunk.partition(b"\r\n")[2][:-2] for chunk in CHUNKS)


@pytest.mark.parametrize(
    "usage_with_done", [False, True], ids=["usage in its own chunk", "usage and end in one chunk"]
)
@pytest.mark.parametrize("pieces", [None, 7, 61], ids=["one read", "reads of 7", "reads of 61"])
@pytest.mark.parametrize(
    ("options", "usage_shown"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
    ids=["no options", "null", "usage declined", "usage requested"],
)
async def test_a_streamed_transfer_is_verified_and_usage_is_shown_only_if_requested(
    client: aiohttp.ClientSession,
    options: dict[str, Any],
    *,
    usage_shown: bool,
    usage_with_done: bool,
    pieces: int | None,
) -> None:
    usage = build_usage(100)
    decode = FakeEngine(
        "d1", decode=send_text_and_usage(usage, usage_with_done=usage_with_done, pieces=pieces)
    )
    async with run_router(FakeEngine("p1"), decode) as world:
        got = await read_raw_response(client, world, stream=True, **options)
        end = build_events(build_usage_event(usage), "[DONE]") if usage_shown else build_events("[DONE]")
        assert got == TEXT_EVENTS + end
        assert read_outcome_counts(world) == (1, 0, 0, "Verified")
        assert world["d1"].decodes[0]["stream_options"] == {"include_usage": True}
        assert world.router.counters.output_tokens == len(CHUNKS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (build_usage(100), (1, 0, 0)),
        (build_usage(96), (1, 0, 0)),
        (build_usage(95), (0, 1, 0)),
        (build_usage(0), (0, 1, 0)),
        (build_usage(None), (0, 0, 1)),
        (build_usage(None, details=False), (0, 0, 1)),
        (None, (0, 0, 1)),
    ],
    ids=["all", "whole blocks", "less", "none", "details null", "no details", "no usage"],
)
async def test_the_transfer_outcome_follows_the_cached_token_count(
    client: aiohttp.ClientSession, *, stream: bool, usage: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=send_text_and_usage(usage))) as world:
        await read_raw_response(client, world, stream=stream)
        assert read_outcome_counts(world)[:3] == expected


async def test_missing_cached_tokens_mean_zero_once_the_engine_has_reported_some(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(
        FakeEngine("p1"), FakeEngine("d1", decode=send_text_and_usage(build_usage(100)))
    ) as world:
        await read_raw_response(client, world)
        world["d1"].decode = send_text_and_usage(build_usage(None))
        await read_raw_response(client, world)
        assert read_outcome_counts(world)[:3] == (1, 1, 0)


async def test_a_prompt_of_one_token_is_not_counted(client: aiohttp.ClientSession) -> None:
    """The last token of a prompt is always computed, so nothing is fetched."""
    usage = {**build_usage(0), "prompt_tokens": 1}
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=send_text_and_usage(usage))) as world:
        await read_raw_response(client, world)
        assert read_outcome_counts(world) == (0, 0, 0, "NoTrafficYet")


async def test_usage_without_a_kv_transfer_counts_tokens_only(client: aiohttp.ClientSession) -> None:
    usage = {**build_usage(0), "completion_tokens": 2}
    async with run_router(FakeEngine("d1", decode=send_text_and_usage(usage))) as world:
        got = await read_raw_response(client, world, stream=True)
        assert got == TEXT_EVENTS + build_events("[DONE]"), "the client did not request the usage"
        assert world["d1"].decodes[0]["stream_options"] == {"include_usage": True}
        assert (world.router.counters.output_tokens, dict(world.router.pairs.pairs)) == (2, {})


async def test_what_decode_caches_of_remote_media_is_read_by_no_other_request(
    client: aiohttp.ClientSession,
) -> None:
    """A server may send each engine another image: the KV would be cached under the hash of the wrong one."""
    part = {"type": "image_url", "image_url": {"url": "https://example.com/logo.png"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}], "max_tokens": 3}
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        for _ in range(2):
            async with client.post(world.url("/v1/chat/completions"), json=body) as response:
                assert response.status == 200
        salts = [decode.get("cache_salt") for decode in world["d1"].decodes]
        assert (None in salts, len(set(salts))) == (False, 2)
        assert all("kv_transfer_params" in decode for decode in world["d1"].decodes)
        assert all("cache_salt" not in prefill for prefill in world["p1"].prefills)


# --- the lease ---------------------------------------------------------------------------------------------


def build_expired_metric(count: int) -> bytes:
    return b'vllm:nixl_num_kv_expired_reqs_total{engine="0"} %d.0\n' % count


def has_late_transfer(world: RunningRouter) -> bool:
    """Whether a transfer to d1 is so old that its KV may have been fetched too late."""
    return bool(world.router.fleet["d1"].incoming_transfers.find_late(time.monotonic()))


def delay_kv_transfer(after: asyncio.Event, then: Script) -> Script:
    """A decode script that delays transfers until `after` is set; recomputed prompts are not delayed."""

    async def script(response: ResponseWriter) -> None:
        if "kv_transfer_params" in response.request.body:
            await after.wait()
        await then(response)

    return script


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("before", "after", "kv_valid"),
    [
        (build_expired_metric(2), build_expired_metric(2), True),
        (build_expired_metric(2), build_expired_metric(3), False),
        (build_expired_metric(2), b"", False),
        (b"", b"", False),
    ],
    ids=["nothing expired", "a transfer expired", "no longer reported", "never reported"],
)
async def test_a_response_after_the_lease_is_forwarded_only_if_no_transfer_expired(
    client: aiohttp.ClientSession, *, stream: bool, before: bytes, after: bytes, kv_valid: bool
) -> None:
    go = asyncio.Event()
    prefill = FakeEngine("p1", metrics=before)
    decode = FakeEngine("d1", decode=delay_kv_transfer(go, send_text_and_usage(build_usage(100))))
    settings = settings_with_short_timeouts(first_byte=DEADLINE_S)
    async with run_router(prefill, decode, settings=settings) as world:
        world.router.fleet["p1"].kv_lease_s = 1.5
        if before:
            await wait_until(lambda: world.router.fleet["p1"].expired_transfers == 2, "its metrics are read")
        request_task = asyncio.ensure_future(read_raw_response(client, world, stream=stream))
        await wait_until(lambda: bool(world["d1"].decodes), "the decode leg waits")
        prefill.metrics = after
        await wait_until(lambda: has_late_transfer(world), "the transfer is late")
        go.set()
        got = await request_task
        assert got.endswith(build_events("[DONE]")) if stream else b"a b c" in got
        with_kv_transfer = ["kv_transfer_params" in body for body in world["d1"].decodes]
        local = dict(world.router.counters.local_prefills)
        assert (with_kv_transfer, local) == (
            ([True], {}) if kv_valid else ([True, False], {"lease_expired": 1})
        )
        assert not world.router.fleet["d1"].health.failures
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kv_valid", [True, False], ids=["nothing expired", "a transfer expired"])
async def test_responses_during_an_overdue_transfer_are_forwarded_only_if_no_transfer_expired(
    client: aiohttp.ClientSession, *, stream: bool, kv_valid: bool
) -> None:
    """Wrong KV may be in the prefix cache of the decode instance before the late response arrives.

    The third request is sent before that is detected, and its response comes afterwards.
    """
    go = {"first": asyncio.Event(), "third": asyncio.Event()}
    respond = send_text_and_usage(build_usage(100))

    async def script(response: ResponseWriter) -> None:
        body = response.request.body
        if "kv_transfer_params" in body and body["prompt"] in go:
            await go[body["prompt"]].wait()
        await respond(response)

    prefill = FakeEngine("p1", metrics=build_expired_metric(2))
    settings = settings_with_short_timeouts(first_byte=DEADLINE_S)
    async with run_router(prefill, FakeEngine("d1", decode=script), settings=settings) as world:
        decode = world.router.fleet["d1"]
        world.router.fleet["p1"].kv_lease_s = 1.5
        await wait_until(lambda: world.router.fleet["p1"].expired_transfers == 2, "its metrics are read")
        first = asyncio.ensure_future(read_raw_response(client, world, prompt="first"))
        await wait_until(lambda: len(world["d1"].decodes) == 1, "the decode leg waits")
        await wait_until(lambda: has_late_transfer(world), "the transfer is late")
        third = asyncio.ensure_future(read_raw_response(client, world, prompt="third"))
        await wait_until(lambda: len(world["d1"].decodes) == 2, "a second decode leg waits")
        prefill.metrics = build_expired_metric(2 if kv_valid else 3)
        got = await read_raw_response(client, world, stream=stream)
        assert got.endswith(build_events("[DONE]")) if stream else b"a b c" in got
        go["third"].set()
        assert b"a b c" in await third
        go["first"].set()
        assert b"a b c" in await first
        sent = [
            (body["prompt"], "kv_transfer_params" in body, body.get("cache_salt"))
            for body in world["d1"].decodes
        ]
        with_kv_transfer = [("first", True, None), ("third", True, None), (PROMPT["prompt"], True, None)]
        recomputed = [(name, False) for name in (PROMPT["prompt"], "third", "first")]
        assert (sent[:3], [request[:2] for request in sent[3:]]) == (
            with_kv_transfer,
            [] if kv_valid else recomputed,
        )
        assert len({request[2] for request in sent}) == (
            1 if kv_valid else 4
        )  # recomputed ones have a salt each
        assert dict(world.router.counters.local_prefills) == ({} if kv_valid else {"lease_expired": 3})
        assert (world.router.counters.cache_salt_rotations, decode.health.failures) == (
            0 if kv_valid else 1,
            0,
        )
        assert world.ledgers_are_empty()


async def test_a_recomputed_response_needs_no_lease_check(
    client: aiohttp.ClientSession,
) -> None:
    async def script(response: ResponseWriter) -> None:
        decode = world.router.fleet["d1"]
        # As the failure of another leg on the same instance does.
        world.router.rotate_cache_salt(decode, decode.cache_salt)
        await send_text_and_usage(build_usage(100))(response)

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=script)) as world:
        assert b"a b c" in await read_raw_response(client, world)
        salts = [body.get("cache_salt", "") for body in world["d1"].decodes]
        assert (len(set(salts)), dict(world.router.counters.local_prefills)) == (2, {"lease_expired": 1})
        assert not world.router.fleet["d1"].health.failures
        assert world.ledgers_are_empty()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engine servers with few blocks and a lease of a second."""
    profile = load_profile("laptop").model_dump() | {
        **{"name": "quick", "t0": 0.002, "d1": 1e-5, "b": 1.25e-4, "weight_bytes": 100_000_000},
        **{
            "block_size": BLOCK_TOKENS,
            "kv_capacity_tokens": BLOCK_TOKENS * BLOCKS,
            "handshake_s": 0.01,
            "startup_s": 0.0,
        },
    }
    path: Path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(profile))
    made = [ready(process) for process in [launch(path, "--lease-s", "1.0") for _ in range(2)]]
    yield made[0], made[1]
    for engine in made:
        engine.kill()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("guarded", [True, False], ids=["lease checked", "lease not checked"])
async def test_a_decode_leg_delayed_past_the_lease_never_returns_another_prompts_text(
    client: aiohttp.ClientSession, engines: tuple[Engine, Engine], *, stream: bool, guarded: bool
) -> None:
    """The engine returns 200 and another prompt's text; only the lease check detects it."""
    p, d = engines
    calls = Client(client)
    async with route_to_servers({"p1": p, "d1": d}, first_byte=10.0, prefill=10.0) as (router, url):
        router.fleet["p1"].kv_lease_s = 1.0 if guarded else 3600.0
        prompt = prompt_of(f"held back {stream} {guarded}")
        await wait_until(lambda: router.fleet["p1"].expired_transfers is not None, "its metrics are read")
        expired = await count_expired(calls, p)
        await calls.inject_fault(d, "hang")
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": stream}
        request_task = asyncio.ensure_future(client.post(url, json=body))
        ledger = router.fleet["d1"].ledger
        await wait_until(lambda: ledger.decode_legs == 1, "the decode leg waits")

        async def has_expired() -> bool:
            return await count_expired(calls, p) > expired

        await wait_until(has_expired, "the lease has expired")
        await fill_cache(calls, p, f"other {stream} {guarded}")
        await calls.inject_fault(d, "none")
        async with await request_task as response:
            content = await response.read()
        text = _text(content, stream=stream)
        assert (response.status, text == expected_text(prompt, 8)) == (200, guarded)
        assert router.counters.local_prefills[LocalPrefillReason.LEASE_EXPIRED] == guarded


async def count_expired(calls: Client, engine: Engine) -> float:
    return await calls.metric(engine, "vllm:nixl_num_kv_expired_reqs_total")


def _text(content: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(content)["choices"][0]["text"])
    events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)
