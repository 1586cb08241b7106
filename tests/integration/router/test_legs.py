"""Both legs of a request over loopback: what each engine is sent, and what the client gets when one fails.

A router in the test's process, over fake engines whose responses are scripts.
"""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_core.values import Role
from fulcrum_router.counters import RequestOutcome
from fulcrum_router.policy import PairKey, TransferOutcome
from fulcrum_router.policy.faults.retry_budget import FLOOR
from fulcrum_router.policy.journey import StopReason
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    build_post,
    close_connection,
    make_kv_transfer_params,
    never_respond,
    respond_with_status,
    run_router,
    send_kv_transfer_params,
    send_source_name,
    settings_with_short_timeouts,
    stream_tokens_then,
)
from tests.waiting import wait_until


def build_four_engines(**scripts: Script) -> list[FakeEngine]:
    """Two prefill and two decode engines; a keyword such as `p1` replaces the script of that engine."""
    engines = [FakeEngine(name) for name in ("p1", "p2", "d1", "d2")]
    for engine in engines:
        if engine.name in scripts:
            setattr(engine, "prefill" if engine.name.startswith("p") else "decode", scripts[engine.name])
    return engines


def prefer_first_prefill_instance(world: RunningRouter) -> None:
    """Predict slow prefills on p2: a busy machine makes p1 look slower than p2 after its first prompt."""
    world.router.fleet["p2"].prefill_model = PrefillModel(c0=DEADLINE_S, c1=0.0, c2=0.0)


async def read_text(response: aiohttp.ClientResponse) -> str:
    """The text of a whole response, streamed or not."""
    if "event-stream" not in response.headers["content-type"]:
        return str((await response.json())["choices"][0]["text"])
    events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def request_completion(
    client: aiohttp.ClientSession, world: RunningRouter, **fields: Any
) -> tuple[int, str, dict[str, str]]:
    """Send a request; return the status, the text and the router's own headers."""
    async with client.post(world.url(), json={**PROMPT, **fields}) as response:
        fulcrum_headers = {
            k.lower(): v for k, v in response.headers.items() if k.lower().startswith("x-fulcrum")
        }
        text = await read_text(response) if response.status == 200 else await response.text()
        return response.status, text, fulcrum_headers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_decode_gets_the_kv_transfer_params_of_the_prefill_response(
    client: aiohttp.ClientSession, stream: bool
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        response = await request_completion(
            client, world, stream=stream, min_tokens=2, stream_options={"include_usage": False}
        )
        given = make_kv_transfer_params(world["p1"])
        del given["remote_prefill_cached_tokens"]
        options = {"include_usage": stream}  # the router requests the usage of every stream
        sent = {**PROMPT, "stream": stream, "min_tokens": 2, "stream_options": options}
        prefill_body = {**PROMPT, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
        prefill_body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        assert response == (200, "p1 p1 p1 ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d1"})
        assert world["p1"].prefills == [prefill_body]
        assert world["d1"].decodes == [{**sent, "kv_transfer_params": given}]
        assert world.ledgers_are_empty()


async def test_both_legs_carry_the_same_request_id_and_trace(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        headers = {"x-request-id": "mine-1", "traceparent": "00-1-2-01", "tracestate": "a=b"}
        async with client.post(world.url(), json=PROMPT, headers=headers) as response:
            assert response.status == 200
        await request_completion(client, world)
        legs = [world["p1"].requests, world["d1"].requests]
        first = [{name: leg[0].headers[name] for name in headers} for leg in legs]
        made = {leg[1].headers["x-request-id"] for leg in legs}
        assert first == [headers, headers]
        assert len(made) == 1
        assert made != {"mine-1"}


@pytest.mark.parametrize("decode", [send_source_name(), respond_with_status(404), respond_with_status(500)])
@pytest.mark.parametrize("stream", [True, False])
async def test_each_response_has_the_request_id_once(
    client: aiohttp.ClientSession, decode: Script, stream: bool
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=decode)) as world:
        body, headers = {**PROMPT, "stream": stream}, {"x-request-id": "mine-1"}
        async with client.post(world.url(), json=body, headers=headers) as response:
            assert response.headers.getall("x-request-id") == ["mine-1"]
        async with client.post(world.url(), data=b"{") as response:
            assert (response.status, len(response.headers.getall("x-request-id"))) == (400, 1)


async def test_reserved_fields_are_dropped_and_the_tier_priority_is_set(
    client: aiohttp.ClientSession,
) -> None:
    evil = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
        "ec_transfer_params": {},
    }
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
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
        assert world.router.counters.get_tier("premium").requests_by_outcome[RequestOutcome.OK] == 1


