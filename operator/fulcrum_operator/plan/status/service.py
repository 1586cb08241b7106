"""What is seen of a service, in counts, conditions and words."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fulcrum_core.api import (
    Condition,
    Floors,
    LastDecision,
    PDAssignmentSpec,
    PDInstance,
    PDPool,
    PDPoolStatus,
    PDService,
    PDServiceStatus,
    RoleAssignment,
    RoleStatus,
    conditions,
)
from fulcrum_core.api.labels import POOL_LABEL
from fulcrum_core.assignment import list_serving
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan.assignment import REFUSED_FOR_S
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.pools import scaling_limited
from fulcrum_operator.plan.rollout import PoolView, revision_of
from fulcrum_operator.plan.status.condition import make_condition
from fulcrum_operator.plan.status.degraded import describe_causes, find_failure_causes
from fulcrum_operator.plan.status.kv_transfer_verified import kv_transfer_verified
from fulcrum_operator.plan.status.model_fits import model_fits
from fulcrum_operator.plan.status.slo_met import slo_met_condition

_ROLES = (Role.PREFILL, Role.DECODE)
_CHANGING_PHASES = (
    *(Phase.PENDING, Phase.STARTING, Phase.SWITCHING, Phase.VERIFYING),
    *(Phase.DRAINING, Phase.TERMINATING),
)


def with_transition_times(
    before: Iterable[Condition], now: Iterable[Condition], *, now_s: float
) -> tuple[Condition, ...]:
    """`now` with the times of transition: kept where the status stays, else this moment."""
    known = {one.type: one for one in before}
    return tuple(_with_transition_time(one, known.get(one.type), now_s) for one in now)


def _with_transition_time(now: Condition, before: Condition | None, now_s: float) -> Condition:
    same = before is not None and before.status == now.status
    at_s = before.last_transition_time if before and same else now_s
    return now.model_copy(update={"last_transition_time": at_s})


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool as it shall stand, with its status, and what its status was made from."""

    pool: PDPool
    view: PoolView
    scaling_limited: Condition
    members: tuple[PDInstance, ...]


def report_pool(
    observed: Observed, view: PoolView, desired: tuple[PDInstance, ...], blocked_by: str | None
) -> PoolReport:
    """A pool with what is seen of it, given its instances as they shall stand."""
    pool, leaving = view.pool, {i.metadata.name for i in observed.instances} - observed.active_names
    members = tuple(i for i in desired if i.spec.pool == view.name and i.metadata.name not in leaving)
    limited = scaling_limited(pool, blocked_by)
    status = PDPoolStatus(
        replicas=len(members),
        ready_replicas=sum(member.status.phase is Phase.SERVING for member in members),
        selector=f"{POOL_LABEL}={view.name}",
        revision=view.revision,
        updated_replicas=sum(revision_of(member) == view.revision for member in members),
        last_good=view.last_good,
        refused=view.refused,
        conditions=with_transition_times(pool.status.conditions, (limited,), now_s=observed.now_s),
        observed_generation=pool.metadata.generation,
    )
    return PoolReport(pool.replace(status=status), view, limited, members)


def service_status(
    observed: Observed,
    assignment: PDAssignmentSpec,
    desired: tuple[PDInstance, ...],
    pools: tuple[PoolReport, ...],
) -> PDServiceStatus:
    """The status of a service whose instances and pools shall stand so."""
    service, roles = observed.service, assignment.roles
    members = tuple(member for report in pools for member in report.members)
    wanted = sum(report.view.wanted for report in pools)
    ready = sum(i.status.phase is Phase.SERVING for i in desired)
    prefill, decode = (_role_status(role, roles, desired, members) for role in _ROLES)
    service_conditions = (
        _ready(observed, len(members), wanted, ready, _count_ready(assignment, desired, prefill, decode)),
        _progressing(service, desired, pools, wanted),
        _degraded(observed, desired, pools),
        _tiers_accepted(service, observed.tiers),
        _scaling_limited(service, pools),
        model_fits(observed, tuple((report.view, report.members) for report in pools)),
        kv_transfer_verified(observed, wanted),
        slo_met_condition(service, observed.slo_report),
    )
    attainment_source = service.status if observed.slo_report is None else observed.slo_report
    return PDServiceStatus(
        conditions=with_transition_times(service.status.conditions, service_conditions, now_s=observed.now_s),
        ready=f"{ready}/{wanted}",
        prefill=prefill,
        decode=decode,
        ratio=f"{prefill.ready}:{decode.ready}",
        attainment=attainment_source.attainment,
        tiers=attainment_source.tiers,
        flips=assignment.flips,
        last_decision=last_decision(roles, refused_for_s=REFUSED_FOR_S),
        endpoint=observed.endpoint,
        model=observed.service.status.model,
        observed_generation=service.metadata.generation,
    )


