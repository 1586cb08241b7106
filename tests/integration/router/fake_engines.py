"""Fake engines whose responses are scripts, and routers that run in the test's process over such engines.

A `FakeEngine` records the requests that it receives. `route_to_servers` runs a router over engine servers
instead.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fulcrum_cluster.process import bind_socket
from fulcrum_core.api.router import TimeoutsSpec
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.router import Router
from fulcrum_router.server import RouterServer
from fulcrum_router.settings import ServiceSettings, Tier, Timeouts
from tests.integration.simulator.servers import MODEL
from tests.integration.simulator.servers import Server as Engine
from tests.waiting import wait_until

DEADLINE_S = 20.0
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PROMPT = {"model": "m", "prompt": "once upon a time", "max_tokens": 3}
"""A completion request."""


@dataclass
class ReceivedRequest:
    """A request that an engine received."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def is_prefill(self) -> bool:
        """Whether this is a prefill leg."""
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))


@dataclass
class ResponseWriter:
    """Writes the response of a script to the router."""

    engine: "FakeEngine"
    request: ReceivedRequest
    writer: asyncio.StreamWriter

    async def json(self, status: int, body: object) -> None:
        """Send a whole JSON response."""
        await self.raw(build_json_response(status, body))

    async def start_stream(self) -> None:
        """Send the head of a stream."""
        await self.raw(STREAM_HEAD)

    async def event(self, text: str) -> None:
        """Send one event in one chunk."""
        await self.raw(frame_event(text))

    async def raw(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self.writer.write(data)
        await self.writer.drain()

    def close(self) -> None:
        """Close the connection, during a response or not."""
        self.writer.transport.abort()

    async def hang(self) -> None:
        """Send nothing until the router disconnects."""
        await asyncio.Event().wait()


Script = Callable[[ResponseWriter], Awaitable[None]]

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def build_json_response(status: int, body: object) -> bytes:
    """A JSON response with its head."""
    content = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} Some\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def send_raw(port: int, request: bytes) -> bytes:
    """Send a request, and read until the router closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    finally:
        writer.transport.abort()


def build_post(body: bytes, *header_lines: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """The bytes of a request with this body."""
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *header_lines, "", ""]
    return "\r\n".join(lines).encode() + body


def frame_event(text: str) -> bytes:
    """Frame one event as one chunk."""
    content = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(content), content)


def make_kv_transfer_params(engine: "FakeEngine", **changes: Any) -> dict[str, Any]:
    """KV transfer parameters as a prefill engine returns them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": engine.name,
        "remote_request_id": "cmpl-x-0-1",
        "remote_host": "127.0.0.1",
        "remote_port": 1234,
        "tp_size": 1,
        "remote_prefill_cached_tokens": 0,
        "a_later_field": {"kept": True},
        **changes,
    }


async def send_kv_transfer_params(response: ResponseWriter) -> None:
    """Script of a prefill leg that succeeds."""
    params = make_kv_transfer_params(response.engine)
    await response.json(200, {"choices": [{}], "kv_transfer_params": params})


def send_source_name(count: int = 3) -> Script:
    """Script of a decode leg that succeeds: each word names the engine whose KV was transferred, or `own`."""

    async def script(response: ResponseWriter) -> None:
        source = (response.request.body.get("kv_transfer_params") or {}).get("remote_engine_id", "own")
        if not response.request.body.get("stream"):
            choice = {"text": f"{source} " * count, "finish_reason": "length"}
            return await response.json(200, {"choices": [choice]})
        await response.start_stream()
        for _ in range(count):
            await response.event(json.dumps({"choices": [{"text": f"{source} ", "finish_reason": None}]}))
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    return script


def respond_with_status(status: int) -> Script:
    """Script that returns an error object with this status."""

    async def script(response: ResponseWriter) -> None:
        await response.json(status, {"error": {"message": "no", "code": status}})

    return script


async def close_connection(response: ResponseWriter) -> None:
    """Script that closes the connection without a response."""
    response.close()


async def never_respond(response: ResponseWriter) -> None:
    """Script that sends nothing."""
    await response.hang()


def stream_tokens_then(tokens: int, then: Script) -> Script:
    """Script that streams `tokens` events and then runs `then`."""

    async def script(response: ResponseWriter) -> None:
        await response.start_stream()
        for _ in range(tokens):
            await response.event(json.dumps({"choices": [{"text": "word ", "finish_reason": None}]}))
        await then(response)

    return script