async def respond_with_aborted_prefill(response: ResponseWriter) -> None:
    await response.json(200, {"choices": [{"finish_reason": "abort"}], "kv_transfer_params": None})


async def send_partial_response(response: ResponseWriter) -> None:
    await response.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
    response.close()


async def send_smtp_banner(response: ResponseWriter) -> None:
    await response.raw(b"220 mail.example.org ESMTP\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        pytest.param(respond_with_status(503), "status", id="returns 503"),
        pytest.param(respond_with_status(429), "status", id="returns 429"),
        pytest.param(respond_with_status(500), "status", id="returns 500"),
        pytest.param(close_connection, "closed", id="closes the connection"),
        pytest.param(send_partial_response, "closed", id="closes during the response"),
        pytest.param(never_respond, "timeout", id="hangs"),
        pytest.param(respond_with_aborted_prefill, "aborted", id="drains and aborts"),
        pytest.param(send_smtp_banner, "malformed", id="does not speak HTTP"),
    ],
)
async def test_a_failed_prefill_leg_is_retried_on_another_instance(
    client: aiohttp.ClientSession, script: Script, failure: str
) -> None:
    settings = settings_with_short_timeouts(prefill=0.1)
    async with run_router(*build_four_engines(p1=script), settings=settings) as world:
        response = await request_completion(client, world, stream=True)
        fulcrum_headers = {"x-fulcrum-prefill": "p2", "x-fulcrum-decode": "d1"}
        assert response == (200, "p2 p2 p2 ", fulcrum_headers)
        assert world.router.counters.retries == {("prefill", failure): 1}
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "failure"),
    [
        pytest.param(respond_with_status(503), "status", id="returns 503"),
        pytest.param(respond_with_status(429), "status", id="returns 429"),
        pytest.param(close_connection, "closed", id="closes before the first byte"),
        pytest.param(send_partial_response, "closed", id="closes during the response"),
        pytest.param(never_respond, "timeout", id="hangs"),
        pytest.param(stream_tokens_then(0, close_connection), "closed", id="dies after the head"),
    ],
)
async def test_a_decode_failure_before_the_first_byte_is_invisible_to_the_client(
    client: aiohttp.ClientSession, script: Script, failure: str, stream: bool
) -> None:
    settings = settings_with_short_timeouts(first_byte=0.1)
    async with run_router(*build_four_engines(d1=script), settings=settings) as world:
        prefer_first_prefill_instance(world)
        response = await request_completion(client, world, stream=stream)
        fulcrum_headers = {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d2"}
        assert response == (200, "p1 p1 p1 ", fulcrum_headers)
        assert world.router.counters.retries == {("decode", failure): 1}
        assert len(world["p1"].prefills) == 2, "KV that may have been fetched is not used again"
        assert world.ledgers_are_empty()


async def send_end_of_stream(response: ResponseWriter) -> None:
    await response.event("[DONE]")
    await response.raw(b"0\r\n\r\n")


async def respond_with_abort(response: ResponseWriter) -> None:
    await response.json(200, {"choices": [{"text": "", "finish_reason": "abort"}]})


async def test_finish_reason_abort_counts_as_a_failed_leg(client: aiohttp.ClientSession) -> None:
    async with run_router(*build_four_engines(d1=respond_with_abort)) as world:
        prefer_first_prefill_instance(world)
        status, text, _ = await request_completion(client, world)
        assert (status, text) == (200, "p1 p1 p1 ")
        assert world.router.counters.retries == {("decode", "aborted"): 1}


async def send_usage_and_end(response: ResponseWriter) -> None:
    await response.event('{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}')
    await send_end_of_stream(response)


@pytest.mark.parametrize(
    "script", [send_end_of_stream, send_usage_and_end], ids=["end only", "usage and end"]
)
async def test_a_stream_without_a_token_counts_as_a_failed_leg(
    client: aiohttp.ClientSession, script: Script
) -> None:
    """vLLM sends this for a new stream while it shuts down."""
    async with run_router(*build_four_engines(d1=stream_tokens_then(0, script))) as world:
        prefer_first_prefill_instance(world)
        response = await request_completion(client, world, stream=True)
        assert response == (200, "p1 p1 p1 ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "d2"})
        assert world.router.counters.retries == {("decode", "aborted"): 1}
        assert world.ledgers_are_empty()


async def test_kv_that_was_not_fetched_is_used_by_another_decode_instance(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(*build_four_engines()) as world:
        world.servers["d1"].close()
        status, text, _ = await request_completion(client, world)
        assert (status, text, len(world["p1"].prefills)) == (200, "p1 p1 p1 ", 1)


async def test_decode_prefills_locally_when_every_prefill_instance_fails(
    client: aiohttp.ClientSession,
) -> None:
    script = respond_with_status(503)
    async with run_router(*build_four_engines(p1=script, p2=script)) as world:
        response = await request_completion(client, world, stream=True)
        fulcrum_headers = {"x-fulcrum-decode": "d1", "x-fulcrum-local-prefill": "prefill_failed"}
        assert response == (200, "own own own ", fulcrum_headers)
        assert (world.router.counters.local_prefills, world.router.counters.unexpected_local_prefills) == (
            {"prefill_failed": 1},
            1,
        )
        usage = {"stream_options": {"include_usage": True}}
        assert world["d1"].decodes == [{**PROMPT, "stream": True, **usage}]
        assert world.ledgers_are_empty()


@pytest.mark.parametrize(
    "closing", [("p1", "p2"), ("d1", "d2"), ("p1", "d1", "d2")], ids=["prefill", "decode", "both"]
)
async def test_a_request_after_which_two_engines_died_reaches_no_third(
    client: aiohttp.ClientSession, closing: tuple[str, ...]
) -> None:
    scripts = dict.fromkeys(closing, close_connection)
    settings = replace(settings_with_short_timeouts(), deflects=False)  # p2 counts as slow
    async with run_router(*build_four_engines(**scripts), settings=settings) as world:
        prefer_first_prefill_instance(world)
        status, text, _ = await request_completion(client, world)
        reached = [name for name in closing if world[name].requests]
        assert (status, len(reached)) == (502, 2)
        assert "two engines failed on this request" in json.loads(text)["error"]["message"]
        assert dict(world.router.counters.stopped_requests) == {StopReason.QUERY_OF_DEATH: 1}
        assert world.ledgers_are_empty()


async def test_retries_of_all_requests_stay_within_the_budget(client: aiohttp.ClientSession) -> None:
    """A service that fails as a whole gets little more load than its clients send."""
    engines = [FakeEngine(name, decode=respond_with_status(503)) for name in ("d1", "d2", "d3")]
    async with run_router(*engines) as world:
        responses = await asyncio.gather(*(request_completion(client, world) for _ in range(60)))
        assert {status for status, _, _ in responses} == {503}
        assert sum(len(engine.requests) for engine in engines) <= 60 + FLOOR + 0.2 * 60
        assert world.router.counters.stopped_requests[StopReason.RETRY_BUDGET] > 0
        assert world.ledgers_are_empty()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"remote_host": "192.0.2.1"}, "wrong_remote_host", id="names another host"),
        pytest.param({"remote_request_id": None}, "incomplete_kv_transfer_params", id="a field is missing"),
    ],
)
async def test_malformed_kv_transfer_params_never_reach_decode(
    client: aiohttp.ClientSession, changes: dict[str, Any], reason: str
) -> None:
    async def script(response: ResponseWriter) -> None:
        await response.json(200, {"kv_transfer_params": make_kv_transfer_params(response.engine, **changes)})

    async with run_router(FakeEngine("p1", prefill=script), FakeEngine("d1")) as world:
        status, text, fulcrum_headers = await request_completion(client, world)
        assert (status, text, fulcrum_headers["x-fulcrum-local-prefill"]) == (200, "own own own ", reason)
        assert world["d1"].decodes == [PROMPT]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"prompt": ["a", "b"]}, "multiple_prompts", id="several prompts"),
        pytest.param({"n": 2}, "multiple_choices", id="several choices"),
        pytest.param({"use_beam_search": True}, "multiple_choices", id="beam search"),
        pytest.param({"prompt_logprobs": 0}, "prompt_logprobs", id="log-probabilities of the prompt"),
        pytest.param({"echo": True, "logprobs": 1}, "prompt_logprobs", id="echo with log-probabilities"),
        pytest.param({"echo": True, "messages": []}, "prompt_logprobs", id="echo of a chat"),
        pytest.param({"truncate_prompt_tokens": -1}, "truncated_prompt", id="truncation by max_tokens"),
        pytest.param({"truncate_prompt_tokens": "-1"}, "truncated_prompt", id="… as text, which vLLM reads"),
    ],
)
async def test_a_request_that_one_kv_transfer_cannot_serve_is_prefilled_locally(
    client: aiohttp.ClientSession, fields: dict[str, Any], reason: str
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        status, _, fulcrum_headers = await request_completion(client, world, **fields)
        assert (status, fulcrum_headers["x-fulcrum-local-prefill"], world["p1"].requests) == (200, reason, [])
        assert world.router.counters.unexpected_local_prefills == 0, "expected, not a failure"
        assert not world.router.pairs.pairs, "a client cannot make a pair look broken"


async def test_a_decode_engine_computes_a_prompt_that_prefill_would_make_late(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(*build_four_engines()) as world:
        world.router.journeys.deflects = True
        for name in ("p1", "p2"):
            ledger = world.router.fleet[name].ledger
            ledger.add_prefill(tokens=1, predicted_s=10 * DEADLINE_S, now_s=time.monotonic())
        status, text, fulcrum_headers = await request_completion(client, world)
        prompts_of_prefill = [len(world[name].requests) for name in ("p1", "p2")]
        assert (status, text, fulcrum_headers, prompts_of_prefill) == (
            200,
            "own own own ",
            {"x-fulcrum-decode": "d1", "x-fulcrum-local-prefill": "deflected"},
            [0, 0],
        )
        assert world.router.counters.unexpected_local_prefills == 0, "expected, not a failure"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_token_of_a_stream_is_awaited(client: aiohttp.ClientSession, *, stream: bool) -> None:
    """No prompt is deflected in front of it."""
    awaited: list[int] = []

    async def script(response: ResponseWriter) -> None:
        ledgers = [world.router.fleet[name].ledger for name in ("p1", "d1")]
        awaited.extend(len(ledger.awaited_first_tokens) for ledger in ledgers)
        await send_source_name()(response)

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=script)) as world:
        status, _, _ = await request_completion(client, world, stream=stream)
        assert (status, awaited) == (200, [0, int(stream)])
        assert world.ledgers_are_empty()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt_logprobs": None}, id="null"),
        pytest.param({"echo": True}, id="echo alone"),
        pytest.param({"echo": False, "logprobs": 1}, id="log-probabilities of the output"),
        pytest.param({"truncate_prompt_tokens": 5}, id="truncation to the same length in both legs"),
    ],
)
async def test_without_log_probabilities_of_the_prompt_its_kv_is_transferred(
    client: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        _, text, _ = await request_completion(client, world, **fields)
        assert text == "p1 p1 p1 "


@pytest.mark.parametrize("status", [400, 404], ids=str)
@pytest.mark.parametrize("where", ["p1", "d1"])
async def test_a_client_error_of_an_engine_is_passed_through(
    client: aiohttp.ClientSession, where: str, status: int
) -> None:
    async with run_router(*build_four_engines(**{where: respond_with_status(status)})) as world:
        got, text, _ = await request_completion(client, world)
        assert (got, json.loads(text)) == (status, {"error": {"message": "no", "code": status}})
        counters = world.router.counters.get_tier("default")
        assert (counters.requests_by_outcome[RequestOutcome.INVALID], counters.offered) == (1, 1)
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("status", [400, 499], ids=["a usual status", "a status without a name"])
@pytest.mark.parametrize("where", ["p1", "d1"])
async def test_a_client_error_in_chunks_is_passed_through(
    client: aiohttp.ClientSession, where: str, status: int
) -> None:
    async def reject(response: ResponseWriter) -> None:
        await response.raw(
            b"HTTP/1.1 %d No\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" % status
        )

    async with run_router(*build_four_engines(**{where: reject})) as world:
        got, text, _ = await request_completion(client, world)
        assert (got, text) == (status, "{}")
        counters = world.router.counters.get_tier("default")
        assert counters.requests_by_outcome[RequestOutcome.INVALID] == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        pytest.param(respond_with_status(503), 503, id="503 stays 503"),
        pytest.param(respond_with_status(429), 503, id="429 is not the client's"),
        pytest.param(respond_with_status(500), 502, id="500 is a bad gateway"),
        pytest.param(close_connection, 502, id="closing is a bad gateway"),
        pytest.param(never_respond, 504, id="hanging is a time-out"),
    ],
)
async def test_the_error_status_names_the_cause_when_every_instance_fails(
    client: aiohttp.ClientSession, script: Script, status: int
) -> None:
    settings = settings_with_short_timeouts(first_byte=0.05)
    engines = [FakeEngine(name, decode=script) for name in ("p1", "d1", "d2")]
    async with (
        run_router(*engines, settings=settings) as world,
        client.post(world.url(), json=PROMPT) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (status, status, "upstream_error")
        assert ("retry-after" in response.headers) == (status == 503)
        assert world.router.counters.get_tier("default").requests_by_outcome[RequestOutcome.FAILED] == 1


async def test_without_instances_the_response_is_503_with_retry_after(client: aiohttp.ClientSession) -> None:
    async with run_router() as world, client.post(world.url(), json=PROMPT) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")


async def send_abort_event(response: ResponseWriter) -> None:
    await response.event(json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}))
    await response.event("[DONE]")
    await response.raw(b"0\r\n\r\n")


