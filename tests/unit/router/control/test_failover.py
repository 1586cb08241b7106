"""Two routers and one Lease: who is active, whom the slice names, and what leaving looks like."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fulcrum_router.control.failover import CHECK_S, HAND_OVER_S, LINGER_S, Failover, Place
from fulcrum_router.router import Router
from tests.unit.router.objects import MemoryObjects

pytestmark = pytest.mark.looptime(start=0.0)

NAME = "chat-router"
FOLLOWS_S = 4.5
"""Three seconds of the Lease, half a second to look, one since the last renewal."""


class LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class Routers:
    """Routers `a`, `b`, … at 10.0.0.1, 10.0.0.2, …"""

    def __init__(self, seed: int) -> None:
        self.objects = MemoryObjects()
        self.objects.put("Lease", NAME, spec={})
        self.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        self.rng = random.Random(seed)
        self.routers: dict[str, Router] = {}
        self.failovers: dict[str, Failover] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        place = Place(
            name=NAME,
            namespace="n",
            identity=name,
            address=f"10.0.0.{ord(name) - ord('a') + 1}",
            port=8000,
            state_port=9091,
        )
        router = self.routers[name] = Router()
        self.failovers[name] = Failover(router, self.objects, place, clock=LoopClock(), rng=self.rng)
        self.tasks[name] = asyncio.create_task(self.failovers[name].run())
        await asyncio.sleep(0.01)

    async def stop(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])

    @property
    def active(self) -> list[str]:
        return [name for name, router in sorted(self.routers.items()) if router.active]

    async def directed_to(self) -> list[str]:
        slice_ = self.objects._kept["EndpointSlice", NAME]
        return [address for endpoint in slice_["endpoints"] for address in endpoint["addresses"]]

    def slice_writes(self) -> int:
        return sum(kind == "EndpointSlice" for kind, _ in self.objects.writes)


@contextmanager
def routers(seed: int) -> Iterator[Routers]:
    made = Routers(seed)
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()


async def test_one_is_active_and_the_slice_names_it(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await world.start("b")
        await asyncio.sleep(60)
        assert (world.active, await world.directed_to()) == (["a"], ["10.0.0.1"])
        assert world.slice_writes() == 1, "what is right is not written again"
        ports = world.objects._kept["EndpointSlice", NAME]["ports"]
        assert [(port["name"], port["port"]) for port in ports] == [("http", 8000), ("state", 9091)]


async def test_the_standby_follows_a_dead_one_and_its_ledger_begins_then(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await world.start("b")
        world.routers["b"].since_s = 0.0
        await asyncio.sleep(7)
        await world.stop("a")
        await asyncio.sleep(FOLLOWS_S)
        assert (world.routers["b"].active, await world.directed_to()) == (True, ["10.0.0.2"])
        assert (world.routers["b"].books.takeovers, world.routers["b"].since_s > 0) == (1, True)


async def test_one_that_leaves_serves_on_until_its_successor_has_the_traffic(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await world.start("b")
        await asyncio.sleep(5)
        await world.stop("a")
        leaving = asyncio.create_task(world.failovers["a"].hand_over())
        await asyncio.sleep(1.2)
        assert (await world.directed_to(), world.active) == (["10.0.0.2"], ["b"])
        assert world.routers["a"].leaving, "clients are sent to the successor now"
        began_s = asyncio.get_running_loop().time()
        await leaving
        assert LINGER_S - 1.5 < asyncio.get_running_loop().time() - began_s <= LINGER_S


async def test_the_last_one_leaves_after_the_window(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await asyncio.sleep(5)
        await world.stop("a")
        began_s = asyncio.get_running_loop().time()
        await world.failovers["a"].hand_over()
        assert HAND_OVER_S <= asyncio.get_running_loop().time() - began_s < HAND_OVER_S + 0.2


async def test_a_standby_leaves_at_once(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await world.start("b")
        await asyncio.sleep(5)
        await world.stop("b")
        began_s = asyncio.get_running_loop().time()
        await world.failovers["b"].hand_over()
        assert asyncio.get_running_loop().time() == began_s
        assert world.active == ["a"]


async def test_without_the_api_server_the_active_one_stays_and_is_the_same_after(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await world.start("b")
        await asyncio.sleep(5)
        world.objects.away = True
        await asyncio.sleep(30)
        assert world.active == ["a"]
        world.objects.away = False
        await asyncio.sleep(30)
        assert (world.active, await world.directed_to()) == (["a"], ["10.0.0.1"])


async def test_a_slice_that_could_not_be_written_is_written_later(seed: int) -> None:
    with routers(seed) as world:
        world.objects.drop("EndpointSlice", NAME)
        await world.start("a")
        await asyncio.sleep(10)
        assert world.active == ["a"]
        world.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        await asyncio.sleep(1)
        assert await world.directed_to() == ["10.0.0.1"]


async def test_a_fault_of_its_own_ends_no_candidature(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with routers(seed) as world:
        faults = iter([RuntimeError("a fault")])
        find = world.objects.get

        async def get(*args: Any, **named: Any) -> Any:
            for fault in faults:
                raise fault
            return await find(*args, **named)

        monkeypatch.setattr(world.objects, "get", get)
        await world.start("a")
        await asyncio.sleep(5)
        assert (world.active, await world.directed_to()) == (["a"], ["10.0.0.1"])


async def test_a_slice_that_somebody_emptied_is_filled_again(seed: int) -> None:
    with routers(seed) as world:
        await world.start("a")
        await asyncio.sleep(5)
        world.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])
        await asyncio.sleep(CHECK_S + 0.1)
        assert await world.directed_to() == ["10.0.0.1"]


async def test_one_that_was_stopped_for_long_does_not_take_the_traffic_back(seed: int) -> None:
    """As after SIGSTOP and SIGCONT: it believes that it leads, and first of all finds a foreign slice."""
    with routers(seed) as world:
        await world.start("a")
        await asyncio.sleep(5)
        await world.stop("a")
        await world.start("b")
        await asyncio.sleep(FOLLOWS_S)
        assert world.failovers["a"]._elector.leading
        assert await world.failovers["a"]._direct_here()
        assert (world.active, await world.directed_to()) == (["b"], ["10.0.0.2"])
