"""Several routers and one Lease: which is active, which one the EndpointSlice names, and the handover."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fulcrum_core.router_state import ROUTER_HANDOVER_TIMEOUT_S
from fulcrum_router.control.failover import (
    LINGER_S,
    MODELS_ANNOTATION,
    MODELS_INTERVAL_S,
    SLICE_CHECK_INTERVAL_S,
    Failover,
    RouterEndpoint,
)
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy.predictions.estimate import DEFAULT_PREFILL
from fulcrum_router.router import Router
from tests.clocks import LoopClock
from tests.unit.router.fake_object_api import FakeObjectApi
from tests.waiting import advance, wait_until

pytestmark = pytest.mark.looptime(start=0.0)

NAME = "chat-router"
TAKEOVER_S = 4.5
"""Longest takeover: 3 s of the Lease, 0.5 s until it is checked, 1 s since its last renewal."""
HANDOVER_S = 1.2
"""Longest time from the release of the Lease to the successor's address in the slice."""


def loop_time() -> float:
    return asyncio.get_running_loop().time()


class RouterGroup:
    """Routers `a`, `b`, … with the addresses 10.0.0.1, 10.0.0.2, …"""

    def __init__(self, seed: int) -> None:
        self.objects = FakeObjectApi()
        self.objects.put("Lease", NAME, spec={})
        self.empty_slice()
        self.rng = random.Random(seed)
        self.routers: dict[str, Router] = {}
        self.failovers: dict[str, Failover] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start_active(self, name: str) -> None:
        """Start a router and wait until traffic is directed to it."""
        self.start(name)
        await self.wait_until_active(name)

    def start(self, name: str) -> None:
        endpoint = RouterEndpoint(
            lease_name=NAME,
            namespace="n",
            identity=name,
            address=_address(name),
            port=8000,
            state_port=9091,
        )
        router = self.routers[name] = Router()
        self.failovers[name] = Failover(router, self.objects, endpoint, clock=LoopClock(), rng=self.rng)
        self.tasks[name] = asyncio.create_task(self.failovers[name].run())

    async def wait_until_active(self, name: str, *, timeout_s: float = 20.0) -> None:
        """Wait until the router is active and the slice names its address."""
        address = _address(name)
        await wait_until(
            lambda: self.routers[name].active and self.slice_addresses() == [address],
            f"router {name} is active",
            timeout_s=timeout_s,
        )

    async def stop(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])

    @property
    def active(self) -> list[str]:
        return [name for name, router in sorted(self.routers.items()) if router.active]

    def empty_slice(self) -> None:
        self.objects.put("EndpointSlice", NAME, addressType="IPv4", endpoints=[], ports=[])

    def slice_addresses(self) -> list[str]:
        slice_ = self.objects.peek("EndpointSlice", NAME)
        return [address for endpoint in slice_["endpoints"] for address in endpoint["addresses"]]

    def slice_writes(self) -> int:
        return sum(kind == "EndpointSlice" for kind, _ in self.objects.writes)


def _address(name: str) -> str:
    return f"10.0.0.{ord(name) - ord('a') + 1}"


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
        await group.start_active("a")
        group.start("b")
        await advance(60)
        assert (group.active, group.slice_addresses()) == (["a"], ["10.0.0.1"])
        assert group.slice_writes() == 1, "a correct slice is not written again"
        ports = group.objects.peek("EndpointSlice", NAME)["ports"]
        assert [(port["name"], port["port"]) for port in ports] == [("http", 8000), ("state", 9091)]


