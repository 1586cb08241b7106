"""Engine pods are created, retried after a refusal, deleted once, and run only after their role probe."""

from typing import Any

import pytest

from fulcrum_cluster.objects import POD, kind_of_resource
from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.errors import Forbidden, InvalidInput
from fulcrum_core.ports import EngineState, InstanceKey, NodeDeparture
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import NotLeader
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.pod_runtime import DRAINED_GRACE_S, PROBING, RETRY_S, PodRuntime
from fulcrum_operator.controller.pods.role_probe import RoleProbes
from tests.unit.operator.builders import SETTINGS, instance, service
from tests.unit.operator.fakes import FakePods
from tests.waiting import advance

pytestmark = pytest.mark.looptime

KEY = InstanceKey("default", "chat-0")
CHAT = ServiceKey("default", "chat")


class RuntimeUnderTest:
    """One service with one instance, and the runtime under test."""

    def __init__(self) -> None:
        self.objects, self.notified, self.is_leader = FakePods(), list[ServiceKey](), True
        self.departures: dict[str, NodeDeparture] = {}
        self.probe_result: FlipStrategy | None = FlipStrategy.RELABEL
        self.probes = RoleProbes(self._probe)
        self.cache = ObjectCache(self.notified.append)
        api: Any = self.objects
        self.runtime = PodRuntime(
            api,
            self.cache,
            self.probes,
            SETTINGS,
            is_leader=lambda: self.is_leader,
            departure_of=self.departures.get,
            on_change=self.notified.append,
        )
        self.version = 1
        self.put(service())
        self.instance = instance("chat-0", Phase.STARTING)
        self.put(self.instance)

    async def _probe(self, _endpoint: str, _model: str) -> FlipStrategy | None:
        return self.probe_result

    def put(self, obj: PDService | PDInstance) -> None:
        self.version += 1
        body = obj.dump()
        body["metadata"] |= {"resourceVersion": str(self.version)}
        self.cache.put_object(kind_of_resource(type(obj)), body)

    async def start(self) -> None:
        await self.runtime.start(self.instance, startup_s=1.0)

    def ready(self, restarts: int = 0, *sidecars: dict[str, Any]) -> None:
        state = {"name": "engine", "restartCount": restarts, "imageID": "x@sha256:01", "state": {}}
        found = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
        status = {"podIP": "10.0.0.7", "containerStatuses": [*sidecars, state], "conditions": found}
        self.cache.put_object(POD, self.objects.put(self.objects.pods["chat-0"] | {"status": status}))

    def states(self) -> list[tuple[EngineState, str]]:
        return [(engine.state, engine.message) for engine in self.runtime.observe("default")]


@pytest.fixture
def under_test() -> RuntimeUnderTest:
    return RuntimeUnderTest()


