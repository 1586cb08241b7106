"""The whole plan of one service: desired objects, engines to start and to end, when to look again."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fulcrum_core.api import (
    ObjectMeta,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDInstanceStatus,
    PDPool,
    Resource,
)
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_core.assignment import AssignmentRules, effective_roles, groups_of, restarts_of, rules_of
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.state import InstanceState
from fulcrum_core.values import KV_LEASE_S, FlipStrategy, Phase, Role
from fulcrum_operator.plan.assignment import Assigned, Member, plan_assignment, refused
from fulcrum_operator.plan.instances import departures, new_instances
from fulcrum_operator.plan.model import Outlook, Read, model_outlook
from fulcrum_operator.plan.observed import Observed, by_number, number_of, played_role
from fulcrum_operator.plan.phases import EngineAction, Facts, Step, advance
from fulcrum_operator.plan.pools import desired_pools
from fulcrum_operator.plan.rollout import LOST_SHOWN_S, PoolView, next_deadline_s, revision_of, view_of
from fulcrum_operator.plan.status.kv_transfer_verified import verified_at
from fulcrum_operator.plan.status.service import pool_state, service_status

DRAIN_LOOK_S = 0.2
"""How often the router is asked whether a drain is done."""
SETTLE_S = 1.0
"""An engine's own count is believed once a drain is so old: no router can have missed the cordon by then."""

