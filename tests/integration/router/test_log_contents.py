"""No log line of a router holds any text of a prompt or an answer, whatever fails.

The canary text is in the request, and in what engines send back; each case drives one error path.
"""

import asyncio
import dataclasses
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from fulcrum_cluster.logs import configure_logging, log_loop_errors
from fulcrum_router.fleet.instances import Fleet
from tests.integration.router.fake_engines import (
    STREAM_HEAD,
    FakeEngine,
    ResponseWriter,
    Script,
    build_post,
    close_connection,
    never_respond,
    run_router,
    send_raw,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until

CANARY = "canary-5f1d-of-a-prompt"
C = CANARY.encode()


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging(stream, level="debug", exception_texts=False)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def send(*pieces: bytes, close: bool = True) -> Script:
    async def script(response: ResponseWriter) -> None:
        for piece in pieces:
            await response.raw(piece)
        if close:
            response.close()
        else:
            await response.hang()

    return script


def whole(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d Some\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def event(text: bytes) -> bytes:
    content = b'data: {"choices":[{"text":"%b"}]}\n\n' % text
    return b"%x\r\n%b\r\n" % (len(content), content)


ENGINE_SCRIPTS: dict[str, Script] = {
    "an error": send(whole(b'{"error":"%b"}' % C, 500), close=False),
    "a refusal": send(whole(b'{"error":"%b"}' % C, 400), close=False),
    "overload": send(whole(b'{"error":"%b"}' % C, 503), close=False),
    "no JSON": send(whole(C), close=False),
    "a status line of text": send(C + b"\r\n\r\n"),
    "a header of text": send(b"HTTP/1.1 200 OK\r\n" + C + b"\r\n\r\n"),
    "a length of text": send(b"HTTP/1.1 200 OK\r\ncontent-length: " + C + b"\r\n\r\n"),
    "a chunk size of text": send(STREAM_HEAD, C + b"\r\n"),
    "half a stream": send(STREAM_HEAD, event(C), event(C)[:20]),
    "a wrong chunk after the first byte": send(STREAM_HEAD, event(C), C + b"\r\n"),
    "an abort": send(whole(b'{"choices":[{"text":"%b","finish_reason":"abort"}]}' % C), close=False),
    "half of a body": send(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + C),
    "usage of text": send(whole(b'{"choices":[1],"usage":{"prompt_tokens":"%b"}}' % C), close=False),
    "params of text": send(
        whole(b'{"choices":[{}],"kv_transfer_params":{"%b":"%b","do_remote_prefill":true}}' % (C, C)),
        close=False,
    ),
    "nothing": close_connection,
    "silence": never_respond,
}


def build_request(*, stream: bool) -> bytes:
    body = json.dumps({"prompt": CANARY, "user": CANARY, "stream": stream}).encode()
    return build_post(body, "connection: close", f"x-customer-tier: {CANARY}", f"x-request-id: {CANARY}")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("name", ENGINE_SCRIPTS)
async def test_no_text_is_logged_if_an_engine_responds_with(
    log_lines: io.StringIO, leg: str, name: str
) -> None:
    script = ENGINE_SCRIPTS[name]
    bad = [FakeEngine("p1", prefill=script), FakeEngine("d1")] if leg == "prefill" else None
    engines = bad or [FakeEngine("p1"), FakeEngine("d1", decode=script)]
    log_loop_errors(asyncio.get_running_loop())
    settings = settings_with_short_timeouts(first_byte=0.2, prefill=0.2, idle=0.2)
    async with run_router(*engines, settings=settings) as world:
        for stream in (True, False):
            assert await send_raw(world.port, build_request(stream=stream))
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
    assert CANARY not in log_lines.getvalue()
    for line in log_lines.getvalue().splitlines():
        json.loads(line)


BAD_REQUESTS = {
    "no JSON": build_post(C, "connection: close"),
    "half of a JSON": build_post(b'{"prompt":"%b"' % C, "connection: close"),
    "too deep": build_post(
        b'{"prompt":' + b'["%b",' % C * 300 + b"1" + b"]" * 300 + b"}", "connection: close"
    ),
    "an unknown path": b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % C,
    "not HTTP": C + b"\r\n\r\n",
    "two hosts": b"POST / HTTP/1.1\r\nhost: %b\r\nhost: %b\r\n\r\n" % (C, C),
    "a wrong chunk": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%b\r\n" % C,
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_no_text_is_logged_if_a_client_sends(log_lines: io.StringIO, name: str) -> None:
    log_loop_errors(asyncio.get_running_loop())
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert b"HTTP/1.1 4" in await send_raw(world.port, BAD_REQUESTS[name])
    assert CANARY not in log_lines.getvalue()


async def test_no_text_is_logged_if_a_client_leaves(log_lines: io.StringIO) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=never_respond)) as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_request(stream=True))
        await wait_until(lambda: bool(world["d1"].requests), "the decode leg was sent")
        writer.transport.abort()
        await wait_until(lambda: bool(world["d1"].abandoned), "the leg was cancelled")
    assert CANARY not in log_lines.getvalue()


class FailingFleet:
    """A fleet whose use fails with the client's text."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    @property
    def candidates(self) -> NoReturn:
        prompt = CANARY
        raise ValueError(f"cannot use {prompt}")


async def test_an_internal_error_is_logged_by_its_type_and_place_alone(log_lines: io.StringIO) -> None:
    log_loop_errors(asyncio.get_running_loop())
    settings = settings_with_short_timeouts()
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings) as world:
        world.router.journeys.fleet = FailingFleet(world.router.fleet)
        response = await send_raw(world.port, build_request(stream=True))
    assert b"HTTP/1.1 500" in response
    lines = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    [line] = [line for line in lines if line["level"] == "error"]
    assert line["exception"]["type"] == "ValueError"
    assert line["exception"]["places"][-1].endswith(" candidates")
    assert CANARY not in log_lines.getvalue()


async def test_the_access_log_has_a_line_of_numbers_for_a_share_of_the_requests(
    log_lines: io.StringIO,
) -> None:
    settings = dataclasses.replace(settings_with_short_timeouts(), access_log=0.5)
    body = json.dumps({"prompt": CANARY, "user": CANARY}).encode()
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings) as world:
        port = world.port
        for number in range(4):
            await send_raw(port, build_post(body, "connection: close", f"x-request-id: r{number}"))
        await send_raw(port, build_post(b"no JSON", "connection: close", "x-request-id: invalid"))
        await send_raw(
            port, build_post(body, "connection: close", "x-request-id: passed", path="/v1/embeddings")
        )
    text = log_lines.getvalue()
    lines = [line for line in map(json.loads, text.splitlines()) if line["event"] == "request ended"]
    assert [(line["request_id"], line["outcome"]) for line in lines] == [
        ("r1", "ok"),
        ("r3", "ok"),
        ("passed", lines[-1]["outcome"]),
    ]
    served = {name: lines[0][name] for name in ("path", "tier", "tenant", "prefill", "decode", "slo_met")}
    assert served == {
        **{"path": "/v1/completions", "tier": "default", "tenant": "", "prefill": "p1", "decode": "d1"},
        "slo_met": True,
    }
    assert lines[0]["duration_s"] >= lines[0]["first_byte_s"] > 0
    assert CANARY not in text
