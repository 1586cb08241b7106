"""Requests that one engine answers alone: where they go, what is forwarded, what is retried and counted."""

import asyncio
import json
import time
from collections import Counter

import aiohttp
import pytest

from fulcrum_router.data_path.passed_paths import GENERATION_PATHS, PASS_THROUGH_PATHS
from fulcrum_router.http1.framing import frame_chunk
from tests.integration.router.fake_engines import (
    FakeEngine,
    ResponseWriter,
    Script,
    build_post,
    close_connection,
    frame_event,
    never_respond,
    respond_with_status,
    run_router,
    send_raw,
    stream_tokens_then,
)
from tests.waiting import wait_until

BODY = {"model": "m", "input": "hello"}


async def echo(response: ResponseWriter) -> None:
    """Script that returns the path and body of the request."""
    await response.json(200, {"path": response.request.path, "body": response.request.body})


def respond(script: Script, *names: str) -> list[FakeEngine]:
    return [FakeEngine(name, prefill=script, decode=script) for name in names]


@pytest.mark.parametrize("path", sorted(path.decode() for path in PASS_THROUGH_PATHS))
async def test_a_request_is_answered_by_one_engine(client: aiohttp.ClientSession, path: str) -> None:
    async with run_router(*respond(echo, "p1", "d1")) as world:
        async with client.post(world.url(path), json=BODY) as response:
            assert (response.status, await response.json()) == (200, {"path": path, "body": BODY})
        assert len(world["p1"].requests) + len(world["d1"].requests) == 1
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
        assert world.router.counters.passed_through == {(path, "ok"): 1}
        assert world.server.clients.memory.held_bytes == 0


async def send_own_request_id(response: ResponseWriter) -> None:
    """Script of an engine that returns a request id, as vLLM does with --enable-request-id-headers."""
    await response.raw(b"HTTP/1.1 200 OK\r\nX-Request-Id: of-the-engine\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.parametrize("path", sorted(path.decode() for path in PASS_THROUGH_PATHS))
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(echo, id="whole"),
        pytest.param(send_own_request_id, id="whole, with an id of the engine"),
        pytest.param(stream_tokens_then(2, close_connection), id="broken stream"),
        pytest.param(respond_with_status(404), id="refused by the engine"),
        pytest.param(respond_with_status(500), id="failed"),
    ],
)
async def test_each_response_has_the_request_id_once(path: str, script: Script) -> None:
    request = build_post(json.dumps(BODY).encode(), "connection: close", "x-request-id: mine-1", path=path)
    async with run_router(*respond(script, "d1")) as world:
        received = (await send_raw(world.port, request)).lower()
        assert world["d1"].requests[0].headers["x-request-id"] == "mine-1"
    assert (received.count(b"x-request-id:"), b"\r\nx-request-id: mine-1\r\n" in received) == (1, True)


async def test_requests_are_spread_over_the_instances(client: aiohttp.ClientSession) -> None:
    go_on = asyncio.Event()

    async def wait_and_echo(response: ResponseWriter) -> None:
        await go_on.wait()
        await echo(response)

    async with run_router(*respond(wait_and_echo, "p1", "p2", "d1", "d2")) as world:
        posts = [asyncio.ensure_future(client.post(world.url("/v1/embeddings"), json=BODY)) for _ in range(8)]
        await wait_until(lambda: sum(len(e.requests) for e in world.engines.values()) == 8, "all were sent")
        assert Counter(len(engine.requests) for engine in world.engines.values()) == {2: 4}
        go_on.set()
        for post in posts:
            (await post).release()


@pytest.mark.parametrize("path", sorted(path.decode() for path in GENERATION_PATHS))
async def test_generation_avoids_prefill_instances(client: aiohttp.ClientSession, path: str) -> None:
    async with run_router(*respond(echo, "p1", "p2", "d1")) as world:
        for _ in range(3):
            (await client.post(world.url(path), json=BODY)).release()
        assert [len(engine.requests) for engine in world.engines.values()] == [0, 0, 3]


