"""Is a service as it shall be: tiers, floors, instances, pairs, its rollout, and is its status current?"""

from collections.abc import Collection, Sequence
from itertools import permutations

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_cli.terminal.ages import format_age
from fulcrum_core.api import conditions as words
from fulcrum_core.api.meta import Condition
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.spelling import format_count
from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import Phase, Role

HANGS_S = 600.0
"""A change that takes longer counts as one that hangs: ten minutes, as a Deployment's deadline has it."""

UNSEEN_S = 30.0
"""Age at which a new service should have been looked at long ago: the operator acts within a second."""


def check_status_is_current(service: PDService, *, now_s: float) -> Finding:
    """Whether the status speaks of the spec as it is."""
    name, meta, seen = service.metadata.name, service.metadata, service.status.observed_generation
    if seen >= meta.generation:
        return ok("status", f"speaks of generation {seen}, the current one", about=name)
    told = f"speaks of generation {seen}, the spec is generation {meta.generation}"
    age_s = now_s - (meta.creation_timestamp or now_s)
    if not seen and age_s > UNSEEN_S:
        advice = "no operator looks after this namespace: see what is said of the operator"
        return problem("status", f"{told}: nobody has looked at it yet", advice, about=name)
    advice = "run this again; if it stays so, the operator is behind or away: see its log"
    return warning("status", told, advice, about=name)


def check_tiers(service: PDService, tiers: Collection[str]) -> Finding:
    """Whether every QoSTier that the service names is there."""
    name = service.metadata.name
    missing = [tier for tier in service.spec.qos_tiers if tier not in tiers]
    if missing:
        advice = f"create it in namespace {service.metadata.namespace}, or take it out of spec.qosTiers"
        return problem("tiers", f"no QoSTier named {', '.join(missing)}", advice, about=name)
    named = len(service.spec.qos_tiers)
    return ok("tiers", f"all {named} named tiers are there" if named else "none is named", about=name)


