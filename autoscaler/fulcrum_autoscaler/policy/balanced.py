"""The balanced policy: the split that balances what prefill and decode will need, reached in one write.

Every tick scores all splits (`split_score`) on the work in flight and on a forecast of the work to come
(`forecast`), corrected by what decode shows (`decode_correction`). The target is the split with the lowest
worst ratio. While the current split is worse than the target, the difference is added up over time: the
regret of staying. The flips follow when the regret reaches their price. So a split that is far off is left
after two ticks, one that is slightly off after a while, and noise moves no instance. A split that meets all
objectives with a margin has no regret, so that the instances that served one burst still serve the next one.
When the worst ratio of even the best split is high (`DEFLECTION_FROM`), some of the prompts that decode can
compute in its spare time count as prefill capacity. `decide` calls it at ticks; it ignores flip requests.
"""

import math
from dataclasses import dataclass, replace

from fulcrum_autoscaler.policy.decisions import DecisionAction, FlipDecision, RejectedInstance, hold
from fulcrum_autoscaler.policy.decode_correction import NO_CORRECTION, DecodeCorrection
from fulcrum_autoscaler.policy.forecast import DemandSample, add_sample, compute_rates
from fulcrum_autoscaler.policy.observation import AutoscalingRules, Observation
from fulcrum_autoscaler.policy.split_score import (
    Need,
    SplitScore,
    can_deflect,
    measure_need,
    measure_slowdown,
    score_split,
)
from fulcrum_autoscaler.policy.victims import NoVictim, choose_victim, with_autoscaler_flip
from fulcrum_core.values import AutoscalingMode, Role

COMFORT = 0.85
"""A ratio up to this is no reason to move."""
EXCESS_MAX = 3.0
"""Most regret in a second: a ratio of 30 is no more urgent than one of 4."""
DEFLECTION_FROM, DEFLECTION_FULL_FROM = 0.75, 0.9
"""Worst ratio of the best split from which deflection begins to count, and at which it counts fully. Below,
instances of the right role are better: a deflected prompt delays answers."""
HORIZON_S = 5.0
"""Time ahead for which splits are scored: a flip is of use for as long, at least."""
SLOWDOWN_TIME_S = 5.0
"""Time over which the slowdown of decode steps is averaged: on real engines, single seconds tell little."""
PRICE_SHARE = 0.05
"""Regret that pays for one flip, as a share of the TTFT objective: a split that is wrong by a tenth lets the
queue grow by a tenth of a second each second, which a long objective bears for longer."""
PRICE_MIN_S = 0.5
"""Least price: with short objectives, the noise of the arrivals decides the price."""
TICK_SHARE_MAX = 0.5
"""Most of the price that one tick pays, so that a single tick moves no instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceState:
    """What the policy passes from tick to tick; a restart loses it, which costs some seconds."""

    samples: tuple[DemandSample, ...] = ()
    paid: float = 0.0
    """Regret so far, as a share of the price of the flips."""
    weighed_at_s: float | None = None
    """Time of the router's state up to which regret was added up; None: a new sum begins."""
    to: Role | None = None
    """Role that gains instances in the move that the regret was added up for."""
    correction: DecodeCorrection = NO_CORRECTION
    slowdown: float = 1.0
    """Decode steps as a multiple of what the latency models say, averaged over time."""


def reset_sums(state: BalanceState) -> BalanceState:
    """Forget regret, correction and slowdown: while flips are blocked, no tick measures them."""
    return replace(state, paid=0.0, weighed_at_s=None, correction=NO_CORRECTION, slowdown=1.0)


def decide_balance(
    state: BalanceState, observation: Observation, rules: AutoscalingRules, *, now_s: float
) -> tuple[BalanceState, FlipDecision]:
    """Run one tick: returns the next state and the decision. The observation must be usable."""
    assert observation.router is not None
    at_s = observation.router.at_s
    seconds = 0.0 if state.weighed_at_s is None else max(0.0, at_s - state.weighed_at_s)
    decode = observation.serving_states(Role.DECODE)
    state = replace(
        state,
        samples=add_sample(state.samples, observation.router),
        weighed_at_s=at_s,
        slowdown=_average_slowdown(state.slowdown, observation, seconds),
    )
    prefill_count, decode_count = len(observation.serving_states(Role.PREFILL)), len(decode)
    rates = compute_rates(state.samples)
    if rates is None or not prefill_count or not decode_count:
        state = replace(state, paid=0.0, correction=NO_CORRECTION)
        return state, hold(observation, "the demand is not known yet", now_s=now_s)
    need = measure_need(observation, rates, rules.slo, slowdown=state.slowdown)
    if need is None:
        held = hold(observation, "no latency model is known yet", now_s=now_s)
        return replace(state, paid=0.0, correction=NO_CORRECTION), replace(held, forecast=rates)
    correction = state.correction.follow(
        need.tokens,
        rates,
        itl_s=need.itl_s,
        seconds=seconds,
        room_tokens=decode_count * need.max_tokens,
    )
    need = replace(need, rates=correction.correct(rates))
    current, target = find_target(prefill_count, decode_count, need, rules)
    state = replace(state, correction=correction)
    state, decision = _weigh(state, observation, rules, current, target, seconds, now_s)
    return state, replace(decision, forecast=need.rates)


