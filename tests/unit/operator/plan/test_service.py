"""The whole plan of a service: objects, engines to start and stop, and statuses."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import (
    Condition,
    LastDecision,
    PDAssignment,
    PDInstance,
    PDPool,
    PDPoolStatus,
    PDService,
    PDServiceStatus,
    Refusal,
    Resource,
    RoleStatus,
)
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, FlipStrategy, Phase, Role
from fulcrum_operator.plan import Observed, Plan, needs_router_state, plan_removal, plan_service
from fulcrum_operator.plan.assignment import REFUSED_FOR_S
from fulcrum_operator.plan.service import CORDON_SETTLE_S, DRAIN_POLL_S
from tests.unit.operator.builders import (
    ENGINE_FACTS,
    EXITED,
    NOW_S,
    STARTING,
    D,
    P,
    assignment,
    assignment_spec,
    engine,
    engines,
    entry,
    instance,
    pool,
    router,
    service,
    settled,
)

FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}
BOUNDED = {"pools": [{"name": "flex", "instances": {"min": 1, "max": 9}}]}


def objects_of_kind(plan: Plan, kind: type[Resource]) -> dict[str, Any]:
    return {obj.metadata.name: obj for obj in plan.objects if isinstance(obj, kind)}


def names(objects: tuple[Resource, ...]) -> list[tuple[str, str]]:
    return [(obj.kind, obj.metadata.name) for obj in objects]


def status_of(plan: Plan) -> PDServiceStatus:
    status: PDServiceStatus = objects_of_kind(plan, PDService)["chat"].status
    return status


def condition(plan: Plan, kind: str) -> tuple[str, str, str]:
    found: Condition = next(c for c in status_of(plan).conditions if c.type == kind)
    return found.status, found.reason, found.message


def test_a_new_service_first_gets_its_pools() -> None:
    plan = plan_service(Observed(service=service(instances=3), now_s=NOW_S))
    made = pool(replicas=3)
    assert plan == Plan(
        objects=(made.replace(metadata=made.metadata.model_copy(update={"uid": ""})),),
        min_available=2,
        requeue_after_s=0.0,
    )


def test_service_with_pools_gets_all_instances_roles_and_engines_at_once() -> None:
    plan = plan_service(Observed(service=service(instances=2), now_s=NOW_S, pools=(pool(replicas=2),)))
    first: dict[str, Any] = {"since": NOW_S, "reason": "first split"}
    assert (
        names(plan.objects),
        objects_of_kind(plan, PDAssignment)["chat"].spec,
        [i.metadata.name for i in plan.start],
    ) == (
        [
            *[("PDAssignment", "chat"), ("PDInstance", "chat-0"), ("PDInstance", "chat-1")],
            *[("PDPool", "chat-flex"), ("PDService", "chat")],
        ],
        assignment_spec({"chat-0": entry(P, **first), "chat-1": entry(D, **first)}),
        ["chat-0", "chat-1"],
    )


def test_new_instances_are_owned_and_labelled() -> None:
    plan = plan_service(Observed(service=service(instances=1), now_s=NOW_S, pools=(pool(replicas=1),)))
    made = objects_of_kind(plan, PDInstance)["chat-0"].metadata
    assert (made.labels, [(owner.kind, owner.uid) for owner in made.owner_references]) == (
        {"fulcrum.dev/service": "chat", "fulcrum.dev/pool": "chat-flex"},
        [("PDPool", "u-chat-flex")],
    )


def test_settled_service_is_not_changed_and_not_requeued() -> None:
    observed = settled(FOUR)
    plan = plan_service(observed)
    assert (
        objects_of_kind(plan, PDInstance),
        objects_of_kind(plan, PDAssignment),
        plan.delete,
        plan.start,
        plan.stop,
        plan.requeue_after_s,
    ) == (
        {i.metadata.name: i for i in observed.instances},
        {"chat": observed.assignment},
        (),
        (),
        (),
        None,
    )


def test_status_of_a_settled_service_reports_all_instances_ready() -> None:
    def holds(kind: str, status: str, reason: str, message: str) -> Condition:
        about = {"type": kind, "status": status, "reason": reason, "message": message}
        return Condition.model_validate({**about, "observed_generation": 1, "last_transition_time": NOW_S})

    assert status_of(plan_service(settled(FOUR))) == PDServiceStatus(
        conditions=(
            holds("Ready", "True", "InstancesServing", "4 of 4 instances serve at http://127.0.0.1:8000"),
            holds("Progressing", "False", "Settled", "4 instances, none changing"),
            holds("Degraded", "False", "AsExpected", "no instance has failed"),
            holds("TiersAccepted", "True", "TiersFound", "the built-in tier"),
            holds(
                "ScalingLimited",
                "False",
                "DesiredWithinRange",
                "all pools have as many instances as requested",
            ),
            holds("ModelFits", "Unknown", "NotApplicable", "simulated engines load no model"),
            holds("KVTransferVerified", "Unknown", "NoTrafficYet", "no KV transfer was observed yet"),
            holds("SLOMet", "Unknown", "NoTraffic", "no request ended in 5m"),
            holds(
                "Simulated",
                "True",
                "SimulatedEngines",
                "4 of 4 instances run simulated engines: the text of their responses is made up",
            ),
        ),
        ready="4/4",
        prefill=RoleStatus(desired=2, ready=2),
        decode=RoleStatus(desired=2, ready=2),
        ratio="2:2",
        endpoint="http://127.0.0.1:8000",
        observed_generation=1,
    )


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    before = status_of(plan_service(settled(FOUR)))
    later = settled(
        FOUR, now_s=NOW_S + 60, service=service(instances=4).replace(status=before), endpoint=None
    )
    times = {c.type: c.last_transition_time for c in status_of(plan_service(later)).conditions}
    assert times == {
        "Ready": NOW_S + 60,
        "Progressing": NOW_S,
        "Degraded": NOW_S,
        "TiersAccepted": NOW_S,
        "ScalingLimited": NOW_S,
        "ModelFits": NOW_S,
        "KVTransferVerified": NOW_S,
        "SLOMet": NOW_S,
        "Simulated": NOW_S,
    }


@pytest.mark.parametrize(
    ("observed", "kind", "expected"),
    [
        pytest.param(
            settled(FOUR, endpoint=None),
            "Ready",
            ("False", "RouterStarting", "waiting for the router"),
            id="no router yet",
        ),
        pytest.param(
            settled({"chat-0": P, "chat-1": D}, engines=engines(["chat-0", "chat-1"], chat_0=STARTING)),
            "Ready",
            ("False", "TooFewInstances", "0 of 1 needed Prefill instances serve; waiting for more"),
            id="a role below its floor",
        ),
        pytest.param(
            settled({"chat-0": D}),
            "Ready",
            ("True", "InstancesServing", "1 of 1 instance serves at http://127.0.0.1:8000"),
            id="a single instance plays both roles",
        ),
        pytest.param(
            settled(FOUR, engines=engines(FOUR, chat_1=STARTING)),
            "Progressing",
            ("True", "InstancesChanging", "4 of 4 instances; chat-1 Starting"),
            id="an instance is starting",
        ),
        pytest.param(
            settled(
                FOUR,
                engines={**engines(FOUR), "chat-1": engine("chat-1", EXITED, exit_reason="signal SIGKILL")},
            ),
            "Degraded",
            ("True", "InstancesFailed", "chat-1: its engine ended: signal SIGKILL; restarting it"),
            id="an engine has exited",
        ),
    ],
)
def test_condition_reports_what_is_wrong(
    observed: Observed, kind: str, expected: tuple[str, str, str]
) -> None:
    assert condition(plan_service(observed), kind) == expected


def test_a_dead_engine_loses_its_endpoint_and_its_role() -> None:
    dead = engine("chat-1", EXITED, exit_reason="signal SIGKILL")
    status = objects_of_kind(
        plan_service(settled(FOUR, engines={**engines(FOUR), "chat-1": dead})), PDInstance
    )["chat-1"].status
    assert (status.phase, status.phase_since, status.endpoint, status.role) == (
        Phase.FAILED,
        NOW_S,
        None,
        None,
    )


def test_a_restarted_engine_serves_at_its_new_endpoint() -> None:
    again = engine("chat-1", restarts=1, endpoint="127.0.0.1:9999", node="n2")
    status = objects_of_kind(
        plan_service(settled(FOUR, engines={**engines(FOUR), "chat-1": again})), PDInstance
    )["chat-1"].status
    assert (status.phase, status.endpoint, status.node, status.restarts, status.role) == (
        Phase.SERVING,
        "127.0.0.1:9999",
        "n2",
        1,
        P,
    )


def test_the_only_serving_instance_plays_both_roles() -> None:
    down = {f"chat_{number}": EXITED for number in (1, 2, 3)}
    made = objects_of_kind(plan_service(settled(FOUR, engines=engines(FOUR, **down))), PDInstance)
    assert {name: made[name].status.role for name in FOUR} == {
        "chat-0": Role.BOTH,
        **dict.fromkeys(list(FOUR)[1:]),
    }


def test_a_flip_under_relabel_changes_the_effective_role_and_nothing_else() -> None:
    observed = settled(FOUR)
    flipped = assignment_spec(
        {**{n: entry(r) for n, r in FOUR.items()}, "chat-2": entry(P, Actor.PERSON, since=NOW_S)}, flips=1
    )
    made = objects_of_kind(plan_service(settled(FOUR, assignment=assignment(flipped, 2))), PDInstance)
    before = {i.metadata.name: i for i in observed.instances}
    expected = before["chat-2"].replace(status=before["chat-2"].status.model_copy(update={"role": P}))
    assert made == {**before, "chat-2": expected}


def test_last_decision_is_the_latest_flip_or_refusal() -> None:
    refusal = Refusal(role=D, reason="the floor is 1", until=NOW_S - 5 + REFUSED_FOR_S)
    decisions = [
        status_of(
            plan_service(
                settled(
                    FOUR,
                    assignment=assignment(assignment_spec(roles)),
                    accepted_assignment=assignment_spec(roles),
                )
            )
        ).last_decision
        for roles in (
            {
                **{n: entry(r) for n, r in FOUR.items()},
                "chat-0": entry(P, Actor.AUTOSCALER, reason="load 1.2"),
            },
            {**{n: entry(r) for n, r in FOUR.items()}, "chat-0": entry(P, Actor.PERSON, refused=refusal)},
        )
    ]
    assert decisions == [
        LastDecision(at=NOW_S - 100, action="chat-0 to Prefill", reason="load 1.2"),
        LastDecision(at=NOW_S - 5, action="chat-0 to Decode refused", reason="the floor is 1"),
    ]


def test_pool_status_reports_replicas_limited_by_bounds() -> None:
    observed = settled(FOUR, spec={"pools": [{"name": "flex", "instances": {"min": 1, "max": 4}}]})
    bounded_pool = pool(replicas=9, bounds=(1, 4))
    made: PDPool = objects_of_kind(
        plan_service(settled(FOUR, service=observed.service, pools=(bounded_pool,))), PDPool
    )["chat-flex"]
    limited = {
        "type": "ScalingLimited",
        "status": "True",
        "reason": "TooManyReplicas",
        "message": "9 instances requested; the bounds 1 to 4 allow 4",
        "last_transition_time": NOW_S,
    }
    assert (made.spec.replicas, made.status) == (
        9,
        PDPoolStatus(
            replicas=4,
            ready_replicas=4,
            selector="fulcrum.dev/pool=chat-flex",
            revision=bounded_pool.spec.launch_revision,
            updated_replicas=4,
            last_good=bounded_pool.spec.launch_spec,
            conditions=(Condition.model_validate(limited),),
        ),
    )


def test_new_instances_take_the_lowest_free_numbers() -> None:
    observed = settled(
        {"chat-0": P, "chat-3": D},
        spec=BOUNDED,
        pools=(pool(replicas=4, bounds=(1, 9)),),
        engines=engines(["chat-0", "chat-1", "chat-3"]),
    )
    plan = plan_service(observed)
    assert ([i.metadata.name for i in plan.start], plan.stop) == (["chat-2", "chat-4"], ("chat-1",))


def with_engine_counts(state: RouterState, **read: Any) -> RouterState:
    """The state with the engine's own request count for its one instance."""
    (only,) = state.instances
    return state.model_copy(update={"instances": (only.model_copy(update=read),)})