async def test_a_pod_is_created_once_and_observed_at_once(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    await under_test.start()
    assert (sorted(under_test.objects.pods), under_test.states()) == (
        ["chat-0"],
        [(EngineState.STARTING, "")],
    )


async def test_an_engine_counts_as_running_after_its_role_probe(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    under_test.ready()
    before = under_test.states()
    assert all(engine.endpoint for engine in under_test.runtime.observe("default")), (
        "the router may probe the engine, too"
    )
    await advance(1)
    assert (before, under_test.states()) == ([(EngineState.STARTING, PROBING)], [(EngineState.RUNNING, "")])
    assert (under_test.notified[-1], under_test.runtime.strategy(KEY)) == (CHAT, FlipStrategy.RELABEL)


async def test_an_engine_probed_by_an_earlier_operator_is_not_probed_again(
    under_test: RuntimeUnderTest,
) -> None:
    under_test.probe_result = None
    await under_test.start()
    under_test.put(instance("chat-0", Phase.SERVING, flip_strategy=FlipStrategy.RESTART))
    under_test.ready()
    assert under_test.states() == [(EngineState.RUNNING, "")]
    assert under_test.runtime.strategy(KEY) is FlipStrategy.RESTART


async def test_a_restarted_container_is_probed_again(under_test: RuntimeUnderTest) -> None:
    under_test.probe_result = None
    await under_test.start()
    under_test.put(instance("chat-0", Phase.SERVING, flip_strategy=FlipStrategy.RELABEL, restarts=0))
    under_test.ready(restarts=1)
    assert under_test.states() == [(EngineState.STARTING, PROBING)]
    await under_test.probes.aclose()


async def test_a_restarted_sidecar_does_not_cause_a_new_probe(
    under_test: RuntimeUnderTest,
) -> None:
    under_test.probe_result = None
    await under_test.start()
    under_test.put(instance("chat-0", Phase.SERVING, flip_strategy=FlipStrategy.RELABEL, restarts=1))
    under_test.ready(1, {"name": "proxy", "restartCount": 4, "state": {}})
    assert under_test.states() == [(EngineState.RUNNING, "")]


async def test_a_stopped_pod_is_deleted_once_and_observed_until_it_is_gone(
    under_test: RuntimeUnderTest,
) -> None:
    await under_test.start()
    await under_test.runtime.stop(KEY)
    await under_test.runtime.stop(KEY)
    terminating = [engine.terminating for engine in under_test.runtime.observe("default")]
    under_test.cache.remove(POD, "default", "chat-0", version="900")
    assert (under_test.objects.deletions, terminating, under_test.states()) == (["chat-0"], [True], [])


@pytest.mark.parametrize(("drained", "grace_s"), [(False, None), (True, DRAINED_GRACE_S)])
async def test_a_drained_pod_gets_a_short_grace_period_and_others_their_own(
    under_test: RuntimeUnderTest, drained: bool, grace_s: float | None
) -> None:
    await under_test.start()
    await under_test.runtime.stop(KEY, drained=drained)
    assert under_test.objects.graces_s == [grace_s]


async def test_stopping_an_unknown_instance_does_nothing(under_test: RuntimeUnderTest) -> None:
    await under_test.runtime.stop(KEY)
    assert under_test.objects.deletions == []


async def test_a_refused_pod_is_observed_with_its_error_and_retried(under_test: RuntimeUnderTest) -> None:
    under_test.objects.refusal = InvalidInput("spec.containers[0].image", "X", "is no image")
    await under_test.start()
    refused = (EngineState.STARTING, "PodRefused: spec.containers[0].image (X) is no image")
    assert under_test.states() == [refused]
    await advance(RETRY_S * 2.5)
    notifications = 3  # for the service, the instance and the refusal, none for its repetition
    assert (under_test.states(), under_test.notified.count(CHAT)) == ([refused], notifications)
    under_test.objects.refusal = None
    await advance(RETRY_S)
    assert (sorted(under_test.objects.pods), under_test.states()) == (
        ["chat-0"],
        [(EngineState.STARTING, "")],
    )


async def test_a_refused_pod_that_was_stopped_is_not_retried(under_test: RuntimeUnderTest) -> None:
    under_test.objects.refusal = InvalidInput("spec", "X", "is wrong")
    await under_test.start()
    under_test.objects.refusal = None
    await under_test.runtime.stop(KEY)
    await advance(RETRY_S * 2)
    assert (under_test.objects.pods, under_test.states()) == ({}, [])


async def test_an_existing_pod_missing_from_the_cache_is_adopted(under_test: RuntimeUnderTest) -> None:
    other = RuntimeUnderTest()
    await other.start()
    under_test.objects.pods = other.objects.pods
    await under_test.start()
    assert under_test.states() == [(EngineState.STARTING, "")]


async def test_a_foreign_pod_with_the_instances_name_is_reported_and_left_alone(
    under_test: RuntimeUnderTest,
) -> None:
    under_test.objects.put({"metadata": {"name": "chat-0", "namespace": "default", "uid": "x"}})
    await under_test.start()
    message = "NameTaken: a pod chat-0 exists that Fulcrum did not create"
    assert under_test.states() == [(EngineState.STARTING, message)]
    await under_test.runtime.stop(KEY)
    assert under_test.objects.deletions == []


async def test_the_role_label_is_written_once(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    shown = instance("chat-0", role=Role.DECODE)
    await under_test.runtime.sync_role_label(shown)
    version = under_test.objects.version
    await under_test.runtime.sync_role_label(shown)
    labels = under_test.objects.pods["chat-0"]["metadata"]["labels"]
    assert (labels["fulcrum.dev/role"], under_test.objects.version) == ("Decode", version)


async def test_a_standby_deletes_and_labels_nothing(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    under_test.is_leader = False
    with pytest.raises(NotLeader):
        await under_test.runtime.stop(KEY)
    with pytest.raises(NotLeader):
        await under_test.runtime.sync_role_label(instance("chat-0", role=Role.DECODE))
    assert under_test.objects.deletions == []


async def test_engines_are_observed_only_in_their_own_namespace(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    assert (len(under_test.runtime.observe("default")), under_test.runtime.observe("other")) == (1, ())


@pytest.mark.parametrize(
    ("refusal", "lacks_room"),
    [("exceeded quota: gpus, requested: 1, used: 8, limited: 8", True), ("violates PodSecurity", False)],
)
async def test_a_pod_beyond_a_quota_lacks_room(
    under_test: RuntimeUnderTest, refusal: str, lacks_room: bool
) -> None:
    under_test.objects.refusal = Forbidden(refusal)
    await under_test.start()
    (engine,) = under_test.runtime.observe("default")
    assert (engine.reason, engine.lacks_room) == ("EngineStartFailed", lacks_room)
    await under_test.runtime.stop(KEY)


async def test_an_engine_on_a_departing_node_is_observed_as_such(under_test: RuntimeUnderTest) -> None:
    await under_test.start()
    under_test.cache.put_object(
        POD, under_test.objects.put(under_test.objects.pods["chat-0"] | {"spec": {"nodeName": "n1"}})
    )
    before = [engine.node_departure for engine in under_test.runtime.observe("default")]
    cordon = under_test.departures["n1"] = NodeDeparture("cordoned", 1.0, is_certain=False)
    assert (before, [e.node_departure for e in under_test.runtime.observe("default")]) == ([None], [cordon])


async def test_an_engine_is_observed_again_only_if_its_pod_changed(under_test: RuntimeUnderTest) -> None:
    """Each reconcile observes all pods of its namespace, and most of them did not change."""
    await under_test.start()
    under_test.ready()
    under_test.runtime.observe("default")
    await advance(1.0)
    first, again = under_test.runtime.observe("default"), under_test.runtime.observe("default")
    assert all(one is other for one, other in zip(first, again, strict=True))
    under_test.ready(restarts=1)
    (changed,) = under_test.runtime.observe("default")
    assert (first[0].restarts, changed.restarts) == (0, 1)


async def test_nothing_is_kept_of_the_pods_of_a_namespace_whose_services_were_deleted(
    under_test: RuntimeUnderTest,
) -> None:
    """Without a service no reconcile observes the namespace, so nothing would find that its pods are gone."""
    await under_test.start()
    under_test.ready()
    under_test.states()
    await advance(1.0)
    assert under_test.runtime.strategy(KEY) is FlipStrategy.RELABEL
    under_test.runtime.forget_namespace("other")
    assert under_test.runtime.strategy(KEY) is FlipStrategy.RELABEL
    under_test.cache.remove(POD, "default", "chat-0")
    under_test.runtime.forget_namespace("default")
    assert (under_test.runtime._known_pods, under_test.runtime._pod_uids) == ({}, {})
    under_test.ready()
    assert under_test.runtime.strategy(KEY) is None, "the result of its role probe is forgotten, too"


async def test_an_engine_at_work_stays_at_work_if_crds_did_not_store_how_it_flips(
    under_test: RuntimeUnderTest,
) -> None:
    """Otherwise each start of an operator on such CRDs would take every instance out of service."""
    await under_test.start()
    under_test.ready()
    under_test.put(instance("chat-0", Phase.SERVING))
    assert under_test.states() == [(EngineState.RUNNING, "")]
    await advance(1.0)
    assert under_test.runtime.strategy(KEY) is FlipStrategy.RELABEL


async def test_an_engine_that_restarted_meanwhile_is_probed_before_it_works(
    under_test: RuntimeUnderTest,
) -> None:
    await under_test.start()
    under_test.ready(restarts=1)
    under_test.put(instance("chat-0", Phase.SERVING))
    assert under_test.states() == [(EngineState.STARTING, PROBING)]
    await under_test.probes.aclose()
