"""The store watcher: which fleet and settings a router has after each state of the store's objects."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import fulcrum_core
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api.meta import format_time
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import DEFAULT_MAX_QUEUE_S, QoSTier
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import AutoscalingMode, Role, Slo
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.observe.objects import StoreWatcher, load_models
from fulcrum_router.policy.tiers.admission import TierAdmission
from fulcrum_router.router import Router
from fulcrum_router.settings import Tier
from tests.objects import make_object
from tests.unit.router.fake_object_api import FakeObjectApi
from tests.waiting import wait_until

DEADLINE_S = 20.0
SINCE = "2026-01-01T00:00:00.000000Z"
IDENTITY = {"model": "m", "engine": "e", "kvDtype": "bf16", "blockSize": 16, "tensorParallel": 1}
NAMES = ("s-0", "s-1", "s-2", "s-3")
Fleet = dict[str, tuple[Role, bool]]


class WatchedService:
    """A store with a service of four instances, and a router that watches it."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.router = Router()
        self.watcher = StoreWatcher(self.router, self.store, service="s", namespace="default")
        self._port = 9000

    async def create_objects(self) -> None:
        spec = {"model": "m", "instances": 4, "qosTiers": ["gold", "absent"]}
        await self.store.create(make_object(PDService, "s", spec))
        pool = {
            "service": "s",
            "model": "m",
            "engine": {},
            "role": "Flexible",
            "replicas": 4,
            "instances": {"min": 4},
        }
        await self.store.create(make_object(PDPool, "s-flex", pool))
        tier = {"priority": 7, "slo": {"ttft": "100ms", "tpot": "10ms"}}
        await self.store.create(make_object(QoSTier, "gold", tier))
        for name in NAMES:
            own = {"service": "s", "pool": "s-flex", "model": "m", "engine": {}}
            await self.store.create(make_object(PDInstance, name, own))
            await self.set_status(name)
        roles = {n: entry("Prefill" if n in NAMES[:2] else "Decode") for n in NAMES}
        assignment = {"service": "s", "roles": roles}
        await self.store.create(make_object(PDAssignment, "s", assignment))

    async def set_status(self, name: str, **status: Any) -> None:
        self._port += 1
        full = {"phase": "Serving", "endpoint": f"127.0.0.1:{self._port}", "identity": IDENTITY, **status}
        await self.store.patch_status(PDInstance, name, full, namespace="default")

    async def patch_assignment(self, **spec: Any) -> int:
        """Patch the assignment and return its new generation."""
        patched = await self.store.patch(PDAssignment, "s", {"spec": spec}, namespace="default")
        return patched.metadata.generation

    async def flip(self, name: str, role: str, by: str = "Person") -> int:
        return await self.patch_assignment(roles={name: {"role": role, "by": by}})

    def fleet(self) -> Fleet:
        return {i.name: (i.role, i.serving) for i in self.router.fleet.instances}

    async def wait_until_acknowledged(self, generation: int) -> bool:
        return await self.router.applied_assignment.wait_until_reached(generation, DEADLINE_S)


def entry(role: str) -> dict[str, Any]:
    return {"role": role, "since": SINCE, "by": "Operator"}


@pytest.fixture
async def watched() -> AsyncIterator[WatchedService]:
    made = WatchedService()
    await made.create_objects()
    running = asyncio.create_task(made.watcher.run())
    assert await made.wait_until_acknowledged(1)
    yield made
    running.cancel()
    await asyncio.wait([running])


async def wait_for_fleet(watched: WatchedService, expected: Fleet) -> None:
    await wait_until(lambda: watched.fleet() == expected, f"the fleet is {expected}")


async def wait_for_refusal(watched: WatchedService) -> None:
    counters = watched.router.counters
    await wait_until(lambda: counters.refused_assignments, "the assignment is refused")


START: Fleet = {
    "s-0": (Role.PREFILL, True),
    "s-1": (Role.PREFILL, True),
    "s-2": (Role.DECODE, True),
    "s-3": (Role.DECODE, True),
}


