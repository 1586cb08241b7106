"""The clients' side of HTTP/1.1: framing, limits, order, and who may ask what how."""

import asyncio
import json

import pytest

from fulcrum_router.data_path import downstream as client_module
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    Answering,
    FakeEngine,
    World,
    decode_words,
    running,
    until,
)

BODY = b'{"model": "m", "prompt": "hello"}'


def post(body: bytes = BODY, *fields: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request."""
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


async def talk(world: World, *pieces: bytes, answers: int = 1) -> list[tuple[int, bytes]]:
    """Send the pieces one by one; the answers with a length that come back, or fewer if the router closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    got = []
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(answers):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            fields = dict(line.lower().split(b": ", 1) for line in head[:-4].split(b"\r\n")[1:])
            got.append((int(head[9:12]), await reader.readexactly(int(fields.get(b"content-length", 0)))))
        writer.close()
    return got


async def closes_after(world: World, request: bytes) -> bytes:
    """Everything that comes back until the router closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(request)
    async with asyncio.timeout(DEADLINE_S):
        content = await reader.read()
    writer.close()
    return content


def statuses(got: list[tuple[int, bytes]]) -> list[int]:
    return [status for status, _ in got]


async def test_a_request_may_be_split_anywhere() -> None:
    request = post()
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        for split in range(1, len(request)):
            assert statuses(await talk(world, request[:split], request[split:])) == [200]


async def test_a_chunked_body_is_read() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:])]
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await talk(world, head, *pieces, b"0\r\n\r\n")) == [200]
        assert world["d1"].decodes[0]["prompt"] == "hello"


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def echo(answering: Answering) -> None:
        await answering.json(200, {"choices": [{"text": answering.asked.body["prompt"]}]})

    requests = b"".join(post(json.dumps({"prompt": f"n{n}"}).encode()) for n in range(4))
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with running(FakeEngine("p1"), FakeEngine("d1", decode=echo)) as world:
        got = await talk(world, requests[:200], requests[200:] + get, answers=5)
        texts = [json.loads(body).get("choices", [{}])[0].get("text") for _, body in got]
        assert texts == ["n0", "n1", "n2", "n3", None]


async def test_a_connection_is_kept_unless_the_client_says_close() -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await talk(world, post(), post(), answers=2)) == [200, 200]
        answer = await closes_after(world, post(BODY, "Connection: close") + post())
        assert (answer.count(b"HTTP/1.1 200"), answer.count(b"connection: close")) == (1, 1)


async def test_an_http_1_0_client_gets_an_answer_that_it_understands() -> None:
    async def until_close(answering: Answering) -> None:
        assert answering.asked.body["stream"]
        await answering.raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await answering.raw(b"data: one\n\ndata: [DONE]\n\n")
        answering.writer.close()

    async with running(FakeEngine("p1"), FakeEngine("d1", decode=until_close)) as world:
        answer = await closes_after(world, post(b'{"prompt":"a","stream":true}', version="1.0"))
        assert answer.endswith(b"\r\n\r\ndata: one\n\ndata: [DONE]\n\n")


async def test_expect_100_continue_is_met() -> None:
    reading = post(BODY, "Expect: 100-continue")
    head, body = reading[: -len(BODY)], reading[-len(BODY) :]
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_offer_to_upgrade_is_passed_over() -> None:
    offer = post(BODY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA")
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert statuses(await talk(world, offer, post(), answers=2)) == [200, 200]
        assert [body["prompt"] for body in world["d1"].decodes] == ["hello", "hello"]


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(get("/v1/nothing"), 404, id="a path that is none"),
        pytest.param(get("/v1/completions"), 405, id="GET where POST is due"),
        pytest.param(get("/health", "DELETE"), 405, id="DELETE where GET is due"),
        pytest.param(post(b"{"), 400, id="a body that is not JSON"),
        pytest.param(post(b"[1]"), 400, id="a body that is no object"),
        pytest.param(b"NONSENSE\r\n\r\n", 400, id="not HTTP"),
        pytest.param(get("/" + "x" * 40_000), 431, id="a path too long"),
        pytest.param(post(BODY, f"x-long: {'y' * 40_000}"), 431, id="a head too long"),
        pytest.param(post(BODY, "Expect: miracles"), 417, id="an expectation that cannot be met"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
            413,
            id="a body too long",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_in_openai_s_words(request_bytes: bytes, status: int) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        [(got, body)] = await talk(world, request_bytes)
        error = json.loads(body)["error"]
        assert (got, error["code"], error["type"]) == (status, status, "invalid_request_error")
        assert world["p1"].asked == []


async def test_a_head_that_never_ends_is_cut_off() -> None:
    async with running() as world:
        endless = b"GET / HTTP/1.1\r\nx-long: " + b"y" * 20_000
        [(status, _)] = await talk(world, endless, b"y" * 20_000)
        assert status == 431


async def test_a_head_that_never_ends_is_cut_off_however_slowly_it_grows() -> None:
    async with running() as world:
        [(status, _)] = await talk(world, b"GET / HTTP/1.1\r\nx-long: ", *[b"y" * 1_000] * 33)
        assert status == 431


async def test_trailers_that_never_end_are_cut_off() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    trailers = b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1_000) for n in range(40))
    async with running() as world:
        [(status, _)] = await talk(world, head, trailers)
        assert status == 431


async def test_a_chunked_body_that_grows_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BODY_BYTES", 100)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with running() as world:
        [(status, _)] = await talk(
            world, head, b"40\r\n" + b"y" * 64 + b"\r\n", b"40\r\n" + b"y" * 64 + b"\r\n"
        )
        assert status == 413


async def test_head_has_no_body() -> None:
    async with running(FakeEngine("d1")) as world:
        answer = await closes_after(world, b"HEAD /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\n")


async def test_the_model_is_listed_and_readiness_follows_the_fleet() -> None:
    async with running(FakeEngine("p1")) as world:
        paths = ("/v1/models", "/health", "/ready", "/metrics")
        before = [(await talk(world, get(path)))[0] for path in paths]
        assert [status for status, _ in before] == [200] * 4
        assert json.loads(before[0][1])["data"][0]["id"] == "m"
        world.router.fleet["p1"].assign(None)
        after = [(await talk(world, get(path)))[0][0] for path in paths]
        assert after == [200, 200, 503, 200]


async def test_idle_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_S", 0.05)
    async with running() as world:
        assert await closes_after(world, b"") == b""


async def test_at_the_end_requests_in_flight_get_a_moment() -> None:
    go_on = asyncio.Event()

    async def slow(answering: Answering) -> None:
        await go_on.wait()
        await decode_words()(answering)

    async with running(FakeEngine("p1"), FakeEngine("d1", decode=slow), grace_s=DEADLINE_S) as world:
        request = asyncio.ensure_future(closes_after(world, post()))
        await until(lambda: bool(world["d1"].asked), "decode is asked")
        world.stopping(go_on.set)
    assert (await request).startswith(b"HTTP/1.1 200")
