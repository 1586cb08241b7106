"""Whether KV moves between the instances of a service, by what its router has seen: KVTransferVerified.

The router counts hand-offs by what decode did not have to compute, pair by pair; here its findings become
one condition, and for each instance the time at which it was first proven. Words change when a finding does
and not with its counts, so that nothing is written while nothing changes.
"""

from collections.abc import Collection, Iterable
from itertools import permutations

from fulcrum_core.api import Condition, PDInstance
from fulcrum_core.api import conditions as words
from fulcrum_core.spelling import format_list
from fulcrum_core.state import PairState
from fulcrum_core.transfer import can_transfer
from fulcrum_core.values import Phase
from fulcrum_operator.plan.observed import Observed, by_number
from fulcrum_operator.plan.status.condition import Standing, condition

KV_LOOK_S = 10.0
"""How often the router is asked what became of the hand-offs, and of the requests."""
FIRST_LOOK_S = 2.0
"""How often while nobody has seen one yet, and somebody may wait for that: …"""
FIRST_LOOKS_FOR_S = 60.0
"""… so long."""
TOLD = 3
"""Pairs named in a message."""


def look_every_s(seen: Observed) -> float:
    """How long a look at the router's counts is good for."""
    for known in seen.service.status.conditions:
        unseen = known.reason == words.NO_TRAFFIC_YET
        if unseen and seen.now_s < (known.last_transition_time or 0.0) + FIRST_LOOKS_FOR_S:
            return FIRST_LOOK_S
    return KV_LOOK_S


def kv_transfer(seen: Observed, wanted: int) -> Condition:
    """The condition KVTransferVerified of a service that wants so many instances."""
    serving = tuple(i for i in seen.staying if i.status.phase is Phase.SERVING)
    if wanted <= 1:
        return _condition(seen, "Unknown", words.NOT_APPLICABLE, "a single instance hands nothing over")
    if len(serving) > 1 and (apart := _apart(serving)):
        return _condition(seen, "False", words.NOT_COMPATIBLE, apart)
    if seen.router is not None:
        found = _judged(seen, _pairs_of(seen.router.pairs, {i.metadata.name for i in serving}))
        if found is not None:
            return found
    return _as_before(seen)


def _judged(seen: Observed, pairs: tuple[PairState, ...]) -> Condition | None:
    """What the pairs say; None if they say nothing yet."""
    bad = sorted((pair for pair in pairs if pair.last_reason in words.BAD_TRANSFERS), key=_rank)
    if bad:
        ways = [f"{_way(pair.prefill, pair.decode)}: {pair.last_reason}" for pair in bad]
        told = format_list(ways, at_most=TOLD)
        return _condition(seen, "False", bad[0].last_reason, told)
    if proven := _with(pairs, words.PROVEN):
        told = f"seen to hand KV over: {format_list(proven, at_most=TOLD)}"
        return _condition(seen, "True", words.VERIFIED, told)
    if silent := _with(pairs, words.CANNOT_TELL):
        told = "decode does not say what it computed: is --enable-prompt-tokens-details given?"
        return _condition(seen, "Unknown", words.CANNOT_TELL, f"{format_list(silent, at_most=TOLD)}: {told}")
    return None


def _with(pairs: tuple[PairState, ...], reason: str) -> list[str]:
    found = ((pair.prefill, pair.decode) for pair in pairs if pair.last_reason == reason)
    return [_way(*names) for names in sorted(found, key=lambda names: tuple(map(by_number, names)))]


def _way(prefill: str, decode: str) -> str:
    return f"{prefill} → {decode}"


def _as_before(seen: Observed) -> Condition:
    """Nobody has said anything new: what was known stands."""
    for before in seen.service.status.conditions:
        stale = before.reason in (words.NOT_APPLICABLE, words.NOT_COMPATIBLE)
        if before.type == words.KV_TRANSFER_VERIFIED and not stale:
            return _condition(seen, before.status, before.reason, before.message)
    return _condition(seen, "Unknown", words.NO_TRAFFIC_YET, "no hand-off was seen yet")


def verified_at(seen: Observed, instance: PDInstance, *, same_engine: bool) -> float | None:
    """When the instance was first seen to hand KV over or to read it, in this life of its engine."""
    before = instance.status.kv_verified_at if same_engine else None
    if seen.router is None or not same_engine:
        return before
    own = [p for p in seen.router.pairs if instance.metadata.name in (p.prefill, p.decode)]
    if any(pair.last_reason == words.PROVEN for pair in own):
        return before if before is not None else float(int(seen.now_s))
    return None if any(pair.last_reason in words.BAD_TRANSFERS for pair in own) else before


def _pairs_of(pairs: Iterable[PairState], names: Collection[str]) -> tuple[PairState, ...]:
    """Those between two of the named instances."""
    return tuple(pair for pair in pairs if pair.prefill in names and pair.decode in names)


def _rank(pair: PairState) -> tuple[int, tuple[int, str], tuple[int, str]]:
    return (words.BAD_TRANSFERS.index(pair.last_reason), by_number(pair.prefill), by_number(pair.decode))


def _apart(serving: tuple[PDInstance, ...]) -> str:
    """Why no instance can read what another one computes; empty if one can, or may."""
    known = {i.metadata.name: i.status.identity.value() for i in serving if i.status.identity is not None}
    if len(known) < len(serving) or len(set(known.values())) == 1:
        return ""
    pairs = permutations(sorted(known, key=by_number), 2)
    verdicts = {_way(*names): can_transfer(*(known[name] for name in names)) for names in pairs}
    if any(verdict.allowed for verdict in verdicts.values()):
        return ""
    return format_list([f"{way}: {verdict.reason}" for way, verdict in verdicts.items()], at_most=TOLD)


def _condition(seen: Observed, status: Standing, reason: str, message: str) -> Condition:
    return condition(seen.service, words.KV_TRANSFER_VERIFIED, status, reason, message)