def last_decision(roles: Mapping[str, RoleAssignment], *, refused_for_s: float) -> LastDecision | None:
    """The latest flip or refusal among the entries; of several at one time the last by name."""
    decisions = [
        decision for name in sorted(roles) for decision in _decisions(name, roles[name], refused_for_s)
    ]
    return max(decisions, key=lambda decision: (decision.at, decision.action), default=None)


def _decisions(name: str, entry: RoleAssignment, refused_for_s: float) -> Iterable[LastDecision]:
    if entry.by is not Actor.OPERATOR:
        yield LastDecision.model_validate(
            {
                "at": entry.since,
                "action": f"{name} to {entry.role}",
                "reason": entry.reason or f"by {entry.by}",
            }
        )
    if entry.refused:
        at_s = entry.refused.until - refused_for_s
        request = f"to {entry.refused.role}" if entry.refused.role else "changed"
        action = f"{name} {request} refused"
        yield LastDecision.model_validate({"at": at_s, "action": action, "reason": entry.refused.reason})


def _role_status(
    role: Role,
    roles: Mapping[str, RoleAssignment],
    desired: tuple[PDInstance, ...],
    members: tuple[PDInstance, ...],
) -> RoleStatus:
    phases = [i.status.phase for i in desired if i.status.role is not None and i.status.role.serves(role)]
    entries = [roles[member.metadata.name] for member in members if member.metadata.name in roles]
    return RoleStatus(
        desired=sum(entry.role is role and not entry.cordoned for entry in entries),
        ready=phases.count(Phase.SERVING),
        draining=phases.count(Phase.DRAINING),
    )


def _condition(
    service: PDService, condition_type: str, *, holds: bool, reason: str, message: str
) -> Condition:
    return make_condition(service, condition_type, "True" if holds else "False", reason, message)


def _count_ready(
    assignment: PDAssignmentSpec, desired: tuple[PDInstance, ...], prefill: RoleStatus, decode: RoleStatus
) -> dict[Role, int]:
    """How many serve each role. One that plays Both because it is left alone counts for its own role only."""
    ready = [i.metadata.name for i in desired if i.status.phase is Phase.SERVING]
    if len(ready) == 1:
        return {role: len(list_serving(assignment.roles, ready, role)) for role in _ROLES}
    return {Role.PREFILL: prefill.ready, Role.DECODE: decode.ready}


def _ready(
    observed: Observed, members: int, wanted: int, ready: int, counts: Mapping[Role, int]
) -> Condition:
    service, endpoint = observed.service, observed.endpoint
    floors = service.spec.roles.to_floors()
    missing = [role for role in _ROLES if counts[role] < floors.for_role(role)]
    if missing and not (wanted == 1 and ready):
        reason, message = _too_few(floors, missing, wanted, counts)
    elif endpoint is None:
        reason, message = conditions.ROUTER_STARTING, "waiting for the router"
    else:
        instances_serve = format_count(members, "instance serves", "instances serve")
        reason, message = conditions.INSTANCES_SERVING, f"{ready} of {instances_serve} at {endpoint}"
    return _condition(
        service,
        conditions.READY,
        holds=reason == conditions.INSTANCES_SERVING,
        reason=reason,
        message=message,
    )


