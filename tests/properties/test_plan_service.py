"""Properties of the operator's plan for any state of instances, engines and router."""

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.api import (
    Floors,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDPool,
    PDService,
    RoleAssignment,
)
from fulcrum_core.assignment import build_assignment_rules, list_assigned, may_apply
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, FlipStrategy, Phase, Role
from fulcrum_operator.plan import Observed, Plan, plan_service
from fulcrum_operator.plan.assignment import AssignableInstance, plan_first_split
from fulcrum_operator.plan.instance_state import active_names, ready_instances
from tests.unit.core.router_states import instance_state, router_state

NOW_S = 1_800_000_000.0
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
NEAR = st.floats(NOW_S - 300, NOW_S).map(lambda at_s: round(at_s, 3))


@st.composite
def entries(draw: st.DrawFn) -> RoleAssignment:
    fields = {
        "role": draw(ROLES),
        "since": draw(NEAR),
        "by": draw(st.sampled_from(Actor)),
        "cordoned": draw(st.booleans()),
    }
    return RoleAssignment.model_validate(fields)


@st.composite
def engines(draw: st.DrawFn, name: str) -> EngineObservation | None:
    state = draw(st.one_of(st.none(), st.sampled_from(EngineState)))
    if state is None:
        return None
    endpoint = "127.0.0.1:1" if state is EngineState.RUNNING else None
    return EngineObservation(name=name, state=state, restarts=draw(st.integers(0, 3)), endpoint=endpoint)


@st.composite
def routers(draw: st.DrawFn, names: list[str]) -> RouterState | None:
    if draw(st.booleans()):
        return None
    states = [
        instance_state(
            name, draw(ROLES), legs=draw(st.integers(0, 3)), pending_transfers=draw(st.integers(0, 1))
        )
        for name in names
    ]
    generation = draw(st.integers(1, 3))
    return router_state(*states, generation=generation, acknowledged_at_s=NOW_S, at_s=NOW_S)


STRATEGIES = st.one_of(st.none(), st.sampled_from(FlipStrategy))


@st.composite
def observations(
    draw: st.DrawFn, strategies: st.SearchStrategy[FlipStrategy | None] = STRATEGIES
) -> Observed:
    """Draw a service in any state: partly created, scaled, flipped, crashed."""
    count, ceiling = draw(st.integers(1, 6)), 8
    pool = {"name": "flex", "instances": {"min": 1, "max": ceiling}}
    floors = {"prefill": {"min": draw(st.integers(1, 2))}, "decode": {"min": draw(st.integers(1, 2))}}
    service = PDService.model_validate(
        {"metadata": {"name": "chat", "uid": "u"}, "spec": {"model": "m", "pools": [pool], "roles": floors}}
    )
    flexible = PDPool.model_validate(
        {
            "metadata": {"name": "chat-flex", "uid": "u-pool"},
            "spec": {
                "service": "chat",
                "model": "m",
                "engine": {},
                "role": "Flexible",
                "replicas": draw(st.integers(0, 9)),
                "instances": pool["instances"],
            },
        }
    )
    names = [f"chat-{number}" for number in range(count)]
    instances = tuple(draw(instance(name, strategies)) for name in names)
    spec = PDAssignmentSpec(
        service="chat", roles={name: draw(entries()) for name in names}, floors=service.spec.roles.to_floors()
    )
    observed = {name: draw(engines(name)) for name in names}
    accepted = draw(st.one_of(st.none(), st.just(spec)))
    assignment = PDAssignment.model_validate(
        {"metadata": {"name": "chat", "generation": 2}, "spec": spec.dump()}
    )
    return Observed(
        service=service,
        now_s=NOW_S,
        pools=(flexible,),
        instances=instances,
        assignment=assignment if accepted else None,
        engines={name: engine for name, engine in observed.items() if engine},
        router=draw(routers(names)),
        accepted_assignment=accepted,
    )


@st.composite
def instance(draw: st.DrawFn, name: str, strategies: st.SearchStrategy[FlipStrategy | None]) -> PDInstance:
    status = {
        "phase": draw(st.sampled_from(Phase)),
        "phase_since": draw(NEAR),
        "role": draw(st.one_of(st.none(), ROLES)),
        "flip_strategy": draw(strategies),
    }
    spec: dict[str, Any] = {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {}}
    return PDInstance.model_validate({"metadata": {"name": name}, "spec": spec, "status": status})


def planned_assignment(plan: Plan) -> PDAssignmentSpec:
    return next(obj.spec for obj in plan.objects if isinstance(obj, PDAssignment))


def apply_plan(observed: Observed, plan: Plan) -> Observed:
    """Return the observation after the plan's objects were written and before any engine changed."""
    written = [obj for obj in plan.objects if isinstance(obj, PDInstance)]
    deleted = {obj.metadata.name for obj in plan.delete if isinstance(obj, PDInstance)}
    leaving = [i for i in observed.instances if i.metadata.name in deleted]
    return Observed(
        service=next(obj for obj in plan.objects if isinstance(obj, PDService)),
        now_s=observed.now_s,
        pools=tuple(obj for obj in plan.objects if isinstance(obj, PDPool)),
        instances=(*written, *leaving),
        assignment=next(obj for obj in plan.objects if isinstance(obj, PDAssignment)),
        engines=observed.engines,
        router=None,
        accepted_assignment=plan.accepted_assignment,
    )


