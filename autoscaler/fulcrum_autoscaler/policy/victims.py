"""Chooses the instance that flips: Arrow's Algorithm 3 (try_flip); builds the assignment with the flip.

Arrow's instances are alike. Where pools have different hardware, instances of the one that suits the new role
much better go first.

Used by `arrow`, by `balanced` and by the simulator's planners. Whether to flip at all is decided before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_autoscaler.policy.decisions import RejectedInstance
from fulcrum_autoscaler.policy.observation import AutoscalingRules, Observation
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.assignment import build_flip, may_apply
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import Actor, Role

SUITABILITY_MARGIN = 1.5
"""Factor within which pools suit a role equally: their latency models are estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """The instance to flip; `reason` describes the work that makes it the cheapest."""

    instance: str
    reason: str
    rejected: tuple[RejectedInstance, ...]
    """The other candidates: those that `may_apply` refused, and those that cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoVictim:
    """No instance may flip; `reason`: why not the cheapest candidate, or that only one is left."""

    reason: str
    rejected: tuple[RejectedInstance, ...] = ()


def choose_victim(
    observation: Observation,
    to: Role,
    rules: AutoscalingRules,
    *,
    now_s: float,
    base: PDAssignmentSpec | None = None,
) -> Victim | NoVictim:
    """Choose the cheapest instance that may flip to the role `to`. Ties go to the first name.

    The source role must have more than one serving instance before the flip and keep its floor after it. The
    cost of a prefill instance is (has no decode work, queued prefill seconds), that of a decode instance (has
    no prefill work, resident tokens). So an instance that still works for the other role goes first, then the
    one with the least work. Instances whose pool suits the role `to` much less than another one go last.

    `base` is the stored assignment, if `observation.assignment` already contains flips that are not written
    yet: `may_apply` then judges these flips and the new one together.

    Cordoned instances and instances that do not serve are no candidates. Candidates that `may_apply` refuses
    (pin, earlier refusal, fixed pool, cooldown, floor) are skipped and reported with the reason.
    """
    source = to.other
    serving = observation.serving_states(source)
    unsuitable = _find_unsuitable(serving, to)
    candidates = sorted(
        serving, key=lambda state: (state.name in unsuitable, *_cost(state, source), state.name)
    )
    if len(candidates) <= 1:
        return NoVictim(reason=f"{source} keeps its last instance: {len(candidates)} serving")
    rejected: list[RejectedInstance] = []
    for index, state in enumerate(candidates):
        verdict = may_apply(
            base or observation.assignment,
            with_autoscaler_flip(observation.assignment, state.name, to, reason="", now_s=now_s),
            observation.confirmed_serving,
            rules.assignment_rules,
            now_s=now_s,
        )
        if verdict.allowed:
            costlier = (
                RejectedInstance(
                    instance=s.name,
                    reason=_describe_work(s, source) + (f", suits {source}" if s.name in unsuitable else ""),
                )
                for s in candidates[index + 1 :]
            )
            suits = f", suits {to}" if unsuitable and state.name not in unsuitable else ""
            return Victim(
                instance=state.name,
                reason=_describe_work(state, source) + suits,
                rejected=(*rejected, *costlier),
            )
        rejected.append(RejectedInstance(instance=state.name, reason=verdict.reason))
    return NoVictim(reason=rejected[0].reason, rejected=tuple(rejected))


def with_autoscaler_flip(
    current: PDAssignmentSpec, instance: str, to: Role, *, reason: str, now_s: float
) -> PDAssignmentSpec:
    """Return `current` with one instance flipped by the autoscaler."""
    return build_flip(current, instance, to, by=Actor.AUTOSCALER, reason=reason, now_s=now_s)


def _find_unsuitable(candidates: Sequence[InstanceState], to: Role) -> frozenset[str]:
    """Find the candidates that suit the role `to` much less than the one that suits it best.

    How fast an instance is does not count: if one pool takes twice as long as another for prompts and for
    steps, it does not matter which has which role. The result is empty if a pool was not measured yet.
    """
    ratios = {state.name: state.suits_prefill for state in candidates if state.suits_prefill is not None}
    if len(ratios) < len(candidates) or not ratios:
        return frozenset()
    if to is Role.PREFILL:
        least = max(ratios.values()) / SUITABILITY_MARGIN
        return frozenset(name for name, ratio in ratios.items() if ratio < least)
    most = min(ratios.values()) * SUITABILITY_MARGIN
    return frozenset(name for name, ratio in ratios.items() if ratio > most)


def _cost(state: InstanceState, source: Role) -> tuple[bool, float]:
    """Return Algorithm 3's victim cost. A queue length that is not finite sorts last."""
    if source is Role.PREFILL:
        queued_s = state.prefill_queued_s
        return not _has_decode_work(state), queued_s if math.isfinite(queued_s) else math.inf
    return not _has_prefill_work(state), state.decode_tokens


def _has_decode_work(state: InstanceState) -> bool:
    return state.decode_legs > 0 or state.decode_tokens > 0


def _has_prefill_work(state: InstanceState) -> bool:
    return state.prefill_tokens > 0 or state.prefill_queued_s > 0


def _describe_work(state: InstanceState, source: Role) -> str:
    if source is Role.PREFILL:
        suffix = ", already decodes" if _has_decode_work(state) else ""
        return f"{state.prefill_queued_s:.2f} s of prefill queued{suffix}"
    suffix = ", already prefills" if _has_prefill_work(state) else ""
    return f"{format_count(state.decode_tokens, 'token')} in its KV cache{suffix}"
