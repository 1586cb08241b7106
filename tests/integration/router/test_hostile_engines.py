"""Engines that send garbage, endless or untrue responses: clients get another engine's answer.

In each case the bad engine's connection is not used again, nothing is buffered without end, and no turn of
the event loop takes long.
"""

import asyncio
import itertools
import json
from collections.abc import Iterable

import aiohttp
import pytest

from tests.integration.router.fake_engines import (
    DEADLINE_S,
    STREAM_HEAD,
    FakeEngine,
    ResponseWriter,
    Script,
    make_kv_transfer_params,
    run_router,
    settings_with_short_timeouts,
)
from tests.stalls import measure_stalls
from tests.waiting import wait_until

MAX_STALL_S = 0.02
OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED_HEAD = OK_HEAD + b"transfer-encoding: chunked\r\n\r\n"


def send(*pieces: bytes) -> Script:
    """Script that sends these bytes and keeps the connection open."""

    async def script(response: ResponseWriter) -> None:
        for piece in pieces:
            await response.raw(piece)
        await response.hang()

    return script


def send_for_ever(first: bytes, pieces: Iterable[bytes]) -> Script:
    """Script that sends without an end, as fast as the router reads."""

    async def script(response: ResponseWriter) -> None:
        await response.raw(first)
        for piece in pieces:
            await response.raw(piece)

    return script


def drip(data: bytes) -> Script:
    """Script that sends one byte now and then."""

    async def script(response: ResponseWriter) -> None:
        loop = asyncio.get_running_loop()
        for number in range(len(data)):
            await response.raw(data[number : number + 1])
            turn = loop.create_future()
            loop.call_later(0.02, turn.set_result, None)
            await turn

    return script


def send_and_close(data: bytes) -> Script:
    """Script that sends these bytes and closes the connection."""

    async def script(response: ResponseWriter) -> None:
        await response.raw(data)
        response.writer.close()

    return script