def _too_few(floors: Floors, missing: list[Role], wanted: int, counts: Mapping[Role, int]) -> tuple[str, str]:
    if 1 < wanted < floors.prefill + floors.decode:
        floor_text = f"{floors.prefill} Prefill and {floors.decode} Decode"
        return conditions.FLOORS_TOO_HIGH, f"{wanted} instances cannot hold the floors of {floor_text}"
    shortfalls = [f"{counts[role]} of at least {floors.for_role(role)} {role}" for role in missing]
    return conditions.TOO_FEW_INSTANCES, f"{' and '.join(shortfalls)} serve; waiting for more"


def _progressing(
    service: PDService, desired: tuple[PDInstance, ...], pools: tuple[PoolReport, ...], wanted: int
) -> Condition:
    changing = [f"{i.metadata.name} {i.status.phase}" for i in desired if i.status.phase in _CHANGING_PHASES]
    rolling = [report.pool for report in pools if report.view.rolling_out]
    paused_pools = [report.view.name for report in pools if report.view.held_by_pause]
    if rolling:
        reason, message = (
            conditions.ROLLOUT_PROGRESSING,
            "; ".join(_describe_rollout(pool) for pool in rolling),
        )
    elif changing or len(desired) != wanted:
        reason, message = (
            conditions.INSTANCES_CHANGING,
            f"{len(desired)} of {format_count(wanted, 'instance')}",
        )
    elif paused_pools:
        message = f"paused: {', '.join(paused_pools)} shall have another revision"
        return _condition(
            service, conditions.PROGRESSING, holds=False, reason=conditions.ROLLOUT_PAUSED, message=message
        )
    else:
        message = f"{format_count(wanted, 'instance')}, none changing"
        return _condition(
            service, conditions.PROGRESSING, holds=False, reason=conditions.SETTLED, message=message
        )
    names = ", ".join(changing)
    message = f"{message}; {names}" if names else message
    return _condition(service, conditions.PROGRESSING, holds=True, reason=reason, message=message)


def _describe_rollout(pool: PDPool) -> str:
    status = pool.status
    have = format_count(status.replicas, "instance has", "instances have")
    return f"pool {pool.metadata.name}: {status.updated_replicas} of {have} revision {status.revision}"


def _degraded(
    observed: Observed, desired: tuple[PDInstance, ...], pools: tuple[PoolReport, ...]
) -> Condition:
    causes = find_failure_causes(observed, tuple(report.view for report in pools), desired)
    reason = causes[0].reason if causes else conditions.AS_EXPECTED
    message = describe_causes(causes) if causes else "no instance has failed"
    return _condition(
        observed.service, conditions.DEGRADED, holds=bool(causes), reason=reason, message=message
    )


def _scaling_limited(service: PDService, pools: tuple[PoolReport, ...]) -> Condition:
    limited_pools = [report for report in pools if report.scaling_limited.status == "True"]
    if not limited_pools:
        message = "all pools have as many instances as asked"
        return _condition(
            service,
            conditions.SCALING_LIMITED,
            holds=False,
            reason=conditions.DESIRED_WITHIN_RANGE,
            message=message,
        )
    message = "; ".join(
        f"pool {report.view.name}: {report.scaling_limited.message}" for report in limited_pools
    )
    reason = limited_pools[0].scaling_limited.reason
    return _condition(service, conditions.SCALING_LIMITED, holds=True, reason=reason, message=message)


def _tiers_accepted(service: PDService, tiers: Collection[str]) -> Condition:
    missing = [name for name in service.spec.qos_tiers if name not in tiers]
    if missing:
        message = f"no QoSTier named {', '.join(missing)} in namespace {service.metadata.namespace}"
        return _condition(
            service, conditions.TIERS_ACCEPTED, holds=False, reason=conditions.TIER_NOT_FOUND, message=message
        )
    named = service.spec.qos_tiers
    message = format_count(len(named), "tier") if named else "the built-in tier"
    return _condition(
        service, conditions.TIERS_ACCEPTED, holds=True, reason=conditions.TIERS_FOUND, message=message
    )
