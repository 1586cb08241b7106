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
)
from fulcrum_core.api import conditions as words
from fulcrum_core.api.labels import POOL_LABEL
from fulcrum_core.assignment import serving
from fulcrum_core.spelling import format_count
from fulcrum_core.values import Actor, Phase, Role
from fulcrum_operator.plan.assignment import REFUSED_FOR_S
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.pools import scaling_limited
from fulcrum_operator.plan.rollout import PoolView, revision_of
from fulcrum_operator.plan.status.condition import condition
from fulcrum_operator.plan.status.degraded import told, troubles_of
from fulcrum_operator.plan.status.kv_transfer_verified import kv_transfer
from fulcrum_operator.plan.status.model_fits import model_fits
from fulcrum_operator.plan.status.slo_met import slo_met

_ROLES = (Role.PREFILL, Role.DECODE)
_CHANGING = (
    *(Phase.PENDING, Phase.STARTING, Phase.SWITCHING, Phase.VERIFYING),
    *(Phase.DRAINING, Phase.TERMINATING),
)


def judged(before: Iterable[Condition], now: Iterable[Condition], *, now_s: float) -> tuple[Condition, ...]:
    """`now` with the times of transition: kept where the status stays, else this moment."""
    known = {one.type: one for one in before}
    return tuple(_timed(one, known.get(one.type), now_s) for one in now)


