"""Scores a split by the worst ratio of what it will need to what it has. Used by `balanced`.

With P prefill and D decode instances, S_T and S_D the objectives, and a horizon of H seconds:

    prefill    A / P                        A: prefill work that arrives each second
    TTFT       (max(0, Q + (A - P)·H) / P + T) / S_T     Q: prefill work queued, T: that of a mean request
    TPOT       x / (0.8·MT)                 x: KV tokens per instance, MT: tokens whose step takes S_D
    KV cache   x / (0.9·capacity)           capacity: KV tokens that fit one instance
    sequences  requests per instance / those that an engine decodes together, where known
    held       decode instances now / D, while requests of lower tiers wait in the router for room in decode

The KV tokens follow from the tokens R of the requests in flight, of those in the prefill queue only as many
as are computed within the horizon, min(1, P·H/Q), and from those R* = a·I(x) that the arrivals
will have in the long run (Little's law: a token-steps arrive each second, a step takes I), which R approaches
in the time τ that a request decodes: R_H = R* + (R - R*)·exp(-H/τ).

Decode that computes prompts in a share f of its time adds f·D to P, and takes I(x) / (1 - f) for a step:
MT becomes ((1 - f)·S_D - intercept) / slope.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_autoscaler.policy.forecast import Rates
from fulcrum_autoscaler.policy.observation import Observation
from fulcrum_core.deflection import find_longest_prompt_s
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import Role, Slo

BATCH_FULL = 0.8
"""Share of MT that the mean batch of a split may use."""
SLOWDOWN_MAX = 1.5
"""Most by which measured steps may be longer than the models say: more has another cause than the batch."""
KV_USE_MAX = 0.9
"""Share of the KV cache from which requests start to wait: prompts need room for all of their tokens."""
DEFLECTED_SHARE_MAX = 0.5
"""Most of its time that a decode instance is expected to spend on prompts."""
DEFLECTED_STEPS = 4
"""Shares up to the largest one that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The work in flight and the work to come, of all instances together."""

    rates: Rates
    queued_s: float
    tokens: float
    """KV tokens of the requests that decode."""
    reserved_tokens: float
    """KV tokens of prompts that are being computed or wait for prefill."""
    legs: float
    max_tokens: float
    """MT: KV tokens of one instance whose step takes the TPOT objective."""
    itl_intercept_s: float
    itl_slope_s: float
    """The model of a step of decode instances, scaled up by the slowdown."""
    kv_capacity_tokens: float
    itl_s: float
    """Inter-token latency now: measured, or as predicted for the tokens in flight."""
    max_seqs: float
    """Requests that an engine decodes together; infinite: not known."""
    full_decode_instances: int = 0
    """Decode instances now, if requests wait in the router for room in decode; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitScore:
    """The ratios of one split. Above 1, the objective is missed or the work grows without end."""

    prefill_instances: int
    decode_instances: int
    ratios: dict[str, float]
    deflected_share: float = 0.0
    """Share of the time of decode instances in which they compute prompts."""

    @property
    def worst(self) -> float:
        """The highest ratio, by which splits are compared."""
        return max(self.ratios.values())

    @property
    def cause(self) -> str:
        """Name of the worst ratio."""
        return max(self.ratios, key=lambda name: self.ratios[name])

    def __str__(self) -> str:
        worst = f"{self.cause} at {self.worst:.2f}"
        if self.deflected_share:
            worst += f", with {100 * self.deflected_share:.0f} % of decode's time for prompts"
        return f"{self.prefill_instances}:{self.decode_instances} ({worst})"


def measure_slowdown(observation: Observation) -> float:
    """Measured steps as a multiple of what the models of the same instances say, over the decode legs.

    Of one instance, at most `SLOWDOWN_MAX` counts. 1 if nothing is measured.
    """
    measured_s = predicted_s = 0.0
    for state in observation.serving_states(Role.DECODE):
        if state.itl_s is None or state.itl_intercept_s is None or state.itl_slope_s is None:
            continue
        step_s = state.itl_intercept_s + state.itl_slope_s * state.decode_tokens
        measured_s += state.decode_legs * min(state.itl_s, SLOWDOWN_MAX * step_s)
        predicted_s += state.decode_legs * step_s
    return measured_s / predicted_s if predicted_s > 0 else 1.0


def measure_need(observation: Observation, rates: Rates, slo: Slo, *, slowdown: float) -> Need | None:
    """Add up the states of the serving instances; None if the latency models are not known.

    A model that says too little would call a split good while its decodes miss their objective: a `slowdown`
    above 1 makes its steps longer. Models count by the decode legs of their instances: those of others need
    not have learned yet.
    """
    prefill, decode = observation.serving_states(Role.PREFILL), observation.serving_states(Role.DECODE)
    states = (*prefill, *decode)
    intercept_s = _mean_over_legs(decode, [s.itl_intercept_s for s in decode])
    slope_s = _mean_over_legs(decode, [s.itl_slope_s for s in decode])
    if intercept_s is None or slope_s is None:
        return None
    tokens = sum(s.decode_tokens for s in states)
    intercept_s, slope_s = max(1.0, slowdown) * intercept_s, max(1.0, slowdown) * slope_s
    measured_s = _mean_over_legs(decode, [s.itl_s if s.decode_legs else None for s in decode])
    itl_s = intercept_s + slope_s * tokens / len(decode) if measured_s is None else measured_s
    capacity = _mean([s.kv_capacity_tokens for s in states])
    return Need(
        rates=rates,
        queued_s=math.fsum(s.prefill_queued_s for s in prefill if math.isfinite(s.prefill_queued_s)),
        tokens=tokens,
        reserved_tokens=sum(s.reserved_tokens for s in states),
        legs=sum(s.decode_legs for s in states),
        max_tokens=max(1.0, (slo.tpot_s - intercept_s) / slope_s) if slope_s else math.inf,
        itl_intercept_s=intercept_s,
        itl_slope_s=slope_s,
        kv_capacity_tokens=math.inf if capacity is None else capacity,
        itl_s=itl_s,
        max_seqs=math.fsum(math.inf if s.max_seqs is None else s.max_seqs for s in decode) / len(decode),
        full_decode_instances=len(decode) if any(s.decode_is_full for s in decode) else 0,
    )


