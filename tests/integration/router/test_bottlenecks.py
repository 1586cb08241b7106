"""A fault in one part of the service: metric, condition and `fulcrum status` name that part.

One router over two engine servers gets one fault after another. The operator's clock is the test's: it reads
the router 5 and 10 seconds after the fault.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fulcrum_cli.terminal.output import condition_lines
from fulcrum_core.api import PDService
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_operator.plan.slo_window import SloReport, SloWindow, update_window
from fulcrum_operator.plan.status.slo_met import slo_met_condition
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.state_port import build_router_state
from fulcrum_router.policy.waiting.waiting_room import WaitingRoom
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier
from tests.conftest import RecordMeasurement
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    build_post,
    route_to_servers,
    run_router,
    settings_with_short_timeouts,
)
from tests.integration.simulator.servers import MODEL, Client, Server, launch, prompt_of, ready
from tests.objects import make_object
from tests.waiting import wait_until, wait_until_time

SLO = Slo(ttft_s=0.25, tpot_s=0.06)
NAMED_WITHIN_S = 15.0
KV_TOKENS = 2_048
SERVICE = make_object(PDService, "chat", {"model": MODEL, "instances": 2})


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """A prefill and a decode instance with quick steps and a small KV cache."""
    quick = {"t0": 0.002, "b": 1.25e-4, "d1": 1e-4, "kv_capacity_tokens": KV_TOKENS, "startup_s": 0.0}
    quick |= {"weight_bytes": 100_000_000}
    path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(load_profile("laptop").model_dump() | quick | {"name": "quick"}))
    processes = [launch(path), launch(path)]
    servers = dict(zip(("p1", "d1"), map(ready, processes), strict=True))
    yield servers
    for server in servers.values():
        server.kill()


class Scene:
    """The service under test: sends requests, injects faults, reads the router as the operator does."""

    def __init__(
        self, session: aiohttp.ClientSession, router: Router, url: str, engines: dict[str, Server]
    ) -> None:
        self.router, self._session, self._url, self._engines = router, session, url, engines
        self._prompts = iter(range(1_000_000))
        self.window, self._now_s = SloWindow(), 1_000_000.0

    async def stream(self, tokens: int = 100, output: int = 2) -> None:
        """Send a request with a new prompt; returns at the end of its response."""
        body = {"model": MODEL, "prompt": prompt_of(f"{next(self._prompts)}", tokens), "max_tokens": output}
        async with self._session.post(self._url, json={**body, "stream": True}) as response:
            await response.read()

    async def in_turn(self, count: int, **request: int) -> None:
        for _ in range(count):
            await self.stream(**request)

    async def at_once(self, count: int, **request: int) -> None:
        await asyncio.gather(*(self.stream(**request) for _ in range(count)))

    async def inject(self, engine: str, kind: str, **fields: Any) -> None:
        await Client(self._session).inject_fault(self._engines[engine], kind, **fields)

    async def runs(self, engine: str, requests: int) -> bool:
        stats = await Client(self._session).stats(self._engines[engine])
        return bool(stats["running"] == requests)

    def read_router(self, *, after_s: float) -> SloReport | None:
        """Read the router's counts `after_s` seconds later, as the operator does every five seconds."""
        self._now_s += after_s
        state = build_router_state(self.router, now_s=self._now_s)
        self.window = update_window(self.window, state, SERVICE, now_s=self._now_s)
        return self.window.report

    def configure(self, **settings: Any) -> None:
        current = self.router.settings
        assert current is not None
        self.router.configure(replace(current, **settings), last_prefill_to_decode_s=None)


async def refuse(scene: Scene) -> None:
    room = scene.router.journeys.waiting_room
    scene.router.journeys.waiting_room = WaitingRoom(prefill_ahead_s=1e-6, max_requests=0)
    try:
        await scene.at_once(6)
    finally:
        scene.router.journeys.waiting_room = room


async def make_wait(scene: Scene) -> None:
    scene.configure(prefill_ahead_s=1e-6)
    await scene.at_once(8, tokens=800)
    scene.configure(prefill_ahead_s=float("inf"))


async def queue_prompts(scene: Scene) -> None:
    await scene.at_once(8, tokens=800)


async def slow_prefill(scene: Scene) -> None:
    await scene.inject("p1", "slow", factor=40)
    await scene.in_turn(3)
    await scene.inject("p1", "none")


async def fill_decode(scene: Scene) -> None:
    """Two requests fill the KV cache of the decode instance; the others find no room."""
    await scene.inject("d1", "slow", factor=2)
    large = asyncio.ensure_future(scene.at_once(2, tokens=850, output=170))
    await wait_until(lambda: scene.runs("d1", 2), "the large requests decode")
    await scene.at_once(3, tokens=400)
    await large
    await scene.inject("d1", "none")


