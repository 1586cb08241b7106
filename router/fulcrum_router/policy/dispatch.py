"""Choose the instance for the prefill and the instance for the decode of a request: Arrow's Algorithm 1.

    cost_prefill(r, i) = (I(Σ L(decoding on i)), Σ T(queued on i) + T(r, i))                lexicographic
    cost_decode (r, i) = (Σ T(queued on i), I(Σ L(decoding on i) + L(r)) − S_D)

T is the predicted prefill time of a prompt, L the number of KV tokens of a request, I the predicted time
between two tokens of a batch. S_T is the TTFT objective, S_D the TPOT objective. All costs are seconds, so
that instances on different hardware compare. Arrow's paper counts tokens in three of the four parts; on equal
instances the order is the same.

An instance passes the SLO check if the second part is at most 0 (decode), or at most what is left of S_T
(prefill) after the time since the request's arrival and the time of decode until its first token. The first
part, the work of the other phase, prefers an instance that serves one phase only to one that has just
flipped. Of the instances that pass, the cheapest takes the request. If none passes, a flip is proposed and
the cheapest of all is the fallback.

Decode legs whose prompt is still computed have a reservation on their decode instance, which counts like
their tokens. A request that does not fit into the KV cache with all of these does not pass the check of
decode; the time that it waits for room is added to the first part. So is the time that it waits for a place
where its engine decodes no more requests together, but such an instance may pass. An instance whose legs have
failed has the expected loss of time added to the first part. KV transfers count, too: the least transfer time
of a prefill instance is added to its TTFT, the extra time of the pair to the first part of a decode instance.
Equal costs: the instance with fewer decode legs is chosen, then the first by name.

The journey (`journey.choices`) calls both functions, and enters the choice in the ledgers. Nothing is changed
here.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from fulcrum_core.formatting import format_count
from fulcrum_core.values import Role, Slo
from fulcrum_router.policy.candidates import Candidates, V
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import SourcePairs, TransferDelay
from fulcrum_router.policy.work import Work


class DispatchReason(StrEnum):
    """The rule by which an instance was chosen."""

    WITHIN_SLO = "within_slo"
    """The cheapest instance that meets the SLO."""
    PREFILLED_HERE = "prefilled_here"
    """The instance computed the prompt and now has a decode role: no KV transfer is needed."""
    LEAST_COST = "least_cost"
    """No instance meets the SLO: the cheapest of all."""
    OTHER_ROLE = "other_role"
    """No decode instance serves: a prefill instance decodes."""
    OVERFLOW = "overflow"
    """Accelerators would compute the prompt too late, and a CPU instance is sooner."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class Dispatch(NamedTuple):
    """The chosen instance, the rule that chose it, and its cost pair."""

    instance: str
    reason: DispatchReason
    cost: tuple[float, float]


class FlipProposal(NamedTuple):
    """A proposal to flip one instance to `role`, because no instance of that role meets the SLO.

    `fallback` takes the request if no flip follows.
    """

    role: Role
    fallback: Dispatch
    reason: str


class NoInstance(NamedTuple):
    """No instance can take the request."""

    reason: str


DispatchDecision = Dispatch | FlipProposal | NoInstance

Cost = tuple[float, float, int, str]
"""A cost pair, followed by the tie-breakers: decode legs in flight, and the instance's name."""
UnnamedCost = tuple[float, float, int]
"""A cost without the instance's name, which is read only if the instance may be the cheapest."""

_PREFILL: Final = Role.PREFILL  # an attribute of an enum is slow to read
_DECODE: Final = Role.DECODE
_WITHIN_SLO: Final = DispatchReason.WITHIN_SLO
_PREFILLED_HERE: Final = DispatchReason.PREFILLED_HERE


