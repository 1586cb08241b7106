"""The fast loop against the memory store: what it writes, when, and what it does when others answer badly."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from fulcrum_autoscaler.journal import Journal
from fulcrum_autoscaler.loop import WRITE_TRIES, Autoscaler
from fulcrum_autoscaler.meters import Families, Meters
from fulcrum_autoscaler.policy import Action, Decision, Trigger
from fulcrum_autoscaler.routers import RouterAway
from fulcrum_cluster.memory import MemoryStore
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import StoreUnavailable
from fulcrum_core.ports import Clock, R
from fulcrum_core.state import FlipWanted, InstanceState, RouterState
from fulcrum_core.values import Actor, Role
from tests.unit.autoscaler.builders import NOW_S, decode, prefill, router, wanted


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = NOW_S

    def now_s(self) -> float:
        return self.s

    def monotonic_s(self) -> float:
        return self.s


class LoopClock:
    """The event loop's own time, which a test moves by sleeping."""

    def now_s(self) -> float:
        return NOW_S + asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class ScriptedRouter:
    """Says what a test wants; None: away. It acknowledges every generation at once."""

    def __init__(self, clock: Clock, *instances: InstanceState) -> None:
        self.clock = clock
        self.instances: tuple[InstanceState, ...] | None = instances
        self.wanted: asyncio.Queue[FlipWanted] = asyncio.Queue()
        self.seq = 0
        self.seq_at_acknowledgement = 0
        self.asked_after: list[int] = []
        self.patience_is_over = False

    async def state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        if self.instances is None:
            raise RouterAway("gone")
        del timeout_s
        seq = self.seq_at_acknowledgement or self.seq
        return router(
            *self.instances, generation=min_generation, at_s=self.clock.now_s(), flip_wanted_seq=seq
        )

    async def flip_wanted(self, *, after: int, timeout_s: float) -> FlipWanted | None:
        del timeout_s
        self.asked_after.append(after)
        return None if self.patience_is_over else await self.wanted.get()


class RivalStore(MemoryStore):
    """A store in which somebody else writes just before the first `rivals` writes of the assignment."""

    rivals = 0
    away = False

    async def patch(self, kind: type[R], name: str, patch: Mapping[str, Any], **where: Any) -> R:
        if self.away:
            raise StoreUnavailable("no answer")
        if self.rivals and kind is PDAssignment:
            self.rivals -= 1
            flips = 40 + self.rivals
            await super().patch(kind, name, {"spec": {"flips": flips}}, namespace=where["namespace"])
        return await super().patch(kind, name, patch, **where)


class Objects:
    """`Desired` read from the store's own entries by the test."""

    def __init__(self) -> None:
        self.the_service: PDService | None = None
        self.the_assignment: PDAssignment | None = None
        self.the_instances: list[PDInstance] = []
        self.the_pools: list[PDPool] = []

    def service(self) -> PDService | None:
        return self.the_service

    def assignment(self) -> PDAssignment | None:
        return self.the_assignment

    def instances(self) -> Iterable[PDInstance]:
        return self.the_instances

    def pools(self) -> Iterable[PDPool]:
        return self.the_pools


class World:
    """One service of two prefill and one decode instance, decode over its objective."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = RivalStore(self.clock, new_uid=lambda: "uid")
        self.router = ScriptedRouter(
            self.clock, prefill("chat-0", 0.9), prefill("chat-1", 0.8), decode("chat-2", 0.1)
        )
        self.objects = Objects()
        self.journal = Journal()
        self.families = Families()
        self.meters = Meters(self.families, namespace="default", service="chat")
        self.autoscaler = self.restarted()

    def restarted(self) -> Autoscaler:
        return Autoscaler(
            desired=self.objects,
            store=self.store,
            router=self.router,
            clock=self.clock,
            journal=self.journal,
            meters=self.meters,
        )

    async def filled(self, **autoscaling: Any) -> "World":
        spec = {
            "model": "m",
            "instances": 3,
            "slo": {"ttft": "1s", "tpot": "100ms"},
            "autoscaling": {"arrow": {"passes": 1}, **autoscaling},
        }
        self.objects.the_service = await self.store.create(
            parse_as(PDService, {"metadata": {"name": "chat"}, "spec": spec})
        )
        roles = {"chat-0": "Prefill", "chat-1": "Prefill", "chat-2": "Decode"}
        given = {"since": "2020-01-01T00:00:00.000000Z", "by": "Operator"}
        await self.store.create(
            parse_as(
                PDAssignment,
                {
                    "metadata": {"name": "chat"},
                    "spec": {
                        "service": "chat",
                        "roles": {name: {"role": role, **given} for name, role in roles.items()},
                    },
                },
            )
        )
        for name in roles:
            await self.join(name)
        await self.relist()
        return self

    async def join(self, name: str) -> None:
        """One more instance serves, and the autoscaler knows."""
        await self.store.create(_instance(name, "Pending"))
        await self.turn(name, "Serving")
        self.objects.the_instances.append(_instance(name, "Serving"))

    async def turn(self, name: str, phase: str) -> None:
        """The instance's phase changes; the autoscaler has not heard of it yet."""
        await self.store.patch_status(PDInstance, name, {"phase": phase}, namespace="default")

    async def relist(self) -> None:
        """Let the autoscaler see the assignment as it is now, as its watch would."""
        self.objects.the_assignment = await self.stored()

    async def stored(self) -> PDAssignment:
        return await self.store.get(PDAssignment, "chat", namespace="default")

    async def roles(self) -> str:
        return "".join(entry.role[0] for _, entry in sorted((await self.stored()).spec.roles.items()))


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
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def world(clock: HandClock) -> World:
    return World(clock)


