"""Engines as pods: made, refused, tried again, ended once, and running only once they were probed."""

import asyncio
from typing import Any

import pytest

from fulcrum_cluster.objects import POD, kind_of_resource
from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.ports import EngineState, InstanceKey
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import NotLeading
from fulcrum_operator.controller.pods.pod_runtime import DRAINED_GRACE_S, PROBED, RETRY_S, PodRuntime
from fulcrum_operator.controller.pods.role_probe import Probes
from fulcrum_operator.controller.reconcile import ServiceKey
from tests.unit.operator.builders import SETTINGS, instance, service
from tests.unit.operator.fakes import Pods

pytestmark = pytest.mark.looptime

KEY = InstanceKey("default", "chat-0")
CHAT = ServiceKey("default", "chat")


class World:
    """One service, one instance, and what the runtime makes of it."""

    def __init__(self) -> None:
        self.objects, self.woken, self.leads = Pods(), list[ServiceKey](), True
        self.answer: FlipStrategy | None = FlipStrategy.RELABEL
        self.probes = Probes(self._ask)
        self.cache = Cache(self.woken.append)
        api: Any = self.objects
        self.runtime = PodRuntime(
            api, self.cache, self.probes, SETTINGS, leads=lambda: self.leads, on_change=self.woken.append
        )
        self.version = 1
        self.hold(service())
        self.instance = instance("chat-0", Phase.STARTING)
        self.hold(self.instance)

    async def _ask(self, _endpoint: str, _model: str) -> FlipStrategy | None:
        return self.answer

    def hold(self, obj: PDService | PDInstance) -> None:
        self.version += 1
        body = obj.dump()
        body["metadata"] |= {"resourceVersion": str(self.version)}
        self.cache.take(kind_of_resource(type(obj)), body)

    async def start(self) -> None:
        await self.runtime.start(self.instance, startup_s=1.0)

    def ready(self, restarts: int = 0, *beside: dict[str, Any]) -> None:
        state = {"name": "engine", "restartCount": restarts, "imageID": "x@sha256:01", "state": {}}
        found = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        status = {"podIP": "10.0.0.7", "containerStatuses": [*beside, state], "conditions": found}
        self.cache.take(POD, self.objects.put(self.objects.pods["chat-0"] | {"status": status}))

    def seen(self) -> list[tuple[EngineState, str]]:
        return [(engine.state, engine.message) for engine in self.runtime.observe("default")]


@pytest.fixture
def world() -> World:
    return World()


async def test_a_pod_is_made_once_and_seen_at_once(world: World) -> None:
    await world.start()
    await world.start()
    assert (sorted(world.objects.pods), world.seen()) == (["chat-0"], [(EngineState.STARTING, "")])


async def test_an_engine_runs_once_it_was_probed(world: World) -> None:
    await world.start()
    world.ready()
    before = world.seen()
    assert all(engine.endpoint for engine in world.runtime.observe("default")), "routers may look at it, too"
    await asyncio.sleep(1)
    assert (before, world.seen()) == ([(EngineState.STARTING, PROBED)], [(EngineState.RUNNING, "")])
    assert (world.woken[-1], world.runtime.strategy(KEY)) == (CHAT, FlipStrategy.RELABEL)


async def test_what_served_under_the_operator_before_needs_no_second_probe(world: World) -> None:
    world.answer = None
    await world.start()
    world.hold(instance("chat-0", Phase.SERVING, strategy=FlipStrategy.RESTART))
    world.ready()
    assert world.seen() == [(EngineState.RUNNING, "")]
    assert world.runtime.strategy(KEY) is FlipStrategy.RESTART


async def test_a_container_that_was_started_again_is_probed_again(world: World) -> None:
    world.answer = None
    await world.start()
    world.hold(instance("chat-0", Phase.SERVING, strategy=FlipStrategy.RELABEL, restarts=0))
    world.ready(restarts=1)
    assert world.seen() == [(EngineState.STARTING, PROBED)]
    await world.probes.aclose()


