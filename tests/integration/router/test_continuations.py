"""Streams whose engine fails after the first byte: another one goes on, or they end with an error event."""

import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from fulcrum_router.counters import ContinuationOutcome, RequestOutcome
from fulcrum_router.data_path import chunk_buffer, continuation
from fulcrum_router.policy.journey import StopReason
from fulcrum_simulator.text import output_text, prompt_digest, render_chat
from tests.integration.router.fake_engines import (
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    close_connection,
    frame_event,
    respond_with_status,
    route_to_servers,
    run_router,
)
from tests.integration.simulator.servers import MODEL, Server, launch, ready
from tests.waiting import wait_until

SOUND = {"model": "m", "prompt": "once", "max_tokens": 8, "temperature": 0, "stream": True}
MESSAGES = [{"role": "user", "content": "hello"}]
WORDS = ["One", " two", " three", " four", " five", " six"]
CHAT = "/v1/chat/completions"


def event(engine: str, text: str | None, *, chat: bool = False, **fields: Any) -> str:
    """One event as vLLM writes it; without text the opening of a chat."""
    head = {
        "id": f"id-{engine}",
        "object": "o",
        "created": len(engine) * 1000 + ord(engine[-1]),
        "model": "m",
    }
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["delta"] = {"content": text} if text is not None else {"role": "assistant", "content": ""}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": None, **fields}
    return json.dumps({**head, "choices": [choice]}, separators=(",", ":"))


ODD_EVENTS = {
    "a long time of creation": lambda written: written.replace('"created":', '"created":' + "1" * 5_000),
    "an id that is missing": lambda written: written.replace('"token_ids":[0]', '"token_ids":[1,,2]'),
    "an id of many bits": lambda written: written.replace('"token_ids":[0]', f'"token_ids":[{2**70}]'),
    "an id of many digits": lambda written: written.replace('_ids":[0]', '_ids":[' + "1" * 5_000 + "]"),
}
"""Events of an engine with numbers that no request to another one can have."""


def usage_event(prompt: int, completion: int) -> str:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return json.dumps({"id": "x", "created": 1, "choices": [], "usage": usage}, separators=(",", ":"))


def stream_words(first: int, last: int, then: Script | None = None, *, chat: bool = False) -> Script:
    """A decode leg that sends these words, and the end of the stream or what `then` does."""

    async def script(response: ResponseWriter) -> None:
        name = response.engine.name
        await response.start_stream()
        if chat:
            await response.event(event(name, None, chat=True))
        for number in range(first, last):
            await response.event(event(name, WORDS[number], chat=chat, token_ids=[number]))
        if then is not None:
            return await then(response)
        await response.event(event(name, "", chat=chat, finish_reason="stop", token_ids=[]))
        await response.event(usage_event(10 + first, last - first))
        await response.raw(frame_event("[DONE]") + b"0\r\n\r\n")

    return script


async def stream_rest(response: ResponseWriter) -> None:
    """A decode leg that sends the words that the prompt does not have yet."""
    first = sum(word in response.request.body["prompt"] for word in WORDS)
    await stream_words(first, len(WORDS))(response)


class Received:
    """A stream as its client sees it."""

    def __init__(self, content: str) -> None:
        lines = [line[6:] for line in content.splitlines() if line.startswith("data: ")]
        self.done = lines[-1:] == ["[DONE]"]
        self.events = [json.loads(line) for line in lines if line != "[DONE]"]
        self.choices = [e["choices"][0] for e in self.events if e.get("choices")]
        self.text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in self.choices)
        self.ids = {e["id"] for e in self.events if "error" not in e}
        self.created = {e["created"] for e in self.events if "error" not in e}
        self.error_code = next((e["error"]["code"] for e in self.events if "error" in e), None)
        self.usage = next((e["usage"] for e in self.events if e.get("usage")), None)


