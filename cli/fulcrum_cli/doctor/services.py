"""Is a service as it shall be: tiers, floors, instances, pairs, its rollout, and is its status current?"""

from collections.abc import Collection, Sequence
from itertools import permutations

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api import conditions
from fulcrum_core.api.meta import Condition
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.formatting import format_count
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import Phase, Role

PROGRESS_DEADLINE_S = 600.0
"""A change that takes longer counts as one that hangs: ten minutes, as a Deployment's deadline has it."""

FIRST_RECONCILE_DEADLINE_S = 30.0
"""Age at which a new service should have been looked at long ago: the operator acts within a second."""


def check_status_is_current(service: PDService, *, now_s: float) -> Finding:
    """Whether the status speaks of the spec as it is."""
    name, meta, observed_generation = (
        service.metadata.name,
        service.metadata,
        service.status.observed_generation,
    )
    if observed_generation >= meta.generation:
        return ok("status", f"speaks of generation {observed_generation}, the current one", service=name)
    observed = f"speaks of generation {observed_generation}, the spec is generation {meta.generation}"
    age_s = now_s - (meta.creation_timestamp or now_s)
    if not observed_generation and age_s > FIRST_RECONCILE_DEADLINE_S:
        advice = "no operator looks after this namespace: see what is said of the operator"
        return problem("status", f"{observed}: nobody has looked at it yet", advice, service=name)
    advice = "run this again; if it stays so, the operator is behind or away: see its log"
    return warning("status", observed, advice, service=name)


def check_tiers(service: PDService, tiers: Collection[str]) -> Finding:
    """Whether every QoSTier that the service names is there."""
    name = service.metadata.name
    missing = [tier for tier in service.spec.qos_tiers if tier not in tiers]
    if missing:
        advice = f"create it in namespace {service.metadata.namespace}, or take it out of spec.qosTiers"
        return problem("tiers", f"no QoSTier named {', '.join(missing)}", advice, service=name)
    named = len(service.spec.qos_tiers)
    return ok("tiers", f"all {named} named tiers are there" if named else "none is named", service=name)