def _timed(now: Condition, before: Condition | None, now_s: float) -> Condition:
    same = before is not None and before.status == now.status
    at_s = before.last_transition_time if before and same else now_s
    return now.model_copy(update={"last_transition_time": at_s})


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as it shall stand, with its status, and what its status was made from."""

    pool: PDPool
    view: PoolView
    limited: Condition
    members: tuple[PDInstance, ...]


def pool_state(
    seen: Observed, view: PoolView, desired: tuple[PDInstance, ...], held: str | None
) -> PoolState:
    """A pool with what is seen of it, given its instances as they shall stand."""
    pool, leaving = view.pool, {i.metadata.name for i in seen.instances} - seen.counted
    members = tuple(i for i in desired if i.spec.pool == view.name and i.metadata.name not in leaving)
    limited = scaling_limited(pool, held)
    status = PDPoolStatus(
        replicas=len(members),
        ready_replicas=sum(member.status.phase is Phase.SERVING for member in members),
        selector=f"{POOL_LABEL}={view.name}",
        revision=view.revision,
        updated_replicas=sum(revision_of(member) == view.revision for member in members),
        last_good=view.last_good,
        refused=view.refused,
        conditions=judged(pool.status.conditions, (limited,), now_s=seen.now_s),
        observed_generation=pool.metadata.generation,
    )
    return PoolState(pool.replace(status=status), view, limited, members)


def service_status(
    seen: Observed, wish: PDAssignmentSpec, desired: tuple[PDInstance, ...], pools: tuple[PoolState, ...]
) -> PDServiceStatus:
    """The status of a service whose instances and pools shall stand so."""
    service, roles = seen.service, wish.roles
    members = tuple(member for state in pools for member in state.members)
    wanted = sum(state.view.wanted for state in pools)
    ready = sum(i.status.phase is Phase.SERVING for i in desired)
    prefill, decode = (_role_status(role, roles, desired, members) for role in _ROLES)
    conditions = (
        _ready(seen, len(members), wanted, ready, _able(wish, desired, prefill, decode)),
        _progressing(service, desired, pools, wanted),
        _degraded(seen, desired, pools),
        _tiers_accepted(service, seen.tiers),
        _scaling_limited(service, pools),
        model_fits(seen, tuple((state.view, state.members) for state in pools)),
        kv_transfer(seen, wanted),
        slo_met(service, seen.slo),
    )
    figures = service.status if seen.slo is None else seen.slo
    return PDServiceStatus(
        conditions=judged(service.status.conditions, conditions, now_s=seen.now_s),
        ready=f"{ready}/{wanted}",
        prefill=prefill,
        decode=decode,
        ratio=f"{prefill.ready}:{decode.ready}",
        attainment=figures.attainment,
        tiers=figures.tiers,
        flips=wish.flips,
        last_decision=last_decision(roles, refused_for_s=REFUSED_FOR_S),
        endpoint=seen.endpoint,
        model=seen.service.status.model,
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
        wished = f"to {entry.refused.role}" if entry.refused.role else "changed"
        action = f"{name} {wished} refused"
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


def _condition(service: PDService, kind: str, *, holds: bool, reason: str, message: str) -> Condition:
    return condition(service, kind, "True" if holds else "False", reason, message)


def _able(
    wish: PDAssignmentSpec, desired: tuple[PDInstance, ...], prefill: RoleStatus, decode: RoleStatus
) -> dict[Role, int]:
    """How many serve each role. One that plays Both because it is left alone counts for its own role only."""
    ready = [i.metadata.name for i in desired if i.status.phase is Phase.SERVING]
    if len(ready) == 1:
        return {role: len(serving(wish.roles, ready, role)) for role in _ROLES}
    return {Role.PREFILL: prefill.ready, Role.DECODE: decode.ready}


def _ready(seen: Observed, members: int, wanted: int, ready: int, counts: Mapping[Role, int]) -> Condition:
    service, endpoint = seen.service, seen.endpoint
    floors = service.spec.roles.floors()
    lacking = [role for role in _ROLES if counts[role] < floors.of(role)]
    if lacking and not (wanted == 1 and ready):
        reason, message = _too_few(floors, lacking, wanted, counts)
    elif endpoint is None:
        reason, message = words.ROUTER_STARTING, "waiting for the router"
    else:
        serve = format_count(members, "instance serves", "instances serve")
        reason, message = words.INSTANCES_SERVING, f"{ready} of {serve} at {endpoint}"
    return _condition(
        service, words.READY, holds=reason == words.INSTANCES_SERVING, reason=reason, message=message
    )


def _too_few(floors: Floors, lacking: list[Role], wanted: int, counts: Mapping[Role, int]) -> tuple[str, str]:
    if 1 < wanted < floors.prefill + floors.decode:
        held = f"{floors.prefill} Prefill and {floors.decode} Decode"
        return words.FLOORS_TOO_HIGH, f"{wanted} instances cannot hold the floors of {held}"
    short = [f"{counts[role]} of at least {floors.of(role)} {role}" for role in lacking]
    return words.TOO_FEW_INSTANCES, f"{' and '.join(short)} serve; waiting for more"


def _progressing(
    service: PDService, desired: tuple[PDInstance, ...], pools: tuple[PoolState, ...], wanted: int
) -> Condition:
    moving = [f"{i.metadata.name} {i.status.phase}" for i in desired if i.status.phase in _CHANGING]
    rolling = [state.pool for state in pools if state.view.rolls]
    held = [state.view.name for state in pools if state.view.waits]
    if rolling:
        reason, message = words.ROLLOUT_PROGRESSING, "; ".join(_rolled(pool) for pool in rolling)
    elif moving or len(desired) != wanted:
        reason, message = words.INSTANCES_CHANGING, f"{len(desired)} of {format_count(wanted, 'instance')}"
    elif held:
        message = f"paused: {', '.join(held)} shall have another revision"
        return _condition(
            service, words.PROGRESSING, holds=False, reason=words.ROLLOUT_PAUSED, message=message
        )
    else:
        message = f"{format_count(wanted, 'instance')}, none changing"
        return _condition(service, words.PROGRESSING, holds=False, reason=words.SETTLED, message=message)
    names = ", ".join(moving)
    message = f"{message}; {names}" if names else message
    return _condition(service, words.PROGRESSING, holds=True, reason=reason, message=message)


def _rolled(pool: PDPool) -> str:
    status = pool.status
    have = format_count(status.replicas, "instance has", "instances have")
    return f"pool {pool.metadata.name}: {status.updated_replicas} of {have} revision {status.revision}"


def _degraded(seen: Observed, desired: tuple[PDInstance, ...], pools: tuple[PoolState, ...]) -> Condition:
    troubles = troubles_of(seen, tuple(state.view for state in pools), desired)
    reason = troubles[0].reason if troubles else words.ALL_WELL
    message = told(troubles) if troubles else "no instance has failed"
    return _condition(seen.service, words.DEGRADED, holds=bool(troubles), reason=reason, message=message)


def _scaling_limited(service: PDService, pools: tuple[PoolState, ...]) -> Condition:
    limited = [state for state in pools if state.limited.status == "True"]
    if not limited:
        message = "all pools have as many instances as asked"
        return _condition(
            service, words.SCALING_LIMITED, holds=False, reason=words.WITHIN_BOUNDS, message=message
        )
    message = "; ".join(f"pool {state.view.name}: {state.limited.message}" for state in limited)
    reason = limited[0].limited.reason
    return _condition(service, words.SCALING_LIMITED, holds=True, reason=reason, message=message)


def _tiers_accepted(service: PDService, tiers: Collection[str]) -> Condition:
    missing = [name for name in service.spec.qos_tiers if name not in tiers]
    if missing:
        message = f"no QoSTier named {', '.join(missing)} in namespace {service.metadata.namespace}"
        return _condition(
            service, words.TIERS_ACCEPTED, holds=False, reason=words.TIER_NOT_FOUND, message=message
        )
    named = service.spec.qos_tiers
    message = format_count(len(named), "tier") if named else "the built-in tier"
    return _condition(service, words.TIERS_ACCEPTED, holds=True, reason=words.TIERS_FOUND, message=message)
