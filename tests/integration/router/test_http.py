"""HTTP/1.1 towards clients: framing, limits, order of responses, paths and methods.

A router in the test's process gets raw bytes, over fake engines. The reader alone has a fuzz target.
"""

import asyncio
import json
import socket
import time
from functools import partial

import pytest
from aiohttp.test_utils import TestClient, TestServer

from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.metrics_port import make_metrics_app
from fulcrum_router.control.requests_page import RequestsPage
from fulcrum_router.data_path import downstream as client_module
from fulcrum_router.http1 import requests as request_module
from fulcrum_router.http1.limits import LARGE_BODY_BYTES, UNFINISHED_SHARE, estimate_parsed_bytes
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    build_post,
    never_respond,
    run_router,
    send_source_name,
    stream_tokens_then,
)
from tests.waiting import run_pending_tasks, wait_until, wait_until_time

BODY = b'{"model": "m", "prompt": "hello"}'


def has_requests(engine: FakeEngine, number: int) -> bool:
    return len(engine.requests) == number


async def send_pieces(
    world: RunningRouter, *pieces: bytes, response_count: int = 1
) -> list[tuple[int, bytes]]:
    """Send the pieces one by one; return statuses and bodies, fewer if the router closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await run_pending_tasks()  # so that the router reads the pieces apart
    got = []
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(response_count):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            fields = dict(line.lower().split(b": ", 1) for line in head[:-4].split(b"\r\n")[1:])
            got.append((int(head[9:12]), await reader.readexactly(int(fields.get(b"content-length", 0)))))
        writer.close()
    return got


async def read_until_closed(world: RunningRouter, request: bytes) -> bytes:
    """Everything that the router sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(request)
    async with asyncio.timeout(DEADLINE_S):
        content = await reader.read()
    writer.close()
    return content


def statuses(got: list[tuple[int, bytes]]) -> list[int]:
    return [status for status, _ in got]


async def test_a_request_may_be_split_anywhere() -> None:
    request = build_post(BODY)
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        for split in range(1, len(request)):
            assert statuses(await send_pieces(world, request[:split], request[split:])) == [200]


async def test_a_chunked_body_is_read() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:])]
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await send_pieces(world, head, *pieces, b"0\r\n\r\n")) == [200]
        assert world["d1"].decodes[0]["prompt"] == "hello"


async def test_responses_to_pipelined_requests_come_in_order() -> None:
    async def echo(response: ResponseWriter) -> None:
        await response.json(200, {"choices": [{"text": response.request.body["prompt"]}]})

    requests = b"".join(build_post(json.dumps({"prompt": f"n{n}"}).encode()) for n in range(4))
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=echo)) as world:
        got = await send_pieces(world, requests[:200], requests[200:] + get, response_count=5)
        texts = [json.loads(body).get("choices", [{}])[0].get("text") for _, body in got]
        assert texts == ["n0", "n1", "n2", "n3", None]


async def test_a_connection_is_kept_alive_unless_the_client_asks_to_close_it() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await send_pieces(world, build_post(BODY), build_post(BODY), response_count=2)) == [
            200,
            200,
        ]
        response = await read_until_closed(world, build_post(BODY, "Connection: close") + build_post(BODY))
        assert (response.count(b"HTTP/1.1 200"), response.count(b"connection: close")) == (1, 1)


async def test_an_http_1_0_client_gets_an_unchunked_response() -> None:
    async def until_close(response: ResponseWriter) -> None:
        assert response.request.body["stream"]
        await response.raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await response.raw(b"data: one\n\ndata: [DONE]\n\n")
        response.writer.close()

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=until_close)) as world:
        response = await read_until_closed(world, build_post(b'{"prompt":"a","stream":true}', version="1.0"))
        assert response.endswith(b"\r\n\r\ndata: one\n\ndata: [DONE]\n\n")