async def send_partial_chunk(response: ResponseWriter) -> None:
    await response.raw(b'40\r\ndata: {"choices": [{"te')
    response.close()


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(close_connection, id="the engine closes"),
        pytest.param(never_respond, id="the engine hangs"),
        pytest.param(send_abort_event, id="the engine aborts"),
        pytest.param(send_partial_chunk, id="the engine dies inside a chunk"),
    ],
)
async def test_a_broken_stream_ends_in_an_error_event_and_no_clean_end(then: Script) -> None:
    seen = asyncio.Event()

    async def when_client_has_events(response: ResponseWriter) -> None:
        await seen.wait()
        await then(response)

    settings = settings_with_short_timeouts(idle=0.1)
    async with run_router(
        *build_four_engines(d1=stream_tokens_then(2, when_client_has_events)), settings=settings
    ) as world:
        raw = await read_raw_stream(world, seen)
        events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
        error = json.loads(events[-1])["error"]
        assert (len(events), error["type"], error["code"]) == (3, "upstream_error", 502)
        assert not raw.endswith("0\r\n\r\n")
        assert "[DONE]" not in raw
        assert world.router.counters.get_tier("default").requests_by_outcome[RequestOutcome.BROKEN] == 1
        assert world.ledgers_are_empty()


async def read_raw_stream(world: RunningRouter, seen: asyncio.Event) -> str:
    """Read a stream until the router closes; set `seen` after two events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    writer.write(build_post(body))
    content = b""
    async with asyncio.timeout(DEADLINE_S):
        while data := await reader.read(65536):
            content += data
            if content.count(b"data: ") >= 2:
                seen.set()
    writer.close()
    return content.decode()


async def disconnect_after(world: RunningRouter, engine: FakeEngine, *, after: bytes = b"") -> None:
    """Request a stream and disconnect when the engine has the request, or after these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    body = json.dumps({**PROMPT, "stream": True}).encode()
    writer.write(build_post(body))
    await wait_until(lambda: bool(engine.requests), "the engine has the request")
    if after:
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(after)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("scripts", "engine"),
    [
        pytest.param({"p1": never_respond}, "p1", id="during prefill"),
        pytest.param({"d1": never_respond}, "d1", id="before the first byte"),
        pytest.param({"d1": stream_tokens_then(2, never_respond)}, "d1", id="during the stream"),
    ],
)
async def test_a_client_disconnect_cancels_the_leg_in_flight(scripts: dict[str, Script], engine: str) -> None:
    async with run_router(*build_four_engines(**scripts)) as world:
        await disconnect_after(world, world[engine])
        await wait_until(lambda: bool(world[engine].abandoned), "the engine sees the disconnect")
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")
        counters = world.router.counters.get_tier("default")
        assert (counters.offered, counters.requests_by_outcome[RequestOutcome.CANCELLED]) == (1, 1)