async def test_roles_endpoints_and_settings_come_from_the_store(watched: WatchedService) -> None:
    await wait_for_fleet(watched, START)
    settings = watched.router.settings
    assert settings is not None
    gold = Tier("gold", Slo(ttft_s=0.1, tpot_s=0.01), -7, TierAdmission(max_queue_s=DEFAULT_MAX_QUEUE_S))
    assert settings.tiers == {"gold": gold}, "a tier that does not exist is left out"
    assert [settings.find_tier(name) for name in ("gold", "absent", None)] == [
        gold,
        *[settings.default_tier] * 2,
    ]
    assert settings.autoscaling_mode is AutoscalingMode.AUTO
    assert len({id(i.identity) for i in watched.router.fleet.instances}) == 1, (
        "equal identities are one object"
    )


async def test_a_start_is_expected_to_take_as_long_as_the_one_before(watched: WatchedService) -> None:
    starts = watched.router.journeys.starts
    await wait_for_fleet(watched, START)
    assert starts.list_coming(time.monotonic()) == ()
    await watched.set_status("s-1", phase="Starting", phaseSince=format_time(time.time() - 60.0))
    await wait_for_fleet(watched, {**START, "s-1": (Role.PREFILL, False)})
    assert starts.list_coming(time.monotonic()) == (), "no start was seen to its end"
    await watched.set_status("s-1", phase="Verifying")
    await watched.set_status("s-1")
    await wait_for_fleet(watched, START)
    await watched.set_status("s-2", phase="Starting", phaseSince=format_time(time.time()))
    await wait_for_fleet(watched, {**START, "s-2": (Role.DECODE, False)})
    ((in_s, role),) = starts.list_coming(time.monotonic())
    assert role is Role.DECODE
    assert 60.0 - DEADLINE_S < in_s < 60.0 + DEADLINE_S
    await watched.set_status("s-2", phase="Starting", phaseSince=SINCE, reason="Unschedulable")
    await wait_until(lambda: not starts.list_coming(time.monotonic()), "a start that is blocked is given up")


async def test_a_flip_is_applied_and_acknowledged(watched: WatchedService) -> None:
    generation = await watched.flip("s-0", "Decode")
    assert await watched.wait_until_acknowledged(generation)
    assert watched.fleet() == {**START, "s-0": (Role.DECODE, True)}
    flips = watched.router.counters.flips
    assert (sum(flips.counts), flips.sum > 0) == (1, True), "one flip was timed, since its decision"


async def test_an_assignment_below_the_floor_keeps_the_last_good_one_in_force(
    watched: WatchedService,
) -> None:
    good = await watched.flip("s-0", "Decode")
    await watched.wait_until_acknowledged(good)
    await watched.flip("s-1", "Decode")
    await wait_for_refusal(watched)
    assert watched.router.applied_assignment.generation == good
    assert watched.fleet() == {**START, "s-0": (Role.DECODE, True)}


async def test_a_refused_assignment_is_checked_again_when_readiness_changes(watched: WatchedService) -> None:
    await watched.set_status("s-1", phase="Starting")
    await wait_for_fleet(watched, {**START, "s-1": (Role.PREFILL, False)})
    generation = await watched.flip("s-0", "Decode")
    await wait_for_refusal(watched)
    await watched.set_status("s-1")
    assert await watched.wait_until_acknowledged(generation)
    assert watched.router.counters.refused_assignments == 1


@pytest.mark.parametrize(
    ("status", "serving", "starting"),
    [
        pytest.param({"phase": "Draining"}, False, False, id="draining"),
        pytest.param({"phase": "Terminating"}, False, False, id="terminating"),
        pytest.param({"phase": "Failed"}, False, False, id="failed"),
        pytest.param({"phase": "Starting"}, False, True, id="starting"),
        pytest.param(
            {"phase": "Verifying", "flipStrategy": "Relabel"},
            True,
            True,
            id="verified after a relabel",
        ),
        pytest.param(
            {"phase": "Verifying", "flipStrategy": "Restart"}, False, True, id="verified after a restart"
        ),
    ],
)
async def test_an_instance_serves_only_in_a_phase_that_takes_work(
    watched: WatchedService, status: dict[str, Any], serving: bool, starting: bool
) -> None:
    await watched.set_status("s-0", **status)

    def has_new_endpoint() -> bool:
        pool = watched.router.fleet["s-0"].connection_pool
        return pool is not None and pool.port == 9005

    await wait_until(has_new_endpoint, "the new status is applied")
    assert watched.fleet() == {**START, "s-0": (Role.PREFILL, serving)}
    assert [i.starting for i in watched.router.fleet.instances] == [starting, False, False, False]


