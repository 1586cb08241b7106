"""When the autoscaler's loop writes a flip, and what it does without store or router.

Also with missing or stale objects, and with another writer. One test is of the decision history.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from fulcrum_autoscaler.decision_history import DecisionHistory
from fulcrum_autoscaler.loop import WRITE_ATTEMPTS_MAX, ServiceAutoscaler
from fulcrum_autoscaler.metrics import AutoscalerMetrics, ServiceMetrics
from fulcrum_autoscaler.policy import DecisionAction, FlipDecision, Trigger
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import StoreUnavailable
from fulcrum_core.ports import Clock, R
from fulcrum_core.router_state import DemandState, FlipRequest, InstanceState, RouterState
from fulcrum_core.values import Actor, Role
from tests.clocks import LoopClock, ManualClock
from tests.objects import make_object
from tests.unit.autoscaler.builders import (
    NOW_S,
    FakeServiceObjects,
    decode,
    make_flip_request,
    make_router_state,
    prefill,
)
from tests.waiting import advance


class ScriptedRouter:
    """Fake `RouterClient`: the test sets the router's instances and flip requests.

    The router acknowledges every generation at once. If `instances` is None, it does not respond.
    """

    def __init__(self, clock: Clock, *instances: InstanceState) -> None:
        self.clock = clock
        self.instances: tuple[InstanceState, ...] | None = instances
        self.demand: DemandState | None = None
        self.flip_requests: asyncio.Queue[FlipRequest] = asyncio.Queue()
        self.seq = 0
        self.seq_at_acknowledgement = 0
        self.polled_after: list[int] = []
        self.poll_times_out = False

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        if self.instances is None:
            raise RouterUnavailable("no response")
        del timeout_s
        seq = self.seq_at_acknowledgement or self.seq
        return make_router_state(
            *self.instances,
            generation=min_generation,
            at_s=self.clock.now_s(),
            flip_request_seq=seq,
            demand=self.demand,
        )

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        del timeout_s
        self.polled_after.append(after)
        return None if self.poll_times_out else await self.flip_requests.get()


class ConflictingStore(MemoryStore):
    """A memory store that can be unavailable, and in which another writer can be faster.

    Before each of the next `conflicts_left` patches, the other writer changes the assignment.
    """

    conflicts_left = 0
    unavailable = False

    async def patch(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        if self.unavailable:
            raise StoreUnavailable("no response")
        if self.conflicts_left and kind is PDAssignment:
            self.conflicts_left -= 1
            flips = 40 + self.conflicts_left
            await super().patch(kind, name, {"spec": {"flips": flips}}, namespace=where["namespace"])
        return await super().patch(kind, name, patch, **where)


class AutoscalerSetup:
    """An autoscaler and one service, whose load calls for a flip from prefill to decode.

    The service has two prefill instances and one decode instance, whose ITL equals the TPOT objective.
    The objects exist after `create_objects`.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = ConflictingStore(self.clock, new_uid=lambda: "uid")
        self.router = ScriptedRouter(
            self.clock, prefill("chat-0", 0.9), prefill("chat-1", 0.8), decode("chat-2", 0.1)
        )
        self.objects = FakeServiceObjects()
        self.history = DecisionHistory()
        self.autoscaler_metrics = AutoscalerMetrics()
        self.metrics = ServiceMetrics(self.autoscaler_metrics, namespace="default", service="chat")
        self.autoscaler = self.make_autoscaler()

    def make_autoscaler(self) -> ServiceAutoscaler:
        return ServiceAutoscaler(
            objects=self.objects,
            store=self.store,
            router=self.router,
            clock=self.clock,
            history=self.history,
            metrics=self.metrics,
        )

    async def create_objects(self, **autoscaling: Any) -> "AutoscalerSetup":
        spec = {
            "model": "m",
            "instances": 3,
            "slo": {"ttft": "1s", "tpot": "100ms"},
            "autoscaling": {"policy": "arrow", "arrow": {"consecutiveTicks": 1}, **autoscaling},
        }
        self.objects.the_service = await self.store.create(make_object(PDService, "chat", spec))
        roles = {"chat-0": "Prefill", "chat-1": "Prefill", "chat-2": "Decode"}
        given = {"since": "2020-01-01T00:00:00.000000Z", "by": "Operator"}
        entries = {name: {"role": role, **given} for name, role in roles.items()}
        await self.store.create(make_object(PDAssignment, "chat", {"service": "chat", "roles": entries}))
        for name in roles:
            await self.add_instance(name)
        await self.refresh_assignment()
        return self

    async def add_instance(self, name: str) -> None:
        """Add a serving instance to the store and to the objects that the autoscaler watches."""
        await self.store.create(_instance(name, "Pending"))
        await self.set_phase(name, "Serving")
        self.objects.the_instances.append(_instance(name, "Serving"))

    async def set_phase(self, name: str, phase: str) -> None:
        """Change an instance's phase in the store only: the autoscaler's watch does not show it yet."""
        await self.store.patch_status(PDInstance, name, {"phase": phase}, namespace="default")

    async def refresh_assignment(self) -> None:
        """Copy the assignment from the store to the objects that the autoscaler watches."""
        self.objects.the_assignment = await self.read_assignment()

    async def read_assignment(self) -> PDAssignment:
        return await self.store.get(PDAssignment, "chat", namespace="default")

    async def role_letters(self) -> str:
        return "".join(
            entry.role[0] for _, entry in sorted((await self.read_assignment()).spec.roles.items())
        )