def check_floors(
    service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> Finding:
    """Whether the floors can hold with the instances wanted, and do hold now."""
    name, floors, impossible = (
        service.metadata.name,
        service.spec.roles.to_floors(),
        explain_impossible_floors(service),
    )
    if impossible is not None:
        observed, advice = impossible
        return problem("floors", observed, advice, service=name)
    shortfalls = _floor_shortfalls(service, instances, assignment)
    if shortfalls:
        observed = f"{' and '.join(shortfalls)} serve"
        return problem(
            "floors", observed, "see why instances do not serve; flips wait until then", service=name
        )
    return ok("floors", f"at least {floors.prefill} Prefill and {floors.decode} Decode", service=name)


def explain_impossible_floors(service: PDService) -> tuple[str, str] | None:
    """Why the floors cannot hold with all instances that there may be, and what to do; None if they can."""
    floors, pools = service.spec.roles.to_floors(), service.spec.resolve_pools()
    instances_max = sum(pool.instances.effective_max for pool in pools)
    for role in (Role.PREFILL, Role.DECODE):
        available = sum(pool.instances.effective_max for pool in pools if pool.role in ("Flexible", role))
        if available < floors.for_role(role) and instances_max > 1:
            floor = f"spec.roles.{role.lower()}.min is {floors.for_role(role)}"
            observed = f"{floor}, but only {format_count(available, 'instance')} can {role.lower()}"
            return observed, "lower the floor, or give the pools more instances"
    if 1 < instances_max < floors.prefill + floors.decode:
        floors_text = f"floors of {floors.prefill} and {floors.decode}"
        observed = f"{floors_text} need more than the {instances_max} instances there may be"
        return observed, "lower spec.roles.*.min, or raise spec.instances"
    return None


def _floor_shortfalls(
    service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> list[str]:
    entries = assignment.spec.roles if assignment else {}
    available = [i for i in instances if i.is_serving]
    available = [i for i in available if not (entry := entries.get(i.metadata.name)) or not entry.cordoned]
    if len(instances) == 1 and available:
        return []  # one alone does both
    counts = {
        role: sum(i.status.role is not None and i.status.role.serves(role) for i in available)
        for role in (Role.PREFILL, Role.DECODE)
    }
    floors = service.spec.roles.to_floors()
    return [
        f"{n} of at least {floors.for_role(role)} {role}"
        for role, n in counts.items()
        if n < floors.for_role(role)
    ]


def check_instances(service: str, instances: Sequence[PDInstance]) -> Finding:
    """Whether an instance has failed."""
    failed = [i for i in instances if i.status.phase is Phase.FAILED]
    if failed:
        observed = "; ".join(f"{i.metadata.name}: {i.status.message or 'no reason given'}" for i in failed)
        advice = "its log says why: kubectl logs --previous; it is replaced or started again by itself"
        return problem("instances", observed, advice, service=service)
    if not instances:
        return problem(
            "instances", "there is none", "is the operator running, and is there a node?", service=service
        )
    serving = sum(i.is_serving for i in instances)
    return ok("instances", f"none has failed, {serving} of {len(instances)} serve", service=service)


def check_pairs(service: str, instances: Sequence[PDInstance], assignment: PDAssignment | None) -> Finding:
    """Whether prefill and decode can exchange KV, by what the engines say of themselves."""
    known = {i.metadata.name: i.status.identity.to_identity() for i in instances if i.status.identity}
    unknown = sorted(i.metadata.name for i in instances if i.is_serving and not i.status.identity)
    incompatible = [
        f"{p} → {d}: {verdict.reason}"
        for p, d in permutations(sorted(known), 2)
        if _is_prefill_decode_pair(p, d, assignment)
        and not (verdict := can_transfer(known[p], known[d])).allowed
    ]
    pairs = sum(_is_prefill_decode_pair(p, d, assignment) for p, d in permutations(known, 2))
    if incompatible:
        observed = (
            f"{len(incompatible)} of {format_count(pairs, 'pair')} cannot exchange KV; {incompatible[0]}"
        )
        advice = "give all pools the same model, engine image and KV settings"
        all_of_them = len(incompatible) == pairs
        return (problem if all_of_them else warning)("pairs", observed, advice, service=service)
    if unknown:
        observed = f"not known yet of {', '.join(unknown)}: no identity"
        return warning("pairs", observed, "run this again when they have been verified", service=service)
    return ok("pairs", f"no pair of {pairs} is refused", service=service)


def _is_prefill_decode_pair(prefill: str, decode: str, assignment: PDAssignment | None) -> bool:
    """Whether the first prefills for the second by their roles of now."""
    entries = assignment.spec.roles if assignment else {}
    one, other = entries.get(prefill), entries.get(decode)
    return one is None or other is None or (one.role is Role.PREFILL and other.role is Role.DECODE)


def check_model(service: PDService) -> Finding:
    """Whether the model fits the hardware, as the operator judges it."""
    name, condition = service.metadata.name, _find_condition(service.status.conditions, conditions.MODEL_FITS)
    if condition is None or condition.reason == conditions.NOT_APPLICABLE:
        return ok("model", condition.message if condition else "nothing is said of it yet", service=name)
    if condition.status == "False":
        advice = "give it more devices or memory, a shorter maxLength or fewer bits: fulcrum plan tries it"
        return problem(
            "model", f"does not fit, {condition.reason}: {condition.message}", advice, service=name
        )
    known = "fits" if condition.status == "True" else "not known whether it fits"
    return ok("model", f"{known}, {condition.reason}: {condition.message}", service=name)


def check_progress(service: PDService, *, now_s: float) -> Finding:
    """Whether a change is under way that does not come to its end."""
    name = service.metadata.name
    progressing = _find_condition(service.status.conditions, conditions.PROGRESSING)
    if progressing is None or progressing.status != "True":
        return ok("progress", progressing.message if progressing else "nothing is changing", service=name)
    since_s = now_s - (progressing.last_transition_time or now_s)
    observed = f"{progressing.message}; for {format_age(since_s)}"
    if since_s > PROGRESS_DEADLINE_S:
        advice = "see the instances that do not serve; a rollout is taken back by the spec of before"
        return problem("progress", observed, advice, service=name)
    return ok("progress", observed, service=name)


def check_conditions(service: PDService) -> Finding:
    """What the operator itself says is wrong."""
    name = service.metadata.name
    bad = [f"{c.type} is {c.status} ({c.reason}): {c.message}" for c in bad_conditions(service)]
    if bad:
        return problem("conditions", "; ".join(bad), "the message says what is waited for", service=name)
    if not service.status.conditions:
        return warning("conditions", "there are none yet", "run this again in a moment", service=name)
    return ok("conditions", "the operator sees nothing wrong", service=name)


def bad_conditions(service: PDService) -> list[Condition]:
    """Those by which the operator says that something is wrong."""
    return [c for c in service.status.conditions if (c.type, c.status) in _BAD_CONDITIONS]


_BAD_CONDITIONS = {
    (conditions.READY, "False"),
    (conditions.DEGRADED, "True"),
    (conditions.TIERS_ACCEPTED, "False"),
    (conditions.KV_TRANSFER_VERIFIED, "False"),
    (conditions.SLO_MET, "False"),
}


def _find_condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