async def send_done_and_hang(response: ResponseWriter) -> None:
    await response.event("[DONE]")
    await response.hang()


async def test_a_client_that_disconnects_after_the_done_event_counts_as_ok() -> None:
    """Engines send the end of the body in its own packet, and many clients do not wait for it."""
    async with run_router(
        FakeEngine("p1"), FakeEngine("d1", decode=stream_tokens_then(3, send_done_and_hang))
    ) as world:
        await disconnect_after(world, world["d1"], after=b"data: [DONE]\n\n")
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")
        counters = world.router.counters
        assert (
            counters.get_tier("default").requests_by_outcome[RequestOutcome.OK],
            counters.output_tokens,
        ) == (1, 3)
        assert world.router.pairs[PairKey("p1", "d1")].counts[TransferOutcome.UNKNOWN] == 1
        await wait_until(lambda: bool(world["d1"].abandoned), "the engine sees the disconnect")


async def test_a_dead_idle_connection_is_replaced_without_counting_a_retry(
    client: aiohttp.ClientSession,
) -> None:
    seen = 0

    async def close_on_second_request(response: ResponseWriter) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            return response.close()  # the second request on the reused connection
        await send_kv_transfer_params(response)

    async with run_router(FakeEngine("p1", prefill=close_on_second_request), FakeEngine("d1")) as world:
        first, second = await request_completion(client, world), await request_completion(client, world)
        assert (first[:2], second[:2], seen) == ((200, "p1 p1 p1 "), (200, "p1 p1 p1 "), 3)
        assert world.router.counters.retries == {}


