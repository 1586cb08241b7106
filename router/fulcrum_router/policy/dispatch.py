"""Choose the instance for the prefill and the instance for the decode of a request: Arrow's Algorithm 1.

    cost_prefill(r, i) = (Σ L(decoding on i), Σ T(queued on i) + T(r, i))            lexicographic
    cost_decode (r, i) = (Σ L(prefilling on i), Σ L(decoding on i) + L(r) − MT(i, S_D))

T is the predicted prefill time of a prompt, L the number of KV tokens of a request, MT(i, S_D) the largest
batch, in tokens, that instance i decodes within the TPOT objective S_D. S_T is the TTFT objective.

An instance passes the SLO check if the second part is at most S_T (prefill) or 0 (decode). The first part,
the work of the other phase, prefers an instance that serves one phase only to one that has just flipped. Of
the instances that pass, the cheapest takes the request. If none passes, a flip is proposed and the cheapest
of all is the fallback.

Slow KV transfers count, too: the extra transfer time of a prefill instance is added to its TTFT; for a decode
instance, the tokens that it could compute in that time are added to the first part.
Equal costs: the instance with fewer decode legs is chosen, then the first by name.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from fulcrum_core.formatting import format_count
from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import EngineIdentity, Role, Slo
from fulcrum_router.policy.ledger import LedgerView


class InstanceView(Protocol):
    """The state of one instance that dispatch reads."""

    @property
    def name(self) -> str:
        """Name of the PDInstance."""

    @property
    def role(self) -> Role:
        """Current role."""

    @property
    def serving(self) -> bool:
        """Whether new work may be sent to the instance."""

    @property
    def identity(self) -> EngineIdentity | None:
        """Engine properties that KV transfers depend on; None: unknown, treated as compatible."""

    @property
    def ledger(self) -> LedgerView:
        """Work that this router has in flight on the instance."""

    @property
    def prefill_model(self) -> PrefillModel:
        """T(n): predicted prefill time of n tokens."""

    @property
    def decode_model(self) -> DecodeModel:
        """I(n): predicted inter-token latency with n tokens in the batch; MT is its inverse."""

    @property
    def itl_s(self) -> float | None:
        """Mean inter-token latency over the last completed second.

        None: no tokens in that second, or /metrics was not read.
        """


V = TypeVar("V", bound=InstanceView)


class TransferDelay(NamedTuple):
    """Extra time of a pair's KV transfers over a fast pair's, in seconds or in tokens computed meanwhile."""

    fixed: float = 0.0
    """Delay of each transfer."""
    per_token: float = 0.0
    """Additional delay for each prompt token."""


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

_PREFILL, _DECODE = Role.PREFILL, Role.DECODE  # an attribute of an enum is slow to read
_WITHIN_SLO, _PREFILLED_HERE = DispatchReason.WITHIN_SLO, DispatchReason.PREFILLED_HERE


_UNKNOWN_COST = math.inf
"""Replaces a NaN cost (the only value that differs from itself): NaN cannot be ordered, so it ranks last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipProposalRules:
    """The conditions under which dispatch may propose a flip."""

    enabled: bool = False
    max_decode_load: float = 0.5
    """Decode load LD below which a decode instance may flip to prefill (Arrow's L_SHRINK)."""
    to_decode_cooldown_until_s: float = -math.inf
    """End of the cooldown of flips from prefill to decode, in Unix seconds."""


NO_FLIP_PROPOSALS = FlipProposalRules()