def _average_slowdown(before: float, observation: Observation, seconds: float) -> float:
    now = measure_slowdown(observation)
    return now + (before - now) * math.exp(-seconds / SLOWDOWN_TIME_S)


def find_target(
    prefill: int, decode: int, need: Need, rules: AutoscalingRules
) -> tuple[SplitScore, SplitScore]:
    """Return the scores of the current split and of the target: the best one, of equal ones the nearest one.

    All up to `COMFORT` are equal. Deflection counts in part from a worst ratio of the best split above
    `DEFLECTION_FROM`, and fully from `DEFLECTION_FULL_FROM`.
    """
    total, floors = prefill + decode, rules.assignment_rules.floors
    low, high = max(1, floors.prefill), total - max(1, floors.decode)
    splits = [(p, total - p) for p in {prefill, *range(low, high + 1)}]

    def score_all(deflection: float) -> list[SplitScore]:
        return [
            score_split(p, d, need, rules.slo, horizon_s=HORIZON_S, deflection=deflection) for p, d in splits
        ]

    scores = score_all(0.0)
    if rules.deflects and can_deflect(need.rates, rules.slo):
        best = min(score.worst for score in scores)
        if best > DEFLECTION_FROM:
            scores = score_all(min(1.0, (best - DEFLECTION_FROM) / (DEFLECTION_FULL_FROM - DEFLECTION_FROM)))
    current = next(score for score in scores if score.prefill_instances == prefill)
    return current, min(
        scores, key=lambda s: (max(s.worst, COMFORT), abs(s.prefill_instances - prefill), s.prefill_instances)
    )


def _weigh(
    state: BalanceState,
    observation: Observation,
    rules: AutoscalingRules,
    current: SplitScore,
    target: SplitScore,
    seconds: float,
    now_s: float,
) -> tuple[BalanceState, FlipDecision]:
    """Add the regret of the last `seconds`, and flip when it pays for the move to the target."""
    flips = target.prefill_instances - current.prefill_instances
    if not flips:
        better = (
            f"at most {COMFORT:.2f} is enough" if current.worst <= COMFORT else "no other split is better"
        )
        reason = f"split {current}: {better}"
        return replace(state, paid=0.0, to=None), hold(observation, reason, now_s=now_s)
    to = Role.PREFILL if flips > 0 else Role.DECODE
    excess = min(EXCESS_MAX, current.worst - max(target.worst, COMFORT))
    price = max(PRICE_MIN_S, PRICE_SHARE * rules.slo.ttft_s) * math.sqrt(abs(flips))
    paid = (state.paid if state.to is to else 0.0) + min(excess * seconds / price, TICK_SHARE_MAX)
    state = replace(state, paid=paid, to=to)
    cause = f"split {current}, better: {target}; regret {paid * price:.2f} s, a flip follows at {price:.2f} s"
    if paid < 1.0:
        return state, hold(observation, cause, now_s=now_s)
    decision = _flip(observation, rules, to, abs(flips), cause, now_s)
    return (replace(state, paid=0.0, to=None) if decision.action is DecisionAction.FLIP else state), decision


def _flip(
    observation: Observation, rules: AutoscalingRules, to: Role, count: int, cause: str, now_s: float
) -> FlipDecision:
    """Choose victims one after the other; as many as may flip go in one write."""
    chosen: list[str] = []
    rejected: tuple[RejectedInstance, ...] = ()
    described, trial = "", observation
    for _ in range(count):
        choice = choose_victim(trial, to, rules, now_s=now_s, base=observation.assignment)
        rejected = choice.rejected
        if isinstance(choice, NoVictim):
            described = described or choice.reason
            break
        chosen.append(choice.instance)
        described = described or f"{choice.instance}: {choice.reason}"
        trial = replace(
            trial,
            assignment=with_autoscaler_flip(trial.assignment, choice.instance, to, reason="", now_s=now_s),
        )
    held = hold(observation, f"{cause}; {described}", now_s=now_s)
    if not chosen:
        return replace(held, action=DecisionAction.REFUSE, rejected=rejected)
    return replace(
        held,
        action=DecisionAction.FLIP if rules.mode is AutoscalingMode.AUTO else DecisionAction.ADVISE,
        instance=chosen[0],
        further_instances=tuple(chosen[1:]),
        to=to,
        rejected=rejected,
    )
