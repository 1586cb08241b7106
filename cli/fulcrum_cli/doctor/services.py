"""Checks of one service: status, conditions, progress, tiers, floors, instances, model and KV pairs.

`examine` calls them for each service. They judge what the operator has reported; `routing` has the way of
requests.
"""

from collections.abc import Collection, Sequence
from itertools import permutations

from fulcrum_cli.doctor.findings import CheckId, Finding, ok, problem, warning
from fulcrum_cli.terminal.output import format_age
from fulcrum_core.api import conditions
from fulcrum_core.api.meta import Condition
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.formatting import format_count
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import Phase, Role

PROGRESS_DEADLINE_S = 600.0
"""Seconds after which a change counts as stuck; the default of a Deployment."""

FIRST_RECONCILE_DEADLINE_S = 30.0
"""Age in seconds by which a new service must have been reconciled; the operator needs about one."""


def check_status_is_current(service: PDService, *, now_s: float) -> Finding:
    """Check that the status is of the current generation of the spec."""
    name, meta, observed_generation = (
        service.metadata.name,
        service.metadata,
        service.status.observed_generation,
    )
    if observed_generation >= meta.generation:
        return ok(CheckId.STATUS, f"of generation {observed_generation}, the current one", service=name)
    observed = f"of generation {observed_generation}, the spec is of generation {meta.generation}"
    age_s = now_s - (meta.creation_timestamp or now_s)
    if not observed_generation and age_s > FIRST_RECONCILE_DEADLINE_S:
        advice = "no operator manages this namespace: see the findings of the operator"
        return problem(CheckId.STATUS, f"{observed}: no operator has reconciled it", advice, service=name)
    advice = "run this again; if this stays, the operator is slow or not running: see its log"
    return warning(CheckId.STATUS, observed, advice, service=name)


def check_tiers(service: PDService, tiers: Collection[str]) -> Finding:
    """Check that every QoSTier that the service names exists."""
    name = service.metadata.name
    missing = [tier for tier in service.spec.qos_tiers if tier not in tiers]
    if missing:
        advice = f"create it in namespace {service.metadata.namespace}, or remove it from spec.qosTiers"
        return problem(CheckId.TIERS, f"QoSTier not found: {', '.join(missing)}", advice, service=name)
    named = len(service.spec.qos_tiers)
    observed = f"all {named} named tiers exist" if named else "the service uses none: spec.qosTiers is empty"
    return ok(CheckId.TIERS, observed, service=name)