def choose_prefill(
    instances: Sequence[V],
    tokens: int,
    slo: Slo,
    *,
    rules: FlipProposalRules = NO_FLIP_PROPOSALS,
    exclude: Collection[str] = (),
    delays: Mapping[str, TransferDelay] | None = None,
) -> DispatchDecision:
    """Choose the prefill instance for a prompt of `tokens` uncached tokens.

    Candidates are serving instances that are not in `exclude` and whose KV some serving decode instance can
    read. Without a candidate the result is `NoInstance`: the decode instance then computes the prompt itself.

    Args:
        instances: All instances of the service.
        tokens: Predicted tokens of the prompt.
        slo: Objectives of the request's tier.
        rules: When a flip may be proposed.
        exclude: Names of instances that have failed this request.
        delays: Extra transfer time by prefill instance, in seconds.
    """
    decode_instances = [i for i in instances if i.serving and i.role is not _PREFILL]
    costs = [
        _compute_prefill_cost(candidate, tokens)
        for candidate in instances
        if candidate.serving
        and candidate.role is not _DECODE
        and candidate.name not in exclude
        and (
            not decode_instances
            or decode_instances[0].identity is candidate.identity  # the usual case, without a call
            or any(can_read(candidate.identity, reader.identity) for reader in decode_instances)
        )
    ]
    if not costs:
        return NoInstance("no serving prefill instance whose KV a decode instance can read")
    if delays:
        costs = [(batch, ttft_s + _compute_delay(delays, n, tokens), r, n) for batch, ttft_s, r, n in costs]
    chosen = _choose_within(costs, slo.ttft_s)
    if chosen:
        return chosen
    least = _choose_cheapest(costs)
    reason = _explain_flip_to_prefill(decode_instances, tokens, slo, rules)
    if reason is None:
        return least
    considered = format_count(len(costs), "prefill instance")
    return FlipProposal(Role.PREFILL, least, f"{considered}, best TTFT {least.cost[1]:.3f} s; {reason}")


def choose_decode(
    instances: Sequence[V],
    tokens: int,
    slo: Slo,
    *,
    prefilled_on: V | None = None,
    rules: FlipProposalRules = NO_FLIP_PROPOSALS,
    now_s: float = 0.0,
    exclude: Collection[str] = (),
    delays: Mapping[str, TransferDelay] | None = None,
) -> DispatchDecision:
    """Choose the decode instance for a prompt of `tokens` tokens whose KV is on `prefilled_on`.

    If no decode instance serves, a prefill instance decodes (`OTHER_ROLE`): every engine can do both.

    Args:
        instances: All instances of the service.
        tokens: Tokens of the prompt.
        slo: Objectives of the request's tier.
        prefilled_on: Instance that computed the prompt; None: no KV was computed.
        rules: When a flip may be proposed.
        now_s: Unix time, for the cooldown of `rules`.
        exclude: Names of instances that have failed this request.
        delays: Extra transfer time by decode instance, in prompt tokens that it could compute meanwhile.
    """
    if (
        prefilled_on is not None
        and prefilled_on.role is not _PREFILL
        and _is_available(prefilled_on, exclude)
    ):
        cost = _compute_decode_cost(prefilled_on, tokens, slo)
        return Dispatch(prefilled_on.name, _PREFILLED_HERE, cost[:2])
    source = None if prefilled_on is None else prefilled_on.identity
    costs = _list_decode_costs(instances, tokens, slo, _PREFILL, source, exclude)
    if not costs:
        return _choose_other_role(instances, tokens, slo, source, exclude)
    if delays:
        costs = [
            (queue + _compute_delay(delays, n, tokens), excess_tokens, r, n)
            for queue, excess_tokens, r, n in costs
        ]
    chosen = _choose_within(costs, 0.0)
    if chosen:
        return chosen
    least = _choose_cheapest(costs)
    reason = _explain_flip_to_decode(instances, tokens, slo, rules, now_s)
    if reason is None:
        return least
    considered = format_count(len(costs), "decode instance")
    return FlipProposal(
        Role.DECODE,
        least,
        f"{considered}, best exceeds the SLO batch by {least.cost[1]:.0f} tokens; {reason}",
    )


def compute_decode_load(decode_instances: Iterable[InstanceView], slo: Slo) -> float | None:
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
    decode_instances: Sequence[InstanceView], tokens: int, slo: Slo, rules: FlipProposalRules
) -> str | None:
    """Explain why a decode instance should flip to prefill; None: no flip.

    A prompt that is too long for the SLO even without a queue causes no flip: it would miss the SLO on any
    instance, and each such prompt would flip another one.
    """
    candidates = [d for d in decode_instances if not d.role.serves(Role.PREFILL)] if rules.enabled else []
    if len(candidates) <= 1 or all(d.prefill_model.ttft_s(tokens) > slo.ttft_s for d in candidates):
        return None
    load = compute_decode_load(decode_instances, slo)
    if load is None or load >= rules.max_decode_load:
        return None
    return f"decode load {load:.2f} is below {rules.max_decode_load:g}"