@given(observations())
def test_repeated_planning_reaches_a_fixed_point(observed: Observed) -> None:
    """While engines and router do not change, the objects stop changing after a few reconciles."""
    for _ in range(6):
        plan = plan_service(observed)
        if apply_plan(observed, plan) == observed:
            break
        observed = apply_plan(observed, plan)
    assert (
        plan_service(observed).objects == plan_service(apply_plan(observed, plan_service(observed))).objects
    )


@given(observations())
def test_the_same_observation_gives_the_same_plan(observed: Observed) -> None:
    assert plan_service(observed) == plan_service(observed)


@given(observations(), st.integers())
def test_the_order_of_instances_does_not_matter(observed: Observed, seed: int) -> None:
    shuffled, engines = list(observed.instances), list(observed.engines.items())
    Random(seed).shuffle(shuffled)
    Random(seed).shuffle(engines)
    other = Observed(
        service=observed.service,
        now_s=observed.now_s,
        pools=observed.pools,
        instances=tuple(shuffled),
        assignment=observed.assignment,
        engines=dict(engines),
        router=observed.router,
        accepted_assignment=observed.accepted_assignment,
    )
    assert plan_service(other) == plan_service(observed)


@given(observations(st.just(FlipStrategy.RELABEL)))
def test_every_assignment_written_by_the_operator_passes_may_apply(observed: Observed) -> None:
    """No cordon, removal or new entry takes a role below its floor.

    Only a failed flip is rolled back unconditionally, and the strategy Relabel has no rollback.
    """
    if observed.assignment is None or observed.accepted_assignment is None:
        return
    plan = plan_service(observed)
    rules = build_assignment_rules(observed.service.spec, observed.pools, observed.instances)
    verdict = may_apply(
        observed.accepted_assignment,
        planned_assignment(plan),
        ready_instances(observed),
        rules,
        now_s=observed.now_s,
    )
    assert verdict.allowed, verdict.reason


@given(observations())
def test_every_instance_has_an_entry_and_every_entry_an_instance(observed: Observed) -> None:
    plan = plan_service(observed)
    existing = {obj.metadata.name for obj in (*plan.objects, *plan.delete) if isinstance(obj, PDInstance)}
    counted = existing - ({i.metadata.name for i in observed.instances} - active_names(observed))
    assert counted <= set(planned_assignment(plan).roles) <= existing


@given(observations())
def test_only_running_engines_have_an_endpoint(observed: Observed) -> None:
    running = {name for name, engine in observed.engines.items() if engine.state is EngineState.RUNNING}
    shown = {
        obj.metadata.name
        for obj in plan_service(observed).objects
        if isinstance(obj, PDInstance) and obj.status.endpoint
    }
    assert shown <= running


@given(observations())
def test_no_instance_is_started_and_stopped_in_one_plan(observed: Observed) -> None:
    plan = plan_service(observed)
    assert not {i.metadata.name for i in plan.start} & set(plan.stop)


@given(
    st.lists(st.one_of(st.none(), ROLES), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_first_split_keeps_the_floors_if_possible(
    fixed: list[Role | None], prefill_floor: int, decode_floor: int
) -> None:
    members = [AssignableInstance(f"chat-{number}", role) for number, role in enumerate(fixed)]
    split = plan_first_split(members, prefill_floor=prefill_floor, decode_floor=decode_floor)
    had = {role: list(split.values()).count(role) for role in (Role.PREFILL, Role.DECODE)}
    free = fixed.count(None)
    missing = max(0, decode_floor - fixed.count(Role.DECODE))
    assert had[Role.DECODE] >= min(decode_floor, fixed.count(Role.DECODE) + free)
    assert had[Role.PREFILL] >= min(prefill_floor, fixed.count(Role.PREFILL) + max(0, free - missing))
    assert {name: split[name] for name, role in _fixed(members)} == dict(_fixed(members))


def _fixed(members: list[AssignableInstance]) -> list[tuple[str, Role]]:
    return [(member.name, member.fixed_role) for member in members if member.fixed_role]


@given(observations(), ROLES)
def test_no_edit_of_the_assignment_takes_a_role_below_its_floor(observed: Observed, role: Role) -> None:
    """After the operator's reconcile the assignment keeps the floors, whatever a user wrote into it."""
    if observed.assignment is None or observed.accepted_assignment is None:
        return
    everyone = {
        name: entry.model_copy(update={"role": role})
        for name, entry in observed.assignment.spec.roles.items()
    }
    patched = observed.assignment.spec.model_copy(
        update={"roles": everyone, "floors": Floors(prefill=0, decode=0)}
    )
    requested = observed.assignment.replace(spec=patched)
    plan = plan_service(
        Observed(
            service=observed.service,
            now_s=observed.now_s,
            pools=observed.pools,
            instances=observed.instances,
            assignment=requested,
            engines=observed.engines,
            router=observed.router,
            accepted_assignment=observed.accepted_assignment,
        )
    )
    floors = observed.service.spec.roles.to_floors()
    desired = sum(pool.spec.instances.clamp(pool.spec.replicas) for pool in observed.pools)
    if desired == 1 and floors == Floors():
        floors = Floors(prefill=0, decode=1)  # the single instance plays Both
    for phase in (Role.PREFILL, Role.DECODE):
        before = list_assigned(observed.accepted_assignment.roles, ready_instances(observed), phase)
        now = list_assigned(planned_assignment(plan).roles, ready_instances(observed), phase)
        assert len(now) >= min(len(before), floors.for_role(phase))