def check_floors(
    service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> Finding:
    """Whether the floors can hold with the instances wanted, and do hold now."""
    name, floors, impossible = service.metadata.name, service.spec.roles.floors(), impossible_floors(service)
    if impossible is not None:
        seen, advice = impossible
        return problem("floors", seen, advice, about=name)
    short = _short(service, instances, assignment)
    if short:
        seen = f"{' and '.join(short)} serve"
        return problem("floors", seen, "see why instances do not serve; flips wait until then", about=name)
    return ok("floors", f"at least {floors.prefill} Prefill and {floors.decode} Decode", about=name)


def impossible_floors(service: PDService) -> tuple[str, str] | None:
    """Why the floors cannot hold with all instances that there may be, and what to do; None if they can."""
    floors, pools = service.spec.roles.floors(), service.spec.resolved_pools()
    most = sum(pool.instances.ceiling for pool in pools)
    for role in (Role.PREFILL, Role.DECODE):
        able = sum(pool.instances.ceiling for pool in pools if pool.role in ("Flexible", role))
        if able < floors.of(role) and most > 1:
            floor = f"spec.roles.{role.lower()}.min is {floors.of(role)}"
            seen = f"{floor}, but only {format_count(able, 'instance')} can {role.lower()}"
            return seen, "lower the floor, or give the pools more instances"
    if 1 < most < floors.prefill + floors.decode:
        seen = (
            f"floors of {floors.prefill} and {floors.decode} need more than the {most} instances there may be"
        )
        return seen, "lower spec.roles.*.min, or raise spec.instances"
    return None


def _short(service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None) -> list[str]:
    entries = assignment.spec.roles if assignment else {}
    able = [i for i in instances if i.status.phase is Phase.SERVING]
    able = [i for i in able if not (entry := entries.get(i.metadata.name)) or not entry.cordoned]
    if len(instances) == 1 and able:
        return []  # one alone does both
    counts = {
        role: sum(i.status.role is not None and i.status.role.serves(role) for i in able)
        for role in (Role.PREFILL, Role.DECODE)
    }
    floors = service.spec.roles.floors()
    return [f"{n} of at least {floors.of(role)} {role}" for role, n in counts.items() if n < floors.of(role)]


def check_instances(service: str, instances: Sequence[PDInstance]) -> Finding:
    """Whether an instance has failed."""
    failed = [i for i in instances if i.status.phase is Phase.FAILED]
    if failed:
        told = "; ".join(f"{i.metadata.name}: {i.status.message or 'no reason given'}" for i in failed)
        advice = "its log says why: kubectl logs --previous; it is replaced or started again by itself"
        return problem("instances", told, advice, about=service)
    if not instances:
        return problem(
            "instances", "there is none", "is the operator running, and is there a node?", about=service
        )
    serving = sum(i.status.phase is Phase.SERVING for i in instances)
    return ok("instances", f"none has failed, {serving} of {len(instances)} serve", about=service)


def check_pairs(service: str, instances: Sequence[PDInstance], assignment: PDAssignment | None) -> Finding:
    """Whether prefill and decode can exchange KV, by what the engines say of themselves."""
    known = {i.metadata.name: i.status.identity.value() for i in instances if i.status.identity}
    unknown = sorted(
        i.metadata.name for i in instances if i.status.phase is Phase.SERVING and not i.status.identity
    )
    refused = [
        f"{p} → {d}: {verdict.reason}"
        for p, d in permutations(sorted(known), 2)
        if _meet(p, d, assignment) and not (verdict := can_transfer(known[p], known[d])).allowed
    ]
    pairs = sum(_meet(p, d, assignment) for p, d in permutations(known, 2))
    if refused:
        seen = f"{len(refused)} of {format_count(pairs, 'pair')} cannot exchange KV; {refused[0]}"
        advice = "give all pools the same model, engine image and KV settings"
        all_of_them = len(refused) == pairs
        return (problem if all_of_them else warning)("pairs", seen, advice, about=service)
    if unknown:
        seen = f"not known yet of {', '.join(unknown)}: no identity"
        return warning("pairs", seen, "run this again when they have been verified", about=service)
    return ok("pairs", f"no pair of {pairs} is refused", about=service)


def _meet(prefill: str, decode: str, assignment: PDAssignment | None) -> bool:
    """Whether the first prefills for the second by their roles of now."""
    entries = assignment.spec.roles if assignment else {}
    one, other = entries.get(prefill), entries.get(decode)
    return one is None or other is None or (one.role is Role.PREFILL and other.role is Role.DECODE)


def check_model(service: PDService) -> Finding:
    """Whether the model fits the hardware, as the operator judges it."""
    name, fits = service.metadata.name, _condition(service.status.conditions, words.MODEL_FITS)
    if fits is None or fits.reason == words.NOT_APPLICABLE:
        return ok("model", fits.message if fits else "nothing is said of it yet", about=name)
    if fits.status == "False":
        advice = "give it more devices or memory, a shorter maxLength or fewer bits: fulcrum plan tries it"
        return problem("model", f"does not fit, {fits.reason}: {fits.message}", advice, about=name)
    known = "fits" if fits.status == "True" else "not known whether it fits"
    return ok("model", f"{known}, {fits.reason}: {fits.message}", about=name)


def check_progress(service: PDService, *, now_s: float) -> Finding:
    """Whether a change is under way that does not come to its end."""
    name = service.metadata.name
    progressing = _condition(service.status.conditions, words.PROGRESSING)
    if progressing is None or progressing.status != "True":
        return ok("progress", progressing.message if progressing else "nothing is changing", about=name)
    since_s = now_s - (progressing.last_transition_time or now_s)
    seen = f"{progressing.message}; for {format_age(since_s)}"
    if since_s > HANGS_S:
        advice = "see the instances that do not serve; a rollout is taken back by the spec of before"
        return problem("progress", seen, advice, about=name)
    return ok("progress", seen, about=name)


def check_conditions(service: PDService) -> Finding:
    """What the operator itself says is wrong."""
    name = service.metadata.name
    bad = [f"{c.type} is {c.status} ({c.reason}): {c.message}" for c in bad_conditions(service)]
    if bad:
        return problem("conditions", "; ".join(bad), "the message says what is waited for", about=name)
    if not service.status.conditions:
        return warning("conditions", "there are none yet", "run this again in a moment", about=name)
    return ok("conditions", "the operator sees nothing wrong", about=name)


def bad_conditions(service: PDService) -> list[Condition]:
    """Those by which the operator says that something is wrong."""
    return [c for c in service.status.conditions if (c.type, c.status) in _BAD]


_BAD = {
    (words.READY, "False"),
    (words.DEGRADED, "True"),
    (words.TIERS_ACCEPTED, "False"),
    (words.KV_TRANSFER_VERIFIED, "False"),
    (words.SLO_MET, "False"),
}


def _condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
