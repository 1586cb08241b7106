"""The plan of one service: desired objects, engines to start and stop, and when to plan again.

The controller calls `plan_service` in every reconcile and applies the `Plan`. The other modules of this
package decide the parts; this one puts them together.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
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
from fulcrum_core.assignment import (
    AssignmentRules,
    build_assignment_rules,
    find_restarted_by_flip,
    group_by_compatibility,
    resolve_effective_roles,
)
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import KV_LEASE_S, FlipStrategy, Phase, Role
from fulcrum_operator.plan.assignment import (
    AssignableInstance,
    AssignmentPlan,
    plan_assignment,
    refuse_changes,
)
from fulcrum_operator.plan.departing_nodes import creation_deadline_s, departure_of
from fulcrum_operator.plan.disruption_budget import plan_min_available
from fulcrum_operator.plan.instance_state import (
    active_instances,
    current_role,
    engine_lost,
    flip_strategy,
    instance_number,
    lost_node_endpoints,
    members_of,
    revision_of,
    sort_instances,
    startup_s,
)
from fulcrum_operator.plan.instances import plan_new_instances, plan_removals
from fulcrum_operator.plan.model import ModelPlan, ModelReadRequest, plan_model_read, with_model_status
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.phases import EngineAction, InstanceFacts, PhaseTransition, plan_transition
from fulcrum_operator.plan.pools import desired_pools, desired_replicas
from fulcrum_operator.plan.rollout import PoolView, next_rollout_deadline_s, view_pool
from fulcrum_operator.plan.start_deadlines import list_start_deadlines_s
from fulcrum_operator.plan.status.assignment import assignment_status
from fulcrum_operator.plan.status.kv_transfer_verified import verified_at
from fulcrum_operator.plan.status.pool import report_pool
from fulcrum_operator.plan.status.service import service_status

DRAIN_POLL_S = 0.2
"""Interval at which the router is queried during a drain."""
CORDON_SETTLE_S = 1.0
"""Age of a drain from which the engine's own request count is trusted: all routers know the cordon."""

LOST_SHOWN_S = 60.0
"""Seconds for which a lost instance is shown as Failed, unless its pool is complete again earlier."""