_ASKS_ROUTER = (Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING)
_WITH_ENDPOINT = (Phase.SERVING, Phase.DRAINING, Phase.VERIFYING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be. Objects are whole; whoever applies them writes the difference, in this order."""

    objects: tuple[Resource, ...] = ()
    delete: tuple[Resource, ...] = ()
    start: tuple[PDInstance, ...] = ()
    stop: tuple[str, ...] = ()
    drained: frozenset[str] = frozenset()
    """Of those to stop: who has nothing left that anybody waits for."""
    accepted: PDAssignmentSpec | None = None
    """The assignment as judged, to be remembered once it is written."""
    read: Read | None = None
    """The model that somebody shall read; None: nobody need."""
    wake_after_s: float | None = None
    """When to look again even if nothing happens; None: no need."""


def asks_router(seen: Observed) -> bool:
    """Whether a plan depends on the router's ledger.

    Someone drains or is verified, somebody must go, or a node is said to be lost.
    """
    if seen.silent or any(i.status.phase in _ASKS_ROUTER for i in seen.instances):
        return True
    pools = {pool.metadata.name: pool for pool in seen.pools}
    views = tuple(
        view_of(seen, pool) for pool in desired_pools(seen.service, seen.pools) if pool.metadata.name in pools
    )
    return bool(departures(seen, views))


def plan_removal(service: str, engines: Mapping[str, EngineObservation]) -> Plan:
    """What is left to do for a service that is gone: end its engines. The store deletes what it owned."""
    return Plan(stop=tuple(sorted(name for name in engines if number_of(service, name) is not None)))


def plan_service(seen: Observed) -> Plan:
    """What shall be for a service that exists.

    Pools come first and alone: their instances are owned by them, so they are made once the pools have an
    identity.
    """
    pools = desired_pools(seen.service, seen.pools)
    known = {pool.metadata.name for pool in seen.pools}
    if any(pool.metadata.name not in known for pool in pools):
        return Plan(objects=pools, accepted=seen.accepted, wake_after_s=0.0)
    views = tuple(view_of(seen, pool) for pool in pools)
    model = model_outlook(seen, views)
    seen = seen.with_model(model.status)
    born = new_instances(seen, views)
    rules = rules_of(seen.service.spec, pools, (*seen.instances, *born))
    members = tuple(_member(i, rules) for i in by_name((*seen.staying, *born)))
    assigned = plan_assignment(seen, members, departures(seen, views), rules)
    instances = by_name((*seen.instances, *born))
    shown_until_s = _shown_until_s(seen, views)
    ledger = {state.name: state for state in seen.router.instances} if seen.router else {}
    steps = {
        name: advance(_facts(seen, assigned, i, ledger.get(name), shown_until_s.get(i.spec.pool, seen.now_s)))
        for i in instances
        for name in (i.metadata.name,)
    }
    wish = _rolled_back(assigned.spec, instances, steps, now_s=seen.now_s)
    return _assembled(seen, views, model, instances, replace(assigned, spec=wish), steps)


def _assembled(
    seen: Observed,
    views: tuple[PoolView, ...],
    model: Outlook,
    instances: tuple[PDInstance, ...],
    assigned: Assigned,
    steps: Mapping[str, Step],
) -> Plan:
    wish = assigned.spec
    desired = _desired(seen, instances, wish, steps)
    now = tuple(pool_state(seen, view, desired, assigned.held.get(view.name)) for view in views)
    status = service_status(seen, wish, desired, now)
    gone = tuple(instance for instance in desired if steps[instance.metadata.name].done)
    kept = tuple(instance for instance in desired if not steps[instance.metadata.name].done)
    named = frozenset(view.name for view in views)
    return Plan(
        objects=(
            _assignment(seen, wish),
            *kept,
            *(state.pool for state in now),
            seen.service.replace(status=status),
        ),
        delete=(*gone, *_unnamed(seen, named)),
        start=tuple(i for i in kept if _starts(i.metadata.name, steps, seen)),
        stop=tuple(sorted({*_orphans(seen), *_to_stop(seen, desired, steps)})),
        drained=frozenset(name for name, step in steps.items() if step.action is EngineAction.STOP_DRAINED),
        accepted=wish,
        read=model.read,
        wake_after_s=_wake_after_s(steps, _deadlines(seen, views, model), now_s=seen.now_s),
    )


def by_name(instances: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """Instances by their numbers."""
    return tuple(sorted(instances, key=lambda instance: by_number(instance.metadata.name)))


def _member(instance: PDInstance, rules: AssignmentRules) -> Member:
    name = instance.metadata.name
    return Member(name, rules.fixed_roles.get(name), revision_of(instance))


def _shown_until_s(seen: Observed, views: tuple[PoolView, ...]) -> dict[str, float]:
    """By pool: until when what it has lost is shown; no longer than until it is whole again."""
    return {view.name: seen.now_s if view.whole else math.inf for view in views}


def _deadlines(seen: Observed, views: tuple[PoolView, ...], model: Outlook) -> list[float]:
    """Those to come: on what is past this pass has acted, or there was nothing left to give up."""
    known = (*(next_deadline_s(seen, view) for view in views), model.deadline_s)
    return [deadline_s for deadline_s in known if deadline_s is not None and deadline_s > seen.now_s]


def _facts(
    seen: Observed,
    assigned: Assigned,
    instance: PDInstance,
    state: InstanceState | None,
    whole_at_s: float,
) -> Facts:
    name, status = instance.metadata.name, instance.status
    entry = assigned.spec.roles.get(name)
    since_s = status.phase_since if status.phase_since is not None else seen.now_s
    return Facts(
        phase=status.phase,
        since_s=since_s,
        now_s=seen.now_s,
        drain_timeout_s=seen.service.spec.drain.timeout,
        engine=seen.engines.get(name),
        assigned=entry.role if entry else None,
        played=played_role(instance),
        strategy=seen.strategy(instance),
        cordoned=entry is not None and entry.cordoned,
        leaving=name in assigned.leaving,
        drained=_acknowledged(seen)
        and (state is None or state.at_rest(since_s=since_s + SETTLE_S))
        and _leases_known(seen, status.phase_since),
        answers=state is not None and not state.missed_probes,
        legs=max(state.legs, state.engine_requests or 0) if state else None,
        startup_s=seen.startup_s(instance),
        taken=seen.taken(instance),
        shown_until_s=min(since_s + LOST_SHOWN_S, whole_at_s),
    )


def _acknowledged(seen: Observed) -> bool:
    if seen.router is None or seen.assignment is None:
        return False
    return seen.router.generation >= seen.assignment.metadata.generation


def _leases_known(seen: Observed, drain_since_s: float | None) -> bool:
    """Whether no hand-off can be open that the router does not know of.

    A router that was started after the drain began has an empty ledger: what its predecessor handed off is
    held until the lease has run out.
    """
    if seen.router is None or drain_since_s is None:
        return False
    return seen.router.since_s <= drain_since_s or seen.now_s >= seen.router.since_s + _longest_lease_s(seen)


def _longest_lease_s(seen: Observed) -> float:
    known = (i.status.identity for i in seen.instances)
    return max((identity.kv_lease for identity in known if identity is not None), default=KV_LEASE_S)


def _rolled_back(
    wish: PDAssignmentSpec, instances: tuple[PDInstance, ...], steps: Mapping[str, Step], *, now_s: float
) -> PDAssignmentSpec:
    """`wish` with the flips that did not come through given up, each with its reason."""
    for instance in instances:
        name, played = instance.metadata.name, played_role(instance)
        why = steps[name].refused
        if why and played is not None:
            before = wish.roles[name].model_copy(update={"role": played, "pinned_until": None})
            last = wish.model_copy(update={"roles": {**wish.roles, name: before}})
            wish = refused(last, wish, why, now_s=now_s)
    return wish


def _desired(
    seen: Observed, instances: tuple[PDInstance, ...], wish: PDAssignmentSpec, steps: Mapping[str, Step]
) -> tuple[PDInstance, ...]:
    """The instances as they shall stand. Who serves with nobody to take the other role plays Both."""
    serving = [name for name, step in steps.items() if step.phase is Phase.SERVING]
    seen_to_be = tuple(i.replace(status=_fact_status(seen, i, steps[i.metadata.name])) for i in instances)
    roles = effective_roles(wish.roles, serving, groups_of(seen_to_be), restarts=restarts_of(seen_to_be))
    played = {i.metadata.name: i.status.role for i in instances}
    return tuple(
        _with_role(seen, i, wish, (roles.get(name), played[name]), steps[name])
        for name, i in zip(played, seen_to_be, strict=True)
    )


def _fact_status(seen: Observed, instance: PDInstance, step: Step) -> PDInstanceStatus:
    """All of the status but the role."""
    name, before = instance.metadata.name, instance.status
    engine, facts = seen.engines.get(name), seen.facts.get(name)
    entered = before.phase is not step.phase
    runs = step.phase in _WITH_ENDPOINT and engine is not None and engine.state is EngineState.RUNNING
    endpoint = engine.endpoint if engine and (runs or step.phase is Phase.STARTING) else None
    same = runs and engine is not None and engine.restarts == before.restarts
    probed = facts is not None and facts.strategy is not None
    return before.model_copy(
        update={
            "phase": step.phase,
            "phase_since": seen.now_s if entered else before.phase_since,
            "endpoint": endpoint,
            "identity": facts.identity if facts and endpoint else before.identity,
            "strategy": seen.strategy(instance) if probed and runs else before.strategy,
            "restarts": engine.restarts if engine else before.restarts,
            "kv_verified_at": verified_at(seen, instance, same_engine=same),
            "message": step.message,
        }
    )


def _with_role(
    seen: Observed,
    instance: PDInstance,
    wish: PDAssignmentSpec,
    roles: tuple[Role | None, Role | None],
    step: Step,
) -> PDInstance:
    """The instance with the role it plays, and the one that an engine started now is started for.

    Args:
        seen: What is there.
        instance: As it shall stand otherwise.
        wish: The roles that are wished.
        roles: What it plays by the wish, and what it played so far.
        step: Where it goes.
    """
    name, (role, known) = instance.metadata.name, roles
    entry = wish.roles.get(name)
    if step.phase in (Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING):
        role = known or (Role(entry.role) if entry else None)
    made = instance.replace(status=instance.status.model_copy(update={"role": role}))
    starts = step.action is EngineAction.START and name not in seen.engines
    if not starts or entry is None or seen.strategy(instance) is not FlipStrategy.RESTART:
        return made
    return made.replace(spec=made.spec.model_copy(update={"role": entry.role}))


def _assignment(seen: Observed, wish: PDAssignmentSpec) -> PDAssignment:
    if seen.assignment:
        return seen.assignment.replace(spec=wish)
    service = seen.service
    meta = ObjectMeta(
        name=service.metadata.name,
        namespace=service.metadata.namespace,
        labels={SERVICE_LABEL: service.metadata.name},
        owner_references=(service.owner_reference(),),
    )
    return PDAssignment(metadata=meta, spec=wish)


def _unnamed(seen: Observed, named: frozenset[str]) -> tuple[PDPool, ...]:
    """Pools that the spec no longer names and that have no instance left."""
    used = {instance.spec.pool for instance in seen.instances}
    return tuple(p for p in seen.pools if p.metadata.name not in named and p.metadata.name not in used)


def _starts(name: str, steps: Mapping[str, Step], seen: Observed) -> bool:
    return steps[name].action is EngineAction.START and name not in seen.engines


def _to_stop(seen: Observed, kept: tuple[PDInstance, ...], steps: Mapping[str, Step]) -> tuple[str, ...]:
    stops = (EngineAction.STOP, EngineAction.STOP_DRAINED)
    names = (instance.metadata.name for instance in kept)
    return tuple(name for name in names if steps[name].action in stops and name in seen.engines)


def _orphans(seen: Observed) -> tuple[str, ...]:
    """Engines of this service that no instance stands for."""
    known = {instance.metadata.name for instance in seen.instances}
    ours = (name for name in seen.engines if number_of(seen.service.metadata.name, name) is not None)
    return tuple(name for name in ours if name not in known)


def _wake_after_s(steps: Mapping[str, Step], deadlines: Iterable[float], *, now_s: float) -> float | None:
    """Soon while the router must be asked about a drain, at the next deadline otherwise."""
    drains = any(step.phase in _ASKS_ROUTER and step.deadline_s is not None for step in steps.values())
    due = [step.deadline_s for step in steps.values() if step.deadline_s is not None]
    waits = [max(0.0, deadline_s - now_s) for deadline_s in (*due, *deadlines) if deadline_s < math.inf]
    return min((*waits, *((DRAIN_LOOK_S,) if drains else ())), default=None)
