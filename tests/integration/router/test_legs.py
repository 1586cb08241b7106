"""Two legs over loopback, and every way in which one of them fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from fulcrum_core.values import Role
from fulcrum_router.counters import Outcome
from fulcrum_router.policy import PairKey, Proof
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    Answering,
    FakeEngine,
    Script,
    World,
    answer_status,
    close_at_once,
    give_handoff,
    handoff,
    hang,
    quick_settings,
    running,
    stream_then,
    until,
)

PROMPT = {"model": "m", "prompt": "once upon a time", "max_tokens": 3}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that opens a connection per request, so that tests do not meet each other."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(DEADLINE_S)
    ) as session:
        yield session


def four(**scripts: Script) -> list[FakeEngine]:
    """Two prefill and two decode engines; `p1`, `d1` … replaces a script."""
    engines = [FakeEngine(name) for name in ("p1", "p2", "d1", "d2")]
    for engine in engines:
        if engine.name in scripts:
            setattr(engine, "prefill" if engine.name.startswith("p") else "decode", scripts[engine.name])
    return engines


async def text_of(response: aiohttp.ClientResponse) -> str:
    """The text of a whole answer, streamed or not."""
    if "event-stream" not in response.headers["content-type"]:
        return str((await response.json())["choices"][0]["text"])
    events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def ask(client: aiohttp.ClientSession, world: World, **fields: Any) -> tuple[int, str, dict[str, str]]:
    """One request: status, text and the router's own headers."""
    async with client.post(world.url(), json={**PROMPT, **fields}) as response:
        ours = {k.lower(): v for k, v in response.headers.items() if k.lower().startswith("x-fulcrum")}
        text = await text_of(response) if response.status == 200 else await response.text()
        return response.status, text, ours


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_decode_gets_the_hand_off_as_prefill_gave_it(
    client: aiohttp.ClientSession, stream: bool
) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        answer = await ask(
            client, world, stream=stream, min_tokens=2, stream_options={"include_usage": False}
        )
        given = handoff(world["p1"])
        del given["remote_prefill_cached_tokens"]
        options = {"include_usage": stream}  # the router asks where a stream's client did not
        sent = {**PROMPT, "stream": stream, "min_tokens": 2, "stream_options": options}
        asked_of_p = {**PROMPT, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
        asked_of_p["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        assert answer == (200, "p1 p1 p1 ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d1"})
        assert world["p1"].prefills == [asked_of_p]
        assert world["d1"].decodes == [{**sent, "kv_transfer_params": given}]
        assert world.ledgers_are_empty()


async def test_both_legs_carry_the_same_request_id_and_trace(client: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        headers = {"x-request-id": "mine-1", "traceparent": "00-1-2-01", "tracestate": "a=b"}
        async with client.post(world.url(), json=PROMPT, headers=headers) as response:
            assert response.status == 200
        await ask(client, world)
        legs = [world["p1"].asked, world["d1"].asked]
        first = [{name: leg[0].headers[name] for name in headers} for leg in legs]
        made = {leg[1].headers["x-request-id"] for leg in legs}
        assert first == [headers, headers]
        assert len(made) == 1
        assert made != {"mine-1"}


async def test_fields_of_the_router_are_dropped_and_a_tier_s_priority_is_put_in(
    client: aiohttp.ClientSession,
) -> None:
    evil = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
        "ec_transfer_params": {},
    }
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        body = {**PROMPT, **evil, "priority": -99, "request_id": "mine"}
        async with client.post(world.url(), json=body, headers={"x-customer-tier": "premium"}) as response:
            assert response.status == 200
        prefill, decode = world["p1"].prefills[0], world["d1"].decodes[0]
        assert decode["kv_transfer_params"]["remote_host"] == "127.0.0.1"
        assert [set(leg) & {"ec_transfer_params", "request_id"} for leg in (prefill, decode)] == [
            set(),
            set(),
        ]
        assert [leg["priority"] for leg in (prefill, decode)] == [-5, -5]
        assert world.router.books.tier("premium").ended[Outcome.OK] == 1


async def refused_handoff(answering: Answering) -> None:
    await answering.json(200, {"choices": [{"finish_reason": "abort"}], "kv_transfer_params": None})


async def half_an_answer(answering: Answering) -> None:
    await answering.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
    answering.close()


async def not_http(answering: Answering) -> None:
    await answering.raw(b"220 mail.example.org ESMTP\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        pytest.param(answer_status(503), "status", id="answers 503"),
        pytest.param(answer_status(500), "status", id="answers 500"),
        pytest.param(close_at_once, "closed", id="closes the connection"),
        pytest.param(half_an_answer, "closed", id="closes in mid-answer"),
        pytest.param(hang, "timeout", id="hangs"),
        pytest.param(refused_handoff, "aborted", id="drains and aborts"),
        pytest.param(not_http, "malformed", id="does not speak HTTP"),
    ],
)
async def test_a_failed_prefill_leg_goes_to_another_instance(
    client: aiohttp.ClientSession, script: Script, failure: str
) -> None:
    settings = quick_settings(prefill=0.1)
    async with running(*four(p1=script), settings=settings) as world:
        answer = await ask(client, world, stream=True)
        ours = {"x-fulcrum-prefill": "p2", "x-fulcrum-decode": "d1"}
        assert answer == (200, "p2 p2 p2 ", ours)
        assert world.router.books.retries == {("prefill", failure): 1}
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "failure"),
    [
        pytest.param(answer_status(503), "status", id="answers 503"),
        pytest.param(close_at_once, "closed", id="closes before the first byte"),
        pytest.param(half_an_answer, "closed", id="closes in mid-answer"),
        pytest.param(hang, "timeout", id="hangs"),
        pytest.param(stream_then(0, close_at_once), "closed", id="dies after the head"),
    ],
)
async def test_a_decode_leg_that_fails_before_its_first_byte_is_unseen_by_the_client(
    client: aiohttp.ClientSession, script: Script, failure: str, stream: bool
) -> None:
    settings = quick_settings(first_byte=0.1)
    async with running(*four(d1=script), settings=settings) as world:
        answer = await ask(client, world, stream=stream)
        ours = {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d2"}
        assert answer == (200, "p1 p1 p1 ", ours)
        assert world.router.books.retries == {("decode", failure): 1}
        assert len(world["p1"].prefills) == 2, "a hand-off that may have been fetched is not used again"
        assert world.ledgers_are_empty()


async def only_the_end(answering: Answering) -> None:
    await answering.event("[DONE]")
    await answering.raw(b"0\r\n\r\n")


async def abort_after_nothing(answering: Answering) -> None:
    await answering.json(200, {"choices": [{"text": "", "finish_reason": "abort"}]})


async def test_an_abort_that_nobody_asked_for_is_a_failure(client: aiohttp.ClientSession) -> None:
    async with running(*four(d1=abort_after_nothing)) as world:
        status, text, _ = await ask(client, world)
        assert (status, text) == (200, "p1 p1 p1 ")
        assert world.router.books.retries == {("decode", "aborted"): 1}


async def end_after_usage(answering: Answering) -> None:
    await answering.event('{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}')
    await only_the_end(answering)


@pytest.mark.parametrize("script", [only_the_end, end_after_usage], ids=["its end", "usage and end"])
async def test_a_stream_without_a_token_is_a_failure(client: aiohttp.ClientSession, script: Script) -> None:
    """What vLLM sends for a new stream while it shuts down."""
    async with running(*four(d1=stream_then(0, script))) as world:
        answer = await ask(client, world, stream=True)
        assert answer == (200, "p1 p1 p1 ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d2"})
        assert world.router.books.retries == {("decode", "aborted"): 1}
        assert world.ledgers_are_empty()


