"""Admission: what becomes of a request that would miss its objectives, before an engine works for it.

An engine gives no prompt back. So a request that will be late takes the time of others that could be served,
and under a burst all of them are late. Whether a request will be late is predicted when it arrives, for each
phase:

    prefill    time since arrival + work in front + T(n) + KV transfer + first decode step  <=  S_T
    decode     KV tokens when its prompt is computed, its own included  <=  what S_D and the KV cache allow

Decode is predicted for the end of the prefill and not for now (after Mooncake, FAST 2025): otherwise decode
looks idle while many prompts are computed for it, and full when no more are admitted, and the admitted load
swings. An answer of o tokens is in decode for o * I(tokens). So of those that are found there, the mean is
t_d = Σo²/Σo * I(tokens), and a share of 1 - t/t_d of them still runs after t. Of those whose prompts are
computed now, the share of `_predict_arrived` runs, by the plain mean of o. An instance counts at most its own
limit while another one has room.

While a scale-out is under way, the instances that start count from the time at which they are expected to
serve (`policy.starts`): work that waits in the router drains faster then, and decode has more room.

In mode Direct requests wait in engines, which may serve lower tiers in their turn. So lower tiers are
admitted only while the wait is short (`Admission.limit_waits`): the rest of S_T is for higher ones.

A prompt that takes longer than S_T alone is admitted while an instance is idle: else nobody would serve it.
It cannot be interrupted, so another instance must stay for the rest, unless there is only one: a tenant that
sends nothing but such prompts would hold them all, and other tenants be refused.

What is done with a request that would be late depends on its tier: `TierAdmission`. An admitted request that
waits in the router is refused when it cannot be in time any more, as predictions err: an engine has not begun
it yet.

`JourneyContext.judge` asks once for each request, corrects the forecast (`forecast_errors`), counts the
decision in `Admission`, and delays the return of refused clients (`return_queue`). In mode Advise decisions
are counted and every request is served; in mode Off nothing is asked. The journey carries the decision out.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from fulcrum_core.values import AdmissionMode, OverloadAction, Role
from fulcrum_router.policy.dispatch import KV_ENGINE_FULL
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import TransferDelay
from fulcrum_router.policy.starts import ComingInstance
from fulcrum_router.policy.tiers.decode_share import MAX_REQUEST_SHARE, TOKEN_SHARE, find_kv_share
from fulcrum_router.policy.tiers.forecast_errors import ForecastErrors
from fulcrum_router.policy.tiers.return_queue import ReturnQueue
from fulcrum_router.policy.work import Work

MAX_RETRY_AFTER_S = 60
"""Longest time that a refused client is asked to wait: a prediction does not reach farther."""
MAX_LIMITED_RETRY_AFTER_S = 3_600
"""Longest time that a client over the rate limit of its tenant is asked to wait."""
LOWER_WAIT_SHARE = 0.5
"""Share of the tightest TTFT objective that all lower tiers together may fill with their waits in engines."""
DEGRADE_FROM = 0.8
"""Load of decode from which the output of tiers with `OverloadAction.DEGRADE` is limited."""


class RefusalReason(StrEnum):
    """Why a request is refused: metric label and `x-fulcrum-refused` header."""

    PREFILL_FULL = "prefill_full"
    """The first token of the request would be late."""
    DECODE_FULL = "decode_full"
    """Decode would have no room for it when its prompt is computed."""
    WAITED_TOO_LONG = "waited_too_long"
    """It waited in the router until it could not be in time any more, or for the longest time of its tier."""

    RATE_LIMIT = "rate_limit"
    """Its tenant has used the tokens that its tier allows in a minute."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class AdmissionDecision(StrEnum):
    """What is done with a request."""

    ADMIT = "admit"
    QUEUE = "queue"
    """It is served, but late."""
    DEGRADE = "degrade"
    """It is served with less output than it asked for."""
    REFUSE = "refuse"

    __hash__ = str.__hash__  # see RefusalReason


class Refusal(NamedTuple):
    """Why a request is refused, and when it would be admitted."""

    reason: RefusalReason
    retry_after_s: int
    message: str


