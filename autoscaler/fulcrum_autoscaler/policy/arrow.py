"""Decides when an instance flips: at a tick of the monitor, or for a flip request of the router.

The monitor detects decode overload (Arrow's Algorithm 2). The router detects prefill overload for each
request and sends a flip request at once (Algorithm 1, step 3). `decide` calls both functions; `loads`
measures the loads, `victims` chooses the instance. `propose_assignment` and `hold_if_blocked` serve
`balanced`, too.
"""

from dataclasses import dataclass, replace

from fulcrum_autoscaler.policy.decisions import DecisionAction, FlipDecision, Trigger, hold
from fulcrum_autoscaler.policy.loads import Loads, measure_loads
from fulcrum_autoscaler.policy.observation import AutoscalingRules, Observation, why_unusable
from fulcrum_autoscaler.policy.victims import NoVictim, choose_victim, with_autoscaler_flip
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import AutoscalingMode, Role

REASON_MAX = 1024
"""Longest `reason` that a PDAssignment entry accepts, in characters."""


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state that the monitor passes from tick to tick. A restart loses it, which costs a few ticks."""

    consecutive_ticks: int = 0
    """Consecutive ticks, up to the last one, whose loads called for another decode instance."""


def decide_on_tick(
    monitor_state: MonitorState, observation: Observation, rules: AutoscalingRules, *, now_s: float
) -> tuple[MonitorState, FlipDecision]:
    """Run one tick of Algorithm 2; returns the next monitor state and the decision.

    The monitor flips an instance from prefill to decode if, for some consecutive ticks,

        LD >= expand   or   LP <= shrink <= LD

    with the prefill load LP and the decode load LD. A tick without usable router state resets the count of
    ticks.
    """
    blocked = hold_if_blocked(observation, rules, Trigger.TICK, now_s=now_s)
    if blocked:
        return MonitorState(), blocked
    loads = measure_loads(observation, rules.slo)
    cause = _why_decode_needs_instance(loads, rules)
    if cause is None:
        return MonitorState(), hold(observation, _why_no_flip(loads, rules), loads=loads, now_s=now_s)
    consecutive_ticks = min(monitor_state.consecutive_ticks + 1, rules.consecutive_ticks)
    if consecutive_ticks < rules.consecutive_ticks:
        reason = f"{cause}, for {consecutive_ticks} of {rules.consecutive_ticks} ticks"
        return MonitorState(consecutive_ticks), hold(
            observation, reason, loads=loads, consecutive_ticks=consecutive_ticks, now_s=now_s
        )
    cause = f"{cause}, for {format_count(consecutive_ticks, 'tick')}"
    decision = _try_flip(observation, Role.DECODE, rules, cause, Trigger.TICK, loads, now_s=now_s)
    decision = replace(decision, consecutive_ticks=consecutive_ticks)
    return (
        MonitorState() if decision.action is DecisionAction.FLIP else MonitorState(consecutive_ticks)
    ), decision


def decide_on_flip_request(
    request: FlipRequest, observation: Observation, rules: AutoscalingRules, *, now_s: float
) -> FlipDecision:
    """Decide on the request of a router that found no instance able to serve `request.role` within the SLO.

    A flip to prefill is granted only while decode load is low (LD < shrink): otherwise the remaining decode
    instances could not take over the prefilled requests, which would occupy KV cache without progress. The
    cooldown applies to flips to decode only.
    """
    blocked = hold_if_blocked(observation, rules, Trigger.FLIP_REQUEST, now_s=now_s)
    if blocked:
        return blocked
    loads = measure_loads(observation, rules.slo)
    # The reason of a request for prefill includes the decode load, so the cause does not repeat it.
    cause = f"the router requests an instance for {request.role}: {request.reason}"
    if request.role is Role.PREFILL:
        refusal = _why_decode_cannot_spare(loads, rules)
        if refusal:
            held = hold(
                observation, f"{cause}; {refusal}", trigger=Trigger.FLIP_REQUEST, loads=loads, now_s=now_s
            )
            return replace(held, action=DecisionAction.REFUSE)
    return _try_flip(observation, request.role, rules, cause, Trigger.FLIP_REQUEST, loads, now_s=now_s)


def propose_assignment(current: PDAssignmentSpec, decision: FlipDecision) -> PDAssignmentSpec:
    """Return `current` with the flips of `decision` applied.

    Raises:
        ValueError: if the decision flips no instance.
    """
    if decision.instance is None or decision.to is None:
        raise ValueError(f"a decision to {decision.action} proposes no flip")
    reason = decision.reason[:REASON_MAX]
    for instance in (decision.instance, *decision.further_instances):
        current = with_autoscaler_flip(current, instance, decision.to, reason=reason, now_s=decision.at_s)
    return current


def hold_if_blocked(
    observation: Observation, rules: AutoscalingRules, trigger: Trigger, *, now_s: float
) -> FlipDecision | None:
    """Hold if autoscaling is off or paused, or the observation is not usable; None: a policy may decide."""
    if rules.mode is AutoscalingMode.OFF:
        return hold(observation, "autoscaling is off", trigger=trigger, now_s=now_s)
    if rules.paused:
        return hold(observation, "flips are paused", trigger=trigger, now_s=now_s)
    unusable = why_unusable(observation, rules, now_s=now_s)
    return hold(observation, f"cannot decide: {unusable}", trigger=trigger, now_s=now_s) if unusable else None


def _why_decode_needs_instance(loads: Loads, rules: AutoscalingRules) -> str | None:
    """Describe the part of Algorithm 2's condition that is met; None if neither is.

    Each unknown load counts so that it argues against the flip: decode's as 0, prefill's as 1.
    """
    lp, ld = loads.prefill, loads.decode
    if ld is None:
        return None
    if ld.low >= rules.expand:
        return f"decode load {ld} has reached {rules.expand:.2f}"
    if lp is not None and lp.high <= rules.shrink <= ld.low:
        return f"decode load {ld} has reached {rules.shrink:.2f} and prefill load {lp} has not passed it"
    return None


def _why_no_flip(loads: Loads, rules: AutoscalingRules) -> str:
    if loads.prefill is None or loads.decode is None:
        return f"cannot decide: {loads}"
    if not loads.prefill.high and not loads.decode.high:
        return "neither prefill nor decode has any load"
    return (
        f"{loads}: decode gets an instance at a decode load of {rules.expand:.2f}, or of {rules.shrink:.2f} "
        f"while prefill load is at most {rules.shrink:.2f}"
    )


def _why_decode_cannot_spare(loads: Loads, rules: AutoscalingRules) -> str | None:
    """Return why decode can give up no instance; None if it can.

    Decode load is low if LD < shrink. With a shrink above expand/2, which an engine with a high minimum
    latency needs, that rule alone would let decode give up an instance and request it back at once. So the
    load on one instance fewer, LD·n/(n − 1), must also stay below expand. With Arrow's thresholds (1.0 and
    0.5) it always does.
    """
    load = loads.decode
    if load is None:
        return "decode load unknown, so decode gives up no instance"
    if load.high >= rules.shrink:
        return f"decode gives up no instance: decode load {load} is not below {rules.shrink:.2f}"
    fewer = load.instances - 1
    if fewer and load.high * load.instances / fewer >= rules.expand:
        left = format_count(fewer, "instance")
        return f"decode gives up no instance: its load {load} would reach {rules.expand:.2f} on {left}"
    return None


def _try_flip(
    observation: Observation,
    to: Role,
    rules: AutoscalingRules,
    cause: str,
    trigger: Trigger,
    loads: Loads,
    *,
    now_s: float,
) -> FlipDecision:
    held = hold(observation, cause, trigger=trigger, loads=loads, now_s=now_s)
    choice = choose_victim(observation, to, rules, now_s=now_s)
    if isinstance(choice, NoVictim):
        return replace(
            held, action=DecisionAction.REFUSE, reason=f"{cause}; {choice.reason}", rejected=choice.rejected
        )
    return replace(
        held,
        action=DecisionAction.FLIP if rules.mode is AutoscalingMode.AUTO else DecisionAction.ADVISE,
        reason=f"{cause}; cheapest to flip: {choice.instance} ({choice.reason})",
        instance=choice.instance,
        to=to,
        rejected=choice.rejected,
    )
