"""The condition KVTransferVerified: decode instances continue from KV that prefill instances computed.

The router verifies KV transfers pair by pair, from the number of cached prompt tokens that the decode engine
reports. The condition is True if a pair is verified and none fails. It is False if a pair fails, or if no two
serving instances are compatible, also before any traffic. It is Unknown with one desired instance, before the
first transfer, and if the decode engine reports nothing. It stays as it was while the router has no result.
Its message names pairs, not numbers of transfers, so that traffic alone does not change the status.

This module also computes since when each instance counts as verified, and how often the operator queries the
router for these results and for request counts.
"""

from collections.abc import Collection, Iterable
from itertools import permutations

from fulcrum_core.api import Condition, PDInstance, conditions
from fulcrum_core.api.meta import ConditionStatus
from fulcrum_core.formatting import format_list
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.router_state import PairState
from fulcrum_operator.plan.instance_state import active_instances, instance_order
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.status.condition import make_condition

ROUTER_POLL_S = 10.0
"""Interval at which the router is queried for KV transfers and request counts."""
FAST_POLL_S = 2.0
"""Poll interval until the first KV transfer is observed, for at most `FAST_POLL_DURATION_S`."""
FAST_POLL_DURATION_S = 60.0
"""Duration of the fast polling, in seconds."""
PAIRS_LISTED_MAX = 3
"""Number of pairs named in a message."""


def router_poll_interval_s(observed: Observed) -> float:
    """Seconds between two queries of the router's counters."""
    for known in observed.service.status.conditions:
        waiting = (known.type, known.reason) == (conditions.KV_TRANSFER_VERIFIED, conditions.NO_TRAFFIC_YET)
        if waiting and observed.now_s < (known.last_transition_time or 0.0) + FAST_POLL_DURATION_S:
            return FAST_POLL_S
    return ROUTER_POLL_S


def kv_transfer_verified(observed: Observed, desired_replicas: int) -> Condition:
    """The condition KVTransferVerified of a service with this desired number of instances."""
    serving = tuple(i for i in active_instances(observed) if i.is_serving)
    if desired_replicas <= 1:
        return _condition(observed, "Unknown", conditions.NOT_APPLICABLE, "one instance transfers no KV")
    if len(serving) > 1 and (incompatibility := _incompatibility(serving)):
        return _condition(observed, "False", conditions.INCOMPATIBLE, incompatibility)
    if observed.router is not None:
        found = _judge_pairs(
            observed, _pairs_between(observed.router.pairs, {i.metadata.name for i in serving})
        )
        if found is not None:
            return found
    return _previous_condition(observed)


def _judge_pairs(observed: Observed, pairs: tuple[PairState, ...]) -> Condition | None:
    """The condition that follows from these pairs; None if none of them has a result."""
    failing = sorted(
        (pair for pair in pairs if pair.last_reason in conditions.KV_TRANSFER_PROBLEMS), key=_severity
    )
    if failing:
        descriptions = [f"{_format_pair(pair.prefill, pair.decode)}: {pair.last_reason}" for pair in failing]
        message = format_list(descriptions, at_most=PAIRS_LISTED_MAX)
        return _condition(observed, "False", failing[0].last_reason, message)
    if verified := _pairs_with_reason(pairs, conditions.VERIFIED):
        message = f"KV transfer verified: {format_list(verified, at_most=PAIRS_LISTED_MAX)}"
        return _condition(observed, "True", conditions.VERIFIED, message)
    if silent := _pairs_with_reason(pairs, conditions.NOT_REPORTED):
        message = (
            "the decode engine does not report computed prompt tokens: "
            "start it with --enable-prompt-tokens-details"
        )
        return _condition(
            observed,
            "Unknown",
            conditions.NOT_REPORTED,
            f"{format_list(silent, at_most=PAIRS_LISTED_MAX)}: {message}",
        )
    return None


def _pairs_with_reason(pairs: tuple[PairState, ...], reason: str) -> list[str]:
    found = ((pair.prefill, pair.decode) for pair in pairs if pair.last_reason == reason)
    return [
        _format_pair(*names) for names in sorted(found, key=lambda names: tuple(map(instance_order, names)))
    ]


def _format_pair(prefill: str, decode: str) -> str:
    return f"{prefill} → {decode}"


def _previous_condition(observed: Observed) -> Condition:
    """The previous condition if it still applies, else NoTrafficYet: the router has no result."""
    for before in observed.service.status.conditions:
        stale = before.reason in (conditions.NOT_APPLICABLE, conditions.INCOMPATIBLE)
        if before.type == conditions.KV_TRANSFER_VERIFIED and not stale:
            return _condition(observed, before.status, before.reason, before.message)
    return _condition(observed, "Unknown", conditions.NO_TRAFFIC_YET, "no KV transfer was observed yet")


def verified_at(observed: Observed, instance: PDInstance, *, same_engine: bool) -> float | None:
    """When the operator first saw a verified KV transfer to or from the instance.

    Counts from the last start of the engine and from the last failure. None if there was none, or if one of
    the instance's pairs fails and no other is verified.
    """
    before = instance.status.kv_verified_at if same_engine else None
    if observed.router is None or not same_engine:
        return before
    own_pairs = [p for p in observed.router.pairs if instance.metadata.name in (p.prefill, p.decode)]
    if any(pair.last_reason == conditions.VERIFIED for pair in own_pairs):
        return before if before is not None else float(int(observed.now_s))
    return None if any(pair.last_reason in conditions.KV_TRANSFER_PROBLEMS for pair in own_pairs) else before


def _pairs_between(pairs: Iterable[PairState], names: Collection[str]) -> tuple[PairState, ...]:
    """The pairs between two of the named instances."""
    return tuple(pair for pair in pairs if pair.prefill in names and pair.decode in names)


def _severity(pair: PairState) -> tuple[int, tuple[int, str], tuple[int, str]]:
    return (
        conditions.KV_TRANSFER_PROBLEMS.index(pair.last_reason),
        instance_order(pair.prefill),
        instance_order(pair.decode),
    )


def _incompatibility(serving: tuple[PDInstance, ...]) -> str:
    """Why no instance can read KV of another one; empty if some pair can, or if an identity is missing."""
    known = {
        i.metadata.name: i.status.identity.to_identity() for i in serving if i.status.identity is not None
    }
    if len(known) < len(serving) or len(set(known.values())) == 1:
        return ""
    pairs = permutations(sorted(known, key=instance_order), 2)
    verdicts = {_format_pair(*names): can_transfer(*(known[name] for name in names)) for names in pairs}
    if any(verdict.allowed for verdict in verdicts.values()):
        return ""
    return format_list(
        [f"{pair}: {verdict.reason}" for pair, verdict in verdicts.items()], at_most=PAIRS_LISTED_MAX
    )


def _condition(observed: Observed, status: ConditionStatus, reason: str, message: str) -> Condition:
    return make_condition(observed.service, conditions.KV_TRANSFER_VERIFIED, status, reason, message)
