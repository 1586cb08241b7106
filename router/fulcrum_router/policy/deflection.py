"""Deflection: a decode instance computes a prompt in the time that its decodes leave.

With S_D the TPOT objective, I(x) the time of a decode step over x KV tokens, and T(n) the time of a prompt
among decodes:

    T(n) ≤ 30·S_D               one stall; an engine computes up to its token budget of a prompt in one step
    φ = 1 − I(x)/(0.8·S_D) > 0  share of the time that the decodes can spare
    T(n)/φ ≤ 60 s               time in which they have caught up with their objective after the prompt
    c + T(n)/φ ≤ m·0.8·S_D/4    the same, with the time c that earlier prompts still need

The last bound is a quarter of the time for an answer of m tokens, the mean. The objective is a mean over the
tokens of a request: one long stall does not miss it, many do. Therefore an instance gets the next prompt when
it has nearly caught up (c ≤ 1 s), and with short answers all prompts that it has not caught up with count as
one stall.

A request that starts to decode gets no token while a prompt fills the steps of the engine: what runs goes
before what is new. So the prompt must end before such a first token is due, unless that is of a lower tier.
It must also fit into the KV cache, and end in time itself.

A request is deflected if the best prefill instance would end its prompt in the last third of the TTFT
objective or later, and the decode instance sooner: without such a margin, the spare time of decode stays
unused until it is too late.

No prompt is deflected while a higher tier sends requests (`tiers.decode_share`).

With `dispatch.deflect` the journey asks (`journey.eligible`): when a request is about to be sent to a prefill
instance, and again while it waits. `Ledger.deflect` then remembers when the decodes will have caught up.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from fulcrum_core.deflection import MIXED_FACTOR, STALL_MAX, TPOT_SHARE, find_stalls_max_s
from fulcrum_core.values import Role
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.work import Work

KV_FULL_WITH_PROMPT: Final = 0.9
"""Share of the KV cache that may be used with the prompt: decodes grow."""
RECOVERY_MAX_S: Final = 60.0
"""Longest time to catch up: until then, the instance takes no other prompt. What stalls may take is
50 s with answers of 5,000 tokens and 50 ms."""
CAUGHT_UP_WITHIN_S: Final = 1.0
"""Time before an instance has caught up from which it gets the next prompt."""
LATE_FACTOR: Final = 1.3
"""Multiple of that time within which a prompt should have ended. On `drift` near 99 %, half of what the rule
gains is lost with 1."""
RISK_SHARE: Final = 1 / 3
"""Share of the TTFT objective before its end in which a prompt is at risk. On mixes of 200 s, 1.5 times, mode
Queue, seed 1: 90.7 % of the requests within the SLO with 0, 94.7 with 1/3, 94.2 with 2/3, 91.0 without any
deflection."""


class Deflection(NamedTuple):
    """The decode instance that computes a prompt, and the time until its decodes have caught up."""

    instance: str
    recovery_s: float


def is_at_risk(work: Work, *, ends_at_s: float) -> bool:
    """Whether a request whose prompt a prefill instance ends at `ends_at_s` should be deflected."""
    return not ends_at_s <= work.deadline_s - RISK_SHARE * work.slo.ttft_s


def can_deflect_in_time(instance: InstanceRecord, work: Work, *, now_s: float, output_tokens: float) -> bool:
    """Whether an instance will have time for the prompt before its deadline, if not yet.

    It must end the prompts it has, and catch up with its decodes. The batch, room in the KV cache and first
    tokens that are due do not count, unlike in `choose_deflection`: they change from moment to moment.
    `output_tokens` is the mean answer.
    """
    ledger, tpot_s, compute_s = instance.ledger, work.slo.tpot_s, _predict_compute_s(instance, work)
    longest_s = min(STALL_MAX * tpot_s, find_stalls_max_s(tpot_s=tpot_s, output_tokens=output_tokens))
    starts_at_s = max(now_s + ledger.remaining_s(now_s), ledger.caught_up_at_s - CAUGHT_UP_WITHIN_S)
    fits = compute_s <= longest_s and starts_at_s + compute_s <= work.deadline_s
    return fits and instance.role is Role.DECODE


def _predict_compute_s(instance: InstanceRecord, work: Work) -> float:
    """Predict T(n)."""
    return MIXED_FACTOR * instance.prefill_model.ttft_s(work.count_computed(instance.name))


def choose_deflection(
    instances: Iterable[InstanceRecord],
    work: Work,
    *,
    now_s: float,
    by_s: float,
    output_tokens: float,
    exclude: Collection[str] = (),
) -> Deflection | None:
    """Choose the decode instance that catches up first; None: none can spare the time.

    Args:
        instances: Instances that take decode legs.
        work: The request.
        now_s: Time on the monotonic clock.
        by_s: Time by which the prompt must end: its deadline, or when a prefill instance would end it.
        output_tokens: Mean answer.
        exclude: Names of instances that must not get the request.
    """
    best: tuple[float, str, float] | None = None
    for instance in instances:
        if instance.role is not Role.DECODE or instance.name in exclude:
            continue
        recovery_s = _predict_recovery_s(instance, work, now_s, by_s)
        if recovery_s is None or not _bears_stalls(instance, work, now_s, recovery_s, output_tokens):
            continue
        found = max(now_s, instance.ledger.caught_up_at_s) + recovery_s, instance.name, recovery_s
        if best is None or found < best:
            best = found
    return None if best is None else Deflection(best[1], best[2])


def _bears_stalls(
    instance: InstanceRecord, work: Work, now_s: float, recovery_s: float, output_tokens: float
) -> bool:
    """Whether a mean answer bears this stall, and those that the instance has not caught up with."""
    behind_s = max(0.0, instance.ledger.caught_up_at_s - now_s)
    return behind_s + recovery_s <= find_stalls_max_s(tpot_s=work.slo.tpot_s, output_tokens=output_tokens)


def _predict_recovery_s(instance: InstanceRecord, work: Work, now_s: float, by_s: float) -> float | None:
    """Predict T(n)/φ; None: the instance cannot spare the time, or has no room."""
    ledger, tpot_s = instance.ledger, work.slo.tpot_s
    if ledger.caught_up_at_s > now_s + CAUGHT_UP_WITHIN_S:
        return None
    compute_s = _predict_compute_s(instance, work)
    if not compute_s <= STALL_MAX * tpot_s:
        return None
    starts_at_s = now_s + ledger.remaining_s(now_s)
    if not starts_at_s + compute_s <= by_s:
        return None
    batch = ledger.decode_tokens + ledger.reserved_tokens + work.context_tokens
    capacity = instance.kv_capacity_tokens
    if capacity and batch > KV_FULL_WITH_PROMPT * capacity:
        return None
    spare_s = TPOT_SHARE * tpot_s - instance.decode_model.itl_s(batch)
    if spare_s <= 0:
        return None
    recovery_s = compute_s * TPOT_SHARE * tpot_s / spare_s
    if not recovery_s <= RECOVERY_MAX_S:
        return None
    ends_by_s = starts_at_s + LATE_FACTOR * compute_s
    return None if ledger.has_first_token_due(now_s, ends_by_s, priority=work.priority) else recovery_s