async def test_an_unfetched_hand_off_serves_another_decode_instance(client: aiohttp.ClientSession) -> None:
    async with running(*four()) as world:
        world.servers["d1"].close()
        status, text, _ = await ask(client, world)
        assert (status, text, len(world["p1"].prefills)) == (200, "p1 p1 p1 ", 1)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(answer_status(503), "prefill_failed", id="every prefill answers 503"),
        pytest.param(close_at_once, "prefill_failed", id="every prefill closes"),
    ],
)
async def test_without_any_prefill_the_decode_instance_computes_the_prompt_and_says_so(
    client: aiohttp.ClientSession, script: Script, reason: str
) -> None:
    async with running(*four(p1=script, p2=script)) as world:
        answer = await ask(client, world, stream=True)
        ours = {"x-fulcrum-decode": "d1", "x-fulcrum-local-prefill": reason}
        assert answer == (200, "own own own ", ours)
        assert (world.router.books.local, world.router.books.local_prefills) == ({reason: 1}, 1)
        assert world["d1"].decodes == [{**PROMPT, "stream": True}]
        assert world.ledgers_are_empty()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"remote_host": "192.0.2.1"}, "foreign_host", id="names another host"),
        pytest.param({"remote_request_id": None}, "incomplete_handoff", id="lacks a field"),
    ],
)
async def test_a_malformed_hand_off_never_reaches_decode(
    client: aiohttp.ClientSession, changes: dict[str, Any], reason: str
) -> None:
    async def script(answering: Answering) -> None:
        await answering.json(200, {"kv_transfer_params": handoff(answering.engine, **changes)})

    async with running(FakeEngine("p1", prefill=script), FakeEngine("d1")) as world:
        status, text, ours = await ask(client, world)
        assert (status, text, ours["x-fulcrum-local-prefill"]) == (200, "own own own ", reason)
        assert world["d1"].decodes == [PROMPT]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"prompt": ["a", "b"]}, "several_prompts", id="several prompts"),
        pytest.param({"n": 2}, "several_answers", id="several answers"),
    ],
)
async def test_what_one_hand_off_cannot_serve_is_not_disaggregated(
    client: aiohttp.ClientSession, fields: dict[str, Any], reason: str
) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        status, _, ours = await ask(client, world, **fields)
        assert (status, ours["x-fulcrum-local-prefill"], world["p1"].asked) == (200, reason, [])
        assert world.router.books.local_prefills == 0, "by design, not by fault"