async def test_connections_to_engines_are_reused(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        for _ in range(5):
            await request_completion(client, world)
        request_counts = [len(world[name].prefills) + len(world[name].decodes) for name in ("p1", "d1")]
        assert request_counts == [5, 5]
        assert max(world["p1"].connections, world["d1"].connections) <= 2, "one for requests, one for probes"


async def test_a_slow_client_applies_backpressure_to_the_engine() -> None:
    chunk = b"10000\r\n" + b"data: " + b"x" * (0x10000 - 8) + b"\n\n\r\n"
    sent = 0

    async def send_endless_stream(response: ResponseWriter) -> None:
        nonlocal sent
        await response.start_stream()
        for _ in range(4096):
            await response.raw(chunk)
            sent += len(chunk)

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=send_endless_stream)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        body = json.dumps({**PROMPT, "stream": True}).encode()
        writer.write(build_post(body))
        await reader.readuntil(b"\r\n\r\n")
        history: list[int] = []

        def has_stalled() -> bool:
            history.append(sent)
            return sent > 0 and history.count(sent) > 40  # 40 polls, 0.2 s

        await wait_until(has_stalled, "the engine can send no more")
        assert sent < 32 * 1024 * 1024, "kernel buffers and a little more, not the whole stream"
        writer.transport.abort()
        await wait_until(world.ledgers_are_empty, "the ledgers are empty")