class Admitted(NamedTuple):
    """How a request is served."""

    decision: AdmissionDecision = AdmissionDecision.ADMIT
    give_up_at_s: float = math.inf
    """Time at which it is refused if it still waits in the router."""
    output_limit: int | None = None
    """Output tokens that it may have; None: as many as it asked for."""


ADMITTED = Admitted()


class Forecast(NamedTuple):
    """What a request would meet if it was admitted now."""

    ttft_s: float
    """Time from the arrival of the request to its first token."""
    alone_s: float
    """The same on idle instances, without the time since its arrival."""
    decode_load: float
    """KV tokens when its prompt is computed, its own included, by what objectives and KV caches allow."""
    decode_stay_s: float
    """Mean time in decode of the requests that are found there."""

    def correct(self, factor: float) -> "Forecast":
        """Multiply the times before the first token: see `forecast_errors`."""
        return Forecast(factor * self.ttft_s, factor * self.alone_s, self.decode_load, self.decode_stay_s)


UNKNOWN_FORECAST = Forecast(0.0, 0.0, 0.0, 0.0)
"""No instance serves."""


class ReserveView(NamedTuple):
    """What reserves mean for one request."""

    own_instances: int = 0
    """Prefill instances that its tier has reserved."""
    own_backlog_s: float = 0.0
    """Prefill work of its tier that waits in the router and goes before it."""
    kept_decode: float = 0.0
    """Share of the KV cache that other tiers keep for themselves."""


NO_RESERVE_VIEW = ReserveView()


class TierAdmission(NamedTuple):
    """How requests of one tier are admitted."""

    sheddable: bool = True
    """Whether they may be refused."""
    action: OverloadAction = OverloadAction.REJECT
    max_queue_s: float = math.inf
    """Longest wait of a request with action QUEUE."""
    max_output_tokens: int = 0
    """Output of a request with action DEGRADE."""


DEFAULT_TIER_ADMISSION = TierAdmission()


class TierDecisions:
    """How many requests of one tier were decided how."""

    __slots__ = ("decisions", "refusals")

    def __init__(self) -> None:
        self.decisions = dict.fromkeys(AdmissionDecision, 0)
        self.refusals = dict.fromkeys(RefusalReason, 0)


class Admission:
    """Mode and tiers of one service, the counts of decisions, and what corrects forecasts and waits."""

    __slots__ = ("counts", "errors", "max_wait_s", "mode", "returns", "tiers")

    def __init__(self) -> None:
        self.mode = AdmissionMode.OFF
        self.tiers: Mapping[str, TierAdmission] = {}
        """Settings of a tier by its name; other tiers have `DEFAULT_TIER_ADMISSION`."""
        self.max_wait_s: Mapping[int, float] = {}
        """By priority: longest wait with which requests are admitted; the highest has none."""
        self.errors = ForecastErrors()
        self.returns = ReturnQueue()
        self.counts: dict[tuple[AdmissionMode, str], TierDecisions] = {}
        """Decisions by mode and tier; in mode Advise, decisions that were counted but not carried out."""

    def find_tier(self, name: str) -> TierAdmission:
        """How requests of this tier are admitted."""
        return self.tiers.get(name, DEFAULT_TIER_ADMISSION)

    def limit_waits(self, priorities: Collection[int], *, ttft_s: float) -> None:
        """Limit the waits of lower tiers in engines, where `ttft_s` is the tightest TTFT objective.

        Each level may fill more than the one below. With one level there is no limit.
        """
        levels = sorted(set(priorities))
        share_s = LOWER_WAIT_SHARE * ttft_s / max(1, len(levels) - 1)
        self.max_wait_s = {level: share_s * (rank + 1) for rank, level in enumerate(levels[:-1])}

    def record(self, tier: str, outcome: Refusal | Admitted) -> None:
        """Count a decision."""
        counts = self._find_counts(tier)
        if type(outcome) is Refusal:
            counts.decisions[AdmissionDecision.REFUSE] += 1
            counts.refusals[outcome.reason] += 1
        elif type(outcome) is Admitted:
            counts.decisions[outcome.decision] += 1

    def record_given_up(self, tier: str) -> None:
        """Count an admitted request that is refused after it waited."""
        self._find_counts(tier).refusals[RefusalReason.WAITED_TOO_LONG] += 1

    def record_limited(self, tier: str) -> None:
        """Count a request over the rate limit of its tenant, which holds in each mode."""
        self._find_counts(tier, AdmissionMode.ENFORCE).refusals[RefusalReason.RATE_LIMIT] += 1

    def _find_counts(self, tier: str, mode: AdmissionMode | None = None) -> TierDecisions:
        key = mode or self.mode, tier
        counts = self.counts.get(key)
        if counts is None:
            counts = self.counts[key] = TierDecisions()
        return counts