def _explain_flip_to_decode(
    instances: Sequence[InstanceView], tokens: int, slo: Slo, rules: FlipProposalRules, now_s: float
) -> str | None:
    """Explain why a prefill instance should flip to decode; None: no flip, or no use to this request."""
    if not rules.enabled or now_s < rules.to_decode_cooldown_until_s:
        return None
    candidates = [p for p in instances if p.serving and p.role is Role.PREFILL]
    if len(candidates) <= 1 or all(tokens > p.decode_model.max_tokens(slo.tpot_s) for p in candidates):
        return None
    return f"{len(candidates)} prefill instances, cooldown has ended"


def _is_available(instance: InstanceView, exclude: Collection[str]) -> bool:
    return instance.serving and instance.name not in exclude


def _choose_other_role(
    instances: Sequence[InstanceView],
    tokens: int,
    slo: Slo,
    source: EngineIdentity | None,
    exclude: Collection[str],
) -> DispatchDecision:
    costs = _list_decode_costs(instances, tokens, slo, _DECODE, source, exclude)
    if not costs:
        return NoInstance("no serving instance" + (" that can read the prefill's KV" if source else ""))
    return _choose_cheapest(costs)._replace(reason=DispatchReason.OTHER_ROLE)


def _list_decode_costs(
    instances: Sequence[InstanceView],
    tokens: int,
    slo: Slo,
    excluded_role: Role,
    source: EngineIdentity | None,
    exclude: Collection[str],
) -> list[Cost]:
    """List the costs of the serving instances without `excluded_role` that can read the KV of `source`."""
    return [
        _compute_decode_cost(instance, tokens, slo)
        for instance in instances
        if instance.serving
        and instance.role is not excluded_role
        and instance.name not in exclude
        and (source is None or source is instance.identity or can_read(source, instance.identity))
    ]


def _compute_prefill_cost(instance: InstanceView, tokens: int) -> Cost:
    ledger = instance.ledger
    seconds = ledger.prefill_queued_s + instance.prefill_model.ttft_s(tokens)
    if seconds != seconds:
        seconds = _UNKNOWN_COST
    return (ledger.decode_tokens, seconds, ledger.decode_legs, instance.name)


def _compute_decode_cost(instance: InstanceView, tokens: int, slo: Slo) -> Cost:
    ledger = instance.ledger
    excess_tokens = ledger.decode_tokens + tokens - instance.decode_model.max_tokens(slo.tpot_s)
    if excess_tokens != excess_tokens:
        excess_tokens = _UNKNOWN_COST
    return (ledger.prefill_tokens, excess_tokens, ledger.decode_legs, instance.name)


def _compute_delay(delays: Mapping[str, TransferDelay], name: str, tokens: int) -> float:
    """Compute the extra transfer time of this instance for a prompt of `tokens`, in the unit of `delays`."""
    delay = delays.get(name)
    return 0.0 if delay is None else delay[0] + delay[1] * tokens


def _choose_within(costs: Sequence[Cost], bound: float) -> Dispatch | None:
    best = min(costs)
    if best[1] > bound:  # the first part ranks first, so a dearer instance may still be within the bound
        best = min((cost for cost in costs if cost[1] <= bound), default=best)
    first, second, _, name = best
    return Dispatch(name, _WITHIN_SLO, (first, second)) if second <= bound else None


def _choose_cheapest(costs: Sequence[Cost]) -> Dispatch:
    first, second, _, name = min(costs)
    return Dispatch(name, DispatchReason.LEAST_COST, (first, second))


def can_read(source: EngineIdentity | None, reader: EngineIdentity | None) -> bool:
    """Whether an engine `reader` can use the KV of an engine `source`; unknown identities are compatible."""
    if source is None or reader is None or source is reader:
        return True
    return can_transfer(source, reader).allowed