@pytest.mark.parametrize("status", [400, 404, 429], ids=str)
@pytest.mark.parametrize("where", ["p1", "d1"])
async def test_the_engine_s_word_on_a_bad_request_goes_through(
    client: aiohttp.ClientSession, where: str, status: int
) -> None:
    async with running(*four(**{where: answer_status(status)})) as world:
        got, text, _ = await ask(client, world)
        assert (got, json.loads(text)) == (status, {"error": {"message": "no", "code": status}})
        books = world.router.books.tier("default")
        assert (books.ended[Outcome.INVALID], books.offered) == (1, 0)
        assert world.ledgers_are_empty()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        pytest.param(answer_status(503), 503, id="503 stays 503"),
        pytest.param(answer_status(500), 502, id="500 is a bad gateway"),
        pytest.param(close_at_once, 502, id="closing is a bad gateway"),
        pytest.param(hang, 504, id="hanging is a time-out"),
    ],
)
async def test_when_nobody_answers_the_client_is_told_why(
    client: aiohttp.ClientSession, script: Script, status: int
) -> None:
    settings = quick_settings(first_byte=0.05)
    engines = [FakeEngine(name, decode=script) for name in ("p1", "d1", "d2")]
    async with (
        running(*engines, settings=settings) as world,
        client.post(world.url(), json=PROMPT) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (status, status, "upstream_error")
        assert ("retry-after" in response.headers) == (status == 503)
        assert world.router.books.tier("default").ended[Outcome.FAILED] == 1


async def test_without_instances_the_answer_is_503_and_come_back(client: aiohttp.ClientSession) -> None:
    async with running() as world, client.post(world.url(), json=PROMPT) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")


async def abort_event(answering: Answering) -> None:
    await answering.event(json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}))
    await answering.event("[DONE]")
    await answering.raw(b"0\r\n\r\n")


