"""Events report each change once and nothing that stays the same; the recorder counts repeated Events."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fulcrum_cluster.objects import ObjectKind
from fulcrum_core.api import PDService, Refusal, conditions
from fulcrum_core.errors import AlreadyExists, NotFound, StoreUnavailable
from fulcrum_core.models import MODEL_UNKNOWN
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Actor, Phase
from fulcrum_operator.controller.events import (
    Event,
    EventRecorder,
    Reported,
    derive_events,
    event_name,
    instance_failed,
    remember_reported,
    scaled,
)
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.observed import FailureCause
from tests.clocks import ManualClock
from tests.unit.operator.builders import (
    NOW_S,
    STARTING,
    D,
    P,
    assignment,
    assignment_spec,
    engine,
    entry,
    instance,
    pool,
    service,
)

ROLES = {"chat-0": entry(P), "chat-1": entry(D)}
OBSERVED = Observed(
    service=service(instances=2),
    now_s=NOW_S,
    pools=(pool(replicas=2),),
    instances=(instance("chat-0"), instance("chat-1")),
    assignment=assignment(assignment_spec(ROLES)),
    engines={name: engine(name) for name in ROLES},
    accepted_assignment=assignment_spec(ROLES),
)
SETTLED = Plan(
    objects=(OBSERVED.service, *OBSERVED.pools, *OBSERVED.instances),
    accepted_assignment=assignment_spec(ROLES),
)


def reported(before: Observed, plan: Plan, last: Any = None) -> list[tuple[str, str]]:
    """Reasons and messages of the derived Events, in order."""
    known = Reported(OBSERVED.engines if last is None else last)
    return [(event.reason, event.message) for event in derive_events(before, plan, known)]


def service_with(kind: str, reason: str, status: str = "True", message: str = "why") -> PDService:
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    return OBSERVED.service.replace(
        status=OBSERVED.service.status.model_validate({"conditions": [condition]})
    )


def plan_with(obj: PDService) -> Plan:
    return replace(SETTLED, objects=(obj,))


def test_an_unchanged_service_causes_no_event() -> None:
    assert reported(OBSERVED, SETTLED) == []


def test_a_flip_event_names_actor_and_reason() -> None:
    flipped = assignment_spec({**ROLES, "chat-0": entry(D, Actor.PERSON, reason="slow TTFT")})
    assert reported(OBSERVED, replace(SETTLED, accepted_assignment=flipped)) == [
        ("RoleFlipped", "chat-0 flipped to Decode by Person (slow TTFT)")
    ]


def test_the_first_reconcile_of_an_operator_reports_no_flip() -> None:
    flipped = assignment_spec({**ROLES, "chat-0": entry(D, Actor.PERSON)})
    assert (
        reported(replace(OBSERVED, accepted_assignment=None), replace(SETTLED, accepted_assignment=flipped))
        == []
    )


def test_a_refused_assignment_is_reported_once() -> None:
    refusal = Refusal(role=D, reason="the floor is 1", until=NOW_S + 30)
    refused = assignment_spec({**ROLES, "chat-0": entry(P, refused=refusal)})
    plan = replace(SETTLED, accepted_assignment=refused)
    assert reported(OBSERVED, plan) == [("AssignmentRefused", "chat-0 to Decode: the floor is 1")]
    assert (
        reported(replace(OBSERVED, assignment=assignment(refused), accepted_assignment=refused), plan) == []
    )


def test_a_failed_instance_is_reported_once() -> None:
    failed = instance("chat-1", Phase.FAILED, message="its engine ended: exit code 137")
    plan = replace(SETTLED, objects=(failed,))
    assert reported(OBSERVED, plan) == [("InstanceFailed", "chat-1: its engine ended: exit code 137")]
    assert reported(replace(OBSERVED, instances=(failed,)), plan) == []


def test_a_deleted_lost_instance_is_reported_as_replaced() -> None:
    lost = replace(OBSERVED, engines={"chat-1": engine("chat-1", EngineState.LOST)})
    plan = replace(SETTLED, delete=(OBSERVED.instances[1],))
    assert reported(lost, plan) == [("InstanceReplaced", "chat-1 was lost; a new instance replaces it")]
    assert reported(OBSERVED, plan) == []


def test_a_new_replica_count_is_reported_once() -> None:
    small = pool(replicas=4).replace(status=pool(replicas=4).status.model_copy(update={"replicas": 2}))
    scaled_up = small.replace(metadata=small.metadata.model_copy(update={"generation": 2}))
    plan = replace(SETTLED, objects=(scaled_up,))
    assert reported(replace(OBSERVED, pools=(scaled_up,)), plan) == [
        ("ScaledUp", "pool chat-flex scaled from 2 to 4 instances")
    ]
    known = scaled_up.replace(status=scaled_up.status.model_copy(update={"observed_generation": 2}))
    assert reported(replace(OBSERVED, pools=(known,)), plan) == []


START_FAILURES = [
    ("ImagePullBackOff: no such image", "ImagePullFailed"),
    ("Unschedulable: 0/3 nodes are available", "Unschedulable"),
    ("CreateContainerConfigError: no such secret", "EngineStartFailed"),
    ("its roles are probed", None),
    ("", None),
]


@pytest.mark.parametrize(("message", "reason"), START_FAILURES)
def test_a_start_failure_is_reported_once(message: str, reason: str | None) -> None:
    engines = {"chat-1": engine("chat-1", STARTING, reason=reason or "", message=message)}
    seen = replace(OBSERVED, engines=engines)
    assert reported(seen, SETTLED) == ([(reason, f"chat-1: {message}")] if reason else [])
    assert reported(seen, SETTLED, engines) == []


def test_a_failing_image_pull_is_reported_once_for_both_of_its_reasons() -> None:
    tried, waits = (
        {"chat-1": engine("chat-1", STARTING, reason="ImagePullFailed", message=f"{word}: no such image")}
        for word in ("ErrImagePull", "ImagePullBackOff")
    )
    assert reported(replace(OBSERVED, engines=tried), SETTLED, waits) == []


def test_a_more_precise_start_failure_is_reported_again() -> None:
    late, named = (
        {
            "chat-1": engine(
                "chat-1", STARTING, reason="EngineStartFailed", message=f"CreateContainerConfigError: {why}"
            )
        }
        for why in ("failed to sync secret cache: timed out", 'secret "token" not found')
    )
    message = 'chat-1: CreateContainerConfigError: secret "token" not found'
    assert reported(replace(OBSERVED, engines=named), SETTLED, late) == [("EngineStartFailed", message)]


def test_an_externally_deleted_pod_is_reported_once() -> None:
    engines = {"chat-1": engine("chat-1", terminating=True)}
    seen = replace(OBSERVED, engines=engines)
    message = "the pod of chat-1 is being deleted by somebody else; a new instance replaces chat-1"
    assert reported(seen, SETTLED) == [("PodDeletedExternally", message)]
    assert reported(seen, SETTLED, engines) == []


CAUSES = tuple(FailureCause(conditions.CHILD_REFUSED, f"Service chat-{number}: quota") for number in range(9))


def test_each_of_many_refused_objects_is_reported_once() -> None:
    refused = replace(OBSERVED, problems=CAUSES)
    events = [("ChildApplyFailed", f"{cause.message}; retrying") for cause in CAUSES]
    again = derive_events(refused, SETTLED, remember_reported(refused))
    assert (reported(refused, SETTLED), again) == (events, ())


@pytest.mark.parametrize(
    "reason", [conditions.TEMPLATE_PROBLEM, conditions.NODES_FORBIDDEN, conditions.CRDS_OUTDATED]
)
def test_the_event_of_a_problem_that_a_person_has_to_mend_promises_no_retry(reason: str) -> None:
    limited = replace(OBSERVED, problems=(FailureCause(reason, "a cause"),))
    assert reported(limited, SETTLED) == [(reason, "a cause")]


def test_a_router_that_cannot_start_is_reported_once_while_its_message_changes() -> None:
    first, later = (
        replace(
            OBSERVED,
            router_failures=(FailureCause("ImagePullFailed", f"router r-1: {text}", "r-1/ImagePullFailed"),),
        )
        for text in ("ErrImagePull: no such image", "ImagePullBackOff")
    )
    assert (reported(first, SETTLED), derive_events(later, SETTLED, remember_reported(first))) == (
        [("ImagePullFailed", "router r-1: ErrImagePull: no such image")],
        (),
    )


CONDITIONS = [
    (conditions.TIERS_ACCEPTED, conditions.TIERS_FOUND, conditions.TIER_NOT_FOUND, "TierMissing"),
    (
        conditions.TIERS_ACCEPTED,
        conditions.TIERS_FOUND,
        conditions.TENANT_MATCHED_TWICE,
        "TenantMatchedTwice",
    ),
    (conditions.TIERS_ACCEPTED, conditions.TIERS_FOUND, conditions.RESERVES_TOO_LARGE, "ReservesTooLarge"),
    (conditions.TIERS_ACCEPTED, conditions.TIERS_FOUND, conditions.INVALID_ACCESS, "InvalidAccess"),
    (conditions.PROGRESSING, conditions.SETTLED, conditions.ROLLOUT_PROGRESSING, "RolloutStarted"),
    (conditions.PROGRESSING, conditions.ROLLOUT_PROGRESSING, conditions.SETTLED, "RolloutCompleted"),
    (conditions.PROGRESSING, conditions.ROLLOUT_PROGRESSING, conditions.ROLLOUT_PAUSED, None),
    (conditions.PROGRESSING, conditions.ROLLOUT_PAUSED, conditions.ROLLOUT_PROGRESSING, None),
    (conditions.DEGRADED, conditions.AS_EXPECTED, conditions.ROLLED_BACK, "RolledBack"),
    (conditions.DEGRADED, conditions.ROLLED_BACK, conditions.ROLLED_BACK, None),
    (conditions.READY, conditions.TOO_FEW_INSTANCES, conditions.INSTANCES_SERVING, None),
    (conditions.READY, conditions.INSTANCES_SERVING, conditions.FLOORS_TOO_HIGH, "FloorsTooHigh"),
    (
        conditions.SCALING_LIMITED,
        conditions.DESIRED_WITHIN_RANGE,
        conditions.LIMITED_BY_FLOORS,
        "ScalingLimited",
    ),
    (
        conditions.SCALING_LIMITED,
        conditions.LIMITED_BY_FLOORS,
        conditions.TOO_MANY_REPLICAS,
        "ScalingLimited",
    ),
    (conditions.SCALING_LIMITED, conditions.TOO_MANY_REPLICAS, conditions.TOO_MANY_REPLICAS, None),
    (conditions.SCALING_LIMITED, conditions.TOO_FEW_REPLICAS, conditions.DESIRED_WITHIN_RANGE, None),
    (conditions.MODEL_FITS, conditions.NO_INSTANCE_YET, MODEL_UNKNOWN, "ModelNotRead"),
    (conditions.MODEL_FITS, MODEL_UNKNOWN, MODEL_UNKNOWN, None),
]


@pytest.mark.parametrize(("kind", "before", "now", "reason"), CONDITIONS)
def test_a_condition_that_changes_its_reason_is_reported_as_the_table_says(
    kind: str, before: str, now: str, reason: str | None
) -> None:
    seen = replace(OBSERVED, service=service_with(kind, before))
    assert reported(seen, plan_with(service_with(kind, now))) == ([(reason, "why")] if reason else [])


@pytest.mark.parametrize(
    ("before", "now", "is_reported"),
    [
        pytest.param(
            ("Unknown", "ModelUnknown"), ("False", "WeightsTooLarge"), True, id="the model stops fitting"
        ),
        pytest.param(("False", "WeightsTooLarge"), ("False", "WeightsTooLarge"), False, id="nothing changes"),
        pytest.param(
            ("False", "WeightsTooLarge"),
            ("False", "ContextTooLong"),
            True,
            id="it does not fit for another reason",
        ),
        pytest.param(("False", "WeightsTooLarge"), ("True", "Fits"), False, id="it fits again"),
    ],
)
def test_a_model_that_does_not_fit_is_reported_once_for_each_reason(
    before: tuple[str, str], now: tuple[str, str], is_reported: bool
) -> None:
    seen = replace(OBSERVED, service=service_with(conditions.MODEL_FITS, before[1], before[0]))
    plan = plan_with(service_with(conditions.MODEL_FITS, now[1], now[0]))
    assert reported(seen, plan) == ([("ModelDoesNotFit", "why")] if is_reported else [])


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param(
            ("True", "Verified"),
            ("False", "HandshakeFailed"),
            [("KVTransferNotVerified", "Warning")],
            id="the transfer fails",
        ),
        pytest.param(
            ("False", "HandshakeFailed"),
            ("True", "Verified"),
            [("KVTransferVerified", "Normal")],
            id="the transfer works again",
        ),
        pytest.param(("True", "Verified"), ("True", "Verified"), [], id="nothing changes"),
        pytest.param(
            ("Unknown", "NoTrafficYet"),
            ("True", "Verified"),
            [],
            id="the first verification of a new service",
        ),
    ],
)
def test_a_lost_and_a_recovered_kv_transfer_are_both_reported(
    before: tuple[str, str], now: tuple[str, str], expected: list[tuple[str, str]]
) -> None:
    kind = conditions.KV_TRANSFER_VERIFIED
    seen = replace(OBSERVED, service=service_with(kind, before[1], before[0]))
    events = derive_events(seen, plan_with(service_with(kind, now[1], now[0])), Reported(OBSERVED.engines))
    assert [(event.reason, event.type) for event in events] == expected


@dataclass
class FakeEvents:
    """An API server that stores Events."""

    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    unavailable: bool = False

    async def create(self, _kind: ObjectKind, body: dict[str, Any], *, namespace: str) -> dict[str, Any]:
        if self.unavailable:
            raise StoreUnavailable("no response")
        assert namespace == "default"
        name = body["metadata"]["name"]
        if name in self.events:
            raise AlreadyExists(name)
        self.events[name] = dict(body)
        return body

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> dict[str, Any]:
        del namespace
        return self.events[name]

    async def patch(
        self, _kind: ObjectKind, name: str, patch: dict[str, Any], *, namespace: str
    ) -> dict[str, Any]:
        del namespace
        if name not in self.events:
            raise NotFound(name)
        self.events[name] |= patch
        return self.events[name]


class RecorderUnderTest:
    def __init__(self) -> None:
        self.objects, self.clock, self.is_leader = FakeEvents(), ManualClock(NOW_S), True
        self.recorder = self.make_recorder()

    def make_recorder(self) -> EventRecorder:
        api: Any = self.objects
        return EventRecorder(api, self.clock, is_leader=lambda: self.is_leader)

    def counts(self) -> list[tuple[str, int]]:
        return [(event["reason"], event["count"]) for event in self.objects.events.values()]


@pytest.fixture
def under_test() -> RecorderUnderTest:
    return RecorderUnderTest()


UP = scaled("chat-flex", 2, 4)


async def test_a_repeated_event_increments_its_count(under_test: RecorderUnderTest) -> None:
    await under_test.recorder.record(OBSERVED.service.metadata, [UP, UP])
    await under_test.make_recorder().record(OBSERVED.service.metadata, [UP])  # a restarted operator
    assert under_test.counts() == [("ScaledUp", 3)]


async def test_an_expired_event_is_created_again_with_count_1(under_test: RecorderUnderTest) -> None:
    await under_test.recorder.record(OBSERVED.service.metadata, [UP])
    under_test.objects.events.clear()
    await under_test.recorder.record(OBSERVED.service.metadata, [UP])
    assert under_test.counts() == [("ScaledUp", 1)]


async def test_an_events_involved_object_is_the_service(under_test: RecorderUnderTest) -> None:
    await under_test.recorder.record(OBSERVED.service.metadata, [UP])
    event = under_test.objects.events[event_name(OBSERVED.service.metadata, UP)]
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["uid"], event["message"]) == (
        "PDService",
        "chat",
        "u-service",
        "pool chat-flex scaled from 2 to 4 instances",
    )


async def test_an_event_of_an_instance_is_shown_at_the_instance_too(under_test: RecorderUnderTest) -> None:
    failed = instance_failed("chat-1", "its engine ended")
    await under_test.recorder.record(OBSERVED.service.metadata, [failed, failed], OBSERVED.instances)
    about = [
        (event["involvedObject"]["kind"], event["involvedObject"]["name"], event["count"])
        for event in under_test.objects.events.values()
    ]
    assert about == [("PDService", "chat", 2), ("PDInstance", "chat-1", 2)]


async def test_a_service_is_limited_to_a_burst_of_25_events(under_test: RecorderUnderTest) -> None:
    many = [Event("RoleFlipped", "Normal", f"{number}", f"{number}") for number in range(100)]
    await under_test.recorder.record(OBSERVED.service.metadata, many)
    before = len(under_test.objects.events)
    under_test.clock.at_s += 10.0
    await under_test.recorder.record(OBSERVED.service.metadata, many[50:])
    assert (before, len(under_test.objects.events)) == (25, 27)


async def test_an_event_that_cannot_be_written_raises_no_error(under_test: RecorderUnderTest) -> None:
    under_test.objects.unavailable = True
    await under_test.recorder.record(OBSERVED.service.metadata, [UP])
    under_test.objects.unavailable, under_test.is_leader = False, False
    await under_test.recorder.record(OBSERVED.service.metadata, [UP])
    assert under_test.objects.events == {}