def draining_service(**fields: Any) -> Observed:
    """Four instances of which three are desired; chat-3 drains, cordoned in generation 2."""
    roles = {**{name: entry(role) for name, role in FOUR.items()}, "chat-3": entry(D, cordoned=True)}
    instances = (
        *settled(FOUR).instances[:3],
        instance(
            "chat-3",
            Phase.DRAINING,
            role=D,
            flip_strategy=ENGINE_FACTS.flip_strategy,
            phase_since=NOW_S - 60.0,
        ),
    )
    given = {
        "pools": (pool(replicas=3, bounds=(1, 9)),),
        "instances": instances,
        "assignment": assignment(assignment_spec(roles), 2),
        "accepted_assignment": assignment_spec(roles),
    }
    return settled(FOUR, spec=BOUNDED, **{**given, **fields})


@pytest.mark.parametrize(
    ("ledger", "phase"),
    [
        pytest.param(None, Phase.DRAINING, id="the router does not respond"),
        pytest.param(router(1, {"chat-3": 0}), Phase.DRAINING, id="the cordon is not acknowledged"),
        pytest.param(router(2, {"chat-3": 1}), Phase.DRAINING, id="a leg is open"),
        pytest.param(router(2, {"chat-3": 0}, chat_3=1), Phase.DRAINING, id="a KV transfer is pending"),
        pytest.param(router(2, {"chat-3": 0}), Phase.TERMINATING, id="acknowledged and nothing open"),
        pytest.param(
            router(2), Phase.TERMINATING, id="acknowledged, and the router no longer lists the instance"
        ),
        pytest.param(
            router(2).model_copy(update={"ledger_since_s": NOW_S - 29.0}),
            Phase.DRAINING,
            id="a restarted router does not know its predecessor's KV transfers",
        ),
        pytest.param(
            router(2).model_copy(update={"ledger_since_s": NOW_S - 30.0}),
            Phase.TERMINATING,
            id="the lease of the predecessor's KV transfers has expired",
        ),
        pytest.param(
            with_engine_counts(router(2, {"chat-3": 0}), engine_requests=1, engine_read_at_s=NOW_S),
            Phase.DRAINING,
            id="the engine has a request that the router does not know of",
        ),
        pytest.param(
            with_engine_counts(
                router(2, {"chat-3": 0}),
                engine_requests=0,
                engine_read_at_s=NOW_S - 60.0 + CORDON_SETTLE_S - 0.1,
            ),
            Phase.DRAINING,
            id="the engine's count is from before every router knew the cordon",
        ),
        pytest.param(
            with_engine_counts(
                router(2, {"chat-3": 0}), engine_requests=0, engine_read_at_s=NOW_S - 60.0 + CORDON_SETTLE_S
            ),
            Phase.TERMINATING,
            id="the engine has no request",
        ),
        pytest.param(
            with_engine_counts(router(2, {"chat-3": 0}), engine_requests=None, engine_read_at_s=NOW_S - 99.0),
            Phase.TERMINATING,
            id="an engine that does not respond does not delay the drain",
        ),
    ],
)
def test_drain_is_done_when_router_and_engine_report_nothing_left(ledger: Any, phase: Phase) -> None:
    plan = plan_service(draining_service(router=ledger))
    ends = ("chat-3",) if phase is Phase.TERMINATING else ()
    assert (objects_of_kind(plan, PDInstance)["chat-3"].status.phase, plan.stop, plan.drained) == (
        phase,
        ends,
        frozenset(ends),
    )


