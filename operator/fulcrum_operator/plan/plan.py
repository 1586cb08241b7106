"""The whole plan of one service: desired objects, engines to start and to end, when to look again."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from fulcrum_core.api import (
    ObjectMeta,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDInstanceStatus,
    PDPool,
    PDService,
    Resource,
    RoleAssignment,
)
from fulcrum_core.assignment import AssignmentRules, effective_roles, rules_of
from fulcrum_core.ports import EngineObservation
from fulcrum_core.transfer import KV_LEASE_S
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.plan.assignment import REFUSED_FOR_S, Member, leaving, plan_assignment, refused
from fulcrum_operator.plan.instances import members, new_instances, surplus
from fulcrum_operator.plan.observed import Observed, by_number, number_of
from fulcrum_operator.plan.phases import EngineAction, Facts, Step, advance
from fulcrum_operator.plan.pools import SERVICE_LABEL, desired_pools, pool_status, wanted_replicas
from fulcrum_operator.plan.status import service_status

DRAIN_LOOK_S = 0.2
"""How often the router is asked whether a drain is done."""

_WITH_ENDPOINT = (Phase.SERVING, Phase.DRAINING, Phase.VERIFYING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be. Objects are whole; whoever applies them writes the difference, in this order."""

    objects: tuple[Resource, ...] = ()
    delete: tuple[Resource, ...] = ()
    start: tuple[PDInstance, ...] = ()
    stop: tuple[str, ...] = ()
    accepted: PDAssignmentSpec | None = None
    """The assignment as judged, to be remembered once it is written."""
    wake_after_s: float | None = None
    """When to look again even if nothing happens; None: no need."""


def asks_router(service: PDService, pools: tuple[PDPool, ...], instances: tuple[PDInstance, ...]) -> bool:
    """Whether a plan depends on the router's ledger: someone drains or is verified, or somebody must go."""
    wanted = {pool.metadata.name: wanted_replicas(pool) for pool in desired_pools(service, pools)}
    had = Counter(instance.spec.pool for instance in instances)
    waits = any(i.status.phase in (Phase.DRAINING, Phase.VERIFYING) for i in instances)
    return waits or any(count > wanted.get(pool, 0) for pool, count in had.items())


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
    born = new_instances(seen, pools)
    instances = tuple(
        sorted((*seen.instances, *born), key=lambda instance: by_number(instance.metadata.name))
    )
    excess = surplus(seen, pools)
    rules = rules_of(seen.service.spec, pools, instances)
    wish = plan_assignment(seen, _members(instances, rules), excess, rules)
    steps = {i.metadata.name: advance(_facts(seen, wish, i, leaving(wish, excess))) for i in instances}
    wish = _rolled_back(wish, instances, steps, now_s=seen.now_s)
    return _assembled(seen, pools, instances, wish, steps)


def _assembled(
    seen: Observed,
    pools: tuple[PDPool, ...],
    instances: tuple[PDInstance, ...],
    wish: PDAssignmentSpec,
    steps: Mapping[str, Step],
) -> Plan:
    now_s = seen.now_s
    desired = tuple(
        i.replace(status=s) for i, s in zip(instances, _statuses(seen, instances, wish, steps), strict=True)
    )
    status = service_status(
        seen.service,
        wish,
        desired,
        wanted=sum(wanted_replicas(pool) for pool in pools),
        tiers=seen.tiers,
        endpoint=seen.endpoint,
        refused_for_s=REFUSED_FOR_S,
        now_s=now_s,
    )
    counted = tuple(
        pool.replace(status=pool_status(pool, members(desired, pool.metadata.name), now_s=now_s))
        for pool in pools
    )
    gone = tuple(instance for instance in desired if steps[instance.metadata.name].done)
    kept = tuple(instance for instance in desired if not steps[instance.metadata.name].done)
    return Plan(
        objects=(_assignment(seen, wish), *kept, *counted, seen.service.replace(status=status)),
        delete=(*gone, *_unnamed(seen, pools)),
        start=tuple(
            i for i in kept if _acts(i, steps, EngineAction.START) and i.metadata.name not in seen.engines
        ),
        stop=tuple(sorted(chain(_orphans(seen), _to_stop(seen, kept, steps)))),
        accepted=wish,
        wake_after_s=_wake_after_s(steps, now_s=now_s),
    )


def _members(instances: tuple[PDInstance, ...], rules: AssignmentRules) -> tuple[Member, ...]:
    return tuple(Member(i.metadata.name, rules.fixed_roles.get(i.metadata.name)) for i in instances)