_PHASES_NEEDING_ROUTER = (Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING)
_PHASES_WITH_ENDPOINT = (Phase.SERVING, Phase.DRAINING, Phase.VERIFYING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do for one service. Objects are complete; the controller writes the differences in order."""

    objects: tuple[Resource, ...] = ()
    delete: tuple[Resource, ...] = ()
    start: tuple[PDInstance, ...] = ()
    stop: tuple[str, ...] = ()
    drained: frozenset[str] = frozenset()
    """Engines in `stop` that have no open request and no pending KV transfer."""
    accepted_assignment: PDAssignmentSpec | None = None
    """The checked assignment, to be remembered once it is written."""
    model_read: ModelReadRequest | None = None
    """The model whose config.json a pod is to read; None if no read is needed."""
    min_available: int = 0
    """Least number of instances that evictions leave."""
    requeue_after_s: float | None = None
    """Seconds until the next plan without an event; None if no deadline is pending."""


def needs_router_state(observed: Observed) -> bool:
    """Whether a plan depends on the router's state.

    True while an instance drains, switches or is verified, has to be removed, or its node is reported lost.
    """
    if lost_node_endpoints(observed) or any(
        i.status.phase in _PHASES_NEEDING_ROUTER for i in observed.instances
    ):
        return True
    pools = {pool.metadata.name: pool for pool in observed.pools}
    views = tuple(
        view_pool(observed, pool) for pool in _desired_pools(observed) if pool.metadata.name in pools
    )
    return bool(plan_removals(observed, views))


def _desired_pools(observed: Observed) -> tuple[PDPool, ...]:
    return desired_pools(
        observed.service, observed.pools, taken=observed.taken_pools, images=observed.engine_images
    )


def plan_removal(service: str, engines: Mapping[str, EngineObservation], instances: Collection[str]) -> Plan:
    """The plan for a deleted service: stop its engines whose PDInstances are deleted, too.

    The store deletes the objects that the service owned. Those that a person orphaned remain, and their
    engines serve on.
    """
    numbered = (name for name in engines if instance_number(service, name) is not None)
    return Plan(stop=tuple(sorted(name for name in numbered if name not in instances)))


def plan_service(observed: Observed) -> Plan:
    """The plan for an existing service.

    New pools are created in a reconcile of their own: their instances need their uid as owner.
    """
    pools = _desired_pools(observed)
    known = {pool.metadata.name for pool in observed.pools}
    if any(pool.metadata.name not in known for pool in pools):
        return Plan(
            objects=pools,
            accepted_assignment=observed.accepted_assignment,
            min_available=_min_available(observed, ()),
            requeue_after_s=0.0,
        )
    views = tuple(view_pool(observed, pool) for pool in pools)
    model = plan_model_read(observed, views)
    observed = with_model_status(observed, model.status)
    created = plan_new_instances(observed, views)
    rules = build_assignment_rules(observed.service.spec, pools, (*observed.instances, *created))
    members = tuple(
        _assignable_instance(i, rules) for i in sort_instances((*active_instances(observed), *created))
    )
    assignment_plan = plan_assignment(observed, members, plan_removals(observed, views), rules)
    instances = sort_instances((*observed.instances, *created))
    show_failed_until_s = _show_failed_until_s(observed, views)
    ledger = {state.name: state for state in observed.router.instances} if observed.router else {}
    transitions = {
        name: plan_transition(
            _instance_facts(
                observed,
                assignment_plan,
                i,
                ledger.get(name),
                show_failed_until_s.get(i.spec.pool, observed.now_s),
            )
        )
        for i in instances
        for name in (i.metadata.name,)
    }
    assignment = _roll_back_failed_flips(assignment_plan.spec, instances, transitions, now_s=observed.now_s)
    return _assemble_plan(
        observed, views, model, instances, replace(assignment_plan, spec=assignment), transitions
    )


def _assemble_plan(
    observed: Observed,
    views: tuple[PoolView, ...],
    model: ModelPlan,
    instances: tuple[PDInstance, ...],
    assignment_plan: AssignmentPlan,
    transitions: Mapping[str, PhaseTransition],
) -> Plan:
    assignment = assignment_plan.spec
    desired = _desired_instances(observed, instances, assignment, transitions)
    pool_reports = tuple(
        report_pool(observed, view, desired, assignment_plan.blocked_removals.get(view.name))
        for view in views
    )
    status = service_status(observed, assignment, desired, pool_reports)
    deletable = tuple(instance for instance in desired if transitions[instance.metadata.name].deletable)
    kept = tuple(instance for instance in desired if not transitions[instance.metadata.name].deletable)
    named_pools = frozenset(view.name for view in views)
    return Plan(
        objects=(
            _assignment_object(observed, assignment),
            *kept,
            *(report.pool for report in pool_reports),
            observed.service.replace(status=status),
        ),
        delete=(*deletable, *_dropped_pools(observed, named_pools)),
        start=tuple(i for i in kept if _needs_start(i.metadata.name, transitions, observed)),
        stop=tuple(sorted({*_orphaned_engines(observed), *_engines_to_stop(observed, desired, transitions)})),
        drained=frozenset(
            name for name, transition in transitions.items() if transition.action is EngineAction.STOP_DRAINED
        ),
        accepted_assignment=assignment,
        model_read=model.request,
        min_available=_min_available(observed, views),
        requeue_after_s=_requeue_after_s(
            transitions, _deadlines(observed, views, model), now_s=observed.now_s
        ),
    )


def _min_available(observed: Observed, views: tuple[PoolView, ...]) -> int:
    pools = tuple(view.pool for view in views) or _desired_pools(observed)
    return plan_min_available(
        observed.service,
        desired=sum(map(desired_replicas, pools)),
        serving=sum(member.is_serving for view in views for member in view.members),
        can_replace_departing=all(view.can_replace_departing for view in views),
        sees_nodes=observed.sees_nodes,
        deletion_announced=any(
            found.is_certain
            for view in views
            for member in view.departing
            if (found := departure_of(observed, member)) is not None
        ),
    )


def _assignable_instance(instance: PDInstance, rules: AssignmentRules) -> AssignableInstance:
    name = instance.metadata.name
    return AssignableInstance(name, rules.fixed_roles.get(name), revision_of(instance))


def _show_failed_until_s(observed: Observed, views: tuple[PoolView, ...]) -> dict[str, float]:
    """Time until which lost instances are shown as Failed, by pool; now if enough of the pool serve."""
    return {view.name: observed.now_s if view.enough_serving else math.inf for view in views}


def _deadlines(observed: Observed, views: tuple[PoolView, ...], model: ModelPlan) -> list[float]:
    """Future deadlines only: this reconcile has acted on the past ones."""
    known = (
        *(next_rollout_deadline_s(observed, view) for view in views),
        *(at_s for view in views for at_s in _replacement_deadlines_s(observed, view)),
        model.deadline_s,
    )
    return [deadline_s for deadline_s in known if deadline_s is not None and deadline_s > observed.now_s]


def _replacement_deadlines_s(observed: Observed, view: PoolView) -> Iterator[float]:
    yield from list_start_deadlines_s(observed, view.updated, nodes_depart=bool(view.departing))
    if view.departing:
        yield creation_deadline_s(observed, members_of(observed.instances, view.name), view.departing)


def _instance_facts(
    observed: Observed,
    assignment_plan: AssignmentPlan,
    instance: PDInstance,
    state: InstanceState | None,
    failed_shown_until_s: float,
) -> InstanceFacts:
    name, status = instance.metadata.name, instance.status
    entry = assignment_plan.spec.roles.get(name)
    phase_since_s = status.phase_since if status.phase_since is not None else observed.now_s
    return InstanceFacts(
        phase=status.phase,
        phase_since_s=phase_since_s,
        now_s=observed.now_s,
        drain_timeout_s=observed.service.spec.drain.timeout,
        engine=observed.engines.get(name),
        assigned_role=entry.role if entry else None,
        current_role=current_role(instance),
        flip_strategy=flip_strategy(observed, instance),
        cordoned=entry is not None and entry.cordoned,
        leaving=name in assignment_plan.leaving,
        drained=_acknowledged(observed)
        and (state is None or state.is_idle(since_s=phase_since_s + CORDON_SETTLE_S))
        and _all_leases_known(observed, status.phase_since),
        reachable=state is not None and not state.missed_probes,
        open_requests=max(state.legs, state.engine_requests or 0) if state else None,
        startup_s=startup_s(observed, instance),
        engine_lost=engine_lost(observed, instance),
        show_failed_until_s=min(phase_since_s + LOST_SHOWN_S, failed_shown_until_s),
    )


def _acknowledged(observed: Observed) -> bool:
    if observed.router is None or observed.assignment is None:
        return False
    return observed.router.generation >= observed.assignment.metadata.generation


def _all_leases_known(observed: Observed, drain_since_s: float | None) -> bool:
    """Whether the router knows every KV transfer that can be pending.

    A router that started after the drain began has an empty ledger: prompts that its predecessor sent to
    prefill may keep their KV until the lease has expired.
    """
    if observed.router is None or drain_since_s is None:
        return False
    return (
        observed.router.ledger_since_s <= drain_since_s
        or observed.now_s >= observed.router.ledger_since_s + _longest_lease_s(observed)
    )


def _longest_lease_s(observed: Observed) -> float:
    known = (i.status.identity for i in observed.instances)
    return max((identity.kv_lease for identity in known if identity is not None), default=KV_LEASE_S)


def _roll_back_failed_flips(
    assignment: PDAssignmentSpec,
    instances: tuple[PDInstance, ...],
    transitions: Mapping[str, PhaseTransition],
    *,
    now_s: float,
) -> PDAssignmentSpec:
    """`assignment` with failed flips set back to the previous role, each with the reason as its refusal."""
    for instance in instances:
        name, role_before = instance.metadata.name, current_role(instance)
        reason = transitions[name].rollback_reason
        if reason and role_before is not None:
            before = assignment.roles[name].model_copy(update={"role": role_before, "pinned_until": None})
            last = assignment.model_copy(update={"roles": {**assignment.roles, name: before}})
            assignment = refuse_changes(last, assignment, reason, now_s=now_s)
    return assignment


def _desired_instances(
    observed: Observed,
    instances: tuple[PDInstance, ...],
    assignment: PDAssignmentSpec,
    transitions: Mapping[str, PhaseTransition],
) -> tuple[PDInstance, ...]:
    """The instances with their new status. An instance with no partner for the other role plays Both."""
    serving = [name for name, transition in transitions.items() if transition.phase is Phase.SERVING]
    with_status = tuple(
        i.replace(status=_observed_status(observed, i, transitions[i.metadata.name])) for i in instances
    )
    roles = resolve_effective_roles(
        assignment.roles,
        serving,
        group_by_compatibility(with_status),
        restarted_by_flip=find_restarted_by_flip(with_status),
    )
    roles_before = {i.metadata.name: i.status.role for i in instances}
    return tuple(
        _with_effective_role(
            observed, i, assignment, (roles.get(name), roles_before[name]), transitions[name]
        )
        for name, i in zip(roles_before, with_status, strict=True)
    )


def _observed_status(
    observed: Observed, instance: PDInstance, transition: PhaseTransition
) -> PDInstanceStatus:
    """The new status without the role."""
    name, before = instance.metadata.name, instance.status
    engine, facts = observed.engines.get(name), observed.engine_facts.get(name)
    entered = before.phase is not transition.phase
    runs = (
        transition.phase in _PHASES_WITH_ENDPOINT
        and engine is not None
        and engine.state is EngineState.RUNNING
    )
    endpoint = engine.endpoint if engine and (runs or transition.phase is Phase.STARTING) else None
    same = runs and engine is not None and engine.restarts == before.restarts
    probed = facts is not None and facts.flip_strategy is not None
    return before.model_copy(
        update={
            "phase": transition.phase,
            "phase_since": observed.now_s if entered else before.phase_since,
            "endpoint": endpoint,
            "node": engine.node if engine else "",
            "identity": facts.identity if facts and endpoint else before.identity,
            "flip_strategy": flip_strategy(observed, instance) if probed and runs else before.flip_strategy,
            "restarts": engine.restarts if engine else before.restarts,
            "kv_verified_at": verified_at(observed, instance, same_engine=same),
            "reason": _phase_reason(transition, engine),
            "message": transition.message,
        }
    )


def _phase_reason(transition: PhaseTransition, engine: EngineObservation | None) -> str:
    """Constant for programs that says why the instance is in its phase; empty if nothing is unusual."""
    if transition.phase is Phase.STARTING and engine is not None:
        return engine.reason
    return transition.reason


def _with_effective_role(
    observed: Observed,
    instance: PDInstance,
    assignment: PDAssignmentSpec,
    roles: tuple[Role | None, Role | None],
    transition: PhaseTransition,
) -> PDInstance:
    """The instance with its effective role and, if its engine starts now, the role it is started for.

    Args:
        observed: The facts of this reconcile.
        instance: The instance with its new status except the role.
        assignment: The desired roles.
        roles: Effective role by the assignment, and the role so far.
        transition: Next phase and action of the instance.
    """
    name, (role, role_before) = instance.metadata.name, roles
    entry = assignment.roles.get(name)
    if transition.phase in (Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING):
        role = role_before or (Role(entry.role) if entry else None)
    made = instance.replace(status=instance.status.model_copy(update={"role": role}))
    starts = transition.action is EngineAction.START and name not in observed.engines
    if not starts or entry is None or flip_strategy(observed, instance) is not FlipStrategy.RESTART:
        return made
    return made.replace(spec=made.spec.model_copy(update={"role": entry.role}))


def _assignment_object(observed: Observed, assignment: PDAssignmentSpec) -> PDAssignment:
    status = assignment_status(assignment)
    if observed.assignment:
        return observed.assignment.replace(spec=assignment, status=status)
    service = observed.service
    meta = ObjectMeta(
        name=service.metadata.name,
        namespace=service.metadata.namespace,
        labels={SERVICE_LABEL: service.metadata.name},
        owner_references=(service.owner_reference(),),
    )
    return PDAssignment(metadata=meta, spec=assignment, status=status)


def _dropped_pools(observed: Observed, named_pools: frozenset[str]) -> tuple[PDPool, ...]:
    """Pools that the spec no longer names and that have no instances."""
    used = {instance.spec.pool for instance in observed.instances}
    return tuple(
        p for p in observed.pools if p.metadata.name not in named_pools and p.metadata.name not in used
    )


def _needs_start(name: str, transitions: Mapping[str, PhaseTransition], observed: Observed) -> bool:
    return transitions[name].action is EngineAction.START and name not in observed.engines


def _engines_to_stop(
    observed: Observed, kept: tuple[PDInstance, ...], transitions: Mapping[str, PhaseTransition]
) -> tuple[str, ...]:
    stops = (EngineAction.STOP, EngineAction.STOP_DRAINED)
    names = (instance.metadata.name for instance in kept)
    return tuple(name for name in names if transitions[name].action in stops and name in observed.engines)


def _orphaned_engines(observed: Observed) -> tuple[str, ...]:
    """Engines of this service that have no PDInstance."""
    known = {instance.metadata.name for instance in observed.instances}
    ours = (
        name for name in observed.engines if instance_number(observed.service.metadata.name, name) is not None
    )
    return tuple(name for name in ours if name not in known)


def _requeue_after_s(
    transitions: Mapping[str, PhaseTransition], deadlines: Iterable[float], *, now_s: float
) -> float | None:
    """Seconds until the next plan: `DRAIN_POLL_S` during a drain, else the time to the next deadline."""
    drains = any(
        transition.phase in _PHASES_NEEDING_ROUTER and transition.deadline_s is not None
        for transition in transitions.values()
    )
    deadlines_s = [
        transition.deadline_s for transition in transitions.values() if transition.deadline_s is not None
    ]
    waits = [
        max(0.0, deadline_s - now_s) for deadline_s in (*deadlines_s, *deadlines) if deadline_s < math.inf
    ]
    return min((*waits, *((DRAIN_POLL_S,) if drains else ())), default=None)
