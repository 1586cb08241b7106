"""Which instance flips: Algorithm 3 (try_flip).

The source set must have more than one member before, and its floor after. Victim cost of a prefill
instance: (has no decode work, queued prefill seconds); of a decode instance: (has no prefill work,
resident tokens). So an instance that still works for the other role, half flipped, goes first, then the
one with the least work.
Instances that are cordoned or do not serve are no candidates; what `may_apply` refuses (pins, past refusals,
fixed pools, cooldown, floors) is passed over with its reason.
"""

import math
from dataclasses import dataclass

from fulcrum_autoscaler.policy.decisions import Rejected
from fulcrum_autoscaler.policy.observation import FlipRules, Observation
from fulcrum_core.api.pdassignment import PDAssignmentSpec
from fulcrum_core.assignment import may_apply, with_flip
from fulcrum_core.state import InstanceState
from fulcrum_core.values import Actor, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """The instance to flip. `why` says what made it the cheapest."""

    instance: str
    why: str
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoVictim:
    """No instance may flip."""

    reason: str
    rejected: tuple[Rejected, ...] = ()


def choose_victim(seen: Observation, to: Role, rules: FlipRules, *, now_s: float) -> Victim | NoVictim:
    """The cheapest instance that may take the role `to`; ties go to the first name."""
    source = to.other
    candidates = sorted(seen.states(source), key=lambda state: (*_cost(state, source), state.name))
    if len(candidates) <= 1:
        return NoVictim(reason=f"{source} keeps its last instance: {len(candidates)} serving")
    refused: list[Rejected] = []
    for index, state in enumerate(candidates):
        verdict = may_apply(
            seen.assignment,
            flipped(seen.assignment, state.name, to, reason="", now_s=now_s),
            seen.usable,
            rules.assignment,
            now_s=now_s,
        )
        if verdict.allowed:
            dearer = (Rejected(instance=s.name, reason=_work(s, source)) for s in candidates[index + 1 :])
            return Victim(instance=state.name, why=_work(state, source), rejected=(*refused, *dearer))
        refused.append(Rejected(instance=state.name, reason=verdict.reason))
    return NoVictim(reason=refused[0].reason, rejected=tuple(refused))


def flipped(
    current: PDAssignmentSpec, instance: str, to: Role, *, reason: str, now_s: float
) -> PDAssignmentSpec:
    """`current` with the autoscaler's flip of one instance."""
    return with_flip(current, instance, to, by=Actor.AUTOSCALER, reason=reason, now_s=now_s)


def _cost(state: InstanceState, source: Role) -> tuple[bool, float]:
    """Algorithm 3's victim cost; a queue that is no number sorts last."""
    if source is Role.PREFILL:
        queued_s = state.prefill_queued_s
        return not _decodes(state), queued_s if math.isfinite(queued_s) else math.inf
    return not _prefills(state), state.decode_tokens


def _decodes(state: InstanceState) -> bool:
    return state.decode_requests > 0 or state.decode_tokens > 0


def _prefills(state: InstanceState) -> bool:
    return state.prefill_tokens > 0 or state.prefill_queued_s > 0


def _work(state: InstanceState, source: Role) -> str:
    if source is Role.PREFILL:
        half = ", still decodes" if _decodes(state) else ""
        return f"{state.prefill_queued_s:.2f} s of prefill queued{half}"
    half = ", still prefills" if _prefills(state) else ""
    return f"{state.decode_tokens} tokens resident{half}"