def _facts(seen: Observed, wish: PDAssignmentSpec, instance: PDInstance, going: frozenset[str]) -> Facts:
    name, status = instance.metadata.name, instance.status
    entry: RoleAssignment = wish.roles[name]
    ledger = {state.name: state for state in seen.router.instances} if seen.router else {}
    state = ledger.get(name)
    return Facts(
        phase=status.phase,
        since_s=status.phase_since if status.phase_since is not None else seen.now_s,
        now_s=seen.now_s,
        drain_timeout_s=seen.service.spec.drain.timeout,
        engine=seen.engines.get(name),
        assigned=entry.role,
        played=status.role,
        strategy=status.strategy or FlipStrategy.RELABEL,
        cordoned=entry.cordoned,
        leaving=name in going,
        drained=_acknowledged(seen)
        and (state is None or not (state.legs or state.open_handoffs))
        and _leases_known(seen, status.phase_since),
        answers=state is not None and not state.missed_probes,
        legs=state.legs if state else None,
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
    return seen.router.since_s <= drain_since_s or seen.now_s >= seen.router.since_s + KV_LEASE_S


def _rolled_back(
    wish: PDAssignmentSpec, instances: tuple[PDInstance, ...], steps: Mapping[str, Step], *, now_s: float
) -> PDAssignmentSpec:
    """`wish` with the flips that did not come through given up, each with its reason."""
    for instance in instances:
        name, played = instance.metadata.name, instance.status.role
        why = steps[name].refused
        if why and played in (Role.PREFILL, Role.DECODE):
            before = wish.roles[name].model_copy(update={"role": played, "pinned_until": None})
            last = wish.model_copy(update={"roles": {**wish.roles, name: before}})
            wish = refused(last, wish, why, now_s=now_s)
    return wish


def _statuses(
    seen: Observed, instances: tuple[PDInstance, ...], wish: PDAssignmentSpec, steps: Mapping[str, Step]
) -> tuple[PDInstanceStatus, ...]:
    """What each instance's status shall say. An instance alone in serving plays Both."""
    serving = [name for name, step in steps.items() if step.phase is Phase.SERVING]
    roles = effective_roles(wish.roles, serving)
    return tuple(
        _status(seen, i, wish, roles.get(i.metadata.name), steps[i.metadata.name]) for i in instances
    )


def _status(
    seen: Observed, instance: PDInstance, wish: PDAssignmentSpec, role: Role | None, step: Step
) -> PDInstanceStatus:
    name, before = instance.metadata.name, instance.status
    engine, facts = seen.engines.get(name), seen.facts.get(name)
    entered = before.phase is not step.phase
    runs = step.phase in _WITH_ENDPOINT and engine is not None
    if step.phase in (Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING):
        role = before.role or Role(wish.roles[name].role)
    return before.model_copy(
        update={
            "phase": step.phase,
            "phase_since": seen.now_s if entered else before.phase_since,
            "role": role,
            "endpoint": engine.endpoint if runs and engine else None,
            "identity": facts.identity if facts and runs else before.identity,
            "strategy": facts.strategy if facts and runs else before.strategy,
            "restarts": engine.restarts if engine else before.restarts,
            "message": step.message,
        }
    )


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


def _unnamed(seen: Observed, pools: tuple[PDPool, ...]) -> tuple[PDPool, ...]:
    """Pools that the spec no longer names and that have no instance left."""
    named = {pool.metadata.name for pool in pools}
    used = {instance.spec.pool for instance in seen.instances}
    return tuple(p for p in seen.pools if p.metadata.name not in named and p.metadata.name not in used)


def _acts(instance: PDInstance, steps: Mapping[str, Step], action: EngineAction) -> bool:
    return steps[instance.metadata.name].action is action


def _to_stop(seen: Observed, kept: tuple[PDInstance, ...], steps: Mapping[str, Step]) -> tuple[str, ...]:
    stopping = (i.metadata.name for i in kept if _acts(i, steps, EngineAction.STOP))
    return tuple(name for name in stopping if name in seen.engines)


def _orphans(seen: Observed) -> tuple[str, ...]:
    """Engines of this service that no instance stands for."""
    known = {instance.metadata.name for instance in seen.instances}
    ours = (name for name in seen.engines if number_of(seen.service.metadata.name, name) is not None)
    return tuple(name for name in ours if name not in known)


def _wake_after_s(steps: Mapping[str, Step], *, now_s: float) -> float | None:
    """Soon while the router must be asked about a drain, at the next deadline otherwise."""
    deadlines = [step.deadline_s for step in steps.values() if step.deadline_s is not None]
    if not deadlines:
        return None
    return max(0.0, min(DRAIN_LOOK_S, min(deadlines) - now_s))