async def test_a_stream_of_an_http_1_0_client_is_counted_as_any_other_and_has_no_chunks() -> None:
    usage = '{"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}'

    async def stream_with_usage(response: ResponseWriter) -> None:
        assert response.request.body["stream_options"] == {"include_usage": True}
        await response.start_stream()
        for event in ('{"choices":[{"text":"a"}]}', usage, "[DONE]"):
            await response.event(event)
        await response.raw(b"0\r\n\r\n")

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=stream_with_usage)) as world:
        response = await read_until_closed(world, build_post(b'{"prompt":"a","stream":"on"}', version="1.0"))
        head, _, body = response.partition(b"\r\n\r\n")
        assert body == b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
        assert (b"transfer-encoding" in head, b"connection: close" in head) == (False, True)
        assert world.router.counters.output_tokens == 2


@pytest.mark.parametrize(
    ("line", "body"),
    [
        pytest.param(b"Transfer-Encoding:chunked", b"2\r\n{}\r\n0\r\n\r\n", id="no space before the value"),
        pytest.param(b"transfer-encoding: \tchunked ", b"2\r\n{}\r\n0\r\n\r\n", id="more white space"),
        pytest.param(b"content-length: 2\r\nx-transfer-encoding: chunked", b"{}", id="another header"),
    ],
)
async def test_an_http_1_0_client_gets_the_content_however_the_engine_writes_its_head(
    line: bytes, body: bytes
) -> None:
    async def respond(response: ResponseWriter) -> None:
        await response.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + line + b"\r\n\r\n" + body
        )

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=respond)) as world:
        response = await read_until_closed(world, build_post(b'{"prompt":"a"}', version="1.0"))
        head, _, content = response.partition(b"\r\n\r\n")
        assert (content, b"\r\ntransfer-encoding" in head.lower()) == (b"{}", False)


async def test_expect_100_continue_gets_an_interim_response_before_the_body() -> None:
    reading = build_post(BODY, "Expect: 100-continue")
    head, body = reading[: -len(BODY)], reading[-len(BODY) :]
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_upgrade_header_is_ignored() -> None:
    offer = build_post(BODY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA")
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await send_pieces(world, offer, build_post(BODY), response_count=2)) == [200, 200]
        assert [body["prompt"] for body in world["d1"].decodes] == ["hello", "hello"]


def build_get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(build_get("/v1/nothing"), 404, id="unknown path"),
        pytest.param(build_get("/v1/completions"), 405, id="GET on a POST path"),
        pytest.param(build_get("/health", "DELETE"), 405, id="DELETE on a GET path"),
        pytest.param(build_post(b"{"), 400, id="a body that is not JSON"),
        pytest.param(build_post(b"[1]"), 400, id="a body that is not a JSON object"),
        pytest.param(b"NONSENSE\r\n\r\n", 400, id="not HTTP"),
        pytest.param(build_get("/" + "x" * 40_000), 431, id="path too long"),
        pytest.param(build_post(BODY, f"x-long: {'y' * 40_000}"), 431, id="head too long"),
        pytest.param(build_post(BODY, "Expect: miracles"), 417, id="unsupported expectation"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
            413,
            id="body too long",
        ),
    ],
)
async def test_an_invalid_request_gets_an_openai_error_object(request_bytes: bytes, status: int) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        [(got, body)] = await send_pieces(world, request_bytes)
        error = json.loads(body)["error"]
        assert (got, error["code"], error["type"]) == (status, status, "invalid_request_error")
        assert world["p1"].requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_deeply_nested_body_is_rejected_while_other_clients_are_served(path: str) -> None:
    nested = b'{"prompt":' + b"[" * 1_000 + b"]" * 1_000 + b"}"
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        got = await asyncio.gather(
            send_pieces(world, build_post(nested, path=path)), send_pieces(world, build_get("/health"))
        )
        assert [statuses(responses) for responses in got] == [[400], [200]]
        assert [engine.requests for engine in world.engines.values()] == [[], []]


async def test_an_endless_request_head_is_rejected() -> None:
    async with run_router() as world:
        endless = b"GET / HTTP/1.1\r\nx-long: " + b"y" * 20_000
        [(status, _)] = await send_pieces(world, endless, b"y" * 20_000)
        assert status == 431


async def test_an_endless_request_head_sent_in_small_pieces_is_rejected() -> None:
    async with run_router() as world:
        [(status, _)] = await send_pieces(world, b"GET / HTTP/1.1\r\nx-long: ", *[b"y" * 1_000] * 33)
        assert status == 431