def _instance(name: str, phase: str) -> PDInstance:
    return parse_as(
        PDInstance,
        {
            "metadata": {"name": name},
            "spec": {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {}},
            "status": {"phase": phase},
        },
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_S)


@pytest.fixture
def setup(clock: ManualClock) -> AutoscalerSetup:
    return AutoscalerSetup(clock)


def read_metric(setup: AutoscalerSetup, name: str, **labels: str) -> float | None:
    of = {"namespace": "default", "service": "chat"}
    return setup.autoscaler_metrics.registry.get_sample_value(f"fulcrum_autoscaler_{name}", {**of, **labels})


async def test_a_flip_is_one_write_of_the_assignment_with_actor_and_reason(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    before = await setup.read_assignment()
    decision = await setup.autoscaler.tick()
    after = await setup.read_assignment()
    flipped = after.spec.roles["chat-1"]
    assert (decision.action, decision.instance, await setup.role_letters()) == (
        DecisionAction.FLIP,
        "chat-1",
        "PDD",
    )
    assert (flipped.by, flipped.since, flipped.reason) == (Actor.AUTOSCALER, NOW_S, decision.reason)
    assert (after.spec.flips, after.spec.last_prefill_to_decode) == (1, NOW_S)
    assert after.metadata.generation == before.metadata.generation + 1
    assert setup.history.recent(10) == (decision,)
    assert read_metric(setup, "flips_total", to="decode", trigger="tick") == 1


@pytest.mark.parametrize(
    ("autoscaling", "action"),
    [
        pytest.param({"mode": "Advise"}, DecisionAction.ADVISE, id="Advise explains the flip"),
        pytest.param({"mode": "Off"}, DecisionAction.HOLD, id="Off holds"),
        pytest.param({"flip": {"paused": True}}, DecisionAction.HOLD, id="paused holds"),
    ],
)
async def test_nothing_is_written_in_advise_off_or_paused(
    setup: AutoscalerSetup, autoscaling: dict[str, Any], action: DecisionAction
) -> None:
    await setup.create_objects(**autoscaling)
    before = await setup.read_assignment()
    decision = await setup.autoscaler.tick()
    assert (decision.action, await setup.read_assignment()) == (action, before)


@pytest.mark.parametrize(("policy", "shown"), [("arrow", (0.9, 0.4)), ("balanced", (None, None))])
async def test_the_thresholds_of_arrow_are_shown(
    setup: AutoscalerSetup, policy: str, shown: tuple[float | None, float | None]
) -> None:
    await setup.create_objects(policy=policy, arrow={"expand": 0.9, "shrink": 0.4})
    await setup.autoscaler.tick()
    values = [read_metric(setup, "threshold_ratio", threshold=name) for name in ("expand", "shrink")]
    assert tuple(None if value is None or math.isnan(value) else value for value in values) == shown


async def test_the_forecast_of_balanced_is_shown_while_it_is_known(
    setup: AutoscalerSetup, clock: ManualClock
) -> None:
    await setup.create_objects(policy="balanced")
    names = ("forecast_prefill_instances", "forecast_output_tokens_per_second")
    shown = []
    for prefill_s in (0.0, 25.0, None):
        setup.router.demand = prefill_s if prefill_s is None else DemandState(
            requests=50, prefill_s=prefill_s, output_tokens=200 * prefill_s, token_steps=0.0
        )  # fmt: skip
        await setup.autoscaler.tick()
        shown.append([read_metric(setup, name) for name in names])
        clock.at_s += 10.0
    assert str(shown) == "[[nan, nan], [2.5, 500.0], [nan, nan]]"


async def test_a_write_conflict_makes_the_autoscaler_decide_again(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    setup.store.conflicts_left = 2
    decision = await setup.autoscaler.tick()
    assert (decision.action, await setup.role_letters()) == (DecisionAction.FLIP, "PDD")
    assert (await setup.read_assignment()).spec.flips == 41  # the other writer set 40, the flip added 1
    assert read_metric(setup, "write_conflicts_total") == 2


async def test_a_flip_is_given_up_after_the_last_write_attempt_until_the_next_tick(
    setup: AutoscalerSetup,
) -> None:
    await setup.create_objects()
    setup.store.conflicts_left = WRITE_ATTEMPTS_MAX
    decision = await setup.autoscaler.tick()
    assert (decision.action, await setup.role_letters()) == (DecisionAction.REFUSE, "PPD")
    assert decision.reason.endswith(
        f"not written: other writers changed the assignment first, {WRITE_ATTEMPTS_MAX} times"
    )
    await setup.refresh_assignment()
    assert (await setup.autoscaler.tick()).action is DecisionAction.FLIP


async def test_an_instance_pinned_after_the_observation_is_not_flipped(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    stale = setup.objects.the_assignment
    pin = {"spec": {"roles": {"chat-1": {"by": "Person", "pinnedUntil": "2099-01-01T00:00:00.000000Z"}}}}
    await setup.store.patch(PDAssignment, "chat", pin, namespace="default")
    setup.objects.the_assignment = stale
    decision = await setup.autoscaler.tick()
    assert (decision.instance, await setup.role_letters()) == ("chat-0", "DPD")


async def test_an_unavailable_store_refuses_the_flip_and_does_not_crash(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    setup.store.unavailable = True
    decision = await setup.autoscaler.tick()
    assert decision.action is DecisionAction.REFUSE
    assert decision.reason.endswith("not written: the store did not accept the write: no response")


async def test_an_unavailable_router_holds_every_decision(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    setup.router.instances = None
    ticked, requested = (
        await setup.autoscaler.tick(),
        await setup.autoscaler.handle_flip_request(make_flip_request(Role.DECODE)),
    )
    assert [d.reason for d in (ticked, requested)] == ["cannot decide: the router did not respond"] * 2


async def test_a_hold_decision_names_the_missing_object(setup: AutoscalerSetup) -> None:
    assert (await setup.autoscaler.tick()).reason == "cannot decide: the store has no PDService"
    await setup.create_objects()
    setup.objects.the_assignment = None
    assert (await setup.autoscaler.tick()).reason == "cannot decide: the store has no PDAssignment"


async def test_a_restart_keeps_the_cooldown(setup: AutoscalerSetup, clock: ManualClock) -> None:
    await setup.create_objects()
    await setup.autoscaler.tick()
    await setup.refresh_assignment()
    setup.router.instances = (
        prefill("chat-0"),
        prefill("chat-3"),
        decode("chat-1", 0.3),
        decode("chat-2", 0.3),
    )
    patch = {
        "spec": {
            "roles": {"chat-3": {"role": "Prefill", "since": "2020-01-01T00:00:00.000000Z", "by": "Operator"}}
        }
    }
    await setup.store.patch(PDAssignment, "chat", patch, namespace="default")
    await setup.add_instance("chat-3")
    await setup.refresh_assignment()
    clock.at_s += 9
    assert (await setup.make_autoscaler().tick()).action is DecisionAction.REFUSE
    clock.at_s += 1
    assert (await setup.make_autoscaler().tick()).action is DecisionAction.FLIP


async def test_an_instance_that_is_not_serving_is_not_flipped(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    setup.objects.the_instances[1] = _instance("chat-1", "Draining")
    assert (
        await setup.autoscaler.tick()
    ).action is DecisionAction.REFUSE  # chat-0 is the last serving prefill instance


async def test_a_flip_is_rechecked_against_the_instances_in_the_store(setup: AutoscalerSetup) -> None:
    """An instance is starting again, and the watch still shows it as serving."""
    await setup.create_objects()
    await setup.set_phase("chat-0", "Starting")
    decision = await setup.autoscaler.tick()
    assert (decision.action, decision.instance, await setup.role_letters()) == (
        DecisionAction.REFUSE,
        "chat-1",
        "PPD",
    )
    assert "not written: the serving instances have changed: " in decision.reason


async def test_instances_of_a_fixed_pool_are_not_flipped_by_the_loop(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    start = {"service": "chat", "model": "m", "engine": {}}
    pool = {**start, "role": "Prefill", "replicas": 2, "instances": {"min": 2}}
    setup.objects.the_pools.append(make_object(PDPool, "chat-flex", pool))
    decision = await setup.autoscaler.tick()
    assert "belongs to a pool that only serves Prefill" in decision.reason


async def start_with_one_prefill_instance(setup: AutoscalerSetup) -> None:
    """Its queue is long, and two decode instances have little to do."""
    await setup.create_objects()
    setup.router.instances = (prefill("chat-0", 2.0), decode("chat-1", 0.01), decode("chat-2", 0.01))
    roles = {"spec": {"roles": {"chat-1": {"role": "Decode"}}}}
    await setup.store.patch(PDAssignment, "chat", roles, namespace="default")
    await setup.refresh_assignment()


async def test_a_flip_satisfies_all_flip_requests_sent_before_its_acknowledgement(
    setup: AutoscalerSetup,
) -> None:
    await start_with_one_prefill_instance(setup)
    setup.router.seq_at_acknowledgement = 9
    setup.router.flip_requests.put_nowait(FlipRequest(seq=5, role=Role.PREFILL, reason="TTFT 2 s"))
    assert await setup.autoscaler.handle_next_flip_request(4) == 9
    assert (await setup.read_assignment()).spec.roles["chat-1"].role is Role.PREFILL


FOR_BOTH_ROLES = FlipRequest(
    seq=6,
    role=Role.DECODE,
    reason="ITL 120 ms",
    other=FlipRequest(seq=5, role=Role.PREFILL, reason="TTFT 2 s"),
)


async def test_a_refused_flip_request_does_not_hide_the_one_for_the_other_role(
    setup: AutoscalerSetup,
) -> None:
    await start_with_one_prefill_instance(setup)
    setup.router.seq_at_acknowledgement = 9
    setup.router.flip_requests.put_nowait(FOR_BOTH_ROLES)
    assert await setup.autoscaler.handle_next_flip_request(4) == 9
    decisions = [(decision.action, decision.to) for decision in setup.history.recent(10)]
    assert decisions == [(DecisionAction.REFUSE, None), (DecisionAction.FLIP, Role.PREFILL)]


async def test_a_flip_satisfies_the_flip_request_for_the_other_role_as_well(setup: AutoscalerSetup) -> None:
    await setup.create_objects()
    setup.router.seq_at_acknowledgement = 9
    setup.router.flip_requests.put_nowait(FOR_BOTH_ROLES)
    assert await setup.autoscaler.handle_next_flip_request(4) == 9
    decisions = [(decision.action, decision.to) for decision in setup.history.recent(10)]
    assert decisions == [(DecisionAction.FLIP, Role.DECODE)]


@pytest.mark.looptime
async def test_after_two_refused_flip_requests_the_next_poll_begins_after_both() -> None:
    setup = await AutoscalerSetup(LoopClock(NOW_S)).create_objects(mode="Off")
    setup.router.flip_requests.put_nowait(FOR_BOTH_ROLES)
    assert await setup.autoscaler.handle_next_flip_request(4) == 6
    assert [decision.action for decision in setup.history.recent(10)] == [DecisionAction.HOLD] * 2


@pytest.mark.parametrize(
    ("seq", "next_after"),
    [
        pytest.param(2, 2, id="the router was restarted between two polls"),
        pytest.param(58, 57, id="a flip request sent since the poll ended is not skipped"),
    ],
)
async def test_after_an_empty_poll_the_next_starts_at_the_lower_sequence_number(
    setup: AutoscalerSetup, seq: int, next_after: int
) -> None:
    setup.router.poll_times_out, setup.router.seq = True, seq
    assert await setup.autoscaler.handle_next_flip_request(57) == next_after


async def test_hold_decisions_never_push_the_last_flip_out_of_the_history() -> None:
    history = DecisionHistory()
    flip = FlipDecision(at_s=0.0, action=DecisionAction.FLIP, trigger=Trigger.TICK, reason="first")
    history.record(flip)
    for at_s in range(1000):
        history.record(
            FlipDecision(at_s=at_s, action=DecisionAction.HOLD, trigger=Trigger.TICK, reason="low load")
        )
    assert history.recent(10_000)[0] == flip
    assert [d.at_s for d in history.recent(2)] == [998, 999]
    assert history.recent(0) == ()


@pytest.mark.looptime
async def test_ticks_follow_the_interval_and_flip_requests_are_handled_at_once() -> None:
    setup = AutoscalerSetup(LoopClock(NOW_S))
    await setup.create_objects(arrow={"consecutiveTicks": 3, "interval": "1s"})
    running = asyncio.create_task(setup.autoscaler.run())
    await advance(1.99)
    assert await setup.role_letters() == "PPD"
    await advance(0.02)  # the third tick
    assert await setup.role_letters() == "PDD"
    await setup.refresh_assignment()
    setup.router.instances = (prefill("chat-0", 2.0), decode("chat-1", 0.01), decode("chat-2", 0.02))
    setup.router.flip_requests.put_nowait(
        FlipRequest(seq=1, role=Role.PREFILL, reason="predicted TTFT 2.1 s")
    )
    await advance(0.001)
    assert await setup.role_letters() == "PPD"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.looptime
async def test_polling_resumes_at_the_sequence_number_of_a_recovered_router() -> None:
    setup = AutoscalerSetup(LoopClock(NOW_S))
    await setup.create_objects()
    instances, setup.router.instances = setup.router.instances, None
    running = asyncio.create_task(setup.autoscaler.run())
    await advance(2.5)
    setup.router.instances, setup.router.seq = instances, 3
    await advance(1.5)
    assert setup.router.polled_after == [3]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