async def request(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], *, path: str = "/v1/completions"
) -> Received:
    return Received(await read_content(client, url.replace("/v1/completions", path), body))


async def read_content(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    content = b""
    async with client.post(url, json=body) as response:
        assert response.status == 200
        try:
            async for piece in response.content.iter_any():
                content += piece
        except aiohttp.ClientPayloadError:
            pass  # a broken stream ends without its last chunk
        return content.decode()


def continuations(world: RunningRouter) -> dict[str, int]:
    return {str(name): count for name, count in world.router.counters.continuations.items() if count}


def engines(
    *, chat: bool = False, first: Script | None = None, second: Script | None = None
) -> list[FakeEngine]:
    """A decode engine that closes the connection after three words, and one that goes on."""
    first = first or stream_words(0, 3, close_connection, chat=chat)
    return [
        FakeEngine("p1"),
        FakeEngine("d1", decode=first),
        FakeEngine("d2", decode=second or stream_words(3, 6, chat=chat)),
    ]


async def test_a_completion_goes_on_with_another_engine(client: aiohttp.ClientSession) -> None:
    async with run_router(*engines()) as world:
        body = {**SOUND, "min_tokens": 5, "stream_options": {"include_usage": True}}
        received = await request(client, world.url(), body)
        rest = world["d2"].decodes[0]
        assert (received.text, received.done) == ("".join(WORDS), True)
        assert (received.ids, len(received.created)) == ({"id-d1"}, 1)
        assert received.usage == {"prompt_tokens": 10, "total_tokens": 16, "completion_tokens": 6}
        assert (rest["prompt"], rest["max_tokens"], rest["min_tokens"]) == ("onceOne two three", 5, 2)
        assert [sent["prompt"] for sent in world["p1"].prefills] == ["once", "onceOne two three"]
        assert continuations(world) == {"continued": 1}
        tier = world.router.counters.get_tier("default")
        assert (tier.requests_by_outcome[RequestOutcome.OK], sum(tier.ttft.counts)) == (1, 1)
        assert (world.router.counters.output_tokens, world.router.kept_streams.kept_bytes) == (6, 0)
        assert world.ledgers_are_empty()


async def test_a_chat_goes_on_in_the_last_message_and_has_one_opening(client: aiohttp.ClientSession) -> None:
    async with run_router(*engines(chat=True)) as world:
        body = {"model": "m", "messages": MESSAGES, "temperature": 0, "stream": True}
        received = await request(client, world.url(), body, path=CHAT)
        rest = world["d2"].decodes[0]
        assert (received.text, received.done, received.usage) == ("".join(WORDS), True, None)
        assert [c["delta"].get("role") for c in received.choices].count("assistant") == 1
        assert rest["messages"] == [*MESSAGES, {"role": "assistant", "content": "One two three"}]
        assert (rest["continue_final_message"], rest["add_generation_prompt"]) == (True, False)
        assert "max_tokens" not in rest


async def test_token_ids_are_continued_as_token_ids(client: aiohttp.ClientSession) -> None:
    async with run_router(*engines()) as world:
        received = await request(client, world.url(), {**SOUND, "prompt": [7, 8], "return_token_ids": True})
        assert received.text == "".join(WORDS)
        assert world["d2"].decodes[0]["prompt"] == [7, 8, 0, 1, 2]


async def test_a_stream_that_breaks_twice_is_continued_twice(client: aiohttp.ClientSession) -> None:
    async def die_later(response: ResponseWriter) -> None:
        await wait_until(lambda: bool(continuations(world)), "the client has the next word")
        await respond_event_500(response)

    second = stream_words(3, 4, die_later)
    third = FakeEngine("d3", decode=stream_rest)
    async with run_router(*engines(second=second), third) as world:
        world.router.fleet["d3"].health.record_error()
        world.router.fleet["d3"].update_error_share()
        for n in range(4):  # engines die anyway: no query of death
            world.router.journeys.engine_deaths.record(f"x{n}", time.monotonic())
        body = {**SOUND, "stream_options": {"include_usage": True}}
        received = await request(client, world.url(), body)
        assert (received.text, received.done, received.error_code) == ("".join(WORDS), True, None)
        assert continuations(world) == {"continued": 2}
        assert received.usage == {"prompt_tokens": 10, "total_tokens": 16, "completion_tokens": 6}


async def test_a_stream_by_which_two_engines_died_ends_and_its_reason_is_counted(
    client: aiohttp.ClientSession,
) -> None:
    third = FakeEngine("d3", decode=stream_rest)
    async with run_router(*engines(second=stream_words(3, 4, close_connection)), third) as world:
        world.router.fleet["d3"].health.record_error()
        world.router.fleet["d3"].update_error_share()
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.error_code, third.decodes) == ("".join(WORDS[:4]), 502, [])
        assert continuations(world) == {"continued": 1, "failed": 1}
        assert world.router.counters.stopped_requests == {StopReason.QUERY_OF_DEATH: 1}