async def half_a_chunk(answering: Answering) -> None:
    await answering.raw(b'40\r\ndata: {"choices": [{"te')
    answering.close()


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(close_at_once, id="the engine closes"),
        pytest.param(hang, id="the engine hangs"),
        pytest.param(abort_event, id="the engine aborts"),
        pytest.param(half_a_chunk, id="the engine dies in mid-chunk"),
    ],
)
async def test_a_broken_stream_ends_in_an_error_event_and_no_clean_end(then: Script) -> None:
    seen = asyncio.Event()

    async def once_seen(answering: Answering) -> None:
        await seen.wait()
        await then(answering)

    settings = quick_settings(idle=0.1)
    async with running(*four(d1=stream_then(2, once_seen)), settings=settings) as world:
        raw = await raw_stream(world, seen)
        events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        error = json.loads(events[-1])["error"]
        assert (len(events), error["type"], error["code"]) == (3, "upstream_error", 502)
        assert not raw.endswith("0\r\n\r\n")
        assert "[DONE]" not in raw
        assert world.router.books.tier("default").ended[Outcome.BROKEN] == 1
        assert world.ledgers_are_empty()


async def raw_stream(world: World, seen: asyncio.Event) -> str:
    """The bytes of a streamed answer until the router closes; `seen` is set once two events are there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    content = b""
    async with asyncio.timeout(DEADLINE_S):
        while data := await reader.read(65536):
            content += data
            if content.count(b"data: ") >= 2:
                seen.set()
    writer.close()
    return content.decode()


async def leave_when(world: World, engine: FakeEngine, *, after: bytes = b"") -> None:
    """A client of a stream that leaves as soon as the engine was asked, or has said this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: bool(engine.asked), "the engine is asked")
    if after:
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(after)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("scripts", "engine"),
    [
        pytest.param({"p1": hang}, "p1", id="in prefill"),
        pytest.param({"d1": hang}, "d1", id="before decode's first byte"),
        pytest.param({"d1": stream_then(2, hang)}, "d1", id="in mid-stream"),
    ],
)
async def test_a_client_that_leaves_takes_its_leg_along(scripts: dict[str, Script], engine: str) -> None:
    async with running(*four(**scripts)) as world:
        await leave_when(world, world[engine])
        await until(lambda: bool(world[engine].abandoned), "the engine sees the disconnect")
        await until(world.ledgers_are_empty, "the books are clear")
        books = world.router.books.tier("default")
        assert (books.offered, books.ended[Outcome.CANCELLED]) == (1, 1)


async def end_and_hang(answering: Answering) -> None:
    await answering.event("[DONE]")
    await answering.hang()


async def test_a_client_that_leaves_with_the_last_event_has_its_whole_answer() -> None:
    """Engines send the end of the body in a packet of its own, and many clients do not wait for it."""
    async with running(FakeEngine("p1"), FakeEngine("d1", decode=stream_then(3, end_and_hang))) as world:
        await leave_when(world, world["d1"], after=b"data: [DONE]\n\n")
        await until(world.ledgers_are_empty, "the books are clear")
        books = world.router.books
        assert (books.tier("default").ended[Outcome.OK], books.output_tokens) == (1, 3)
        assert world.router.pairs[PairKey("p1", "d1")].counts[Proof.UNKNOWN] == 1
        await until(lambda: bool(world["d1"].abandoned), "the engine is not kept waiting")


async def test_a_kept_connection_that_died_is_replaced_without_a_retry(client: aiohttp.ClientSession) -> None:
    seen = 0

    async def only_once_per_connection(answering: Answering) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            return answering.close()  # the second request on the kept connection
        await give_handoff(answering)

    async with running(FakeEngine("p1", prefill=only_once_per_connection), FakeEngine("d1")) as world:
        first, second = await ask(client, world), await ask(client, world)
        assert (first[:2], second[:2], seen) == ((200, "p1 p1 p1 "), (200, "p1 p1 p1 "), 3)
        assert world.router.books.retries == {}