async def test_a_stream_is_forwarded_event_by_event(client: aiohttp.ClientSession) -> None:
    go_on = asyncio.Event()

    async def end(response: ResponseWriter) -> None:
        await go_on.wait()
        await response.raw(b"0\r\n\r\n")

    async with (
        run_router(*respond(stream_tokens_then(2, end), "d1")) as world,
        client.post(world.url("/v1/responses"), json={**BODY, "stream": True}) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        assert b"word" in first
        go_on.set()
        assert (first + await response.read()).count(b"word") == 2


async def test_the_output_of_a_stream_counts_as_tokens_of_its_decode_instance(
    client: aiohttp.ClientSession,
) -> None:
    body = {"instructions": "x" * 40, "input": [{"content": [{"text": "y" * 40}]}], "stream": True}
    async with run_router(*respond(stream_tokens_then(2, never_respond), "d1")) as world:
        async with client.post(world.url("/v1/responses"), json=body) as response:
            await response.content.readuntil(b"\n\n")
            ledger = world.router.fleet["d1"].ledger
            await wait_until(lambda: ledger.decode_tokens == 80 / 4 + 2, "prompt and output are counted")
            assert ledger.local_prefills == 0
        await wait_until(world.ledgers_are_empty, "nothing is in flight")


async def test_a_client_cannot_set_reserved_fields(client: aiohttp.ClientSession) -> None:
    evil = {"remote_host": "evil"}
    sent = {
        **BODY,
        "kv_transfer_params": evil,
        "vllm_xargs": {"kv_transfer_params": "x", "mine": 1},
        "priority": 1,
    }
    async with (
        run_router(*respond(echo, "d1")) as world,
        client.post(world.url("/v1/messages"), json=sent) as response,
    ):
        assert (await response.json())["body"] == {**BODY, "vllm_xargs": {"mine": 1}}


@pytest.mark.parametrize(
    ("script", "status", "tried"),
    [
        pytest.param(respond_with_status(500), 502, 2, id="an error is retried once"),
        pytest.param(respond_with_status(503), 503, 2, id="overload is retried once, and said"),
        pytest.param(close_connection, 502, 2, id="a lost connection is retried once"),
        pytest.param(respond_with_status(307), 502, 2, id="a redirect is retried once"),
        pytest.param(respond_with_status(404), 404, 1, id="a refusal is the client's"),
    ],
)
async def test_a_request_is_retried_once_unless_the_engine_responds_4xx(
    client: aiohttp.ClientSession, script: Script, status: int, tried: int
) -> None:
    async with run_router(*respond(script, "d1", "d2", "d3")) as world:
        async with client.post(world.url("/v1/embeddings"), json=BODY) as response:
            assert (response.status, "error" in await response.json()) == (status, True)
        assert sum(bool(engine.requests) for engine in world.engines.values()) == tried
        await wait_until(world.ledgers_are_empty, "nothing is in flight")


async def test_a_rejection_is_no_success_of_the_engine(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("d1", decode=respond_with_status(400))) as world:
        health = world.router.fleet["d1"].health
        health.record_error()
        async with client.post(world.url("/v1/embeddings"), json={"input": "x"}) as response:
            assert response.status == 400
        assert (health.rejections, health.error_share > 0) == (1, True)


async def test_retries_are_charged_to_the_budget_of_all_requests(client: aiohttp.ClientSession) -> None:
    async with run_router(*respond(respond_with_status(503), "d1", "d2")) as world:
        budget = world.router.journeys.retry_budget
        while budget.take_retry(time.monotonic()):
            pass
        async with client.post(world.url("/v1/embeddings"), json=BODY) as response:
            assert response.status == 503
        assert sum(len(engine.requests) for engine in world.engines.values()) == 1
        assert world.router.counters.stopped_requests == {"retry_budget": 1}


async def test_pooling_is_not_counted_as_kv_of_decodes(client: aiohttp.ClientSession) -> None:
    async with run_router(*respond(never_respond, "d1")) as world:
        post = asyncio.ensure_future(client.post(world.url("/tokenize"), json={"prompt": "x" * 9_000}))
        await wait_until(lambda: bool(world["d1"].requests), "the engine has the request")
        [instance] = world.router.fleet.instances
        assert (instance.ledger.legs, instance.ledger.decode_tokens) == (1, 0)
        post.cancel()
        await wait_until(world.ledgers_are_empty, "nothing is in flight")


async def test_another_instance_takes_over_before_the_first_byte(client: aiohttp.ClientSession) -> None:
    engines = [*respond(respond_with_status(500), "d1"), *respond(echo, "d2")]
    async with run_router(*engines) as world, client.post(world.url("/rerank"), json=BODY) as response:
        assert (response.status, response.headers["x-fulcrum-decode"]) == (200, "d2")


async def test_a_broken_response_has_no_regular_end(client: aiohttp.ClientSession) -> None:
    async with run_router(*respond(stream_tokens_then(2, close_connection), "d1", "d2")) as world:
        async with client.post(world.url("/v1/responses"), json={**BODY, "stream": True}) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert world.router.counters.passed_through == {("/v1/responses", "broken"): 1}


@pytest.mark.parametrize("path", sorted(path.decode() for path in GENERATION_PATHS))
async def test_a_broken_stream_ends_in_an_error_event_and_no_clean_end(path: str) -> None:
    async with run_router(*respond(stream_tokens_then(2, close_connection), "d1")) as world:
        body = json.dumps({**BODY, "stream": True}).encode()
        received = await send_raw(world.port, build_post(body, path=path))
    last = received.rpartition(b"event: error\ndata: ")[2]
    error = json.loads(last.removesuffix(b"\n\n\r\n"))
    assert (error["type"], error["error"]["message"]) == (
        "error",
        "the engine failed during the stream: the engine closed the connection (end of stream)",
    )


async def test_no_error_event_is_put_into_a_chunk_or_an_event_that_was_sent_in_part() -> None:
    for half in (frame_event("a")[:-9], frame_chunk(b"data: half of an event\n")):

        async def break_off(response: ResponseWriter, half: bytes = half) -> None:
            await response.raw(half)
            response.writer.close()

        async with run_router(*respond(stream_tokens_then(1, break_off), "d1")) as world:
            body = json.dumps({**BODY, "stream": True}).encode()
            received = await send_raw(world.port, build_post(body, path="/v1/responses"))
        assert received.endswith(half)


async def test_a_client_that_leaves_cancels_its_request(client: aiohttp.ClientSession) -> None:
    async with run_router(*respond(never_respond, "d1")) as world:
        post = asyncio.ensure_future(client.post(world.url("/v1/messages"), json=BODY))
        await wait_until(lambda: bool(world["d1"].requests), "the engine has the request")
        post.cancel()
        await wait_until(lambda: bool(world["d1"].abandoned), "the engine sees the disconnect")
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
        assert world.router.counters.passed_through == {("/v1/messages", "cancelled"): 1}


async def test_a_request_that_no_instance_can_serve_or_that_is_no_json(client: aiohttp.ClientSession) -> None:
    async with run_router() as world:
        async with client.post(world.url("/v1/score"), json=BODY) as response:
            assert response.status == 503
        async with client.post(world.url("/v1/score"), data=b"{") as response:
            assert (response.status, json.loads(await response.text())["error"]["code"]) == (400, 400)
        async with client.get(world.url("/v1/score")) as response:
            assert response.status == 405