async def test_a_cordoned_instance_gets_no_work(watched: WatchedService) -> None:
    await watched.wait_until_acknowledged(await watched.patch_assignment(roles={"s-0": {"cordoned": True}}))
    assert watched.fleet() == {**START, "s-0": (Role.PREFILL, False)}


async def test_a_single_serving_instance_serves_both(watched: WatchedService) -> None:
    for name in NAMES[1:]:
        await watched.set_status(name, phase="Failed")
    expected = {**START, "s-0": (Role.BOTH, True)}
    await wait_for_fleet(watched, expected | {n: (START[n][0], False) for n in NAMES[1:]})


async def test_an_engine_that_must_restart_for_its_role_gets_no_work_before_the_restart(
    watched: WatchedService,
) -> None:
    """Between the assignment and the drain, the engine still refuses the work of its new role."""
    await watched.set_status("s-0", role="Prefill", flipStrategy="Restart")
    await watched.wait_until_acknowledged(await watched.flip("s-0", "Decode"))
    assert watched.fleet() == {**START, "s-0": (Role.DECODE, False)}
    await watched.set_status("s-0", role="Decode", flipStrategy="Restart")
    await wait_for_fleet(watched, {**START, "s-0": (Role.DECODE, True)})


async def test_an_instance_that_is_deleted_is_forgotten(watched: WatchedService) -> None:
    await watched.store.delete(PDInstance, "s-3", namespace="default")
    await wait_for_fleet(watched, {name: START[name] for name in NAMES[:3]})


async def test_a_new_endpoint_clears_the_health_of_the_instance(watched: WatchedService) -> None:
    instance = watched.router.fleet["s-0"]
    instance.health.eject(now_s=0.0, judged=False)
    instance.update_serving()
    await watched.set_status("s-0")
    await wait_for_fleet(watched, START)
    assert instance.health.ejected is False


async def wait_for_lease(instance: Instance, lease_s: float) -> None:
    await wait_until(lambda: instance.kv_lease_s == lease_s, f"the lease is {lease_s} s")


async def test_the_kv_lease_comes_from_the_identity_and_the_block_size_from_the_engine(
    watched: WatchedService,
) -> None:
    instance = watched.router.fleet["s-0"]
    assert instance.kv_lease_s == 30.0, "the default without a kvLease in the identity"
    instance.reported_block_size = 32
    await watched.set_status("s-0", endpoint="127.0.0.1:9001", identity={**IDENTITY, "kvLease": "2s"})
    await wait_for_lease(instance, 2.0)
    assert instance.identity is not None
    assert (instance.identity.block_size, instance.identity.kv_lease_s) == (32, 2.0)
    # A new endpoint is another engine process, which has not reported its block size yet.
    await watched.set_status("s-0", identity={**IDENTITY, "kvLease": "55s"})
    await wait_for_lease(instance, 55.0)
    assert instance.identity.block_size == 16


async def test_instances_of_other_services_are_ignored(watched: WatchedService) -> None:
    own = {"service": "other", "pool": "x", "model": "m", "engine": {}}
    await watched.store.create(make_object(PDInstance, "other-0", own))
    await watched.wait_until_acknowledged(await watched.flip("s-0", "Decode"))
    assert set(watched.fleet()) == set(NAMES)


async def test_the_cooldown_is_counted_from_the_assignment(watched: WatchedService) -> None:
    await watched.wait_until_acknowledged(
        await watched.patch_assignment(lastPrefillToDecode="2026-01-01T00:00:00Z")
    )
    until_s = watched.router.journeys.flip_rules.to_decode_cooldown_until_s
    assert until_s == pytest.approx(1767225600.0 + 10.0 - time.time() + time.monotonic(), abs=1.0)


