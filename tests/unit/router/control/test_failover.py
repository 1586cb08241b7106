"""Two routers and one Lease: who is active, whom the slice names, and what leaving looks like."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fulcrum_router.control.failover import (
    HANDOVER_TIMEOUT_S,
    LINGER_S,
    SLICE_CHECK_INTERVAL_S,
    Failover,
    RouterEndpoint,
)
from fulcrum_router.router import Router
from tests.unit.router.fake_object_api import FakeObjectApi

pytestmark = pytest.mark.looptime(start=0.0)

NAME = "chat-router"
TAKEOVER_S = 4.5
"""Three seconds of the Lease, half a second to look, one since the last renewal."""


class LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class RouterGroup:
    """Routers `a`, `b`, … at 10.0.0.1, 10.0.0.2, …"""

    def __init__(self, seed: int) -> None:
        self.objects = FakeObjectApi()
        self.objects.put("Lease", NAME, spec={})
        self.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        self.rng = random.Random(seed)
        self.routers: dict[str, Router] = {}
        self.failovers: dict[str, Failover] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        endpoint = RouterEndpoint(
            name=NAME,
            namespace="n",
            identity=name,
            address=f"10.0.0.{ord(name) - ord('a') + 1}",
            port=8000,
            state_port=9091,
        )
        router = self.routers[name] = Router()
        self.failovers[name] = Failover(router, self.objects, endpoint, clock=LoopClock(), rng=self.rng)
        self.tasks[name] = asyncio.create_task(self.failovers[name].run())
        await asyncio.sleep(0.01)

    async def stop(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])

    @property
    def active(self) -> list[str]:
        return [name for name, router in sorted(self.routers.items()) if router.active]

    async def slice_addresses(self) -> list[str]:
        slice_ = self.objects._objects["EndpointSlice", NAME]
        return [address for endpoint in slice_["endpoints"] for address in endpoint["addresses"]]

    def slice_writes(self) -> int:
        return sum(kind == "EndpointSlice" for kind, _ in self.objects.writes)


@contextmanager
def routers(seed: int) -> Iterator[RouterGroup]:
    made = RouterGroup(seed)
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()


async def test_one_router_is_active_and_its_address_is_in_the_slice(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await group.start("b")
        await asyncio.sleep(60)
        assert (group.active, await group.slice_addresses()) == (["a"], ["10.0.0.1"])
        assert group.slice_writes() == 1, "what is right is not written again"
        ports = group.objects._objects["EndpointSlice", NAME]["ports"]
        assert [(port["name"], port["port"]) for port in ports] == [("http", 8000), ("state", 9091)]


async def test_the_standby_replaces_a_dead_router_and_starts_a_new_ledger(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await group.start("b")
        group.routers["b"].since_s = 0.0
        await asyncio.sleep(7)
        await group.stop("a")
        await asyncio.sleep(TAKEOVER_S)
        assert (group.routers["b"].active, await group.slice_addresses()) == (True, ["10.0.0.2"])
        assert (group.routers["b"].counters.takeovers, group.routers["b"].since_s > 0) == (1, True)


async def test_a_leaving_router_serves_until_its_successor_has_the_traffic(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await group.start("b")
        await asyncio.sleep(5)
        await group.stop("a")
        leaving = asyncio.create_task(group.failovers["a"].hand_over())
        await asyncio.sleep(1.2)
        assert (await group.slice_addresses(), group.active) == (["10.0.0.2"], ["b"])
        assert group.routers["a"].leaving, "clients are sent to the successor now"
        began_s = asyncio.get_running_loop().time()
        await leaving
        assert LINGER_S - 1.5 < asyncio.get_running_loop().time() - began_s <= LINGER_S


async def test_the_last_router_leaves_after_the_handover_timeout(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await asyncio.sleep(5)
        await group.stop("a")
        began_s = asyncio.get_running_loop().time()
        await group.failovers["a"].hand_over()
        assert HANDOVER_TIMEOUT_S <= asyncio.get_running_loop().time() - began_s < HANDOVER_TIMEOUT_S + 0.2


async def test_a_standby_leaves_at_once(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await group.start("b")
        await asyncio.sleep(5)
        await group.stop("b")
        began_s = asyncio.get_running_loop().time()
        await group.failovers["b"].hand_over()
        assert asyncio.get_running_loop().time() == began_s
        assert group.active == ["a"]


async def test_the_active_router_stays_active_through_an_api_server_outage(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await group.start("b")
        await asyncio.sleep(5)
        group.objects.unavailable = True
        await asyncio.sleep(30)
        assert group.active == ["a"]
        group.objects.unavailable = False
        await asyncio.sleep(30)
        assert (group.active, await group.slice_addresses()) == (["a"], ["10.0.0.1"])


async def test_a_failed_slice_write_is_retried(seed: int) -> None:
    with routers(seed) as group:
        group.objects.remove("EndpointSlice", NAME)
        await group.start("a")
        await asyncio.sleep(10)
        assert group.active == ["a"]
        group.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        await asyncio.sleep(1)
        assert await group.slice_addresses() == ["10.0.0.1"]


async def test_an_internal_error_does_not_end_the_candidacy(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with routers(seed) as group:
        faults = iter([RuntimeError("a fault")])
        find = group.objects.get

        async def get(*args: Any, **named: Any) -> Any:
            for fault in faults:
                raise fault
            return await find(*args, **named)

        monkeypatch.setattr(group.objects, "get", get)
        await group.start("a")
        await asyncio.sleep(5)
        assert (group.active, await group.slice_addresses()) == (["a"], ["10.0.0.1"])


async def test_an_emptied_slice_is_filled_again(seed: int) -> None:
    with routers(seed) as group:
        await group.start("a")
        await asyncio.sleep(5)
        group.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        await asyncio.sleep(SLICE_CHECK_INTERVAL_S + 0.1)
        assert await group.slice_addresses() == ["10.0.0.1"]


async def test_a_router_resumed_after_a_long_stop_does_not_take_the_traffic_back(seed: int) -> None:
    """As after SIGSTOP and SIGCONT: it believes that it leads, and first of all finds a foreign slice."""
    with routers(seed) as group:
        await group.start("a")
        await asyncio.sleep(5)
        await group.stop("a")
        await group.start("b")
        await asyncio.sleep(TAKEOVER_S)
        assert group.failovers["a"]._elector.leading
        assert await group.failovers["a"]._ensure_slice()
        assert (group.active, await group.slice_addresses()) == (["b"], ["10.0.0.2"])