async def test_a_refused_connection_ejects_the_instance_until_a_probe_succeeds(
    client: aiohttp.ClientSession,
) -> None:
    async with run_router(*build_four_engines()) as world:
        p1, port = world.router.fleet["p1"], world["p1"].port
        world.servers["p1"].close()
        await request_completion(client, world)
        assert (p1.serving, p1.health.ejected) == (False, True)
        restarted = await asyncio.start_server(world["p1"].serve, "127.0.0.1", port)
        await wait_until(lambda: p1.serving, "a probe readmits the instance")
        restarted.close()


async def test_a_stale_kv_transfer_is_not_used(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.router.fleet["p1"].kv_lease_s = 0.0
        response = await request_completion(client, world)
        fulcrum_headers = {
            "x-fulcrum-prefill": "p1",
            "x-fulcrum-decode": "d1",
            "x-fulcrum-local-prefill": "stale_kv_transfer",
        }
        assert response == (200, "own own own ", fulcrum_headers)


async def test_a_single_instance_serves_both_phases_in_one_leg(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("d1")) as world:
        world.router.fleet["d1"].assign(Role.BOTH)
        assert await request_completion(client, world) == (200, "own own own ", {"x-fulcrum-decode": "d1"})
        assert (world["d1"].prefills, len(world["d1"].decodes)) == ([], 1)


async def test_decode_runs_on_the_prefill_instance_if_that_was_flipped_meanwhile(
    client: aiohttp.ClientSession,
) -> None:
    async def flip_meanwhile(response: ResponseWriter) -> None:
        world.router.fleet["p1"].assign(Role.DECODE)
        await send_kv_transfer_params(response)

    async with run_router(FakeEngine("p1", prefill=flip_meanwhile), FakeEngine("d1")) as world:
        response = await request_completion(client, world)
        assert response == (200, "own own own ", {"x-fulcrum-prefill": "p1", "x-fulcrum-decode": "p1"})
        assert world["p1"].decodes == [PROMPT], "the prompt is in its prefix cache"


@pytest.mark.parametrize("outcome", ["answered", "failed", "cancelled"])
async def test_room_for_decode_is_reserved_while_the_prompt_is_computed(
    client: aiohttp.ClientSession, outcome: str
) -> None:
    go_on = asyncio.Event()

    async def wait(response: ResponseWriter) -> None:
        await go_on.wait()
        await (close_connection if outcome == "failed" else send_kv_transfer_params)(response)

    async with run_router(FakeEngine("p1", prefill=wait), FakeEngine("d1")) as world:
        request = asyncio.ensure_future(request_completion(client, world, stream=True))
        ledger = world.router.fleet["d1"].ledger
        await wait_until(lambda: ledger.reserved_tokens > 0, "room on d1 is reserved")
        assert ledger.legs == 0
        if outcome == "cancelled":
            request.cancel()
            await wait_until(world.ledgers_are_empty, "the room is free again")
        go_on.set()
        with suppress(asyncio.CancelledError):
            await request
        assert world.ledgers_are_empty()


async def test_the_error_of_the_predicted_ttft_is_measured_for_streams(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        await request_completion(client, world)
        whole = [part for part, _ in world.router.ttft_errors.items()]
        await request_completion(client, world, stream=True)
        stream = [part for part, _ in world.router.ttft_errors.items()]
        assert (whole, stream) == (["prefill_leg"], ["prefill_leg", "decode_leg", "ttft"])


async def test_a_stream_of_tool_calls_reaches_the_client_as_the_engine_sent_it(
    client: aiohttp.ClientSession,
) -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": ""}}
    parts = [{**call}, *({"index": 0, "function": {"arguments": text}} for text in ('{"a":', ' "\\n"}'))]
    deltas = [{"role": "assistant", "content": ""}, *({"tool_calls": [part]} for part in parts)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    events = [*(json.dumps({"id": "c", "choices": [choice]}) for choice in choices), "[DONE]"]

    async def call_a_tool(response: ResponseWriter) -> None:
        await response.start_stream()
        for event in events:
            await response.event(event)
        await response.raw(b"0\r\n\r\n")

    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
    async with (
        run_router(FakeEngine("p1"), FakeEngine("d1", decode=call_a_tool)) as world,
        client.post(world.url("/v1/chat/completions"), json={**body, "tools": [{"type": "function"}]}) as got,
    ):
        assert await got.text() == "".join(f"data: {event}\n\n" for event in events)


async def test_streamed_tokens_are_added_to_the_ledger_as_they_arrive(client: aiohttp.ClientSession) -> None:
    go_on = asyncio.Event()

    async def wait(_: ResponseWriter) -> None:
        await go_on.wait()

    async def pause_after_five_tokens(response: ResponseWriter) -> None:
        await stream_tokens_then(5, wait)(response)
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=pause_after_five_tokens)) as world:
        request = asyncio.ensure_future(request_completion(client, world, stream=True))
        ledger = world.router.fleet["d1"].ledger
        await wait_until(lambda: ledger.decode_tokens == 4 + 5, "the ledger counts prompt and output")
        go_on.set()
        await request
        assert (world.router.counters.output_tokens, ledger.decode_tokens) == (5, 0)