def predict_admission(
    prefill: Sequence[InstanceRecord],
    decode: Sequence[InstanceRecord],
    work: Work,
    *,
    now_s: float,
    backlog_s: float,
    output_tokens: float,
    mean_output_tokens: float,
    output_tokens_in_decode: float,
    delays: Mapping[str, TransferDelay],
    leaves_room: bool,
    reserve: ReserveView = NO_RESERVE_VIEW,
    coming: Sequence[ComingInstance] = (),
) -> Forecast:
    """Predict what a request would meet.

    Args:
        prefill: Instances that can compute its prompt, at least one; not those kept for other tiers.
        decode: Instances that can decode it.
        work: The request.
        now_s: Time on the monotonic clock.
        backlog_s: Prefill work that waits in the router and goes before it.
        output_tokens: Its predicted output.
        mean_output_tokens: Mean output of all requests.
        output_tokens_in_decode: Mean final output of the requests in decode at one time.
        delays: Least time of a KV transfer by prefill instance.
        leaves_room: Whether its tier leaves room in decode to higher ones.
        reserve: The reserves of its tier and of others. A tier with a reserve waits for its own work on
            its own instances at most.
        coming: Instances that start, the first one first.
    """
    tokens = work.prompt_tokens
    soonest_s, least_s = predict_prefill(
        prefill, work, now_s=now_s, backlog_s=backlog_s, delays=delays, coming=coming
    )
    if backlog_s and reserve.own_instances:
        # Its own instances take only its own work: it need not wait for the rest of the backlog.
        idle_in_s = min(instance.ledger.remaining_s(now_s) for instance in prefill)
        own_s = idle_in_s + reserve.own_backlog_s / reserve.own_instances
        soonest_s = min(soonest_s, least_s + own_s)
    if least_s > work.slo.ttft_s and len(prefill) > 1:
        soonest_s += _wait_for_another(prefill, now_s=now_s, ttft_s=work.slo.ttft_s)
    steps_s = [instance.decode_model.itl_s(tokens) for instance in decode]
    starts_s = [i.ledger.remaining_s(now_s) + s for i, s in zip(decode, steps_s, strict=True)]
    start_s, step_s = min(starts_s, default=0.0), min(steps_s, default=0.0)
    # The prompts that wait are taken to be as fast to compute, token for token, as this one.
    waiting_tokens = backlog_s / least_s * tokens if least_s else 0.0
    load, stay_s = _predict_decode_load(
        decode,
        tpot_s=work.slo.tpot_s,
        own_tokens=work.context_tokens + work.choices * output_tokens,
        coming_tokens=waiting_tokens,
        mean_output_tokens=mean_output_tokens,
        output_tokens_in_decode=output_tokens_in_decode,
        after_s=soonest_s,
        coming=sum(one.role is Role.DECODE and one.in_s <= soonest_s for one in coming),
        kv_share=find_kv_share(reserve.kept_decode) if leaves_room else None,
    )
    return Forecast(now_s - work.arrival_s + soonest_s + start_s, least_s + step_s, load, stay_s)


def _wait_for_another(prefill: Sequence[InstanceRecord], *, now_s: float, ttft_s: float) -> float:
    """Time until two instances have at most `ttft_s` of work left: one is for others than this request."""
    return max(0.0, sorted(instance.ledger.remaining_s(now_s) for instance in prefill)[1] - ttft_s)


