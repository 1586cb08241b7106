"""Requests whose clients leave at any time leave nothing behind: no socket, no ledger entry, no object.

`--cancelled-requests 100000` runs the full number in about three minutes.
"""

import asyncio
import gc
import json
import os
import random
from collections import Counter
from typing import Any, cast

import pytest

from fulcrum_router.data_path.decode import DecodeLeg
from fulcrum_router.data_path.decode_response import DecodeResponse
from fulcrum_router.data_path.downstream import ClientConnection
from fulcrum_router.data_path.exchange import Exchange
from fulcrum_router.http1 import upstream
from fulcrum_router.http1.upstream import EngineConnection
from fulcrum_router.policy.journey import Journey
from tests.conftest import RecordMeasurement
from tests.integration.router.fake_engines import (
    FakeEngine,
    RunningRouter,
    build_json_response,
    build_post,
    frame_event,
    make_kv_transfer_params,
    run_router,
)
from tests.waiting import wait_until

CLIENTS = 32
MAX_TURNS = 40
"""Turns of the event loop after which a client has left; an undisturbed request takes fewer."""
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    *(frame_event(json.dumps({"choices": [{"text": "word ", "finish_reason": None}]})) for _ in range(5)),
    frame_event("[DONE]"),
    b"0\r\n\r\n",
)
KEPT_TYPES = (ClientConnection, EngineConnection, Exchange, DecodeLeg, DecodeResponse, Journey)


class EngineProtocol(asyncio.Protocol):
    """A quick engine: answers prefill legs with parameters, decode legs with a stream or a whole response."""

    def __init__(self, engine: FakeEngine, rng: random.Random) -> None:
        self._rng, self._received = rng, b""
        params = make_kv_transfer_params(engine)
        self._prefill = build_json_response(
            200, {"choices": [{}], "usage": {"prompt_tokens": 7}, "kv_transfer_params": params}
        )
        self._whole = build_json_response(200, {"choices": [{"text": "word " * 5}]})
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < _content_length(head):
            return
        self._received = b""
        if b'"do_remote_decode":true' in body:
            self._parts = [self._prefill]
        elif head.startswith(b"GET"):
            self._parts = [build_json_response(200, {})]
        else:
            self._parts = list(STREAM) if b'"stream":true' in body else [self._whole]
        if self._rng.random() < 0.05:
            self._transport.abort()
        else:
            self._respond()

    def _respond(self) -> None:
        """Send the next part, and the others in later turns of the event loop."""
        if self._parts and not self._transport.is_closing():
            self._transport.write(self._parts.pop(0))
            asyncio.get_running_loop().call_soon(self._respond)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


class LeavingClient(asyncio.Protocol):
    """Sends one request and leaves after some turns of the event loop, with or without its response."""

    def __init__(self, request: bytes, turns: int) -> None:
        self._request, self._turns = request, turns
        self.left = asyncio.get_running_loop().create_future()
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self._count_turn()

    def _count_turn(self) -> None:
        self._turns -= 1
        if self._turns < 0:
            self._transport.abort()
        elif not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._count_turn)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        if not self.left.done():
            self.left.set_result(None)


async def send_and_leave(world: RunningRouter, rng: random.Random, count: int) -> None:
    """Send `count` requests one after another, each on a connection of its own."""
    for _ in range(count):
        body = json.dumps({"prompt": "hello", "stream": rng.random() < 0.5}, separators=(",", ":")).encode()
        turns = rng.randrange(MAX_TURNS)
        _, client = await asyncio.get_running_loop().create_connection(
            lambda body=body, turns=turns: LeavingClient(build_post(body), turns),  # type: ignore[misc]
            "127.0.0.1",
            world.port,
        )
        await client.left


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_objects() -> Counter[str]:
    """Objects of requests and connections that are alive."""
    gc.collect()
    return Counter(type(known).__name__ for known in gc.get_objects() if isinstance(known, KEPT_TYPES))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux: /proc")
@pytest.mark.timeout(1_200)
async def test_requests_that_are_cancelled_at_any_time_leave_nothing_behind(
    seed: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    record_measurement: RecordMeasurement,
) -> None:
    # Most legs need a connection of their own, so that clients also leave while one is made.
    monkeypatch.setattr(upstream, "MAX_IDLE_S", 0.002)
    rng, total = random.Random(seed), request.config.getoption("--cancelled-requests")
    engines = [FakeEngine(name) for name in ("p1", "p2", "d1", "d2")]
    async with run_router(*engines) as world:
        await use_quick_engines(world, rng)
        instances = world.router.fleet.instances

        async def settle() -> None:
            await wait_until(
                lambda: (
                    world.ledgers_are_empty()
                    and not world.server.clients.connections
                    and all(not pool.busy and not pool.idle_count for pool in pools())
                ),
                "no connection is left",
            )

        def pools() -> list[Any]:
            return [instance.require_connection_pool() for instance in instances]

        def keep_serving() -> None:
            for instance in instances:  # aborting engines are ejected; that is another test's
                instance.health.record_success()
                instance.update_serving()

        await send_and_leave(world, rng, 50)
        await settle()
        files, objects = count_open_files(), count_objects()
        for _ in range(10):
            keep_serving()
            await asyncio.gather(
                *(send_and_leave(world, rng, total // CLIENTS // 10) for _ in range(CLIENTS))
            )
        await settle()
        await wait_until(lambda: count_open_files() <= files, "all sockets are closed")
        assert count_objects() - objects == Counter()
        assert world.server.clients.memory.held_bytes == 0
        outcomes = Counter[str]()
        for tier in world.router.counters.tiers.values():
            outcomes.update({str(outcome): count for outcome, count in tier.requests_by_outcome.items()})
        assert outcomes["cancelled"] > total / 20
        assert outcomes["ok"] > total / 20
        record_measurement(f"cancelled requests: {dict(outcomes)}; {files} files open before and after")


async def use_quick_engines(world: RunningRouter, rng: random.Random) -> None:
    """Replace the engines' servers by quicker ones. The old ones close last: a probe may be on its way."""
    for name, engine in world.engines.items():
        server = await asyncio.get_running_loop().create_server(
            lambda engine=engine: EngineProtocol(engine, rng),  # type: ignore[misc]
            "127.0.0.1",
            0,
        )
        world.servers[f"{name} before"], world.servers[name] = world.servers[name], server
        world.router.fleet[name].set_endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