async def test_a_late_transfer_of_a_leg_that_continues_a_stream_rotates_the_cache_salt(
    client: aiohttp.ClientSession,
) -> None:
    async def die_late(response: ResponseWriter) -> None:
        world.router.fleet["d2"].health.unresponsive_since_s = time.monotonic()
        response.close()

    async with run_router(*engines(second=die_late)) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.error_code, world.router.counters.cache_salt_rotations) == (502, 1)


async def test_a_stream_that_breaks_within_a_chunk_is_not_continued(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like the end of the chunk is content: what followed it would be read as the chunk's rest."""
    monkeypatch.setattr(chunk_buffer, "MAX_BUFFERED_CHUNK_BYTES", 100)
    last = frame_event(event("d1", "x"))[2:]

    async def break_in_chunk(response: ResponseWriter) -> None:
        await response.raw(b"fff" + last)
        response.writer.close()  # after what was sent

    async with run_router(*engines(first=stream_words(0, 0, break_in_chunk))) as world:
        received = await read_content(client, world.url(), SOUND)
        assert received.endswith(last.decode().removeprefix("\r\n")), "no event follows"
        assert (continuations(world), world["d2"].decodes) == ({"failed": 1}, [])


async def test_a_large_event_of_the_next_engine_reaches_the_client(client: aiohttp.ClientSession) -> None:
    """A prompt of text may come back as ids, which take several times its bytes."""

    async def send_large(response: ResponseWriter) -> None:
        await response.start_stream()
        await response.event(event("d2", WORDS[3], prompt_token_ids=[123_456] * 40_000))
        await response.event(event("d2", "", finish_reason="stop"))
        await response.raw(frame_event("[DONE]") + b"0\r\n\r\n")

    async with run_router(*engines(second=send_large)) as world:
        received = await request(client, world.url(), {**SOUND, "return_token_ids": True})
        assert (received.text, received.done) == ("".join(WORDS[:4]), True)
        assert continuations(world) == {"continued": 1}


@pytest.mark.parametrize("words", [0, 1])
async def test_a_chunk_of_the_next_engine_that_is_too_large_ends_in_an_error_event(
    client: aiohttp.ClientSession, words: int
) -> None:
    async def send_too_large(response: ResponseWriter) -> None:
        await stream_words(3, 3 + words, response_too_large)(response)

    async def response_too_large(response: ResponseWriter) -> None:
        await response.raw(frame_event(event("d2", "x" * chunk_buffer.MAX_REWRITTEN_CHUNK_BYTES))[:-10])
        await response.hang()

    given = engines(second=send_too_large)
    given[0].decode = respond_event_500  # nor does the last engine go on
    async with run_router(*given) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.error_code) == ("".join(WORDS[: 3 + words]), 502)
        assert world.ledgers_are_empty()