FOR_EVER = itertools.repeat
BAD_RESPONSES = {
    "garbage": send(bytes(range(256)) * 300),
    "a redirect": send(b"HTTP/1.1 307 Moved\r\nlocation: http://x/\r\ncontent-length: 0\r\n\r\n"),
    "no content": send(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "another protocol": send(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    "an endless head": send_for_ever(OK_HEAD, FOR_EVER(b"x-more: " + b"y" * 10_000 + b"\r\n")),
    "an endless header": send_for_ever(OK_HEAD + b"x-more: ", FOR_EVER(b"y" * 10_000)),
    "a head that drips": drip(OK_HEAD + b"x: " + b"y" * 1_000),
    "bare line feeds": send(OK_HEAD.replace(b"\r\n", b"\n") + b"content-length: 2\n\n{}"),
    "a folded header": send(OK_HEAD + b"x: a\r\n content-length: 2\r\n\r\n{}"),
    "a space before the colon": send(OK_HEAD + b"content-length : 2\r\n\r\n{}"),
    "two lengths": send(OK_HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} "),
    "a length of 5,000 digits": send(OK_HEAD + b"content-length: " + b"9" * 5_000 + b"\r\n\r\n{}"),
    "a signed length": send(OK_HEAD + b"content-length: +2\r\n\r\n{}"),
    "chunks with a length": send(
        OK_HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "2,000 interim responses": send(b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000),
    "a switch of protocols": send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"),
    "a hexadecimal prefix": send(CHUNKED_HEAD + b"0x2\r\n{}\r\n0\r\n\r\n"),
    "an underscore in a size": send(CHUNKED_HEAD + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n"),
    "a chunk longer than its size": send(CHUNKED_HEAD + b"2\r\n{}XX\r\n0\r\n\r\n"),
    "an endless size line": send_for_ever(CHUNKED_HEAD, FOR_EVER(b"0" * 10_000)),
    "endless trailers": send_for_ever(
        CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n", FOR_EVER(b"x: yyyyyyyyy\r\n" * 1_000)
    ),
    "more bytes than its length": send(OK_HEAD + b"content-length: 1\r\n\r\n{}{}{}"),
    "fewer bytes than its length": send_and_close(OK_HEAD + b"content-length: 99\r\n\r\n{}"),
    "fewer chunks than an end": send_and_close(CHUNKED_HEAD + b"2\r\n{}\r\n"),
    "an endless error": send_for_ever(
        b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n",
        FOR_EVER((b"400\r\n" + b"x" * 1_024 + b"\r\n") * 10),
    ),
    "a stream of comments": send_for_ever(STREAM_HEAD, FOR_EVER(b"8\r\n: ping\n\n\r\n" * 500)),
    "a stream that ends before its first token": send(STREAM_HEAD + b"0\r\n\r\n"),
}


@pytest.mark.parametrize("name", BAD_RESPONSES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_another_decode_instance_answers_if_one_responds_with(
    client: aiohttp.ClientSession, name: str, stream: bool
) -> None:
    bad, good = FakeEngine("d1", decode=BAD_RESPONSES[name]), FakeEngine("d2")
    settings = settings_with_short_timeouts(first_byte=0.5, idle=0.5)
    body = {"prompt": "hello", "stream": stream}
    async with run_router(FakeEngine("p1"), bad, good, settings=settings) as world, measure_stalls() as meter:
        for _ in range(2):
            async with client.post(world.url(), json=body) as response:
                text = await response.text()
            assert (response.status, text.count("p1 ")) == (200, 3)
        assert good.decodes
        assert bad.decodes
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
        pool = world.router.fleet["d1"].require_connection_pool()
        assert not pool.busy
        assert meter.longest_s < MAX_STALL_S


async def test_a_whole_response_whose_body_drips_ends_when_its_tokens_should_have(
    client: aiohttp.ClientSession,
) -> None:
    """Each byte comes within the idle time-out."""

    async def drip_body(response: ResponseWriter) -> None:
        await response.raw(OK_HEAD + b"content-length: 100000\r\n\r\n")
        await drip(b" " * 100_000)(response)

    settings = settings_with_short_timeouts(first_byte=0.5, idle=0.5)
    engines = FakeEngine("p1"), FakeEngine("d1", decode=drip_body)
    request = {"prompt": "hello", "max_tokens": 1}
    async with run_router(*engines, settings=settings) as world:
        async with asyncio.timeout(DEADLINE_S / 2), client.post(world.url(), json=request) as response:
            assert response.status == 504
        assert world.router.counters.legs["decode", "too_long"] == 1
        await wait_until(world.ledgers_are_empty, "nothing is in flight")


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")]
)
async def test_a_passed_through_response_that_drips_ends_when_its_tokens_should_have(
    client: aiohttp.ClientSession, path: str, limit: str
) -> None:
    async def drip_stream(response: ResponseWriter) -> None:
        await response.start_stream()
        await drip(b"1\r\n \r\n" * 20_000)(response)

    settings = settings_with_short_timeouts(first_byte=0.5, idle=0.5)
    async with run_router(FakeEngine("p1", decode=drip_stream), settings=settings) as world:
        body = {"input": "hello", "stream": True, limit: 1}
        async with asyncio.timeout(DEADLINE_S / 2), client.post(world.url(path), json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert world.router.counters.passed_through == {(path, "broken"): 1}


async def test_bytes_after_a_response_never_reach_another_client(client: aiohttp.ClientSession) -> None:
    """An engine that announces two bytes and sends a whole response more."""

    async def lie(response: ResponseWriter) -> None:
        secret = b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n"SECRET"'
        await response.raw(OK_HEAD + b"content-length: 2\r\n\r\n{}" + secret)
        await response.hang()

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=lie)) as world:
        for _ in range(5):
            async with client.post(world.url(), json={"prompt": "hello"}) as response:
                assert (response.status, "SECRET" in await response.text()) == (200, False)


BAD_PARAMS: dict[str, object] = {
    "blocks as text": {"remote_block_ids": "x"},
    "blocks that are no ids": {"remote_block_ids": [[1, -2], [None]]},
    "blocks that are nested too deep": {"remote_block_ids": [[[1]]]},
    "a port as text": {"remote_port": "1234"},
    "a port that is none": {"remote_port": 70_000},
    "an engine id as a number": {"remote_engine_id": 5},
    "no request id": {"remote_request_id": None},
    "not for decode": {"do_remote_prefill": "yes"},
}
BAD_PREFILLS = {
    "no JSON": b"<html>",
    "half of a JSON": b'{"choices":[{}],"kv_transf',
    "an array": b"[1]",
    "choices that are numbers": b'{"choices":[1]}',
    "choices that are an object": b'{"choices":{"0":1}}',
    "invalid UTF-8": b'{"choices":["\xff"]}',
    "nested params": b'{"kv_transfer_params":' + b"[" * 900 + b"]" * 900 + b"}",
}


def send_json(body: bytes) -> Script:
    async def script(response: ResponseWriter) -> None:
        await response.raw(OK_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)

    return script


def send_params(**changes: object) -> Script:
    async def script(response: ResponseWriter) -> None:
        params = make_kv_transfer_params(response.engine, **changes)
        await response.json(
            200, {"choices": [{}], "usage": {"prompt_tokens": 10**25}, "kv_transfer_params": params}
        )

    return script


DEEP = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "script",
    [
        *(pytest.param(send_json(body), id=name) for name, body in BAD_PREFILLS.items()),
        *(pytest.param(send_params(**changes), id=name) for name, changes in BAD_PARAMS.items()),  # type: ignore[arg-type]
        pytest.param(send_params(a_later_field=DEEP), id="params that are nested too deep"),
        *(
            pytest.param(BAD_RESPONSES[name], id=name)
            for name in ("garbage", "an endless head", "two lengths", "a redirect", "no content")
        ),
        pytest.param(drip(OK_HEAD + b"content-length: 900\r\n\r\n" + b" " * 900), id="a body that drips"),
    ],
)
async def test_the_decode_instance_computes_the_prompt_if_prefill_responds_with(
    client: aiohttp.ClientSession, script: Script
) -> None:
    settings = settings_with_short_timeouts(prefill=0.5)
    engines = FakeEngine("p1", prefill=script), FakeEngine("d1")
    async with run_router(*engines, settings=settings) as world, measure_stalls() as meter:
        async with asyncio.timeout(DEADLINE_S), client.post(world.url(), json={"prompt": "hi"}) as response:
            text = await response.text()
        assert (response.status, json.loads(text)["choices"][0]["text"]) == (200, "own own own ")
        assert "x-fulcrum-local-prefill" in response.headers
        assert "kv_transfer_params" not in world["d1"].decodes[0]
        assert meter.longest_s < MAX_STALL_S
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