async def test_the_standby_replaces_a_dead_router_and_starts_a_new_ledger(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        group.start("b")
        group.routers["b"].since_s = 0.0
        await advance(7)
        await group.stop("a")
        await group.wait_until_active("b", timeout_s=TAKEOVER_S)
        assert (group.routers["b"].counters.takeovers, group.routers["b"].since_s > 0) == (1, True)


async def test_a_router_that_hands_over_serves_until_its_successor_has_the_traffic(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        group.start("b")
        await advance(5)
        await group.stop("a")
        handing_over = asyncio.create_task(group.failovers["a"].hand_over())
        await group.wait_until_active("b", timeout_s=HANDOVER_S)
        assert group.active == ["b"]
        await wait_until(lambda: group.routers["a"].leaving, "clients are sent to the successor", timeout_s=1)
        began_s = loop_time()
        await handing_over
        assert LINGER_S - 1.5 < loop_time() - began_s <= LINGER_S + 1e-6


async def test_the_last_router_leaves_after_the_handover_timeout(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        await group.stop("a")
        began_s = loop_time()
        await group.failovers["a"].hand_over()
        assert ROUTER_HANDOVER_TIMEOUT_S <= loop_time() - began_s < ROUTER_HANDOVER_TIMEOUT_S + 0.2


async def test_the_last_router_of_a_deleted_service_waits_for_nobody(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        await group.stop("a")
        group.objects.remove("EndpointSlice", NAME)
        began_s = loop_time()
        await group.failovers["a"].hand_over()
        assert loop_time() - began_s <= LINGER_S + 0.2


async def test_a_standby_leaves_at_once(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        group.start("b")
        await advance(5)
        await group.stop("b")
        began_s = loop_time()
        await group.failovers["b"].hand_over()
        assert loop_time() == began_s
        assert group.active == ["a"]


async def test_the_active_router_stays_active_through_an_api_server_outage(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        group.start("b")
        await advance(5)
        group.objects.unavailable = True
        await advance(30)
        assert group.active == ["a"]
        group.objects.unavailable = False
        await advance(30)
        assert (group.active, group.slice_addresses()) == (["a"], ["10.0.0.1"])


async def test_a_failed_slice_write_is_retried(seed: int) -> None:
    with routers(seed) as group:
        group.objects.remove("EndpointSlice", NAME)
        group.start("a")
        await advance(10)
        assert group.active == ["a"]
        group.empty_slice()
        await group.wait_until_active("a", timeout_s=1)


async def test_an_internal_error_does_not_end_the_candidacy(seed: int) -> None:
    with routers(seed) as group:
        group.objects.internal_error = RuntimeError("a bug")
        await group.start_active("a")
        assert group.objects.internal_error is None, "the error was raised"


async def test_an_emptied_slice_is_filled_again(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        group.empty_slice()
        await group.wait_until_active("a", timeout_s=SLICE_CHECK_INTERVAL_S + 0.1)


async def test_a_router_resumed_after_a_long_stop_does_not_take_the_traffic_back(seed: int) -> None:
    """As after SIGSTOP and SIGCONT: the router still counts as the leader, and finds a foreign slice."""
    with routers(seed) as group:
        await group.start_active("a")
        await group.stop("a")
        group.start("b")
        await group.wait_until_active("b", timeout_s=TAKEOVER_S)
        assert group.active == ["a", "b"], "the stopped router has not noticed"
        assert await group.failovers["a"].ensure_slice()
        assert (group.active, group.slice_addresses()) == (["b"], ["10.0.0.2"])


def measure(router: Router, prefill_s: float) -> None:
    """Have the router measure prompts of 1,000 tokens on its instance of the pool `flex`."""
    instance = router.fleet["i"]
    for _ in range(64):
        instance.record_prefill(tokens=1000, cached_tokens=0, computed_for_s=prefill_s)


def predict(router: Router) -> float:
    return router.fleet["i"].prefill_model.ttft_s(1000)


def add_instance(router: Router) -> None:
    router.fleet.add(Instance("i", pool="flex"))


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "hands over"])
async def test_a_successor_starts_from_what_the_router_before_has_learned(seed: int, dies: bool) -> None:
    with routers(seed) as group:
        for name in ("a", "b"):
            group.start(name)
            add_instance(group.routers[name])
        await wait_until(lambda: len(group.active) == 1 and group.slice_writes(), "one is active")
        first = group.active[0]
        second = "b" if first == "a" else "a"
        measure(group.routers[first], 0.5)
        unmeasured_s = predict(group.routers[second])
        if dies:
            await advance(MODELS_INTERVAL_S + SLICE_CHECK_INTERVAL_S)
        await group.stop(first)
        if not dies:
            await group.failovers[first].hand_over()
        await group.wait_until_active(second, timeout_s=TAKEOVER_S)
        assert unmeasured_s == pytest.approx(DEFAULT_PREFILL.ttft_s(1000))
        assert predict(group.routers[second]) == pytest.approx(0.5, rel=0.1)


async def test_models_are_written_at_most_once_a_minute_and_only_if_they_changed(seed: int) -> None:
    with routers(seed) as group:
        await group.start_active("a")
        add_instance(group.routers["a"])
        writes = []
        for prefill_s in (0.5, 0.5, 2.0):
            measure(group.routers["a"], prefill_s)
            await advance(MODELS_INTERVAL_S)
            writes.append(group.slice_writes())
        await advance(SLICE_CHECK_INTERVAL_S)
        assert [*writes, group.slice_writes()] in ([1, 2, 2, 3], [2, 2, 3, 3]), writes


async def test_what_a_router_has_measured_itself_is_not_replaced(seed: int) -> None:
    with routers(seed) as group:
        group.objects.put(
            "EndpointSlice",
            NAME,
            addressType="IPv4",
            endpoints=[],
            ports=[],
            metadata={"annotations": {MODELS_ANNOTATION: '{"flex":{"prefill":[9,0,0],"decode":[3,0]}}'}},
        )
        group.start("a")
        add_instance(group.routers["a"])
        measure(group.routers["a"], 0.5)
        await group.wait_until_active("a")
        assert predict(group.routers["a"]) == pytest.approx(0.5, rel=0.1)
        assert group.routers["a"].fleet["i"].decode_model.itl_s(0) == 3.0