async def test_connections_to_engines_are_kept(client: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        for _ in range(5):
            await ask(client, world)
        asked = [len(world[name].prefills) + len(world[name].decodes) for name in ("p1", "d1")]
        assert asked == [5, 5]
        assert max(world["p1"].connections, world["d1"].connections) <= 2, "one for requests, one for probes"


async def test_a_slow_client_holds_the_engine_back() -> None:
    chunk = b"10000\r\n" + b"data: " + b"x" * (0x10000 - 8) + b"\n\n\r\n"
    sent = 0

    async def flood(answering: Answering) -> None:
        nonlocal sent
        await answering.start_stream()
        for _ in range(4096):
            await answering.raw(chunk)
            sent += len(chunk)

    async with running(FakeEngine("p1"), FakeEngine("d1", decode=flood)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        body = json.dumps({**PROMPT, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while sent != before or not sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 32 * 1024 * 1024, "kernel buffers and a little more, not the whole stream"
        writer.transport.abort()
        await until(world.ledgers_are_empty, "the books are clear")


async def test_an_instance_that_refuses_is_ejected_and_comes_back(client: aiohttp.ClientSession) -> None:
    async with running(*four()) as world:
        p1, port = world.router.fleet["p1"], world["p1"].port
        world.servers["p1"].close()
        await ask(client, world)
        assert (p1.serving, p1.health.ejected) == (False, True)
        back = await asyncio.start_server(world["p1"].serve, "127.0.0.1", port)
        await until(lambda: p1.serving, "a probe brings it back")
        back.close()


async def test_a_stale_hand_off_is_dropped(client: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.router.fleet["p1"].kv_lease_s = 0.0
        answer = await ask(client, world)
        ours = {
            "x-fulcrum-prefill": "p1",
            "x-fulcrum-decode": "d1",
            "x-fulcrum-local-prefill": "stale_handoff",
        }
        assert answer == (200, "own own own ", ours)


async def test_a_single_instance_serves_both_phases_in_one_leg(client: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("d1")) as world:
        world.router.fleet["d1"].assign(Role.BOTH)
        assert await ask(client, world) == (200, "own own own ", {"x-fulcrum-decode": "d1"})
        assert (world["d1"].prefills, len(world["d1"].decodes)) == ([], 1)


async def test_decode_stays_where_the_prefill_ran_if_that_became_decode(
    client: aiohttp.ClientSession,
) -> None:
    async def flip_meanwhile(answering: Answering) -> None:
        world.router.fleet["p1"].assign(Role.DECODE)
        await give_handoff(answering)

    async with running(FakeEngine("p1", prefill=flip_meanwhile), FakeEngine("d1")) as world:
        answer = await ask(client, world)
        assert answer == (200, "own own own ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "p1"})
        assert world["p1"].decodes == [PROMPT], "its own prefix cache holds the prompt"


async def test_tokens_of_a_stream_are_counted_while_it_runs(client: aiohttp.ClientSession) -> None:
    go_on = asyncio.Event()

    async def wait(_: Answering) -> None:
        await go_on.wait()

    async def pause_after_five(answering: Answering) -> None:
        await stream_then(5, wait)(answering)
        await answering.event("[DONE]")
        await answering.raw(b"0\r\n\r\n")

    async with running(FakeEngine("p1"), FakeEngine("d1", decode=pause_after_five)) as world:
        request = asyncio.ensure_future(ask(client, world, stream=True))
        ledger = world.router.fleet["d1"].ledger
        await until(lambda: ledger.decode_tokens == 7 + 5, "prompt and output are in the books")
        go_on.set()
        await request
        assert (world.router.books.output_tokens, ledger.decode_tokens) == (5, 0)