async def slow_decode(scene: Scene) -> None:
    await scene.inject("d1", "slow", factor=40)
    await scene.at_once(3, output=6)
    await scene.inject("d1", "none")


async def slow_network(scene: Scene) -> None:
    """The decode instance is never idle: a long response runs on it all the time."""
    await scene.inject("d1", "slow_transfers", factor=120)
    busy = asyncio.ensure_future(scene.stream(output=1_000))
    try:
        await scene.at_once(7, tokens=300)
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await scene.inject("d1", "none")


FAULTS: dict[str, Callable[[Scene], Coroutine[Any, Any, None]]] = {
    "admission": refuse,
    "waiting": make_wait,
    "prefill_queue": queue_prompts,
    "prefill": slow_prefill,
    "decode_queue": fill_decode,
    "decode": slow_decode,
    "transfer": slow_network,
}


@asynccontextmanager
async def run_scene(engines: dict[str, Server]) -> AsyncIterator[Scene]:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(20)) as session,
        route_to_servers(engines, prefill=20.0, first_byte=20.0, idle=20.0) as (router, url),
    ):
        scene = Scene(session, router, url, engines)
        # Prompts wait in the engine, and stay with the slow instance.
        scene.configure(
            default_tier=Tier("default", SLO),
            prefill_ahead_s=float("inf"),
            deflects=False,
        )
        yield scene


def count_by_part(router: Router, family: str) -> dict[str, float]:
    """The router's counts by latency part, as Prometheus reads them."""
    name = f"fulcrum_router_{family}_total"
    families = text_string_to_metric_families(generate_latest(build_registry(router)).decode())
    samples = [sample for found in families for sample in found.samples if sample.name == name]
    return {sample.labels["part"]: sample.value for sample in samples}


async def test_the_part_in_which_a_fault_is_injected_is_named(
    engines: dict[str, Server], record_measurement: RecordMeasurement
) -> None:
    """`named`: the part with most new misses in the metric, and the reason in `fulcrum status`."""
    named, took_s = dict[str, tuple[str, str]](), dict[str, float]()
    async with run_scene(engines) as scene:
        scene.read_router(after_s=0)
        await scene.at_once(20, tokens=8)  # without a fault
        for part, inject in FAULTS.items():
            before, began_s = count_by_part(scene.router, "slo_misses"), time.monotonic()
            scene.read_router(after_s=30)
            await inject(scene)
            took_s[part] = time.monotonic() - began_s
            after = count_by_part(scene.router, "slo_misses")
            for _ in range(2):
                report = scene.read_router(after_s=5)
            grown = {name: after[name] - before[name] for name in after}
            line = condition_lines([slo_met_condition(SERVICE, report)])[1]
            named[part] = (max(grown, key=lambda name: grown[name]), line.split()[2])
    assert named == {part: (part, f"MissedBy{part.title().replace('_', '')}") for part in FAULTS}
    assert max(took_s.values()) < NAMED_WITHIN_S
    record_measurement("; ".join(f"{part} in {seconds:.1f} s" for part, seconds in took_s.items()))


async def test_the_time_of_a_slow_client_is_a_part_of_its_own_and_no_miss() -> None:
    async def send_a_lot(response: ResponseWriter) -> None:
        await response.start_stream()
        for _ in range(12):
            await response.event(json.dumps({"choices": [{"text": "x" * 1_000_000, "finish_reason": None}]}))
        await response.event("[DONE]")
        await response.raw(b"0\r\n\r\n")

    settings = replace(settings_with_short_timeouts(), default_tier=Tier("default", Slo(60.0, 60.0)))
    async with run_router(FakeEngine("p1"), FakeEngine("d1", decode=send_a_lot), settings=settings) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1024)
        writer.write(build_post(json.dumps({**PROMPT, "stream": True}).encode(), "connection: close"))
        await wait_until(lambda: bool(world.server.clients.connections), "the client is connected")
        (connection,) = world.server.clients.connections
        await wait_until(lambda: connection.paused, "the client's buffers are full")
        await wait_until_time(time.monotonic() + 0.7, "the time of the client is what is measured")
        while await reader.read(65_536):
            pass
        await wait_until(world.ledgers_are_empty, "the request has ended")
        seconds = count_by_part(world.router, "request_time_seconds")
        misses = count_by_part(world.router, "slo_misses")
        writer.close()
    assert (seconds["slow_client"] >= 0.6, sum(misses.values())) == (True, 0)
