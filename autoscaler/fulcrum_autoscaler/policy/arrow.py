"""When roles change: Algorithm 2 (the monitor), and the answer to "flip wanted" (Algorithm 1, step 3).

Decode overload is seen by the periodic monitor, which flips from prefill to decode when, for some ticks
in a row,

    LD >= expand   or   LP <= shrink <= LD

Prefill overload is seen per request by the router's dispatch, which asks for a flip at once: to prefill
only while decode load is low (LD < shrink), because otherwise requests would hold memory without going
on; to decode subject to the cooldown alone. A flip back to prefill never waits.
"""

from dataclasses import dataclass, replace

from fulcrum_autoscaler.policy.decisions import Action, Decision, Trigger
from fulcrum_autoscaler.policy.loads import Loads, measure_loads
from fulcrum_autoscaler.policy.observation import FlipRules, Observation, why_unusable
from fulcrum_autoscaler.policy.victims import NoVictim, choose_victim, flipped
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.spelling import format_count
from fulcrum_core.state import FlipWanted
from fulcrum_core.values import AutoscalingMode, Role

REASON_MAX = 1024
"""Longest reason that a PDAssignment takes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the monitor carries from tick to tick. All else is in the objects: a restart loses a few ticks."""

    passes: int = 0
    """Ticks in a row at which the loads asked for another decode instance."""


def monitor(memory: Memory, seen: Observation, rules: FlipRules, *, now_s: float) -> tuple[Memory, Decision]:
    """One tick of Algorithm 2. A tick that cannot tell starts the count of passes again."""
    held = _held(seen, rules, Trigger.TICK, now_s=now_s)
    if held:
        return Memory(), held
    loads = measure_loads(seen, rules.slo)
    asks = _asks_for_decode(loads, rules)
    if asks is None:
        return Memory(), _hold(seen, Trigger.TICK, _why_content(loads, rules), loads, now_s=now_s)
    passes = min(memory.passes + 1, rules.passes)
    if passes < rules.passes:
        reason = f"{asks}, for {passes} of {rules.passes} ticks"
        return Memory(passes), _hold(seen, Trigger.TICK, reason, loads, passes=passes, now_s=now_s)
    asks = f"{asks}, for {format_count(passes, 'tick')}"
    decision = _try_flip(seen, Role.DECODE, rules, asks, Trigger.TICK, loads, now_s=now_s)
    decision = replace(decision, passes=passes)
    return (Memory() if decision.action is Action.FLIP else Memory(passes)), decision


def answer(wanted: FlipWanted, seen: Observation, rules: FlipRules, *, now_s: float) -> Decision:
    """The answer to a router that found no instance of `wanted.role` within the SLO."""
    held = _held(seen, rules, Trigger.WANTED, now_s=now_s)
    if held:
        return held
    loads = measure_loads(seen, rules.slo)
    asks = f"the router wants {wanted.role}: {wanted.reason}"  # which says that decode load is low
    if wanted.role is Role.PREFILL:
        obstacle = _why_decode_not_low(loads, rules)
        if obstacle:
            return replace(
                _hold(seen, Trigger.WANTED, f"{asks}; {obstacle}", loads, now_s=now_s), action=Action.REFUSE
            )
    return _try_flip(seen, wanted.role, rules, asks, Trigger.WANTED, loads, now_s=now_s)


def proposal(current: PDAssignmentSpec, decision: Decision) -> PDAssignmentSpec:
    """`current` as a decision to flip wants it.

    Raises:
        ValueError: for a decision that flips nothing.
    """
    if decision.instance is None or decision.to is None:
        raise ValueError(f"a decision to {decision.action} proposes nothing")
    reason = decision.reason[:REASON_MAX]
    return flipped(current, decision.instance, decision.to, reason=reason, now_s=decision.at_s)


def _held(seen: Observation, rules: FlipRules, trigger: Trigger, *, now_s: float) -> Decision | None:
    if rules.mode is AutoscalingMode.OFF:
        return _hold(seen, trigger, "autoscaling is off", now_s=now_s)
    if rules.paused:
        return _hold(seen, trigger, "flips are paused", now_s=now_s)
    unusable = why_unusable(seen, rules, now_s=now_s)
    return _hold(seen, trigger, f"cannot tell: {unusable}", now_s=now_s) if unusable else None


def _asks_for_decode(loads: Loads, rules: FlipRules) -> str | None:
    """Algorithm 2's condition in words, or None where it does not hold for sure."""
    lp, ld = loads.prefill, loads.decode
    if ld is None:
        return None
    if ld.low >= rules.expand:
        return f"decode load {ld} is at least {rules.expand:.2f}"
    if lp is not None and lp.high <= rules.shrink <= ld.low:
        return f"prefill load {lp} is at most {rules.shrink:.2f}, decode load {ld} at least that"
    return None


def _why_content(loads: Loads, rules: FlipRules) -> str:
    if loads.prefill is None or loads.decode is None:
        return f"cannot tell: {loads}"
    if not loads.prefill.high and not loads.decode.high:
        return "neither prefill nor decode has any load"
    return (
        f"{loads}: decode gets an instance at a load of {rules.expand:.2f}, or of {rules.shrink:.2f} while "
        "prefill has at most that"
    )


def _why_decode_not_low(loads: Loads, rules: FlipRules) -> str | None:
    """Why decode can spare no instance; None if it can.

    Low is LD < shrink. Where shrink is above half of expand, as an engine with a high floor under its
    latency needs it, that alone would let decode give away what it asks back at once; so its load must also
    stay below expand on one instance fewer, LD·n/(n − 1). With Arrow's own thresholds that always holds.
    """
    load = loads.decode
    if load is None:
        return "cannot tell whether decode can spare an instance: decode load unknown"
    if load.high >= rules.shrink:
        return f"decode can spare none: decode load {load} is not below {rules.shrink:.2f}"
    fewer = load.instances - 1
    if fewer and load.high * load.instances / fewer >= rules.expand:
        left = format_count(fewer, "instance")
        return f"decode can spare none: load {load} on {left} would reach {rules.expand:.2f}"
    return None


def _hold(
    seen: Observation,
    trigger: Trigger,
    reason: str,
    loads: Loads | None = None,
    *,
    passes: int = 0,
    now_s: float,
) -> Decision:
    return Decision(
        at_s=now_s,
        action=Action.HOLD,
        trigger=trigger,
        reason=reason,
        loads=loads,
        passes=passes,
        split=seen.split(),
        generation=seen.generation,
    )


def _try_flip(
    seen: Observation,
    to: Role,
    rules: FlipRules,
    asks: str,
    trigger: Trigger,
    loads: Loads,
    *,
    now_s: float,
) -> Decision:
    blank = _hold(seen, trigger, asks, loads, now_s=now_s)
    found = choose_victim(seen, to, rules, now_s=now_s)
    if isinstance(found, NoVictim):
        return replace(blank, action=Action.REFUSE, reason=f"{asks}; {found.reason}", rejected=found.rejected)
    return replace(
        blank,
        action=Action.FLIP if rules.mode is AutoscalingMode.AUTO else Action.ADVISE,
        reason=f"{asks}; {found.instance} costs least: {found.why}",
        instance=found.instance,
        to=to,
        rejected=found.rejected,
    )