async def test_a_container_beside_the_engine_that_was_started_again_ends_no_life_of_the_engine(
    world: World,
) -> None:
    world.answer = None
    await world.start()
    world.hold(instance("chat-0", Phase.SERVING, strategy=FlipStrategy.RELABEL, restarts=1))
    world.ready(1, {"name": "proxy", "restartCount": 4, "state": {}})
    assert world.seen() == [(EngineState.RUNNING, "")]


async def test_a_pod_is_told_to_end_once_and_is_seen_until_it_is_gone(world: World) -> None:
    await world.start()
    await world.runtime.stop(KEY)
    await world.runtime.stop(KEY)
    ending = [engine.ending for engine in world.runtime.observe("default")]
    world.cache.drop(POD, "default", "chat-0", version="900")
    assert (world.objects.deletions, ending, world.seen()) == (["chat-0"], [True], [])


@pytest.mark.parametrize(("drained", "grace_s"), [(False, None), (True, DRAINED_GRACE_S)])
async def test_who_is_drained_gets_seconds_to_end_and_others_what_their_requests_need(
    world: World, drained: bool, grace_s: float | None
) -> None:
    await world.start()
    await world.runtime.stop(KEY, drained=drained)
    assert world.objects.graces_s == [grace_s]


async def test_stopping_what_is_not_there_does_nothing(world: World) -> None:
    await world.runtime.stop(KEY)
    assert world.objects.deletions == []


async def test_a_refused_pod_says_why_and_is_tried_again(world: World) -> None:
    world.objects.refusal = InvalidInput("spec.containers[0].image", "X", "is no image")
    await world.start()
    refused = (EngineState.STARTING, "PodRefused: spec.containers[0].image (X) is no image")
    assert world.seen() == [refused]
    await asyncio.sleep(RETRY_S * 2.5)
    assert (world.seen(), world.woken.count(CHAT)) == ([refused], 3)  # service, instance, refusal: no more
    world.objects.refusal = None
    await asyncio.sleep(RETRY_S)
    assert (sorted(world.objects.pods), world.seen()) == (["chat-0"], [(EngineState.STARTING, "")])


async def test_a_refused_pod_that_is_wanted_no_more_is_not_tried_again(world: World) -> None:
    world.objects.refusal = InvalidInput("spec", "X", "is wrong")
    await world.start()
    world.objects.refusal = None
    await world.runtime.stop(KEY)
    await asyncio.sleep(RETRY_S * 2)
    assert (world.objects.pods, world.seen()) == ({}, [])


async def test_a_pod_that_the_cache_did_not_know_is_met(world: World) -> None:
    other = World()
    await other.start()
    world.objects.pods = other.objects.pods
    await world.start()
    assert world.seen() == [(EngineState.STARTING, "")]


async def test_a_strangers_pod_of_that_name_is_told(world: World) -> None:
    world.objects.put({"metadata": {"name": "chat-0", "namespace": "default", "uid": "x"}})
    await world.start()
    message = "NameTaken: there is a pod chat-0 that Fulcrum did not make"
    assert world.seen() == [(EngineState.STARTING, message)]
    await world.runtime.stop(KEY)
    assert world.objects.deletions == []


async def test_a_role_is_written_to_the_pod_once(world: World) -> None:
    await world.start()
    shown = instance("chat-0", role=Role.DECODE)
    await world.runtime.show_role(shown)
    version = world.objects.version
    await world.runtime.show_role(shown)
    labels = world.objects.pods["chat-0"]["metadata"]["labels"]
    assert (labels["fulcrum.dev/role"], world.objects.version) == ("Decode", version)


async def test_who_does_not_lead_makes_and_ends_nothing(world: World) -> None:
    await world.start()
    world.leads = False
    with pytest.raises(NotLeading):
        await world.runtime.stop(KEY)
    with pytest.raises(NotLeading):
        await world.runtime.show_role(instance("chat-0", role=Role.DECODE))
    assert world.objects.deletions == []


async def test_an_instance_of_one_name_in_two_namespaces_has_two_engines(world: World) -> None:
    await world.start()
    assert (len(world.runtime.observe("default")), world.runtime.observe("other")) == (1, ())