def check_floors(
    service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> Finding:
    """Check that the pools can have enough instances for the floors, and that enough serve, not cordoned."""
    name, floors, impossible = (
        service.metadata.name,
        service.spec.roles.to_floors(),
        explain_impossible_floors(service),
    )
    if impossible is not None:
        observed, advice = impossible
        return problem(CheckId.FLOORS, observed, advice, service=name)
    shortfalls = _floor_shortfalls(service, instances, assignment)
    if shortfalls:
        observed = f"{' and '.join(shortfalls)} serve"
        return problem(
            CheckId.FLOORS, observed, "see why instances do not serve; until then nothing flips", service=name
        )
    return ok(CheckId.FLOORS, f"at least {floors.prefill} Prefill and {floors.decode} Decode", service=name)


def explain_impossible_floors(service: PDService) -> tuple[str, str] | None:
    """Return why the service's pools cannot have enough instances for its floors, and advice.

    None if the pools can, or if the service may have one instance only: that one serves both roles.
    """
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
        observed = f"{floors_text} need more than the maximum of {instances_max} instances"
        return observed, "lower spec.roles.*.min, or raise spec.instances"
    return None


def _floor_shortfalls(
    service: PDService, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> list[str]:
    entries = assignment.spec.roles if assignment else {}
    available = [i for i in instances if i.is_serving]
    available = [i for i in available if not (entry := entries.get(i.metadata.name)) or not entry.cordoned]
    if len(instances) == 1 and available:
        return []  # a single instance serves both roles
    counts = {
        role: sum(i.status.role is not None and i.status.role.serves(role) for i in available)
        for role in (Role.PREFILL, Role.DECODE)
    }
    floors = service.spec.roles.to_floors()
    return [
        f"{n} of {floors.for_role(role)} needed {role} instances"
        for role, n in counts.items()
        if n < floors.for_role(role)
    ]


def check_instances(service_name: str, instances: Sequence[PDInstance]) -> Finding:
    """Check that the service has instances and none has failed."""
    failed = [i for i in instances if i.status.phase is Phase.FAILED]
    if failed:
        observed = "; ".join(f"{i.metadata.name}: {i.status.message or 'no reason given'}" for i in failed)
        advice = "see kubectl logs --previous for the cause; the operator restarts or replaces the instance"
        return problem(CheckId.INSTANCES, observed, advice, service=service_name)
    if not instances:
        return problem(
            CheckId.INSTANCES,
            "there are none",
            "check that the operator runs and the cluster has a node",
            service=service_name,
        )
    serving = sum(i.is_serving for i in instances)
    return ok(
        CheckId.INSTANCES, f"none has failed, {serving} of {len(instances)} serve", service=service_name
    )


def check_pairs(
    service_name: str, instances: Sequence[PDInstance], assignment: PDAssignment | None
) -> Finding:
    """Check that prefill and decode instances can exchange KV, by `status.identity`.

    Their roles are those of the assignment. An instance without an entry in it counts as both.
    """
    known = {i.metadata.name: i.status.identity.to_identity() for i in instances if i.status.identity}
    unknown = sorted(i.metadata.name for i in instances if i.is_serving and not i.status.identity)
    incompatible = [
        f"{p} → {d}: {verdict.reason}"
        for p, d in permutations(sorted(known), 2)
        if _is_prefill_decode_pair(p, d, assignment)
        and not (verdict := can_transfer(known[p], known[d])).allowed
    ]
    pairs = sum(_is_prefill_decode_pair(p, d, assignment) for p, d in permutations(known, 2))
    counted = f"{format_count(pairs, 'pair')} of the assigned roles"
    if incompatible:
        observed = f"{len(incompatible)} of {counted} cannot exchange KV; {incompatible[0]}"
        advice = "give all pools the same model, engine image and KV settings"
        all_of_them = len(incompatible) == pairs
        return (problem if all_of_them else warning)(CheckId.PAIRS, observed, advice, service=service_name)
    if unknown:
        observed = f"unknown for {', '.join(unknown)}: no identity in its status yet"
        return warning(
            CheckId.PAIRS, observed, "run this again once they have been verified", service=service_name
        )
    return ok(CheckId.PAIRS, f"{counted}, none incompatible", service=service_name)


def _is_prefill_decode_pair(prefill: str, decode: str, assignment: PDAssignment | None) -> bool:
    """Whether `prefill` has the role Prefill and `decode` Decode; an instance without an entry has both."""
    entries = assignment.spec.roles if assignment else {}
    one, other = entries.get(prefill), entries.get(decode)
    return (one is None or one.role is Role.PREFILL) and (other is None or other.role is Role.DECODE)


def check_model(service: PDService) -> Finding:
    """Check that the model fits the hardware, by the condition ModelFits."""
    name, condition = service.metadata.name, _find_condition(service.status.conditions, conditions.MODEL_FITS)
    if condition is None or condition.reason == conditions.NOT_APPLICABLE:
        return ok(CheckId.MODEL, condition.message if condition else "not checked yet", service=name)
    if condition.status == "False":
        advice = "use more devices or memory, a shorter maxLength or fewer bits; try it with fulcrum plan"
        return problem(
            CheckId.MODEL, f"does not fit, {condition.reason}: {condition.message}", advice, service=name
        )
    known = "fits" if condition.status == "True" else "unknown whether it fits"
    return ok(CheckId.MODEL, f"{known}, {condition.reason}: {condition.message}", service=name)


def check_progress(service: PDService, *, now_s: float) -> Finding:
    """Check that no change takes longer than `PROGRESS_DEADLINE_S`."""
    name = service.metadata.name
    progressing = _find_condition(service.status.conditions, conditions.PROGRESSING)
    if progressing is None or progressing.status != "True":
        return ok(
            CheckId.PROGRESS, progressing.message if progressing else "nothing is changing", service=name
        )
    since_s = now_s - (progressing.last_transition_time or now_s)
    observed = f"{progressing.message}; for {format_age(since_s)}"
    if since_s > PROGRESS_DEADLINE_S:
        advice = "see the instances that do not serve; to undo a roll-out, apply the previous spec"
        return problem(CheckId.PROGRESS, observed, advice, service=name)
    return ok(CheckId.PROGRESS, observed, service=name)


def check_conditions(service: PDService) -> Finding:
    """Check that no condition reports a problem; ModelFits and Progressing have checks of their own."""
    name = service.metadata.name
    bad = [f"{c.type} is {c.status} ({c.reason}): {c.message}" for c in bad_conditions(service)]
    if bad:
        return problem(CheckId.CONDITIONS, "; ".join(bad), "see the message for the cause", service=name)
    if not service.status.conditions:
        return warning(CheckId.CONDITIONS, "there are none yet", "run this again in a moment", service=name)
    return ok(CheckId.CONDITIONS, "the operator reports no problem", service=name)


def bad_conditions(service: PDService) -> list[Condition]:
    """Return the conditions that report a problem."""
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
