"""What the requests of a tenant take from its rate limit, by what its engines have done for them."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    RunningRouter,
    Script,
    close_connection,
    make_kv_transfer_params,
    never_respond,
    respond_with_status,
    run_router,
    settings_with_short_timeouts,
    stream_tokens_then,
)
from tests.waiting import wait_until

LIMIT = 1_000
"""A minute; few, so that the seconds of a test fill in little."""
PROMPT_TOKENS, EXPECTED = 4, 100
"""By the measure of `PROMPT`, and by default."""
BASE = settings_with_short_timeouts()
SETTINGS = replace(BASE, default_tier=replace(BASE.default_tier, tokens_per_minute=LIMIT))
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
LONG = {**PROMPT, "max_tokens": 2_000}


def find_used(world: RunningRouter) -> int:
    """The tokens that the bucket of the tenant lacks, but for those of the last second."""
    wait_s = world.router.journeys.rate_limits.by_tier["default"].take("acme", LIMIT, time.monotonic())
    return round(wait_s * LIMIT / 60)


def answer(**usage: Any) -> Script:
    """Script that sends a whole response with this usage."""

    async def script(response: ResponseWriter) -> None:
        await response.json(200, {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage})

    return script


def respond(body: dict[str, Any]) -> Script:
    """Script that sends this body."""

    async def script(response: ResponseWriter) -> None:
        await response.json(200, body)

    return script


def count_prompt(tokens: int) -> Script:
    """Script of a prefill leg whose engine counts this prompt."""

    async def script(response: ResponseWriter) -> None:
        params = make_kv_transfer_params(response.engine)
        usage = {"prompt_tokens": tokens, "completion_tokens": 1}
        await response.json(200, {"choices": [{}], "kv_transfer_params": params, "usage": usage})

    return script


def end_stream(*events: dict[str, Any]) -> Script:
    async def script(response: ResponseWriter) -> None:
        for event in events:
            await response.event(json.dumps(event, separators=(",", ":")))
        await response.raw(b"0\r\n\r\n")

    return script


USAGE_EVENT = {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 309, "completion_tokens": 300}}


OTHER_USAGE = {"input_tokens": 20, "output_tokens": 800, "total_tokens": 820}
FREE = {"input_tokens": 1, "output_tokens": 1}
INPUT = {"input": "once upon a time"}
RESULT = {"type": "tool_result", "tool_use_id": "u", "content": "x" * 8_000}
RESULTS = {"messages": [{"role": "user", "content": [RESULT]}], "max_tokens": 2_000}
TOOLS = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 7_900}}],
}
CONVERSATION = {"messages": [{"role": "user", "content": "once upon a time"}], "max_tokens": 2_000}


@dataclass
class Case:
    """One request, and what it uses."""

    used: int
    decode: Script
    body: dict[str, Any] = field(default_factory=lambda: LONG)
    path: str = "/v1/completions"
    prefill: Script | None = None


CASES = {
    "a whole response, by its usage": Case(709, answer(prompt_tokens=9, completion_tokens=700)),
    "a whole response of several choices": Case(
        709, answer(prompt_tokens=9, completion_tokens=700), {**LONG, "n": 4}
    ),
    "a whole chat, whose prompt the prefill engine counts": Case(
        1_700,
        answer(prompt_tokens=1_000, completion_tokens=700),
        {"messages": [{"role": "user", "content": "hi"}]},
        CHAT,
        count_prompt(1_000),
    ),
    "a chat whose tools are most of its prompt": Case(2_000 + EXPECTED, answer(), TOOLS, CHAT),
    "a chat whose tools are fewer tokens than they look": Case(
        330, answer(prompt_tokens=300, completion_tokens=30), TOOLS, CHAT
    ),
    "a message that repeats the results of tools": Case(2_000 + EXPECTED, respond({}), RESULTS, MESSAGES),
    "a whole response with more output than it may have": Case(
        9 + 3, answer(prompt_tokens=9, completion_tokens=10**7), PROMPT
    ),
    "a whole response with a prompt that nobody believes": Case(
        PROMPT_TOKENS + 30, answer(prompt_tokens=10**7, completion_tokens=30)
    ),
    "a whole response without usage": Case(PROMPT_TOKENS + EXPECTED, answer()),
    "a stream, by its usage": Case(
        309, stream_tokens_then(200, end_stream(USAGE_EVENT)), {**LONG, "stream": True}
    ),
    "a stream of several choices without usage": Case(
        PROMPT_TOKENS + 50, stream_tokens_then(50, end_stream()), {**LONG, "stream": True, "n": 4}
    ),
    "a stream that breaks": Case(
        PROMPT_TOKENS + 50,
        stream_tokens_then(50, close_connection),
        {**LONG, "stream": True, "temperature": 1, "n": 2},
    ),
    "a stream that breaks, with many tokens in each event": Case(
        PROMPT_TOKENS + 5 * 100,
        stream_tokens_then(5, close_connection),
        {**LONG, "stream": True, "stream_interval": "100"},
    ),
    "a stream that breaks, with more tokens in each event than it may have": Case(
        PROMPT_TOKENS + 700,
        stream_tokens_then(5, close_connection),
        {**LONG, "max_tokens": 350, "stream": True, "stream_interval": 10**6, "n": 2},
    ),
    "a stream by its usage, with many tokens in each event": Case(
        309,
        stream_tokens_then(200, end_stream(USAGE_EVENT)),
        {**LONG, "stream": True, "stream_interval": 1_000},
    ),
    "a response of another API": Case(
        820, respond({"id": "r", "usage": OTHER_USAGE, "user": "u"}), INPUT, RESPONSES
    ),
    "a message": Case(820, respond({"content": [], "usage": OTHER_USAGE}), CONVERSATION, MESSAGES),
    "a response that repeats what its client calls a usage": Case(
        820, respond({"usage": OTHER_USAGE, "input_messages": [{"usage": FREE}]}), INPUT, RESPONSES
    ),
    "a response that comes in pieces": Case(
        820, respond({"text": "x" * 100_000, "usage": OTHER_USAGE}), INPUT, RESPONSES
    ),
    "a response that is too large to parse": Case(
        820, respond({"text": "x" * 2_000_000, "usage": OTHER_USAGE}), INPUT, RESPONSES
    ),
    "a response of two turns, each within the limit": Case(
        820, respond({"usage": OTHER_USAGE}), {**INPUT, "max_output_tokens": 500}, RESPONSES
    ),
    "a response without usage": Case(
        PROMPT_TOKENS + EXPECTED, respond({"status": "queued", "usage": None}), INPUT, RESPONSES
    ),
    "a stream of another API, by its last event": Case(
        820,
        stream_tokens_then(
            50, end_stream({"type": "response.completed", "response": {"usage": OTHER_USAGE}})
        ),
        {**INPUT, "stream": True},
        RESPONSES,
    ),
    "a stream of another API that breaks": Case(
        PROMPT_TOKENS + 50, stream_tokens_then(50, close_connection), {**INPUT, "stream": True}, RESPONSES
    ),
    "a message that the engine rejects": Case(
        PROMPT_TOKENS, respond_with_status(400), CONVERSATION, MESSAGES
    ),
    "a request that the engine rejects": Case(PROMPT_TOKENS, respond_with_status(400)),
    "a request that no engine serves": Case(0, respond_with_status(503)),
    "a request that generates nothing": Case(
        0, respond({"usage": {"prompt_tokens": 900}}), INPUT, EMBEDDINGS
    ),
    "a request that ends two engines": Case(PROMPT_TOKENS, close_connection),
}


async def send(client: aiohttp.ClientSession, world: RunningRouter, case: Case) -> None:
    async with client.post(world.url(case.path), json=case.body, headers={"x-tenant-id": "acme"}) as response:
        with suppress(aiohttp.ClientPayloadError):  # a broken stream
            await response.read()


@pytest.mark.parametrize("name", CASES)
async def test_a_request_takes_what_it_has_used(client: aiohttp.ClientSession, name: str) -> None:
    case = CASES[name]
    engines = [FakeEngine(engine, decode=case.decode) for engine in ("p1", "d1", "d2", "d3")]
    if case.prefill is not None:
        engines[0].prefill = case.prefill
    async with run_router(*engines, settings=SETTINGS) as world:
        await send(client, world, case)
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
        assert find_used(world) == pytest.approx(case.used, abs=30 if case.used else 0)


async def leave(request: "asyncio.Task[None]", when: Callable[[], bool]) -> None:
    await wait_until(when, "the engine has the request")
    request.cancel()
    await asyncio.wait((request,))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", LONG), (RESPONSES, {"input": "once upon a time"})],
    ids=["completion", "response"],
)
async def test_a_whole_response_whose_client_leaves_keeps_what_it_has_taken(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    async with run_router(
        FakeEngine("p1"), FakeEngine("d1", decode=never_respond), settings=SETTINGS
    ) as world:
        request = asyncio.create_task(send(client, world, Case(0, never_respond, body, path)))
        await leave(request, lambda: bool(world["d1"].requests))
        await wait_until(world.ledgers_are_empty, "nothing is in flight")
        assert find_used(world) == pytest.approx(PROMPT_TOKENS + EXPECTED, abs=30)


async def test_a_tenant_cannot_exceed_its_limit_by_whole_responses(client: aiohttp.ClientSession) -> None:
    engines = FakeEngine("p1"), FakeEngine("d1", decode=answer(prompt_tokens=4, completion_tokens=1_500))
    async with run_router(*engines, settings=SETTINGS) as world:
        statuses = []
        for _ in range(3):
            async with client.post(world.url(), json=LONG, headers={"x-tenant-id": "acme"}) as response:
                statuses.append(response.status)
        assert statuses == [200, 429, 429]