def test_draining_instance_requeues_soon_for_the_router_state() -> None:
    observed = draining_service()
    assert (plan_service(observed).requeue_after_s, needs_router_state(observed)) == (
        DRAIN_POLL_S,
        True,
    )


def test_settled_service_needs_no_router_state() -> None:
    observed = settled(FOUR)
    assert not needs_router_state(observed)


def test_router_state_is_needed_when_one_of_two_pools_removes_instances() -> None:
    two = {"chat-0": P, "chat-1": D}
    spec = {"pools": [{"name": name, "instances": {"min": 1, "max": 3}} for name in ("flex", "more")]}
    pools = (pool(replicas=1, bounds=(1, 3)), pool("chat-more", replicas=1, bounds=(1, 3)))
    assert needs_router_state(settled(two, spec=spec, pools=pools))


def test_an_instance_whose_engine_is_gone_is_deleted() -> None:
    instances = (*settled(FOUR).instances[:3], instance("chat-3", Phase.TERMINATING))
    plan = plan_service(
        draining_service(instances=instances, engines=engines(["chat-0", "chat-1", "chat-2"]))
    )
    assert (names(plan.delete), plan.start) == ([("PDInstance", "chat-3")], ())


def test_a_pool_that_the_spec_drops_is_emptied_and_then_deleted() -> None:
    old, kept = pool("chat-old", replicas=1), pool(replicas=2)
    two = {"chat-0": P, "chat-1": D}
    full = settled(
        two, pools=(kept, old), instances=(*settled(two).instances, instance("chat-2", pool="chat-old"))
    )
    empty = settled(two, pools=(kept, old))
    assert (
        objects_of_kind(plan_service(full), PDAssignment)["chat"].spec.roles["chat-2"].cordoned,
        names(plan_service(empty).delete),
    ) == (
        True,
        [("PDPool", "chat-old")],
    )