def predict_prefill(
    prefill: Sequence[InstanceRecord],
    work: Work,
    *,
    now_s: float,
    backlog_s: float,
    delays: Mapping[str, TransferDelay],
    coming: Sequence[ComingInstance] = (),
) -> tuple[float, float]:
    """Predict the time until decode has the prompt's KV: now, and with idle instances; at least one.

    Now: on the instance that dispatch would choose, by the steps of its engine.
    """
    tokens = work.prompt_tokens
    soonest_s = least_s = least_remaining_s = math.inf
    total_s, chosen, chosen_delay_s = backlog_s, prefill[0], 0.0
    for instance in prefill:
        remaining_s = instance.ledger.remaining_s(now_s)
        delay = delays.get(instance.name)
        own_s = instance.prefill_model.ttft_s(work.count_computed(instance.name))
        delay_s = 0.0 if delay is None else delay[0] + delay[1] * tokens
        own_s += delay_s
        total_s += remaining_s
        if remaining_s + own_s < soonest_s:
            soonest_s, chosen, chosen_delay_s = remaining_s + own_s, instance, delay_s
        if own_s < least_s:
            least_s = own_s
        if remaining_s < least_remaining_s:
            least_remaining_s = remaining_s
    if backlog_s:
        return least_s + max(least_remaining_s, _find_drain_s(total_s, len(prefill), coming)), least_s
    computed = work.count_computed(chosen.name)
    return chosen.ledger.predict_answer_s(chosen.prefill_model, computed, now_s) + chosen_delay_s, least_s


def _find_drain_s(work_s: float, instances: int, coming: Sequence[ComingInstance]) -> float:
    """Time until prefill instances, with those that start, have done so much work."""
    begun_s = 0.0
    for in_s, role in coming:
        if role is Role.DECODE:
            continue
        if work_s <= instances * (in_s - begun_s):
            break
        work_s -= instances * (in_s - begun_s)
        begun_s, instances = in_s, instances + 1
    return begun_s + work_s / instances


def _predict_decode_load(
    decode: Sequence[InstanceRecord],
    *,
    tpot_s: float,
    own_tokens: float,
    coming_tokens: float,
    mean_output_tokens: float,
    output_tokens_in_decode: float,
    after_s: float,
    coming: int,
    kv_share: float | None,
) -> tuple[float, float]:
    """Predict the load of decode `after_s` from now, and for how long those found there stay in all.

    `coming` instances more decode by then.
    """
    limits = [_find_limit(instance, tpot_s, kv_share) for instance in decode]
    limit = math.fsum(limits)
    if not decode or not math.isfinite(limit):
        return 0.0, 0.0
    present = _limit_tokens([instance.ledger.decode_tokens for instance in decode], limits)
    step_s = math.fsum(i.decode_model.itl_s(n) for i, n in zip(decode, present, strict=True)) / len(decode)
    stay_s = output_tokens_in_decode * step_s
    stays, arrived = _predict_stay(stay_s, after_s), _predict_arrived(mean_output_tokens * step_s, after_s)
    tokens = _limit_tokens(
        [n * stays + i.ledger.reserved_tokens * arrived for i, n in zip(decode, present, strict=True)], limits
    )
    own_tokens = min(own_tokens, MAX_REQUEST_SHARE * limit / len(decode))
    limit *= 1.0 + coming / len(decode)
    return (math.fsum(tokens) + coming_tokens * arrived + own_tokens) / limit, stay_s