def metric(world: World, name: str, **labels: str) -> float | None:
    of = {"namespace": "default", "service": "chat"}
    return world.families.registry.get_sample_value(f"fulcrum_autoscaler_{name}", {**of, **labels})


async def test_a_flip_is_one_signed_write_of_the_assignment(world: World) -> None:
    await world.filled()
    before = await world.stored()
    decision = await world.autoscaler.tick()
    after = await world.stored()
    flipped = after.spec.roles["chat-1"]
    assert (decision.action, decision.instance, await world.roles()) == (Action.FLIP, "chat-1", "PDD")
    assert (flipped.by, flipped.since, flipped.reason) == (Actor.AUTOSCALER, NOW_S, decision.reason)
    assert (after.spec.flips, after.spec.last_prefill_to_decode) == (1, NOW_S)
    assert after.metadata.generation == before.metadata.generation + 1
    assert world.journal.recent(10) == (decision,)
    assert metric(world, "flips_total", to="Decode", trigger="tick") == 1


@pytest.mark.parametrize(
    ("autoscaling", "action"),
    [
        pytest.param({"mode": "Advise"}, Action.ADVISE, id="Advise explains and does not write"),
        pytest.param({"mode": "Off"}, Action.HOLD, id="Off decides nothing and says so"),
        pytest.param({"flip": {"paused": True}}, Action.HOLD, id="paused holds"),
    ],
)
async def test_nothing_is_written_in(world: World, autoscaling: dict[str, Any], action: Action) -> None:
    await world.filled(**autoscaling)
    before = await world.stored()
    decision = await world.autoscaler.tick()
    assert (decision.action, await world.stored()) == (action, before)


async def test_after_somebody_elses_write_all_is_decided_anew(world: World) -> None:
    await world.filled()
    world.store.rivals = 2
    decision = await world.autoscaler.tick()
    assert (decision.action, await world.roles()) == (Action.FLIP, "PDD")
    assert (await world.stored()).spec.flips == 41  # the rival's last word, and ours on top of it
    assert metric(world, "conflicts_total") == 2


async def test_a_flip_that_always_loses_the_race_is_given_up_until_the_next_tick(world: World) -> None:
    await world.filled()
    world.store.rivals = WRITE_TRIES
    decision = await world.autoscaler.tick()
    assert (decision.action, await world.roles()) == (Action.REFUSE, "PPD")
    assert decision.reason.endswith(f"not written: others wrote the assignment first, {WRITE_TRIES} times")
    await world.relist()
    assert (await world.autoscaler.tick()).action is Action.FLIP


async def test_a_person_who_pinned_the_victim_meanwhile_is_obeyed(world: World) -> None:
    await world.filled()
    stale = world.objects.the_assignment
    pin = {"spec": {"roles": {"chat-1": {"by": "Person", "pinnedUntil": "2099-01-01T00:00:00.000000Z"}}}}
    await world.store.patch(PDAssignment, "chat", pin, namespace="default")
    world.objects.the_assignment = stale
    decision = await world.autoscaler.tick()
    assert (decision.instance, await world.roles()) == ("chat-0", "DPD")


async def test_a_store_that_is_away_makes_a_refusal_not_a_crash(world: World) -> None:
    await world.filled()
    world.store.away = True
    decision = await world.autoscaler.tick()
    assert decision.action is Action.REFUSE
    assert decision.reason.endswith("not written: the store refused: no answer")


async def test_a_router_that_is_away_holds_everything(world: World) -> None:
    await world.filled()
    world.router.instances = None
    ticked, asked = await world.autoscaler.tick(), await world.autoscaler.answer(wanted(Role.DECODE))
    assert [d.reason for d in (ticked, asked)] == ["cannot tell: the router did not answer"] * 2


async def test_without_objects_it_holds_and_says_what_is_missing(world: World) -> None:
    assert (await world.autoscaler.tick()).reason == "cannot tell: the store shows no PDService"
    await world.filled()
    world.objects.the_assignment = None
    assert (await world.autoscaler.tick()).reason == "cannot tell: the store shows no PDAssignment"


