"""What is seen of a service, in counts, conditions and words."""

from collections.abc import Collection, Iterable

from fulcrum_core.api import (
    Condition,
    LastDecision,
    PDAssignmentSpec,
    PDInstance,
    PDService,
    PDServiceStatus,
    RoleAssignment,
    RoleStatus,
)
from fulcrum_core.api import conditions as words
from fulcrum_core.assignment import serving
from fulcrum_core.values import Actor, Phase, Role

_CHANGING = (
    *(Phase.PENDING, Phase.STARTING, Phase.SWITCHING, Phase.VERIFYING),
    *(Phase.DRAINING, Phase.TERMINATING),
)


def judged(before: Iterable[Condition], now: Iterable[Condition], *, now_s: float) -> tuple[Condition, ...]:
    """`now` with the times of transition: kept where the status stays, else this moment."""
    known = {condition.type: condition for condition in before}
    return tuple(_timed(condition, known.get(condition.type), now_s) for condition in now)


def _timed(condition: Condition, before: Condition | None, now_s: float) -> Condition:
    same = before is not None and before.status == condition.status
    at_s = before.last_transition_time if before and same else now_s
    return condition.model_copy(update={"last_transition_time": at_s})


def service_status(
    service: PDService,
    assignment: PDAssignmentSpec | None,
    instances: tuple[PDInstance, ...],
    *,
    wanted: int,
    tiers: Collection[str],
    endpoint: str | None,
    refused_for_s: float,
    now_s: float,
) -> PDServiceStatus:
    """The status of a service whose instances stand as in `instances` and shall be `wanted` in number."""
    roles = assignment.roles if assignment else {}
    ready = frozenset(i.metadata.name for i in instances if i.status.phase is Phase.SERVING)
    prefill, decode = (_role_status(role, roles, instances) for role in (Role.PREFILL, Role.DECODE))
    conditions = (
        _ready(service, roles, ready, endpoint),
        _progressing(service, instances, wanted),
        _degraded(service, instances),
        _tiers_accepted(service, tiers),
    )
    return PDServiceStatus(
        conditions=judged(service.status.conditions, conditions, now_s=now_s),
        ready=f"{len(ready)}/{wanted}",
        prefill=prefill,
        decode=decode,
        ratio=f"{prefill.ready}:{decode.ready}",
        flips=assignment.flips if assignment else 0,
        last_decision=last_decision(roles, refused_for_s=refused_for_s),
        endpoint=endpoint,
        observed_generation=service.metadata.generation,
    )


def last_decision(roles: dict[str, RoleAssignment], *, refused_for_s: float) -> LastDecision | None:
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
        action = f"{name} to {entry.refused.role} refused"
        yield LastDecision.model_validate({"at": at_s, "action": action, "reason": entry.refused.reason})


def _role_status(
    role: Role, roles: dict[str, RoleAssignment], instances: tuple[PDInstance, ...]
) -> RoleStatus:
    phases = [i.status.phase for i in instances if i.status.role is not None and i.status.role.serves(role)]
    return RoleStatus(
        desired=sum(entry.role is role and not entry.cordoned for entry in roles.values()),
        ready=phases.count(Phase.SERVING),
        draining=phases.count(Phase.DRAINING),
    )


def _condition(service: PDService, kind: str, *, holds: bool, reason: str, message: str) -> Condition:
    return Condition.model_validate(
        {
            "type": kind,
            "status": "True" if holds else "False",
            "reason": reason,
            "message": message,
            "observedGeneration": service.metadata.generation,
        }
    )


def _ready(
    service: PDService, roles: dict[str, RoleAssignment], ready: frozenset[str], endpoint: str | None
) -> Condition:
    floors = service.spec.roles.floors()
    counts = {role: len(serving(roles, ready, role)) for role in (Role.PREFILL, Role.DECODE)}
    short = [
        f"{n} of {floors.of(role)} {role} instances" for role, n in counts.items() if n < floors.of(role)
    ]
    alone = len(roles) == 1 and len(ready) == 1
    if short and not alone:
        reason, message = words.TOO_FEW_INSTANCES, f"{' and '.join(short)} serve; waiting for more"
    elif endpoint is None:
        reason, message = words.ROUTER_STARTING, "waiting for the router"
    else:
        reason, message = (
            words.INSTANCES_SERVING,
            f"{len(ready)} of {len(roles)} instances serve at {endpoint}",
        )
    return _condition(
        service, words.READY, holds=reason == words.INSTANCES_SERVING, reason=reason, message=message
    )


def _progressing(service: PDService, instances: tuple[PDInstance, ...], wanted: int) -> Condition:
    moving = [i for i in instances if i.status.phase in _CHANGING]
    if moving or len(instances) != wanted:
        names = ", ".join(f"{i.metadata.name} {i.status.phase}" for i in moving)
        message = f"{len(instances)} of {wanted} instances" + (f"; {names}" if names else "")
        return _condition(
            service, words.PROGRESSING, holds=True, reason=words.INSTANCES_CHANGING, message=message
        )
    message = f"{wanted} instances, none changing"
    return _condition(service, words.PROGRESSING, holds=False, reason=words.SETTLED, message=message)


def _degraded(service: PDService, instances: tuple[PDInstance, ...]) -> Condition:
    failed = [f"{i.metadata.name}: {i.status.message}" for i in instances if i.status.phase is Phase.FAILED]
    reason = words.INSTANCES_FAILED if failed else words.ALL_WELL
    message = "; ".join(failed) if failed else "no instance has failed"
    return _condition(service, words.DEGRADED, holds=bool(failed), reason=reason, message=message)


def _tiers_accepted(service: PDService, tiers: Collection[str]) -> Condition:
    missing = [name for name in service.spec.qos_tiers if name not in tiers]
    if missing:
        message = f"no QoSTier named {', '.join(missing)} in namespace {service.metadata.namespace}"
        return _condition(
            service, words.TIERS_ACCEPTED, holds=False, reason=words.TIER_NOT_FOUND, message=message
        )
    message = f"{len(service.spec.qos_tiers)} tiers" if service.spec.qos_tiers else "the built-in tier"
    return _condition(service, words.TIERS_ACCEPTED, holds=True, reason=words.TIERS_FOUND, message=message)