def _limit_tokens(tokens: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Tokens by instance as far as they take room from a new request.

    An instance over its limit has none, however far it is over: the others still have theirs. If all are over
    their limits, a new request waits for the one that is the least over.
    """
    for n, limit in zip(tokens, limits, strict=True):
        if n > limit:
            break
    else:  # the usual case
        return list(tokens)
    least_load = min(n / limit for n, limit in zip(tokens, limits, strict=True))
    most = max(1.0, least_load)
    return [min(n, most * limit) for n, limit in zip(tokens, limits, strict=True)]


def _find_limit(instance: InstanceRecord, tpot_s: float, kv_share: float | None) -> float:
    """Tokens that an instance can decode; an objective that even an empty step misses limits nothing.

    `kv_share`: share of the KV cache that the tier may fill; None: it is the highest tier.
    """
    step = instance.decode_model.max_tokens(tpot_s) or math.inf
    capacity = instance.kv_capacity_tokens or math.inf
    if kv_share is not None:
        return min(TOKEN_SHARE * step, kv_share * capacity)
    return min(step, KV_ENGINE_FULL * capacity)


def _predict_stay(stay_s: float, after_s: float) -> float:
    """Share of the requests in decode that still run: they began at any time of the last `stay_s`."""
    return max(0.0, 1.0 - after_s / stay_s) if stay_s else 0.0


def _predict_arrived(stay_s: float, after_s: float) -> float:
    """Share of the requests that run of those that begin at any time of the next `after_s`."""
    if after_s <= stay_s:
        return 1.0 - after_s / (2 * stay_s) if stay_s else 1.0
    return stay_s / (2 * after_s)


def judge_request(
    forecast: Forecast, work: Work, tier: TierAdmission, *, max_wait_s: float = math.inf
) -> Refusal | Admitted:
    """Decide what is done with a request that may wait for prefill for `max_wait_s` at most.

    With action DEGRADE the forecast is for the limited output.
    """
    if not tier.sheddable:
        return ADMITTED
    wait_s, load = forecast.ttft_s - forecast.alone_s, forecast.decode_load
    late_by_s = max(forecast.ttft_s - max(work.slo.ttft_s, forecast.alone_s), wait_s - max_wait_s)
    if late_by_s <= 0 and load <= 1.0:
        return _admit(forecast, work, tier)
    drained_after_s = forecast.decode_stay_s * (1.0 - 1.0 / load) if load > 1.0 else 0.0
    if tier.action is OverloadAction.QUEUE:
        too_long_by_s = max(max(wait_s, drained_after_s) - tier.max_queue_s, wait_s - max_wait_s)
        if too_long_by_s <= 0:
            return Admitted(AdmissionDecision.QUEUE, work.arrival_s + tier.max_queue_s)
        late_by_s, drained_after_s = min(late_by_s, too_long_by_s), min(drained_after_s, too_long_by_s)
    if late_by_s > 0:
        return _refuse(RefusalReason.PREFILL_FULL, late_by_s, _explain_late(forecast, work))
    message = f"decode would have {100 * load:.0f} % of the tokens that it can serve in time"
    return _refuse(RefusalReason.DECODE_FULL, drained_after_s, message)


def _admit(forecast: Forecast, work: Work, tier: TierAdmission) -> Admitted:
    if tier.action is OverloadAction.QUEUE:
        return Admitted(give_up_at_s=work.arrival_s + tier.max_queue_s)
    # From then on it would be late even if an instance was idle.
    give_up_at_s = work.deadline_s - min(forecast.alone_s, work.slo.ttft_s)
    limit = tier.max_output_tokens
    is_short = 0 < work.output_limit <= limit
    if tier.action is OverloadAction.DEGRADE and forecast.decode_load > DEGRADE_FROM and not is_short:
        return Admitted(AdmissionDecision.DEGRADE, give_up_at_s, limit)
    return Admitted(give_up_at_s=give_up_at_s)


def refuse_waiting(forecast: Forecast, work: Work) -> Refusal:
    """Refuse a request that has waited in the router for too long; the forecast is for one that arrives."""
    wait_s = forecast.ttft_s - max(work.slo.ttft_s, forecast.alone_s)
    return _refuse(RefusalReason.WAITED_TOO_LONG, wait_s, "no instance was free in time")


def delay_return(refusal: Refusal, wait_s: float) -> Refusal:
    """Ask a refused client to come back so many seconds later."""
    return refusal._replace(retry_after_s=math.ceil(min(refusal.retry_after_s + wait_s, MAX_RETRY_AFTER_S)))


def refuse_over_limit(wait_s: float, *, tokens_per_minute: int) -> Refusal:
    """Refuse a request over the rate limit of its tenant; after a large one the wait is many minutes."""
    message = f"the tenant has used the {tokens_per_minute:,} tokens a minute of its tier"
    return _refuse(RefusalReason.RATE_LIMIT, wait_s, message, longest_s=MAX_LIMITED_RETRY_AFTER_S)


def _explain_late(forecast: Forecast, work: Work) -> str:
    return f"the first token would come after {forecast.ttft_s:.1f} s, the objective is {work.slo.ttft_s:g} s"


def _refuse(
    reason: RefusalReason, wait_s: float, message: str, *, longest_s: int = MAX_RETRY_AFTER_S
) -> Refusal:
    return Refusal(reason, max(1, math.ceil(min(wait_s, longest_s))), message)
