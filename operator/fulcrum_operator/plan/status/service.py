"""The status of a PDService: counts by role, the last decision, and its conditions from their modules.

`plan/service` calls it last, with everything that it has planned. It decides nothing about instances.
"""

from collections.abc import Iterable, Mapping

from fulcrum_core.api import (
    Condition,
    LastDecision,
    PDAssignmentSpec,
    PDInstance,
    PDServiceStatus,
    RoleAssignment,
    RoleStatus,
    conditions,
)
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan.assignment import REFUSED_FOR_S
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.status.condition import with_transition_times
from fulcrum_operator.plan.status.degraded import degraded
from fulcrum_operator.plan.status.kv_transfer_verified import kv_transfer_verified
from fulcrum_operator.plan.status.model_fits import model_fits
from fulcrum_operator.plan.status.pool import PoolReport
from fulcrum_operator.plan.status.progressing import progressing
from fulcrum_operator.plan.status.ready import count_ready, ready_condition
from fulcrum_operator.plan.status.scaling_limited import service_scaling_limited
from fulcrum_operator.plan.status.simulated import simulated_condition
from fulcrum_operator.plan.status.slo_met import slo_met_condition
from fulcrum_operator.plan.status.tiers_accepted import tiers_accepted

_ROLES = (Role.PREFILL, Role.DECODE)


def service_status(
    observed: Observed,
    assignment: PDAssignmentSpec,
    desired: tuple[PDInstance, ...],
    pools: tuple[PoolReport, ...],
) -> PDServiceStatus:
    """The new status of the service, given its assignment, desired instances and pools."""
    service, roles = observed.service, assignment.roles
    members = tuple(member for report in pools for member in report.members)
    desired_replicas = sum(report.view.desired_replicas for report in pools)
    ready = sum(i.is_serving for i in desired)
    prefill, decode = (_role_status(role, roles, desired, members) for role in _ROLES)
    service_conditions = (
        ready_condition(
            observed, len(members), desired_replicas, ready, count_ready(assignment, desired, prefill, decode)
        ),
        progressing(service, desired, pools, desired_replicas),
        degraded(observed, tuple(report.view for report in pools), desired),
        tiers_accepted(service, observed.tiers, observed.router),
        service_scaling_limited(service, {report.view.name: report.scaling_limited for report in pools}),
        model_fits(observed, tuple((report.view, report.members) for report in pools)),
        kv_transfer_verified(observed, desired_replicas),
        slo_met_condition(service, observed.slo_report),
        simulated_condition(service, members),
    )
    attainment_source = service.status if observed.slo_report is None else observed.slo_report
    return PDServiceStatus(
        conditions=with_transition_times(service.status.conditions, service_conditions, now_s=observed.now_s),
        ready=f"{ready}/{desired_replicas}",
        reason=summarize_reason(service_conditions),
        prefill=prefill,
        decode=decode,
        ratio=f"{prefill.ready}:{decode.ready}",
        attainment=attainment_source.attainment,
        tiers=attainment_source.tiers,
        flips=assignment.flips,
        last_decision=last_decision(roles, refused_for_s=REFUSED_FOR_S),
        endpoint=observed.endpoint,
        state_tls=observed.state_tls,
        model=observed.service.status.model,
        observed_generation=service.metadata.generation,
    )


def summarize_reason(found: tuple[Condition, ...]) -> str:
    """Reason of Degraded if something is broken, else of Ready if the service is not ready; else empty."""
    bad = ((conditions.DEGRADED, "True"), (conditions.READY, "False"))
    reasons = (c.reason for type_, status in bad for c in found if (c.type, c.status) == (type_, status))
    return next(reasons, "")


def last_decision(roles: Mapping[str, RoleAssignment], *, refused_for_s: float) -> LastDecision | None:
    """The latest flip or refusal among the entries, None without one; of several at once the last by name."""
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
        change = f"{name} to {entry.refused.role}" if entry.refused.role else f"change of {name}"
        action = f"{change} refused"
        yield LastDecision.model_validate({"at": at_s, "action": action, "reason": entry.refused.reason})


def _role_status(
    role: Role,
    roles: Mapping[str, RoleAssignment],
    desired: tuple[PDInstance, ...],
    members: tuple[PDInstance, ...],
) -> RoleStatus:
    playing = [i for i in desired if i.status.role is not None and i.status.role.serves(role)]
    entries = [roles[member.metadata.name] for member in members if member.metadata.name in roles]
    return RoleStatus(
        desired=sum(entry.role is role and not entry.cordoned for entry in entries),
        ready=sum(i.is_serving for i in playing),
        draining=sum(i.status.phase is Phase.DRAINING for i in playing),
    )
