"""What a pass tells of: each thing once, in words, and nothing of what only goes on."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fulcrum_cluster.objects import ObjectKind
from fulcrum_core.api import PDService, Refusal
from fulcrum_core.api import conditions as words
from fulcrum_core.errors import AlreadyExists, NotFound, StoreUnavailable
from fulcrum_core.models import MODEL_UNKNOWN
from fulcrum_core.ports import EngineState
from fulcrum_core.values import Actor, Phase
from fulcrum_operator.controller.events import Event, Recorder, event_name, events_of, scaled
from fulcrum_operator.plan import Observed, Plan
from tests.unit.operator.builders import (
    NOW_S,
    STARTING,
    D,
    P,
    assignment,
    engine,
    entry,
    instance,
    pool,
    service,
    wish,
)

ROLES = {"chat-0": entry(P), "chat-1": entry(D)}
SEEN = Observed(
    service=service(instances=2),
    now_s=NOW_S,
    pools=(pool(replicas=2),),
    instances=(instance("chat-0"), instance("chat-1")),
    assignment=assignment(wish(ROLES)),
    engines={name: engine(name) for name in ROLES},
    accepted=wish(ROLES),
)
SETTLED = Plan(objects=(SEEN.service, *SEEN.pools, *SEEN.instances), accepted=wish(ROLES))


def told(before: Observed, plan: Plan, last: Any = None) -> list[tuple[str, str]]:
    """Reasons and messages, in order."""
    known = SEEN.engines if last is None else last
    return [(event.reason, event.message) for event in events_of(before, plan, dict(known))]


def judged(kind: str, reason: str, status: str = "True", message: str = "why") -> PDService:
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    return SEEN.service.replace(status=SEEN.service.status.model_validate({"conditions": [condition]}))


def after(obj: PDService) -> Plan:
    return replace(SETTLED, objects=(obj,))


def test_nothing_is_told_of_what_goes_on() -> None:
    assert told(SEEN, SETTLED) == []


def test_a_flip_is_told_with_who_and_why() -> None:
    flipped = wish({**ROLES, "chat-0": entry(D, Actor.PERSON, reason="asked")})
    assert told(SEEN, replace(SETTLED, accepted=flipped)) == [
        ("RoleFlipped", "chat-0 to Decode by Person (asked)")
    ]


def test_the_first_pass_of_an_operator_tells_of_no_flip() -> None:
    flipped = wish({**ROLES, "chat-0": entry(D, Actor.PERSON)})
    assert told(replace(SEEN, accepted=None), replace(SETTLED, accepted=flipped)) == []


def test_a_refused_wish_is_told_once() -> None:
    refusal = Refusal(role=D, reason="the floor is 1", until=NOW_S + 30)
    refused = wish({**ROLES, "chat-0": entry(P, refused=refusal)})
    plan = replace(SETTLED, accepted=refused)
    assert told(SEEN, plan) == [("WishRefused", "chat-0 to Decode: the floor is 1")]
    assert told(replace(SEEN, assignment=assignment(refused), accepted=refused), plan) == []


def test_a_failure_is_told_when_it_comes() -> None:
    failed = instance("chat-1", Phase.FAILED, message="its engine ended: exit code 137")
    plan = replace(SETTLED, objects=(failed,))
    assert told(SEEN, plan) == [("InstanceFailed", "chat-1: its engine ended: exit code 137")]
    assert told(replace(SEEN, instances=(failed,)), plan) == []


def test_a_lost_instance_that_is_taken_away_is_replaced() -> None:
    lost = replace(SEEN, engines={"chat-1": engine("chat-1", EngineState.LOST)})
    plan = replace(SETTLED, delete=(SEEN.instances[1],))
    assert told(lost, plan) == [("InstanceReplaced", "chat-1 is replaced by a new instance")]
    assert told(SEEN, plan) == []


def test_another_number_that_was_asked_for_is_told_when_it_is_first_seen() -> None:
    small = pool(replicas=4).replace(status=pool(replicas=4).status.model_copy(update={"replicas": 2}))
    asked = small.replace(metadata=small.metadata.model_copy(update={"generation": 2}))
    plan = replace(SETTLED, objects=(asked,))
    assert told(replace(SEEN, pools=(asked,)), plan) == [("ScaledUp", "pool chat-flex from 2 to 4 instances")]
    known = asked.replace(status=asked.status.model_copy(update={"observed_generation": 2}))
    assert told(replace(SEEN, pools=(known,)), plan) == []


HINDRANCES = [
    ("ImagePullBackOff: no such image", "ImagePullFailed"),
    ("ErrImagePull: no such image", "ImagePullFailed"),
    ("Unschedulable: 0/3 nodes are available", "Unschedulable"),
    ("CreateContainerConfigError: no such secret", "EngineDoesNotStart"),
    ("PodRefused: exceeded quota", "EngineDoesNotStart"),
    ("CreateContainerError", "EngineDoesNotStart"),
    ("RegistryUnavailable: no such host", "ImagePullFailed"),
    ("its roles are probed", None),
    ("", None),
]


@pytest.mark.parametrize(("message", "reason"), HINDRANCES)
def test_what_keeps_an_engine_from_starting_is_told_once(message: str, reason: str | None) -> None:
    engines = {"chat-1": engine("chat-1", STARTING, message=message)}
    seen = replace(SEEN, engines=engines)
    assert told(seen, SETTLED) == ([(reason, f"chat-1: {message}")] if reason else [])
    assert told(seen, SETTLED, engines) == []


def test_a_pull_that_is_tried_again_and_again_is_told_once() -> None:
    tried, waits = (
        {"chat-1": engine("chat-1", STARTING, message=f"{word}: no such image")}
        for word in ("ErrImagePull", "ImagePullBackOff")
    )
    assert told(replace(SEEN, engines=tried), SETTLED, waits) == []


def test_what_is_missing_is_told_after_the_wait_for_it() -> None:
    late, named = (
        {"chat-1": engine("chat-1", STARTING, message=f"CreateContainerConfigError: {why}")}
        for why in ("failed to sync secret cache: timed out", 'secret "token" not found')
    )
    message = 'chat-1: CreateContainerConfigError: secret "token" not found'
    assert told(replace(SEEN, engines=named), SETTLED, late) == [("EngineDoesNotStart", message)]


def test_a_pod_that_somebody_ends_is_told_of_once() -> None:
    engines = {"chat-1": engine("chat-1", ending=True)}
    seen = replace(SEEN, engines=engines)
    message = "the pod of chat-1 is ended by somebody else; a new instance takes its place"
    assert told(seen, SETTLED) == [("ReclaimedForDrain", message)]
    assert told(seen, SETTLED, engines) == []


CONDITIONS = [
    (words.TIERS_ACCEPTED, words.TIERS_FOUND, words.TIER_NOT_FOUND, "TierMissing"),
    (words.PROGRESSING, words.SETTLED, words.ROLLOUT_PROGRESSING, "RolloutStarted"),
    (words.PROGRESSING, words.ROLLOUT_PROGRESSING, words.SETTLED, "RolloutCompleted"),
    (words.PROGRESSING, words.ROLLOUT_PROGRESSING, words.ROLLOUT_PAUSED, None),
    (words.PROGRESSING, words.ROLLOUT_PAUSED, words.ROLLOUT_PROGRESSING, None),
    (words.DEGRADED, words.ALL_WELL, words.ROLLED_BACK, "RolledBack"),
    (words.DEGRADED, words.ROLLED_BACK, words.ROLLED_BACK, None),
    (words.READY, words.TOO_FEW_INSTANCES, words.INSTANCES_SERVING, None),
    (words.READY, words.INSTANCES_SERVING, words.FLOORS_TOO_HIGH, "FloorsTooHigh"),
    (words.SCALING_LIMITED, words.WITHIN_BOUNDS, words.FLOORS_HOLD, "ScalingLimited"),
    (words.SCALING_LIMITED, words.FLOORS_HOLD, words.TOO_MANY_REPLICAS, "ScalingLimited"),
    (words.SCALING_LIMITED, words.TOO_MANY_REPLICAS, words.TOO_MANY_REPLICAS, None),
    (words.SCALING_LIMITED, words.TOO_FEW_REPLICAS, words.WITHIN_BOUNDS, None),
    (words.MODEL_FITS, words.NO_INSTANCE_YET, MODEL_UNKNOWN, "ModelNotRead"),
    (words.MODEL_FITS, MODEL_UNKNOWN, MODEL_UNKNOWN, None),
]


@pytest.mark.parametrize(("kind", "before", "now", "reason"), CONDITIONS)
def test_some_changes_of_conditions_are_told(kind: str, before: str, now: str, reason: str | None) -> None:
    seen = replace(SEEN, service=judged(kind, before))
    assert told(seen, after(judged(kind, now))) == ([(reason, "why")] if reason else [])


@pytest.mark.parametrize(
    ("before", "now", "told_of"),
    [
        pytest.param(("Unknown", "ModelUnknown"), ("False", "WeightsTooLarge"), True, id="it comes"),
        pytest.param(("False", "WeightsTooLarge"), ("False", "WeightsTooLarge"), False, id="it goes on"),
        pytest.param(
            ("False", "WeightsTooLarge"), ("False", "ContextTooLong"), True, id="for another reason"
        ),
        pytest.param(("False", "WeightsTooLarge"), ("True", "Fits"), False, id="it is well again"),
    ],
)
def test_a_model_that_does_not_fit_is_told_once_for_each_reason(
    before: tuple[str, str], now: tuple[str, str], told_of: bool
) -> None:
    seen = replace(SEEN, service=judged(words.MODEL_FITS, before[1], before[0]))
    plan = after(judged(words.MODEL_FITS, now[1], now[0]))
    assert told(seen, plan) == ([("ModelDoesNotFit", "why")] if told_of else [])


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param(
            ("True", "Verified"),
            ("False", "HandshakeFailed"),
            [("KVTransferNotVerified", "Warning")],
            id="it breaks",
        ),
        pytest.param(
            ("False", "HandshakeFailed"),
            ("True", "Verified"),
            [("KVTransferVerified", "Normal")],
            id="and heals",
        ),
        pytest.param(("True", "Verified"), ("True", "Verified"), [], id="it goes on"),
        pytest.param(("Unknown", "NoTrafficYet"), ("True", "Verified"), [], id="a service begins"),
    ],
)
def test_that_kv_is_handed_over_again_is_told(
    before: tuple[str, str], now: tuple[str, str], expected: list[tuple[str, str]]
) -> None:
    kind = words.KV_TRANSFER_VERIFIED
    seen = replace(SEEN, service=judged(kind, before[1], before[0]))
    events = events_of(seen, after(judged(kind, now[1], now[0])), dict(SEEN.engines))
    assert [(event.reason, event.type) for event in events] == expected


@dataclass
class Clock:
    at_s: float = NOW_S

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


@dataclass
class Objects:
    """Events as an API server keeps them."""

    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    away: bool = False

    async def create(self, _kind: ObjectKind, body: dict[str, Any], *, namespace: str) -> dict[str, Any]:
        if self.away:
            raise StoreUnavailable("away")
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


class World:
    def __init__(self) -> None:
        self.objects, self.clock, self.leads = Objects(), Clock(), True
        self.recorder = self.another()

    def another(self) -> Recorder:
        api: Any = self.objects
        return Recorder(api, self.clock, leads=lambda: self.leads)

    def counts(self) -> list[tuple[str, int]]:
        return [(event["reason"], event["count"]) for event in self.objects.events.values()]


@pytest.fixture
def world() -> World:
    return World()


UP = scaled("chat-flex", 2, 4)


async def test_the_same_thing_again_is_one_event_whose_count_grows(world: World) -> None:
    await world.recorder.tell(SEEN.service.metadata, [UP, UP])
    await world.another().tell(SEEN.service.metadata, [UP])  # an operator that was started since
    assert world.counts() == [("ScaledUp", 3)]


async def test_an_event_that_is_forgotten_begins_anew(world: World) -> None:
    await world.recorder.tell(SEEN.service.metadata, [UP])
    world.objects.events.clear()
    await world.recorder.tell(SEEN.service.metadata, [UP])
    assert world.counts() == [("ScaledUp", 1)]


async def test_an_event_is_about_the_service(world: World) -> None:
    await world.recorder.tell(SEEN.service.metadata, [UP])
    event = world.objects.events[event_name(SEEN.service.metadata, UP)]
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["uid"], event["message"]) == (
        "PDService",
        "chat",
        "u-service",
        "pool chat-flex from 2 to 4 instances",
    )


async def test_a_service_that_has_much_to_tell_is_told_of_slowly(world: World) -> None:
    many = [Event("RoleFlipped", "Normal", f"{number}", f"{number}") for number in range(100)]
    await world.recorder.tell(SEEN.service.metadata, many)
    before = len(world.objects.events)
    world.clock.at_s += 10.0
    await world.recorder.tell(SEEN.service.metadata, many[50:])
    assert (before, len(world.objects.events)) == (25, 27)


async def test_what_cannot_be_told_is_no_failure(world: World) -> None:
    world.objects.away = True
    await world.recorder.tell(SEEN.service.metadata, [UP])
    world.objects.away, world.leads = False, False
    await world.recorder.tell(SEEN.service.metadata, [UP])
    assert world.objects.events == {}