def can_deflect(rates: Rates, slo: Slo) -> bool:
    """Whether the mean prompt is short enough, beside mean answers, that the router may deflect it."""
    if not rates.requests:
        return False
    longest_s = find_longest_prompt_s(tpot_s=slo.tpot_s, output_tokens=rates.output_tokens / rates.requests)
    return rates.prefill / rates.requests <= longest_s


def score_split(
    prefill: int, decode: int, need: Need, slo: Slo, *, horizon_s: float, deflection: float = 0.0
) -> SplitScore:
    """Score one split, `horizon_s` > 0 ahead if there is deflection.

    `deflection`: which part, 0 to 1, of the prompts that prefill would not end within the horizon may be
    deflected to decode. The split is scored with the share of them that makes its worst ratio the least.
    """
    alone = _score_share(prefill, decode, need, slo, horizon_s, 0.0)
    lacking_instances = need.rates.prefill + need.queued_s / horizon_s - prefill if deflection else 0.0
    if lacking_instances <= 0.0:
        return alone
    share_max = min(DEFLECTED_SHARE_MAX, deflection * lacking_instances / decode)
    shares = [share_max * step / DEFLECTED_STEPS for step in range(1, DEFLECTED_STEPS + 1)]
    scores = [alone, *(_score_share(prefill, decode, need, slo, horizon_s, share) for share in shares)]
    return min(scores, key=lambda score: score.worst)


def _score_share(
    prefill: int, decode: int, need: Need, slo: Slo, horizon_s: float, share: float
) -> SplitScore:
    """Score a split whose decode instances compute prompts in this share of their time."""
    rates = need.rates
    capacity = prefill + share * decode
    backlog_s = max(0.0, need.queued_s + (rates.prefill - capacity) * horizon_s) / capacity
    mean_s = rates.prefill / rates.requests if rates.requests else 0.0
    computed = min(1.0, capacity * horizon_s / need.queued_s) if need.queued_s else 1.0
    in_flight = need.tokens + computed * need.reserved_tokens
    tokens, sequences = _forecast_decodes(decode, need, in_flight, slo, horizon_s, share)
    lost_tokens = share * slo.tpot_s / need.itl_slope_s if share and need.itl_slope_s else 0.0
    return SplitScore(
        prefill_instances=prefill,
        decode_instances=decode,
        ratios={
            "prefill": rates.prefill / capacity,
            "TTFT": (backlog_s + mean_s) / slo.ttft_s,
            "TPOT": tokens / (BATCH_FULL * max(1.0, need.max_tokens - lost_tokens)),
            "KV cache": tokens / (KV_USE_MAX * need.kv_capacity_tokens),
            "sequences": sequences / need.max_seqs,
            "held": need.full_decode_instances / decode,
        },
        deflected_share=share,
    )


def _forecast_decodes(
    decode: int, need: Need, in_flight: float, slo: Slo, horizon_s: float, share: float
) -> tuple[float, float]:
    """Forecast the KV tokens and the requests of one decode instance after the horizon.

    `in_flight` are the KV tokens of all requests that decode now or within the horizon. In `share` of its
    time the instance computes prompts.
    """
    rates = need.rates
    # x = a·I(x)/(1 - share)/D with I(x) = intercept + slope·x; at most twice the objective
    steps = rates.token_steps / decode
    free = 1.0 - share - steps * need.itl_slope_s
    itl_s = need.itl_intercept_s / free if free > 0 else math.inf
    itl_s = min(itl_s, 2 * slo.tpot_s)
    decode_s = max(itl_s, need.itl_s) * rates.output_tokens / rates.requests if rates.requests else 0.0
    left = math.exp(-horizon_s / decode_s) if decode_s else 0.0
    sequences = rates.output_tokens * itl_s
    return (
        (steps * itl_s * decode * (1 - left) + in_flight * left) / decode,
        (sequences * (1 - left) + need.legs * left) / decode,
    )


def _mean_over_legs(states: Sequence[InstanceState], values: Sequence[float | None]) -> float | None:
    """Weigh the values by the decode legs of their instances; without any legs, all alike."""
    known = [
        (state.decode_legs, value)
        for state, value in zip(states, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    legs = sum(count for count, _ in known)
    if not legs:
        return _mean([value for _, value in known])
    return math.fsum(count * value for count, value in known) / legs


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