def test_instances_of_a_fixed_pool_keep_its_role() -> None:
    spec = {
        "pools": [
            {"name": "p", "role": "Prefill", "instances": {"min": 1}},
            {"name": "d", "role": "Decode", "instances": {"min": 2}},
        ]
    }
    pools = (pool("chat-p", replicas=1, role="Prefill"), pool("chat-d", replicas=2, role="Decode"))
    plan = plan_service(Observed(service=service(**spec), now_s=NOW_S, pools=pools))
    assert {n: e.role for n, e in objects_of_kind(plan, PDAssignment)["chat"].spec.roles.items()} == {
        "chat-0": P,
        "chat-1": D,
        "chat-2": D,
    }


def test_flip_by_restart_that_cannot_drain_is_rolled_back_with_its_reason() -> None:
    roles = {
        **{name: entry(role) for name, role in FOUR.items()},
        "chat-1": entry(D, Actor.PERSON, since=NOW_S - 130),
    }
    stuck = instance(
        "chat-1", Phase.DRAINING, role=P, flip_strategy=FlipStrategy.RESTART, phase_since=NOW_S - 120
    )
    instances = tuple(stuck if i.metadata.name == "chat-1" else i for i in settled(FOUR).instances)
    restart = replace(ENGINE_FACTS, flip_strategy=FlipStrategy.RESTART)
    observed = settled(
        FOUR,
        instances=instances,
        assignment=assignment(assignment_spec(roles)),
        accepted_assignment=assignment_spec(roles),
        router=router(1, {"chat-1": 2}),
        engine_facts={**dict.fromkeys(FOUR, ENGINE_FACTS), "chat-1": restart},
    )
    plan = plan_service(observed)
    refusal = Refusal(role=D, reason="not drained after 120 s, 2 requests left", until=NOW_S + REFUSED_FOR_S)
    given_up = objects_of_kind(plan, PDAssignment)["chat"].spec.roles["chat-1"]
    assert (given_up.role, given_up.refused, objects_of_kind(plan, PDInstance)["chat-1"].status.phase) == (
        P,
        refusal,
        Phase.SERVING,
    )


def test_engines_of_a_deleted_service_are_stopped() -> None:
    running = engines(["chat-0", "chat-11", "chat-b-0", "other-0"])
    assert plan_removal("chat", running, ()) == Plan(stop=("chat-0", "chat-11"))


def test_engines_of_orphaned_instances_are_not_stopped() -> None:
    running = engines(["chat-0", "chat-1"])
    assert plan_removal("chat", running, ("chat-0", "chat-1")) == Plan()