async def test_a_terminating_pod_gets_no_work_before_the_operator_reacts(watched: WatchedService) -> None:
    """A second router also watches pods: that of `s-2` is being deleted, and `s-3` has none."""
    objects, router = FakeObjectApi(), Router()
    for name in NAMES[:3]:
        objects.put("Pod", name, status={"phase": "Running", "podIP": "127.0.0.1"})
    watcher = StoreWatcher(
        router, watched.store, service="s", namespace="default", objects=objects, rng=random.Random(1)
    )
    running = asyncio.create_task(watcher.run())
    try:
        await asyncio.wait_for(watcher.wait_until_synced(), DEADLINE_S)
        serving = {i.name: i.serving for i in router.fleet.instances}
        objects.put("Pod", "s-2", metadata={"deletionTimestamp": SINCE}, status={"podIP": "127.0.0.1"})
        await wait_until(lambda: not router.fleet["s-2"].serving, "the instance gets no work")
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert serving == {"s-0": True, "s-1": True, "s-2": True, "s-3": False}
    assert watched.fleet()["s-2"] == (Role.DECODE, True), "a router without pods waits for the operator"


DATA = Path(fulcrum_core.__file__).parent / "data"
LLAMA_8B = json.loads((Path(__file__).parents[3] / "fixtures/models/llama-3.1-8b/config.json").read_text())


@pytest.mark.parametrize(
    ("spec", "ttft_s"),
    [
        pytest.param(
            {"hardware": {"resource": "nvidia.com/gpu", "type": "H100-SXM"}, "configExcerpt": LLAMA_8B},
            0.042,
            id="a real engine: by its model and hardware",
        ),
        pytest.param({"hardware": {"resource": "nvidia.com/gpu"}}, 0.121, id="unknown hardware: cautious"),
        pytest.param(
            {"engine": {"type": "Simulated", "profile": "l8-h100"}}, 0.029, id="a simulated one: its profile"
        ),
        pytest.param(
            {"engine": {"type": "Simulated", "profile": "away.yaml"}}, 0.121, id="a profile that is elsewhere"
        ),
    ],
)
def test_predictions_start_from_the_hardware(spec: dict[str, Any], ttft_s: float) -> None:
    full = {"service": "s", "pool": "p", "model": "m", "engine": {"type": "vLLM"}, **spec}
    prefill, _ = load_models(make_object(PDInstance, "i", full).spec, load_profile)
    assert prefill.ttft_s(1000) == pytest.approx(ttft_s, rel=0.05)


@pytest.mark.parametrize("in_cluster", [True, False])
async def test_a_router_of_a_cluster_reads_no_file_that_an_instance_names(
    watched: WatchedService, tmp_path: Path, *, in_cluster: bool
) -> None:
    slow = yaml.safe_load((DATA / "profiles" / "l8-h100.yaml").read_text()) | {"t0": 9.0}
    profile = tmp_path / "slow.yaml"
    profile.write_text(yaml.safe_dump(slow))
    engine = {"type": "Simulated", "profile": str(profile)}
    own = {"service": "s", "pool": "other", "model": "m", "engine": engine}
    await watched.store.create(make_object(PDInstance, "s-9", own))
    router, objects = Router(), FakeObjectApi() if in_cluster else None
    watcher = StoreWatcher(router, watched.store, service="s", namespace="default", objects=objects)
    running = asyncio.create_task(watcher.run())
    try:
        await asyncio.wait_for(watcher.wait_until_synced(), DEADLINE_S)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert (router.fleet["s-9"].prefill_model.ttft_s(1) < 9.0) is in_cluster


async def test_a_new_instance_starts_from_what_was_learned_of_its_pool(watched: WatchedService) -> None:
    for _ in range(64):
        watched.router.fleet["s-0"].record_prefill(tokens=1000, cached_tokens=0, computed_for_s=7.0)
    own = {"service": "s", "pool": "s-flex", "model": "m", "engine": {}}
    await watched.store.create(make_object(PDInstance, "s-9", own))
    await wait_until(lambda: watched.router.fleet.get("s-9"), "the instance is known")
    assert watched.router.fleet["s-9"].prefill_model.ttft_s(1000) == pytest.approx(7.0, rel=0.1)