@pytest.mark.parametrize("odd", ODD_EVENTS)
async def test_odd_numbers_of_an_engine_end_in_an_error_event(
    client: aiohttp.ClientSession, odd: str
) -> None:
    async def send_odd(response: ResponseWriter) -> None:
        await response.start_stream()
        await response.event(ODD_EVENTS[odd](event("d1", "x" * 5_000, token_ids=[0])))
        response.writer.close()

    async with run_router(*engines(first=send_odd)) as world:
        body = {**SOUND, "prompt": [7, 8], "return_token_ids": True}
        received = await read_content(client, world.url(), body)
        assert '"code":502' in received.replace(" ", "")
        assert (continuations(world), world["d2"].decodes) == ({"not_sound": 1}, [])
        assert world.router.fleet["d1"].health.failures == 1
        assert world.ledgers_are_empty()


async def respond_event_500(response: ResponseWriter) -> None:
    """An engine whose core died says so in an event."""
    await response.event(json.dumps({"error": {"message": "dead", "code": 500}}))
    await response.raw(frame_event("[DONE]") + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1},
        {"temperature": None},
        {"n": 2},
        {"logprobs": 1},
        {"echo": True},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"guided_json": {}},
        {"response_format": {"type": "json_object"}},
        {"prompt": [1, 2]},
        {"max_tokens": 3},
        {"an_unknown_field": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_is_not_sound_ends_in_an_error_event(
    client: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    async with run_router(*engines()) as world:
        received = await request(client, world.url(), {**SOUND, **fields})
        assert (received.text, received.done) == ("One two three", False)
        assert received.error_code == 502
        assert continuations(world) == {"not_sound": 1}
        assert world["d2"].decodes == []


async def test_a_stream_over_its_time_is_not_continued(client: aiohttp.ClientSession) -> None:
    """Another engine would give it the same time again."""

    async def go_on(response: ResponseWriter) -> None:
        await wait_until(lambda: world.router.kept_streams.kept_bytes > 0, "the client has a word")
        pool = world.router.fleet["d1"].require_connection_pool()
        for connection in pool.busy:
            connection.end_s = 0.0
        await response.hang()

    async with run_router(*engines(first=stream_words(0, 3, go_on))) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.error_code) == ("One two three", 502)
        assert (continuations(world), world["d2"].decodes) == ({"failed": 1}, [])


async def test_a_prompt_in_a_list_is_continued(client: aiohttp.ClientSession) -> None:
    async with run_router(*engines()) as world:
        received = await request(client, world.url(), {**SOUND, "prompt": ["once"]})
        assert received.text == "".join(WORDS)
        assert world["d2"].decodes[0]["prompt"] == ["onceOne two three"]


async def test_a_seed_is_sound(client: aiohttp.ClientSession) -> None:
    async with run_router(*engines()) as world:
        received = await request(client, world.url(), {**SOUND, "temperature": 0.8, "seed": 7})
        assert received.text == "".join(WORDS)


@pytest.mark.parametrize("rest", ["tool_calls", "reasoning", "two choices", "ends in a space"])
async def test_output_that_is_no_plain_text_is_not_continued(
    client: aiohttp.ClientSession, rest: str
) -> None:
    async def odd(response: ResponseWriter) -> None:
        written = event("d1", "x", chat=True)
        deltas = {
            "tool_calls": '{"content":"x","tool_calls":[{"index":0}]}',
            "reasoning": '{"reasoning":"x"}',
            "ends in a space": '{"content":"x\\n"}',
        }
        written = written.replace('{"content":"x"}', deltas.get(rest, '{"content":"x"}'))
        await response.event(
            written.replace('"index":0,', '"index":1,') if rest == "two choices" else written
        )
        response.close()

    async with run_router(*engines(first=stream_words(0, 1, odd, chat=True))) as world:
        body = {"model": "m", "messages": MESSAGES, "temperature": 0, "stream": True}
        received = await request(client, world.url(), body, path=CHAT)
        assert received.error_code == 502
        assert continuations(world) == {"not_sound": 1}


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_the_rest_ends_the_stream_with_an_error_event(
    client: aiohttp.ClientSession, status: int
) -> None:
    given = engines(second=respond_with_status(status))
    given[0].decode = respond_with_status(status)
    async with run_router(*given) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.done) == ("One two three", False)
        assert received.error_code == 502
        assert continuations(world) == {"failed": 1}
        assert world.ledgers_are_empty()


