"""What the router makes of the store's objects."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory import MemoryStore
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.values import AutoscalingMode, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.observe.objects import Watches
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier
from tests.unit.router.objects import MemoryObjects

DEADLINE_S = 20.0
SINCE = "2026-01-01T00:00:00.000000Z"
IDENTITY = {"model": "m", "engine": "e", "kvDtype": "bf16", "blockSize": 16, "tensorParallel": 1}
NAMES = ("s-0", "s-1", "s-2", "s-3")
Fleet = dict[str, tuple[Role, bool]]


class Cluster:
    """A store with a service of four instances, and a router that watches it."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.router = Router()
        self.watches = Watches(self.router, self.store, service="s", namespace="default")
        self._port = 9000

    async def make(self) -> None:
        spec = {"model": "m", "instances": 4, "qosTiers": ["gold", "absent"]}
        await self.store.create(parse_as(PDService, named("PDService", "s", spec)))
        pool = {
            "service": "s",
            "model": "m",
            "engine": {},
            "role": "Flexible",
            "replicas": 4,
            "instances": {"min": 4},
        }
        await self.store.create(parse_as(PDPool, named("PDPool", "s-flex", pool)))
        tier = {"priority": 7, "slo": {"ttft": "100ms", "tpot": "10ms"}}
        await self.store.create(parse_as(QoSTier, named("QoSTier", "gold", tier)))
        for name in NAMES:
            own = {"service": "s", "pool": "s-flex", "model": "m", "engine": {}}
            await self.store.create(parse_as(PDInstance, named("PDInstance", name, own)))
            await self.serve(name)
        roles = {n: entry("Prefill" if n in NAMES[:2] else "Decode") for n in NAMES}
        wish = {"service": "s", "roles": roles}
        await self.store.create(parse_as(PDAssignment, named("PDAssignment", "s", wish)))

    async def serve(self, name: str, **status: Any) -> None:
        self._port += 1
        full = {"phase": "Serving", "endpoint": f"127.0.0.1:{self._port}", "identity": IDENTITY, **status}
        await self.store.patch_status(PDInstance, name, full, namespace="default")

    async def wish(self, **spec: Any) -> int:
        """Patch the assignment; its new generation."""
        patched = await self.store.patch(PDAssignment, "s", {"spec": spec}, namespace="default")
        return patched.metadata.generation

    async def flip(self, name: str, role: str, by: str = "Person") -> int:
        return await self.wish(roles={name: {"role": role, "by": by}})

    def fleet(self) -> Fleet:
        return {i.name: (i.role, i.serving) for i in self.router.fleet.all}

    async def acknowledged(self, generation: int) -> bool:
        return await self.router.epoch.reached(generation, DEADLINE_S)