@dataclass
class FakeEngine:
    """An engine that responds as its scripts do."""

    name: str
    prefill: Script = send_kv_transfer_params
    decode: Script = field(default_factory=send_source_name)
    metrics: bytes = b""
    requests: list[ReceivedRequest] = field(default_factory=list)
    """Completion requests; probes are not recorded."""
    abandoned: list[ReceivedRequest] = field(default_factory=list)
    """Requests whose connection the router closed before the end of the response."""
    connections: int = 0
    port: int = 0

    @property
    def prefills(self) -> list[dict[str, Any]]:
        """Bodies of prefill legs."""
        return [request.body for request in self.requests if request.is_prefill]

    @property
    def decodes(self) -> list[dict[str, Any]]:
        """Bodies of decode legs."""
        return [request.body for request in self.requests if not request.is_prefill]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        try:
            while (request := await read_request(reader)) is not None:
                if request.method == "POST":
                    self.requests.append(request)
                if not await self._respond(request, reader, writer):
                    break
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async def _respond(
        self, request: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        response = ResponseWriter(self, request, writer)
        script = asyncio.ensure_future(self._script(request)(response))
        disconnected = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((script, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if script.done():
            disconnected.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await disconnected
            with suppress(ConnectionError):
                script.result()
            return not writer.is_closing()
        script.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await script
        self.abandoned.append(request)
        return False

    def _script(self, request: ReceivedRequest) -> Script:
        if request.method == "GET":
            return self._page
        return self.prefill if request.is_prefill else self.decode

    async def _page(self, response: ResponseWriter) -> None:
        content = self.metrics
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(content)
        await response.raw(head + content)


async def read_request(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    """The next request on a connection; None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    line, *header_lines = head[:-4].split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (header.partition(":") for header in header_lines)
    }
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = line.split(" ")
    return ReceivedRequest(method, path, headers, json.loads(content) if content else {})


@dataclass
class RunningRouter:
    """A router in this process, and its fake engines."""

    router: Router
    server: RouterServer
    engines: dict[str, FakeEngine]
    port: int
    servers: dict[str, asyncio.Server]
    background: list[asyncio.Future[None]] = field(default_factory=list)

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    def url(self, path: str = "/v1/completions") -> str:
        """URL for clients."""
        return f"http://127.0.0.1:{self.port}{path}"

    def when_stopping(self, then: Callable[[], object]) -> None:
        """Call `then` when the router is shutting down."""

        async def wait() -> None:
            await wait_until(lambda: self.router.stopping, "the router is stopping")
            then()

        self.background.append(asyncio.ensure_future(wait()))

    def ledgers_are_empty(self) -> bool:
        """Whether no ledger counts any work."""
        names = (
            "prefill_queued_s",
            "prefill_tokens",
            "legs",
            "local_prefills",
            "decode_tokens",
            "pending_transfers",
            "reserved_tokens",
            "awaited_first_tokens",
        )
        return all(not getattr(i.ledger, name) for i in self.router.fleet.instances for name in names)


@asynccontextmanager
async def run_router(
    *engines: FakeEngine,
    settings: ServiceSettings | None = None,
    grace_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[RunningRouter]:
    """Run a router over these engines; names that begin with `p` have the role prefill, all others decode."""
    router = Router()
    router.configure(settings or settings_with_short_timeouts(), last_prefill_to_decode_s=None)
    servers = {}
    for engine in engines:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        servers[engine.name] = server
        engine.port = server.sockets[0].getsockname()[1]
        instance = _instance_at(engine.name, engine.port)
        instance.set_identity(EngineIdentity("m", "fake 1", "bf16", 16, 1))
        router.fleet.add(instance)
    bound = bind_socket("127.0.0.1", 0, option="--port")
    served = RouterServer(router, sweep_s=0.01, grace_s=grace_s)
    world = RunningRouter(router, served, {e.name: e for e in engines}, bound.getsockname()[1], servers)
    try:
        async with served.listening(bound, tls=tls):
            yield world
    finally:
        for server in servers.values():
            server.close()


@asynccontextmanager
async def route_to_servers(
    engines: Mapping[str, Engine], **timeouts: float
) -> AsyncIterator[tuple[Router, str]]:
    """Run a router over engine servers, with names as in `run_router`; yields it and its completion URL."""
    router = Router()
    router.configure(
        replace(settings_with_short_timeouts(**timeouts), model=MODEL), last_prefill_to_decode_s=None
    )
    for name, engine in engines.items():
        router.fleet.add(_instance_at(name, engine.port))
    bound = bind_socket("127.0.0.1", 0, option="--port")
    async with RouterServer(router).listening(bound):
        yield router, f"http://127.0.0.1:{bound.getsockname()[1]}/v1/completions"


def _instance_at(name: str, port: int) -> Instance:
    instance = Instance(name)
    instance.set_endpoint("127.0.0.1", port)
    instance.assign(Role.PREFILL if name.startswith("p") else Role.DECODE)
    return instance


def settings_with_short_timeouts(**timeouts: float) -> ServiceSettings:
    """Default settings with time-outs that are short enough for tests."""
    quick = {"connect": 0.5, "prefill": 2.0, "first_byte": 2.0, "idle": 2.0, **timeouts}
    limits = Timeouts.from_spec(TimeoutsSpec.model_validate(quick))
    tiers = {"premium": Tier("premium", SLO, -5)}
    return ServiceSettings(
        service="s", model="m", timeouts=limits, default_tier=Tier("default", SLO), tiers=tiers
    )