async def test_endless_trailers_are_rejected() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    trailers = b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1_000) for n in range(40))
    async with run_router() as world:
        [(status, _)] = await send_pieces(world, head, trailers)
        assert status == 431


async def test_a_chunked_body_over_the_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_BODY_BYTES", 100)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with run_router() as world:
        [(status, _)] = await send_pieces(
            world, head, b"40\r\n" + b"y" * 64 + b"\r\n", b"40\r\n" + b"y" * 64 + b"\r\n"
        )
        assert status == 413


async def test_the_response_to_a_head_request_has_no_body() -> None:
    async with run_router(FakeEngine("d1")) as world:
        response = await read_until_closed(
            world, b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        assert response.startswith(b"HTTP/1.1 200 OK\r\n")
        assert response.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/completions"])
async def test_an_error_response_to_a_head_request_has_no_body(path: str) -> None:
    async with run_router(FakeEngine("d1")) as world:
        got = await read_until_closed(
            world, build_get(path, "HEAD") + build_get("/health")[:-2] + b"connection: close\r\n\r\n"
        )
        assert [part.split(b"\r\n")[0] for part in got.split(b"\r\n\r\n")[:2]][1].startswith(b"HTTP/1.1 200")


async def test_a_thousand_pipelined_upgrades_are_served_one_after_another() -> None:
    offer = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
    async with run_router() as world:
        got = await send_pieces(world, offer * 1_000, response_count=1_000)
        assert statuses(got) == [200] * 1_000


async def test_pipelined_requests_of_a_client_that_does_not_read_are_not_answered_into_memory() -> None:
    """Each response is larger than its request: served without end they would fill the memory."""
    async with run_router() as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1_024)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        writer.write(build_get("/v1/models") * 50_000)
        await wait_until(
            lambda: any(connection.paused for connection in world.server.clients.connections),
            "the router waits for the client to read",
        )
        [connection] = world.server.clients.connections
        assert connection.count_buffered_bytes() < 2_000_000
        writer.transport.abort()


async def test_a_body_over_the_global_limit_is_rejected_until_others_have_ended() -> None:
    go_on = asyncio.Event()

    async def wait_and_respond(response: ResponseWriter) -> None:
        await go_on.wait()
        await send_source_name()(response)

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=wait_and_respond)) as world:
        memory = world.server.clients.memory
        held_bytes = len(BODY) + estimate_parsed_bytes(BODY, few_held=False)
        memory.max_bytes = len(build_post(BODY)) + held_bytes
        first = asyncio.ensure_future(send_pieces(world, build_post(BODY)))
        await wait_until(lambda: bool(world["d1"].requests), "the first request holds its body")
        assert memory.held_bytes == held_bytes
        large = build_post(json.dumps({"prompt": "x" * memory.max_bytes}).encode())
        [(status, body)] = await send_pieces(world, large)
        assert (status, json.loads(body)["error"]["message"]) == (
            503,
            "the router has no memory for more requests now; try again",
        )
        go_on.set()
        assert statuses(await first) == [200]
        await wait_until(lambda: memory.held_bytes == 0, "nothing is held")
        assert statuses(await send_pieces(world, build_post(BODY))) == [200]
        await wait_until(lambda: memory.held_bytes == 0, "nothing is held")


async def test_the_body_of_a_stream_is_forgotten_at_its_first_byte() -> None:
    go_on = asyncio.Event()

    async def wait(_: ResponseWriter) -> None:
        await go_on.wait()

    body = b'{"prompt":"hello","stream":true}'
    engine = FakeEngine("d1", decode=stream_tokens_then(1, wait))
    async with run_router(FakeEngine("p1"), engine) as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_post(body))
        memory = world.server.clients.memory
        await wait_until(lambda: bool(world["p1"].requests), "the request was read")
        await wait_until(lambda: memory.held_bytes == 0, "the body is forgotten")
        assert world["d1"].requests
        writer.transport.abort()
        go_on.set()