async def test_a_prefill_engine_that_refuses_the_rest_ends_the_stream_with_an_error_event(
    client: aiohttp.ClientSession,
) -> None:
    async def answer_once(response: ResponseWriter) -> None:
        first = len(response.engine.prefills) == 1
        await (FakeEngine("p").prefill if first else respond_with_status(400))(response)

    given = engines()
    given[0].prefill = answer_once
    async with run_router(*given) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.error_code) == ("One two three", 502)
        assert continuations(world) == {"failed": 1}


async def test_a_stream_without_another_engine_ends_with_an_error_event(
    client: aiohttp.ClientSession,
) -> None:
    given = engines()[:2]
    given[0].decode = close_connection
    async with run_router(*given) as world:
        received = await request(client, world.url(), SOUND)
        assert (received.text, received.error_code) == ("One two three", 502)
        assert continuations(world) == {"failed": 1}


@pytest.mark.parametrize("limit", ["one stream", "all streams", "requests"])
async def test_what_is_kept_is_limited(
    client: aiohttp.ClientSession, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill_memory(response: ResponseWriter) -> None:
        await wait_until(lambda: world.router.kept_streams.kept_bytes > 0, "the client has a word")
        memory = world.router.request_memory
        assert memory.hold(memory.max_bytes - memory.held_bytes, body_bytes=1)
        response.close()

    if limit == "one stream":
        monkeypatch.setattr(continuation, "MAX_STREAM_BYTES", 100)
    async with run_router(*engines()) as world:
        if limit == "all streams":
            world.router.kept_streams.max_bytes = 100
        elif limit == "requests":
            world["d1"].decode = stream_words(0, 3, fill_memory)
        received = await request(client, world.url(), SOUND)
        assert received.error_code == 502
        assert (continuations(world), world.router.kept_streams.kept_bytes) == ({"not_kept": 1}, 0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Engine servers that need some time for each token."""
    profile = {**load_profile("laptop").model_dump(), "name": "paced", "startup_s": 0.0, "handshake_s": 0.01}
    path = tmp_path_factory.mktemp("profile") / "paced.yaml"
    path.write_text(yaml.safe_dump(profile))
    started = [ready(launch(path)) for _ in range(4)]  # one after another: each needs a core to start
    yield dict(zip(("p1", "d1", "d2", "d3"), started, strict=True))
    for server in started:
        server.kill()


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_a_simulated_engine_goes_on_with_the_same_text(
    client: aiohttp.ClientSession, chat: bool, servers: dict[str, Server]
) -> None:
    prompt = {"messages": MESSAGES} if chat else {"prompt": "once"}
    digest = prompt_digest(render_chat(MESSAGES) if chat else b"once")
    body = {**prompt, "model": MODEL, "max_tokens": 120, "temperature": 0, "stream": True}
    async with route_to_servers(servers) as (router, url):
        received = b""
        async with client.post(
            url.replace("/v1/completions", CHAT if chat else "/v1/completions"), json=body
        ) as r:
            decode = r.headers["x-fulcrum-decode"]
            async for piece in r.content.iter_any():
                if not received:
                    servers[decode].process.kill()
                received += piece
        stream = Received(received.decode())
        assert (stream.text, stream.done) == (output_text(digest, 120), True)
        assert router.counters.continuations[ContinuationOutcome.CONTINUED] == 1