# `Final`: mypyc puts the values into the loops over all instances instead of looking them up by name.
FAILED_LEG_S: Final = 1.0
"""Least time that a failed leg costs its request: an engine that fails fast must not look like one without
work. In decode the request may also have to wait for a place elsewhere (`BATCH_TURNOVER_S`)."""
KV_ENGINE_FULL: Final = 0.95
"""Share of the KV cache above which a request waits in the engine for room."""
KV_TURNOVER_S: Final = 10.0
"""Rough time in which an engine frees as many tokens as its KV cache holds. It ranks full instances by how
full they are, and lets a full one rank behind one with some prefill work."""
BATCH_TURNOVER_S: Final = 30.0
"""Rough time in which an engine ends as many requests as it decodes together: that of an answer."""
_UNKNOWN_COST: Final = math.inf
"""Replaces a NaN cost (the only value that differs from itself): NaN cannot be ordered, so it ranks last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipProposalRules:
    """The conditions under which dispatch may propose a flip."""

    enabled: bool = False
    max_decode_load: float = 0.5
    """Decode load LD below which a decode instance may flip to prefill (Arrow's L_SHRINK)."""
    to_decode_cooldown_until_s: float = -math.inf
    """End of the cooldown of flips from prefill to decode, on the monotonic clock."""


NO_FLIP_PROPOSALS = FlipProposalRules()


def choose_prefill(
    candidates: Candidates[V],
    work: Work,
    *,
    now_s: float,
    rules: FlipProposalRules = NO_FLIP_PROPOSALS,
    exclude: Collection[str] = (),
    delays: Mapping[str, TransferDelay] | None = None,
) -> DispatchDecision:
    """Choose the prefill instance for the prompt of a request.

    Without an instance whose KV some serving decode instance can read, the result is `NoInstance`: the decode
    instance then computes the prompt itself.

    Args:
        candidates: Instances that can take work.
        work: The request.
        now_s: Time on the monotonic clock.
        rules: When a flip may be proposed.
        exclude: Names that must not be chosen: instances that failed the request, shed, or have enough work.
        delays: Least time of a KV transfer by prefill instance; instances without any are left out.
    """
    prefill, decode, tokens = candidates.prefill, candidates.decode, work.prompt_tokens
    count, best, soonest_s = _find_cheapest_prefill(prefill, work, now_s, exclude, delays)
    if best is None:
        return NoInstance("no serving prefill instance whose KV a decode instance can read")
    bound_s = work.deadline_s - now_s
    if best[1] <= bound_s and _starts_within(decode, tokens, now_s, best[1], bound_s):
        return _dispatch(best, _WITHIN_SLO)  # the usual case: one decode instance is looked at
    start_s = min((_predict_decode_start_s(i, tokens, now_s) for i in decode), default=0.0)
    if soonest_s + start_s <= bound_s:
        _, within, _ = _find_cheapest_prefill(
            prefill, work, now_s, exclude, delays, start_s=start_s, bound_s=bound_s
        )
        if within is not None:
            return _dispatch(within, _WITHIN_SLO)
    least = _dispatch(best, DispatchReason.LEAST_COST)
    reason = _explain_flip_to_prefill(decode, tokens, work.slo, rules)
    if reason is None:
        return least
    considered = format_count(count, "prefill instance")
    ttft_s = now_s - work.arrival_s + best[1] + start_s
    predicted = f"the best of {considered} predicts a TTFT of {ttft_s:.2f} s"
    return FlipProposal(Role.PREFILL, least, f"{predicted}; {reason}")


def choose_decode(
    candidates: Candidates[V],
    work: Work,
    *,
    now_s: float,
    prefilled_on: V | None = None,
    rules: FlipProposalRules = NO_FLIP_PROPOSALS,
    exclude: Collection[str] = (),
    pairs: SourcePairs | None = None,
) -> DispatchDecision:
    """Choose the decode instance for a request whose prompt's KV is on `prefilled_on`.

    If no decode instance serves, a prefill instance decodes (`OTHER_ROLE`): every engine can do both.

    Args:
        candidates: Instances that can take work.
        work: The request.
        now_s: Time on the monotonic clock.
        prefilled_on: Instance that computes or computed the prompt; None: no KV was computed.
        rules: When a flip may be proposed.
        exclude: Names that must not be chosen: instances that failed the request, shed, or have enough work.
        pairs: KV transfers from `prefilled_on`; None: all count as fast.
    """
    source = None
    if prefilled_on is not None:
        source = prefilled_on.identity
        if prefilled_on.role is not _PREFILL and prefilled_on.serving and prefilled_on.name not in exclude:
            cost = compute_decode_cost(prefilled_on, work.context_tokens, work.slo.tpot_s, now_s)
            return Dispatch(prefilled_on.name, _PREFILLED_HERE, cost[:2])
    fetchers, other_role = candidates.list_fetchers(source)
    count, best, within = _find_cheapest_decode(fetchers, work, now_s, exclude, pairs)
    if best is None:
        _, best, _ = _find_cheapest_decode(other_role, work, now_s, exclude, None)
        if best is None:
            return NoInstance("no serving instance" + (" that can read the source's KV" if source else ""))
        return _dispatch(best, DispatchReason.OTHER_ROLE)
    if within is not None:  # the first part ranks first, so a dearer instance may still meet the SLO
        return _dispatch(within, _WITHIN_SLO)
    least = _dispatch(best, DispatchReason.LEAST_COST)
    others = [fetcher for fetcher in fetchers if fetcher.name not in exclude]
    reason = _explain_flip_to_decode(others, candidates.other_role, work, rules, now_s)
    if reason is None:
        return least
    considered = format_count(count, "decode instance")
    itl_ms = 1000 * (best[1] + work.slo.tpot_s)
    predicted = f"the best of {considered} predicts an ITL of {itl_ms:.0f} ms"
    return FlipProposal(Role.DECODE, least, f"{predicted}; {reason}")


def compute_decode_load(decode_instances: Iterable[InstanceRecord], slo: Slo) -> float | None:
    """Compute LD: the mean inter-token latency of the decode instances, divided by S_D.

    An instance without requests counts as 0. The result is None if there is no decode instance, or if one has
    requests and its latency is unknown: an unknown load must not pass for a low one.
    """
    total, count = 0.0, 0
    for instance in decode_instances:
        itl_s = instance.itl_s
        if itl_s is None or math.isnan(itl_s):
            if instance.ledger.decode_legs:
                return None
            itl_s = 0.0
        total += itl_s
        count += 1
    return total / count / slo.tpot_s if count else None


def _explain_flip_to_prefill(
    decode_instances: Sequence[InstanceRecord], tokens: int, slo: Slo, rules: FlipProposalRules
) -> str | None:
    """Explain why a decode instance should flip to prefill; None: no flip.

    A prompt that is too long for the SLO even without a queue causes no flip: it would miss the SLO on any
    instance, and each such prompt would flip another one.
    """
    candidates = [d for d in decode_instances if d.role is _DECODE] if rules.enabled else []
    if len(candidates) <= 1 or all(d.prefill_model.ttft_s(tokens) > slo.ttft_s for d in candidates):
        return None
    load = compute_decode_load(decode_instances, slo)
    if load is None or load >= rules.max_decode_load:
        return None
    return f"decode load {load:.2f} is below {rules.max_decode_load:g}"


def _explain_flip_to_decode(
    decode_instances: Sequence[InstanceRecord],
    prefill_instances: Sequence[InstanceRecord],
    work: Work,
    rules: FlipProposalRules,
    now_s: float,
) -> str | None:
    """Explain why a prefill instance should flip to decode; None: no flip, or no use to this request.

    Reservations cause no flip. Their prompts wait for prefill instances: with fewer of these they would wait
    longer, and more reservations would cause more flips.
    """
    if not rules.enabled or now_s < rules.to_decode_cooldown_until_s or len(prefill_instances) <= 1:
        return None
    tokens, tpot_s = work.context_tokens, work.slo.tpot_s
    if all(p.decode_model.itl_s(tokens) > tpot_s for p in prefill_instances):
        return None
    if any(d.decode_model.itl_s(d.ledger.decode_tokens + tokens) <= tpot_s for d in decode_instances):
        return None
    return f"{len(prefill_instances)} prefill instances serve, and the cooldown has ended"


def _find_cheapest_prefill(
    instances: tuple[InstanceRecord, ...],
    work: Work,
    now_s: float,
    exclude: Collection[str],
    delays: Mapping[str, TransferDelay] | None,
    *,
    start_s: float = 0.0,
    bound_s: float = math.inf,
) -> tuple[int, Cost | None, float]:
    """Return how many instances there are, the cheapest with a first token within `bound_s`, and the least
    second part of all costs (that one without transfer delays).

    `start_s`: from the end of the KV transfer to the first token. Only a cost that may be the least becomes
    an object, since all instances are looked at for each request.
    """
    tokens, cached = work.prompt_tokens, work.cached_tokens
    excluded = frozenset(exclude)  # it may hold half of a large fleet
    best: Cost | None = None
    count, least_first, least_second = 0, math.inf, math.inf  # of `best`
    soonest_s = math.inf
    for instance in instances:
        if excluded and instance.name in excluded:
            continue
        count += 1
        computed = max(0, tokens - cached.get(instance.name, 0)) if cached else tokens
        first, second, legs = _compute_prefill_cost(instance, computed, now_s)
        if second < soonest_s:
            soonest_s = second
        if first > least_first or (first == least_first and second > least_second):
            continue
        if delays:  # looked up only where the rest is cheap enough
            second += _compute_delay(delays, instance.name, tokens)
        if second + start_s > bound_s:
            continue
        cost = (first, second, legs, instance.name)
        if best is None or cost < best:
            best, least_first, least_second = cost, first, second
    return count, best, soonest_s


def _find_cheapest_decode(
    instances: tuple[InstanceRecord, ...],
    work: Work,
    now_s: float,
    exclude: Collection[str],
    pairs: SourcePairs | None,
) -> tuple[int, Cost | None, Cost | None]:
    """Return how many instances there are, the cheapest one, and the cheapest one that passes the SLO check.

    Called twice for each request: to reserve room, and to send its decode leg.
    """
    tokens, tpot_s, excluded = work.context_tokens, work.slo.tpot_s, frozenset(exclude)
    best: Cost | None = None
    within: Cost | None = None
    count, least_first, least_second = 0, math.inf, math.inf  # of `within`
    for instance in instances:
        if excluded and instance.name in excluded:
            continue
        count += 1
        first, second, legs = compute_decode_cost(instance, tokens, tpot_s, now_s)
        if first > least_first or (first == least_first and second > least_second):
            continue
        if pairs is not None:  # looked up only where the rest is cheap enough
            first += _compute_transfer_delay_s(instance.name, pairs, tokens, now_s)
            if first > least_first:
                continue
        cost = (first, second, legs, instance.name)
        if best is None or cost < best:
            best = cost
        if second <= 0.0 and (within is None or cost < within):
            within, least_first, least_second = cost, first, second
    return count, best, within


def _compute_prefill_cost(instance: InstanceRecord, tokens: int, now_s: float) -> UnnamedCost:
    ledger = instance.ledger
    batch, model = ledger.decode_tokens, instance.prefill_model
    seconds = model.c0 + (model.c1 + model.c2 * tokens) * tokens  # T(n); a call would cost a fifth of all
    if ledger.prefill_queued_s:
        seconds += ledger.remaining_s(now_s)
    if seconds != seconds:
        seconds = _UNKNOWN_COST
    other_s = FAILED_LEG_S * instance.error_share
    if batch:
        other_s += instance.decode_model.itl_s(batch)
    return (other_s, seconds, ledger.decode_legs)


def compute_decode_cost(instance: InstanceRecord, tokens: int, tpot_s: float, now_s: float) -> UnnamedCost:
    """Compute the cost of decode; the second part is at most 0 if the instance passes the SLO check."""
    ledger, model = instance.ledger, instance.decode_model
    batch = ledger.decode_tokens + ledger.reserved_tokens + tokens
    excess_s = model.intercept + model.slope * batch - tpot_s  # I(n) − S_D
    other_s = FAILED_LEG_S * instance.error_share
    if ledger.prefill_queued_s:
        other_s += ledger.remaining_s(now_s)
    if other_s != other_s:
        other_s = _UNKNOWN_COST
    capacity, max_seqs = instance.kv_capacity_tokens, instance.max_seqs
    if capacity and batch > KV_ENGINE_FULL * capacity:
        room_s = KV_TURNOVER_S * (batch / capacity - KV_ENGINE_FULL)
        other_s += room_s
        if excess_s < room_s:
            excess_s = room_s
    if max_seqs:
        waiting = ledger.decode_legs + ledger.reservations + 1 - max_seqs
        if waiting > 0:
            other_s += BATCH_TURNOVER_S * waiting / max_seqs
        other_s += BATCH_TURNOVER_S * instance.error_share  # a leg that fails waits for a place elsewhere
    return (other_s, excess_s, ledger.decode_legs)


def _predict_decode_start_s(instance: InstanceRecord, tokens: int, now_s: float) -> float:
    """Predict the time from the end of a KV transfer to this instance until the first token."""
    ledger = instance.ledger
    batch = ledger.decode_tokens + ledger.reserved_tokens + tokens
    seconds = instance.decode_model.itl_s(batch) + ledger.remaining_s(now_s)
    return seconds if seconds == seconds else _UNKNOWN_COST


def _starts_within(
    instances: tuple[InstanceRecord, ...], tokens: int, now_s: float, prefill_s: float, bound_s: float
) -> bool:
    """Whether some instance delivers the first token in time if the prefill takes `prefill_s`."""
    none = True
    for instance in instances:
        if prefill_s + _predict_decode_start_s(instance, tokens, now_s) <= bound_s:
            return True
        none = False
    return none


def _compute_transfer_delay_s(decode: str, pairs: SourcePairs, tokens: int, now_s: float) -> float:
    pair = pairs.by_decode.get(decode)
    if pair is None:  # a pair without a record has never transferred, so it is cold
        return pairs.cold_s
    if pair.lag_s_per_1k_tokens or pair.warm_until_s <= now_s:
        return pairs.compute_delay_s(pair, tokens, now_s)
    return 0.0  # it is warm and fast


def _compute_delay(delays: Mapping[str, TransferDelay], name: str, tokens: int) -> float:
    delay = delays.get(name)
    return 0.0 if delay is None else delay[0] + delay[1] * tokens


def _dispatch(cost: Cost, reason: DispatchReason) -> Dispatch:
    first, second, _, name = cost
    return Dispatch(name, reason, (first, second))