async def test_a_connection_over_the_limit_gets_a_503_that_says_so() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.server.clients.max_connections = 1
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        await wait_until(lambda: len(world.server.clients.connections) == 1, "the first is connected")
        response = await read_until_closed(world, build_post(BODY))
        assert response.startswith(b"HTTP/1.1 503")
        assert b"the router has 1 connections open, which is its limit" in response
        writer.close()
        await wait_until(lambda: not world.server.clients.connections, "both are closed")
        assert statuses(await send_pieces(world, build_post(BODY))) == [200]
        assert world.router.counters.refused_connections == 1


async def test_the_router_is_known_to_be_alive_while_clients_use_all_connections() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.server.clients.max_connections = 1
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        await wait_until(lambda: len(world.server.clients.connections) == 1, "the first is connected")
        assert (await read_until_closed(world, build_get("/health"))).startswith(b"HTTP/1.1 503")
        app = make_metrics_app(build_registry(world.router), RequestsPage(world.router))
        async with TestClient(TestServer(app)) as kubelet:
            assert (await kubelet.get("/health")).status == 200
        writer.close()


async def test_connections_without_a_request_make_room_when_very_many_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "CROWDED_TIMEOUT_S", 0.1)
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=never_respond)) as world:
        clients = world.server.clients
        clients.max_connections = 16
        _, busy = await asyncio.open_connection("127.0.0.1", world.port)
        busy.write(build_post(BODY))
        await wait_until(lambda: bool(world["d1"].requests), "a request is served")
        held = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(15)]
        for _, writer in held[:7]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nx-slow: ")
        await wait_until(lambda: len(clients.connections) <= 12, "there is room")
        assert statuses(await send_pieces(world, build_get("/health"))) == [200]
        assert not world["d1"].abandoned, "the request goes on"
        for writer in (busy, *(writer for _, writer in held)):
            writer.transport.abort()


async def test_large_bodies_that_come_slowly_leave_room_for_others() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        memory = world.server.clients.memory
        memory.max_bytes = 1_000_000
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n"
        slow = [(await asyncio.open_connection("127.0.0.1", world.port))[1] for _ in range(20)]
        for writer in slow:
            writer.write(head + b"x" * 300_000)
        await wait_until(
            lambda: len(world.server.clients.connections) == 20 and memory.held_bytes > 250_000,
            "much is held",
        )
        assert memory.unfinished_bytes <= memory.max_bytes * UNFINISHED_SHARE
        assert statuses(await send_pieces(world, build_post(BODY))) == [200]
        for writer in slow:
            writer.transport.abort()
        await wait_until(lambda: memory.held_bytes == 0, "nothing is held")


async def test_small_bodies_that_come_slowly_leave_room_for_others() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        clients, memory = world.server.clients, world.server.clients.memory
        memory.max_bytes = 1_000_000
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n"
        slow = [(await asyncio.open_connection("127.0.0.1", world.port))[1] for _ in range(20)]
        for writer in slow:
            writer.write(head + b"x" * 59_000)
        await wait_until(lambda: memory.refusals > 0, "no more is held")
        assert statuses(await send_pieces(world, build_post(BODY))) == [200]
        for writer in slow:
            writer.transport.abort()
        await wait_until(lambda: not clients.connections, "all are closed")
        assert (memory.held_bytes, memory.unfinished_bytes) == (0, 0)


async def test_a_request_whose_parsed_values_exceed_the_limit_is_rejected() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        memory = world.server.clients.memory
        memory.max_bytes = 5_000_000
        ids, text = {"prompt": [1] * 100_000}, {"prompt": "x" * 300_000}
        posts = [build_post(json.dumps(body, separators=(",", ":")).encode()) for body in (ids, text)]
        assert statuses(await send_pieces(world, *posts, response_count=2)) == [503, 200]
        assert (memory.held_bytes, memory.refusals) == (0, 1)