async def test_a_restart_keeps_the_cooldown(world: World, clock: HandClock) -> None:
    await world.filled()
    await world.autoscaler.tick()
    await world.relist()
    world.router.instances = (
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
    await world.store.patch(PDAssignment, "chat", patch, namespace="default")
    await world.join("chat-3")
    await world.relist()
    clock.s += 9
    assert (await world.restarted().tick()).action is Action.REFUSE
    clock.s += 1
    assert (await world.restarted().tick()).action is Action.FLIP


async def test_an_instance_that_does_not_serve_is_not_flipped(world: World) -> None:
    await world.filled()
    world.objects.the_instances[1] = _instance("chat-1", "Draining")
    assert (await world.autoscaler.tick()).action is Action.REFUSE  # chat-0 would be the last


async def test_an_instance_that_only_seems_to_serve_counts_for_no_floor(world: World) -> None:
    """Replaced under its name, and the watch of instances is behind the watch of the assignment."""
    await world.filled()
    await world.turn("chat-0", "Starting")
    decision = await world.autoscaler.tick()
    assert (decision.action, decision.instance, await world.roles()) == (Action.REFUSE, "chat-1", "PPD")
    assert "not written: what serves has changed: " in decision.reason


async def test_instances_of_a_fixed_pool_stay(world: World) -> None:
    await world.filled()
    pool = {
        "metadata": {"name": "chat-flex"},
        "spec": {
            "service": "chat",
            "model": "m",
            "engine": {},
            "role": "Prefill",
            "replicas": 2,
            "instances": {"min": 2},
        },
    }
    world.objects.the_pools.append(parse_as(PDPool, pool))
    decision = await world.autoscaler.tick()
    assert "belongs to a pool that only serves Prefill" in decision.reason


async def test_what_was_wanted_before_a_flip_took_hold_is_answered_by_it(world: World) -> None:
    await world.filled()
    world.router.instances = (prefill("chat-0", 2.0), decode("chat-1", 0.01), decode("chat-2", 0.01))
    roles = {"spec": {"roles": {"chat-1": {"role": "Decode"}}}}
    await world.store.patch(PDAssignment, "chat", roles, namespace="default")
    await world.relist()
    world.router.seq_at_acknowledgement = 9
    world.router.wanted.put_nowait(FlipWanted(seq=5, role=Role.PREFILL, reason="late"))
    assert await world.autoscaler.answer_next(4) == 9
    assert (await world.stored()).spec.roles["chat-1"].role is Role.PREFILL


@pytest.mark.parametrize(
    ("seq", "goes_on_after"),
    [
        pytest.param(2, 2, id="a router restarted between two polls is followed"),
        pytest.param(58, 57, id="what was wanted since the poll ended is not passed over"),
    ],
)
async def test_after_a_poll_without_an_answer(world: World, seq: int, goes_on_after: int) -> None:
    world.router.patience_is_over, world.router.seq = True, seq
    assert await world.autoscaler.answer_next(57) == goes_on_after


async def test_held_decisions_never_push_the_last_flip_out_of_the_journal() -> None:
    journal = Journal()
    flip = Decision(at_s=0.0, action=Action.FLIP, trigger=Trigger.TICK, reason="first")
    journal.record(flip)
    for at_s in range(1000):
        journal.record(Decision(at_s=at_s, action=Action.HOLD, trigger=Trigger.TICK, reason="calm"))
    assert journal.recent(10_000)[0] == flip
    assert [d.at_s for d in journal.recent(2)] == [998, 999]
    assert journal.recent(0) == ()


@pytest.mark.looptime
async def test_it_ticks_at_its_interval_and_answers_the_router_at_once() -> None:
    world = World(LoopClock())
    await world.filled(arrow={"passes": 3, "interval": "1s"})
    running = asyncio.create_task(world.autoscaler.run())
    await asyncio.sleep(1.99)
    assert await world.roles() == "PPD"
    await asyncio.sleep(0.02)  # the third tick
    assert await world.roles() == "PDD"
    await world.relist()
    world.router.instances = (prefill("chat-0", 2.0), decode("chat-1", 0.01), decode("chat-2", 0.02))
    world.router.wanted.put_nowait(FlipWanted(seq=1, role=Role.PREFILL, reason="predicted TTFT 2.1 s"))
    await asyncio.sleep(0.001)
    assert await world.roles() == "PPD"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.looptime
async def test_a_router_that_comes_back_is_asked_from_its_own_count_on() -> None:
    world = World(LoopClock())
    await world.filled()
    instances, world.router.instances = world.router.instances, None
    running = asyncio.create_task(world.autoscaler.run())
    await asyncio.sleep(2.5)
    world.router.instances, world.router.seq = instances, 3
    await asyncio.sleep(1.5)
    assert world.router.asked_after == [3]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
