"""Whatever clients and engines send together: one response, no internal error, and nothing stays counted.

The other targets are single parsers. Here a request goes the whole way through a running router, with all
features on, to engines that answer with mutated bytes. So code is reached with values that no parser's test
thinks of: compiled code raises a TypeError where Python goes on.
"""

import asyncio
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import structlog

from fulcrum_core.values import AdmissionMode
from fulcrum_router.data_path.passed_paths import PASS_THROUGH_PATHS
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_router.settings import ServiceSettings, Tier
from tests.integration.fuzz.conftest import RunFuzzer
from tests.integration.fuzz.test_bodies import CLIENT_BODIES, ENGINE_TOKENS
from tests.integration.fuzz.test_client_connection import count_responses
from tests.integration.fuzz.test_engine_responses import CORPUS as ENGINE_RESPONSES
from tests.integration.fuzz.test_engine_responses import STREAM, WHOLE
from tests.integration.fuzz.test_engine_responses import TOKENS as STREAM_TOKENS
from tests.integration.router.fake_engines import (
    SLO,
    FakeEngine,
    RunningRouter,
    build_json_response,
    build_post,
    make_kv_transfer_params,
    run_router,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until

PATHS = sorted({b"/v1/completions", b"/v1/chat/completions", *PASS_THROUGH_PATHS})
SEPARATOR = b"\n====\n"
CANARY = "canary-5f1d"
"""In prompts and answers; no line of the log may hold it."""
C = CANARY.encode()
PREFILLED = build_json_response(
    200,
    {
        "choices": [{}],
        "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}},
        "kv_transfer_params": make_kv_transfer_params(FakeEngine("p1")),
    },
)
CHAT = b'{"messages":[{"role":"user","content":"%b"}],"stream":true,"temperature":0}' % (C * 60)
CHAT_EVENT = (
    b'data: {"id":"c-1","created":1,"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
BROKEN = STREAM[: STREAM.index(b"\r\n\r\n") + 4] + b"%x\r\n%b\r\n" % (len(CHAT_EVENT), CHAT_EVENT)
TOKENS = [
    *dict.fromkeys((*ENGINE_TOKENS, *STREAM_TOKENS)), SEPARATOR, PREFILLED, STREAM, WHOLE, BROKEN, CHAT_EVENT,
    *PATHS, C, b'"text":"%b"' % C, b'"max_tokens":', b'"max_completion_tokens":', b'"min_tokens":',
    b'"temperature":0', b'"seed":1', b'"stream":true', b'"logprobs":1', b'"echo":true', b'"best_of":2',
    b'"stream_interval":', b'"truncate_prompt_tokens":', b'"tools":[', b'"model":', b'"content":', b'"role":',
    b'"type":"image_url","image_url":{"url":"http://x"}', b'"stop":["a"]', b'"return_token_ids":true',
    b'"token_ids":[1,2]', b'"usage":{"input_tokens":3,"output_tokens":4}', b'"on"', b'"1_0"', b"1e300",
    b"9223372036854775807", b"-9223372036854775808", b'data: {"error":{"code":', b'"total_tokens":',
    b"[[1]]",
]  # fmt: skip


class Script(NamedTuple):
    """One request, and what engines answer to it."""

    path: bytes
    body: bytes
    prefill: bytes
    decodes: Sequence[bytes]
    """Answers to the first decode leg and to later ones."""


def read_script(data: bytes) -> Script:
    """Path and body, the answer to prefill legs, those to decode legs; what is missing is the usual."""
    request, prefill, *decodes = [*data.split(SEPARATOR, 3), PREFILLED][: max(2, data.count(SEPARATOR) + 1)]
    path, _, body = request.partition(b"\n")
    if path not in PATHS:
        path, body = PATHS[len(path) % 2], request
    return Script(path, body, prefill, decodes or [STREAM if b'"stream":true' in body else WHOLE])


PROMPT = b'{"model":"m","prompt":"%b","user":"%b"}' % (C, C)
STREAMED = b'{"prompt":["%b"],"stream":true,"temperature":0,"max_tokens":5}' % C
CORPUS = [
    *(b"/v1/completions\n" + body for body in (PROMPT, *CLIENT_BODIES)),
    *(b"/v1/completions\n" + PROMPT + SEPARATOR + each for each in ENGINE_RESPONSES),
    *(
        b"/v1/completions\n"
        + STREAMED
        + SEPARATOR
        + PREFILLED
        + SEPARATOR
        + each.replace(b'"a"', b'"%b"' % C)
        for each in ENGINE_RESPONSES
    ),
    b"/v1/chat/completions\n" + CHAT + SEPARATOR + PREFILLED + SEPARATOR + BROKEN + SEPARATOR + STREAM,
    *(path + b'\n{"model":"m","input":"%b","stream":true,"max_tokens":3}' % C for path in PATHS),
]


class ScriptedEngine(asyncio.Protocol):
    """Answers each request as the script of the run says, and closes if the answer may be incomplete."""

    def __init__(self, scripts: "Scripts") -> None:
        self._scripts, self._received = scripts, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not end or len(body) < int(length or b"0"):
            return
        self._received = b""
        self._transport.write(self._scripts.find_answer(head, body))
        if not head.startswith(b"GET"):
            self._transport.close()


class Scripts:
    """The script of the present run."""

    def __init__(self) -> None:
        self.script = read_script(CORPUS[0])
        self.decode_legs = 0

    def find_answer(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"GET"):
            return build_json_response(200, {})
        if b'"do_remote_decode":true' in body:
            return self.script.prefill
        self.decode_legs += 1
        return self.script.decodes[min(self.decode_legs, len(self.script.decodes)) - 1]


def make_settings() -> ServiceSettings:
    """All that a request may meet: two tiers with a reserve and rate limits, admission, prefix awareness."""
    limited = Tier("default", SLO, tokens_per_minute=10**9, reserve=Reserve(0.1, 1.0))
    return replace(
        settings_with_short_timeouts(connect=1.0, prefill=1.0, first_byte=1.0, idle=1.0),
        default_tier=limited,
        tiers={"premium": Tier("premium", SLO, -5)},
        admission=AdmissionMode.ADVISE,
        prefix_aware=True,
        access_log=1.0,
    )


@asynccontextmanager
async def run_scripted_router(scripts: Scripts) -> AsyncIterator[RunningRouter]:
    loop = asyncio.get_running_loop()
    async with run_router(*map(FakeEngine, ("p1", "p2", "d1", "d2")), settings=make_settings()) as world:
        for name in list(world.engines):
            server = await loop.create_server(lambda: ScriptedEngine(scripts), "127.0.0.1", 0)
            world.servers[f"{name} before"], world.servers[name] = world.servers[name], server
            world.router.fleet[name].set_endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        yield world


async def exchange(world: RunningRouter, script: Script) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    tier = "x-customer-tier: premium" if len(script.body) % 2 else "x-tenant-id: t"
    writer.write(build_post(script.body, "connection: close", tier, path=script.path.decode()))
    try:
        async with asyncio.timeout(10.0):
            return await reader.read()
    finally:
        writer.transport.abort()


def count_outcomes(world: RunningRouter) -> Counter[str]:
    found = Counter[str]()
    for tier in world.router.counters.tiers.values():
        found.update({str(outcome): count for outcome, count in tier.requests_by_outcome.items()})
    for (_, outcome), count in world.router.counters.passed_through.items():
        found[f"passed {outcome}"] += count
    return found


def is_router_s(context: dict[str, Any]) -> bool:
    """Whether an error of the event loop was raised in the router, and not in a fake engine."""
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, Exception) else []
    return any("fulcrum_router" in frame.filename for frame in frames)


def test_each_request_is_answered_without_an_internal_error(run_fuzzer: RunFuzzer) -> None:
    scripts = Scripts()
    loop = asyncio.new_event_loop()
    loop_errors: list[dict[str, Any]] = []
    loop.set_exception_handler(
        lambda _, context: loop_errors.append(context) if is_router_s(context) else None
    )
    running = run_scripted_router(scripts)
    world = loop.run_until_complete(running.__aenter__())

    async def serve(script: Script) -> tuple[object, ...]:
        scripts.script, scripts.decode_legs = script, 0
        for instance in world.router.fleet.instances:  # ejection is another test's
            instance.health.record_success()
            instance.update_serving()
        before = count_outcomes(world)
        with structlog.testing.capture_logs() as logs:
            written = await exchange(world, script)
            await wait_until(world.ledgers_are_empty, "nothing is in flight", interval_s=0.001)
        assert CANARY not in str(logs)
        errors = [entry for entry in logs if entry.get("exc_info")]
        assert not errors, errors
        assert not loop_errors, loop_errors
        assert world.server.clients.memory.held_bytes == 0
        assert world.router.kept_streams.kept_bytes == 0
        outcome = count_outcomes(world) - before
        assert outcome.total() == 1
        # A broken response need not be whole, whatever its last bytes look like.
        if (
            "broken" not in str(outcome)
            and b"\r\ntransfer-encoding:" in written.lower().partition(b"\r\n\r\n")[0]
        ):
            assert count_responses(written, [b"POST"]) == 1
        return written[9:12], *outcome, scripts.decode_legs, script.path, written.count(b"data:") > 1

    def run(data: bytes) -> tuple[object, ...]:
        return loop.run_until_complete(serve(read_script(data)))

    try:
        run_fuzzer(run, CORPUS, TOKENS)
    finally:
        loop.run_until_complete(running.__aexit__(None, None, None))
        loop.close()