async def test_clients_that_do_not_read_are_disconnected_when_their_responses_fill_the_memory() -> None:
    async def flood(response: ResponseWriter) -> None:
        await response.start_stream()
        while True:
            await response.event("x" * 60_000)

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=flood)) as world:
        clients, memory = world.server.clients, world.server.clients.memory
        memory.max_bytes = 200_000
        writers = []
        for number in range(1, 9):
            _, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1)
            writer.write(build_post(b'{"prompt":"hello","stream":true}'))
            writers.append(writer)
            await wait_until(partial(has_requests, world["d1"], number), "the stream began")
        await wait_until(lambda: len(clients.connections) < 8, "some are disconnected")
        assert memory.unsent_bytes <= memory.max_bytes / 2
        for writer in writers:
            writer.transport.abort()
        await wait_until(lambda: not clients.connections, "all are closed")
        assert (memory.held_bytes, memory.unsent_bytes) == (0, 0)


async def test_waiting_bodies_of_one_client_do_not_cut_the_response_of_another() -> None:
    text = "x" * 20_000_000  # more than the buffers of the two sockets

    async def answer(response: ResponseWriter) -> None:
        await response.json(200, {"choices": [{"text": text}]})

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=answer)) as world:
        memory = world.server.clients.memory
        memory.max_bytes = 16_000_000
        assert memory.hold(12_000_000, body_bytes=LARGE_BODY_BYTES + 1), "large bodies may take so much"
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_post(BODY, "connection: close"))
        await wait_until(lambda: memory.unsent_bytes > LARGE_BODY_BYTES, "the client does not read")
        async with asyncio.timeout(DEADLINE_S):
            assert text.encode() in await reader.read()
        memory.release(12_000_000)
        writer.close()


async def test_a_rejected_client_that_still_sends_can_read_why() -> None:
    """Closing at once would reset the connection, and the client would not see the response."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
    async with run_router() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head + b"x" * 1_000_000)
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
            await writer.drain()
            await reader.read()
        writer.close()


async def test_a_rejected_client_that_does_not_close_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LINGER_S", 0.05)
    async with run_router() as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"NONSENSE\r\n\r\n")
        await wait_until(lambda: bool(world.server.clients.connections), "it is connected")
        await wait_until(lambda: not world.server.clients.connections, "the router has closed")
        writer.close()


@pytest.mark.parametrize(
    ("tier", "count"), [("gold-plated", 1), ("premium", 0), ("default", 0), ("", 0)], ids=repr
)
async def test_a_tier_that_the_service_does_not_have_is_the_default_tier_and_counted(
    tier: str, count: int
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        lines = (f"x-customer-tier: {tier}",) if tier else ()
        assert statuses(await send_pieces(world, build_post(BODY, *lines))) == [200]
        assert world.router.counters.unknown_tiers == count
        assert set(world.router.counters.tiers) == {"premium" if tier == "premium" else "default"}


async def test_the_model_is_listed_and_ready_needs_a_serving_instance() -> None:
    async with run_router(FakeEngine("p1")) as world:
        paths = ("/v1/models", "/health", "/ready")
        before = [(await send_pieces(world, build_get(path)))[0] for path in paths]
        assert [status for status, _ in before] == [200] * 3
        assert json.loads(before[0][1])["data"][0]["id"] == "m"
        world.router.fleet["p1"].assign(None)
        after = [(await send_pieces(world, build_get(path)))[0][0] for path in paths]
        assert after == [200, 200, 503]


async def test_an_idle_connection_is_closed_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_TIMEOUT_S", 0.05)
    async with run_router() as world:
        assert await read_until_closed(world, b"") == b""


async def test_a_connection_that_is_used_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_TIMEOUT_S", 1.0)
    async with run_router() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2.0:
            writer.write(build_get("/health"))
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
            await wait_until_time(time.monotonic() + 0.1, "as a load balancer probes")
        writer.close()


async def test_requests_in_flight_may_finish_during_the_shutdown_grace_period() -> None:
    go_on = asyncio.Event()

    async def wait_and_respond(response: ResponseWriter) -> None:
        await go_on.wait()
        await send_source_name()(response)

    async with run_router(
        FakeEngine("p1"), FakeEngine("d1", decode=wait_and_respond), grace_s=DEADLINE_S
    ) as world:
        request = asyncio.ensure_future(read_until_closed(world, build_post(BODY)))
        await wait_until(lambda: bool(world["d1"].requests), "the decode leg was sent")
        world.when_stopping(go_on.set)
    assert (await request).startswith(b"HTTP/1.1 200")