def named(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "fulcrum.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def entry(role: str) -> dict[str, Any]:
    return {"role": role, "since": SINCE, "by": "Operator"}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    await made.make()
    running = asyncio.create_task(made.watches.run())
    assert await made.acknowledged(1)
    yield made
    running.cancel()
    await asyncio.wait([running])


async def eventually(cluster: Cluster, expected: Fleet) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while cluster.fleet() != expected:
            await asyncio.sleep(0.001)


START: Fleet = {
    "s-0": (Role.PREFILL, True),
    "s-1": (Role.PREFILL, True),
    "s-2": (Role.DECODE, True),
    "s-3": (Role.DECODE, True),
}


async def test_roles_endpoints_and_settings_come_from_the_store(cluster: Cluster) -> None:
    await eventually(cluster, START)
    settings = cluster.router.settings
    assert settings is not None
    gold = Tier("gold", Slo(ttft_s=0.1, tpot_s=0.01), -7)
    assert settings.tiers == {"gold": gold}, "a tier that does not exist is none"
    assert [settings.tier(name) for name in ("gold", "absent", None)] == [gold, *[settings.default_tier] * 2]
    assert settings.mode is AutoscalingMode.AUTO
    assert len({id(i.identity) for i in cluster.router.fleet.all}) == 1, "equal identities are one object"


async def test_a_flip_is_applied_and_acknowledged(cluster: Cluster) -> None:
    generation = await cluster.flip("s-0", "Decode")
    assert await cluster.acknowledged(generation)
    assert cluster.fleet() == {**START, "s-0": (Role.DECODE, True)}


async def test_a_wish_below_the_floor_leaves_the_last_good_map_in_force(cluster: Cluster) -> None:
    good = await cluster.flip("s-0", "Decode")
    await cluster.acknowledged(good)
    await cluster.flip("s-1", "Decode")
    async with asyncio.timeout(DEADLINE_S):
        while not cluster.router.books.refused_assignments:
            await asyncio.sleep(0.001)
    assert cluster.router.epoch.generation == good
    assert cluster.fleet() == {**START, "s-0": (Role.DECODE, True)}


async def test_a_refused_wish_is_judged_again_when_readiness_changes(cluster: Cluster) -> None:
    await cluster.serve("s-1", phase="Starting")
    await eventually(cluster, {**START, "s-1": (Role.PREFILL, False)})
    generation = await cluster.flip("s-0", "Decode")
    async with asyncio.timeout(DEADLINE_S):
        while not cluster.router.books.refused_assignments:
            await asyncio.sleep(0.001)
    await cluster.serve("s-1")
    assert await cluster.acknowledged(generation)
    assert cluster.router.books.refused_assignments == 1


@pytest.mark.parametrize(
    ("status", "serving", "starting"),
    [
        pytest.param({"phase": "Draining"}, False, False, id="draining"),
        pytest.param({"phase": "Terminating"}, False, False, id="terminating"),
        pytest.param({"phase": "Failed"}, False, False, id="failed"),
        pytest.param({"phase": "Starting"}, False, True, id="its engine runs and is looked at"),
        pytest.param(
            {"phase": "Verifying", "strategy": "Relabel"}, True, True, id="verified while it serves"
        ),
        pytest.param(
            {"phase": "Verifying", "strategy": "Restart"}, False, True, id="verified before it serves"
        ),
    ],
)
async def test_only_phases_that_take_work_get_it(
    cluster: Cluster, status: dict[str, Any], serving: bool, starting: bool
) -> None:
    await cluster.serve("s-0", **status)
    async with asyncio.timeout(DEADLINE_S):
        while (pool := cluster.router.fleet["s-0"].pool) is None or pool.port != 9005:
            await asyncio.sleep(0.001)
    assert cluster.fleet() == {**START, "s-0": (Role.PREFILL, serving)}
    assert [i.starting for i in cluster.router.fleet.all] == [starting, False, False, False]


async def test_a_cordoned_instance_gets_nothing(cluster: Cluster) -> None:
    await cluster.acknowledged(await cluster.wish(roles={"s-0": {"cordoned": True}}))
    assert cluster.fleet() == {**START, "s-0": (Role.PREFILL, False)}


async def test_a_single_serving_instance_serves_both(cluster: Cluster) -> None:
    for name in NAMES[1:]:
        await cluster.serve(name, phase="Failed")
    expected = {**START, "s-0": (Role.BOTH, True)}
    await eventually(cluster, expected | {n: (START[n][0], False) for n in NAMES[1:]})


async def test_an_engine_that_must_be_started_anew_for_a_role_gets_nothing_until_it_was(
    cluster: Cluster,
) -> None:
    """Between the wish and the drain it still refuses what its new role would bring."""
    await cluster.serve("s-0", role="Prefill", strategy="Restart")
    await cluster.acknowledged(await cluster.flip("s-0", "Decode"))
    assert cluster.fleet() == {**START, "s-0": (Role.DECODE, False)}
    await cluster.serve("s-0", role="Decode", strategy="Restart")
    await eventually(cluster, {**START, "s-0": (Role.DECODE, True)})


async def test_an_instance_that_is_deleted_is_forgotten(cluster: Cluster) -> None:
    await cluster.store.delete(PDInstance, "s-3", namespace="default")
    await eventually(cluster, {name: START[name] for name in NAMES[:3]})


async def test_another_endpoint_is_another_process(cluster: Cluster) -> None:
    instance = cluster.router.fleet["s-0"]
    instance.health.failed(0.0, at_once=True)
    instance.refresh()
    await cluster.serve("s-0")
    await eventually(cluster, START)
    assert instance.health.ejected is False


async def leased(instance: Instance, lease_s: float) -> None:
    """Returns once the router goes by it."""
    async with asyncio.timeout(DEADLINE_S):
        while instance.kv_lease_s != lease_s:
            await asyncio.sleep(0.01)


async def test_an_engines_lease_is_what_it_was_started_with_and_its_blocks_what_it_says_itself(
    cluster: Cluster,
) -> None:
    instance = cluster.router.fleet["s-0"]
    assert instance.kv_lease_s == 30.0  # engines that were told nothing
    instance.block_size = 32
    await cluster.serve("s-0", endpoint="127.0.0.1:9001", identity={**IDENTITY, "kvLease": "2s"})
    await leased(instance, 2.0)
    assert instance.identity is not None
    assert (instance.identity.block_size, instance.identity.kv_lease_s) == (32, 2.0)
    await cluster.serve("s-0", identity={**IDENTITY, "kvLease": "55s"})  # another process: it has not said
    await leased(instance, 55.0)
    assert instance.identity.block_size == 16


async def test_other_services_are_none_of_its_business(cluster: Cluster) -> None:
    own = {"service": "other", "pool": "x", "model": "m", "engine": {}}
    await cluster.store.create(parse_as(PDInstance, named("PDInstance", "other-0", own)))
    await cluster.acknowledged(await cluster.flip("s-0", "Decode"))
    assert set(cluster.fleet()) == set(NAMES)


async def test_the_cooldown_is_counted_from_the_assignment(cluster: Cluster) -> None:
    await cluster.acknowledged(await cluster.wish(lastPrefillToDecode="2026-01-01T00:00:00Z"))
    assert cluster.router.rules.to_decode_after_s == 1767225600.0 + 10.0


async def test_a_pod_on_its_way_out_gets_nothing_before_the_operator_says_so(cluster: Cluster) -> None:
    """A second router watches pods, too: its last instance's is being deleted, and one has no pod at all."""
    objects, router = MemoryObjects(), Router()
    for name in NAMES[:3]:
        objects.put("Pod", name, status={"phase": "Running", "podIP": "127.0.0.1"})
    watches = Watches(
        router, cluster.store, service="s", namespace="default", objects=objects, rng=random.Random(1)
    )
    running = asyncio.create_task(watches.run())
    try:
        await asyncio.wait_for(watches.synced(), DEADLINE_S)
        seen = {i.name: i.serving for i in router.fleet.all}
        objects.put("Pod", "s-2", metadata={"deletionTimestamp": SINCE}, status={"podIP": "127.0.0.1"})
        async with asyncio.timeout(DEADLINE_S):
            while router.fleet["s-2"].serving:
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert seen == {"s-0": True, "s-1": True, "s-2": True, "s-3": False}
    assert cluster.fleet()["s-2"] == (Role.DECODE, True), "who does not watch them waits for the operator"
