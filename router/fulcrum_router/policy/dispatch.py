"""Arrow's Algorithm 1: which instance takes a request's prefill, which its decode.

    cost_prefill(r, i) = (Σ L(decoding on i), Σ T(queued on i) + T(r, i))            lexicographic
    cost_decode (r, i) = (Σ L(prefilling on i), Σ L(decoding on i) + L(r) − MT(i, S_D))

An instance passes the SLO check if the second part is at most S_T (prefill) or 0 (decode). The first
part, work of the other phase, prefers clean instances to half-flipped ones. Of those that pass, the
cheapest takes the request; if none passes, a flip is wanted and the cheapest of all is the fall-back.
What a hand-off takes longer than another one counts, too: a prefill instance whose KV every decode instance
gets late is late by that, and of a decode instance the tokens that it could compute meanwhile count in
the first part, as if it had a prefill of its own.
Equal costs go to the instance with fewer requests, then to the first by name.
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
    """What dispatch reads of an instance."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def role(self) -> Role:
        """The role that it plays now."""

    @property
    def serving(self) -> bool:
        """Whether it may be given new work."""

    @property
    def identity(self) -> EngineIdentity | None:
        """What must agree for a KV transfer; None: not known, and not held against it."""

    @property
    def ledger(self) -> LedgerView:
        """Its books."""

    @property
    def prefill_model(self) -> PrefillModel:
        """T(n) of this instance."""

    @property
    def decode_model(self) -> DecodeModel:
        """I(tokens) of this instance, and so MT."""

    @property
    def itl_s(self) -> float | None:
        """Its mean inter-token latency over the last completed second; None: no tokens, or not read."""


V = TypeVar("V", bound=InstanceView)


class TransferDelay(NamedTuple):
    """What the hand-offs of a pair take longer than those of others: each, and for each prompt token."""

    fixed: float = 0.0
    per_token: float = 0.0


class DispatchReason(StrEnum):
    """Why an instance was chosen."""

    WITHIN_SLO = "within_slo"
    PREFILLED_HERE = "prefilled_here"
    LEAST_COST = "least_cost"
    OTHER_ROLE = "other_role"

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class Dispatch(NamedTuple):
    """The instance that takes the request, and its cost pair."""

    instance: str
    reason: DispatchReason
    cost: tuple[float, float]


class FlipProposal(NamedTuple):
    """No instance of `role` meets the SLO and one of the other may flip; `fallback` if none does."""

    role: Role
    fallback: Dispatch
    reason: str


class NoInstance(NamedTuple):
    """Nobody can take it."""

    reason: str


DispatchDecision = Dispatch | FlipProposal | NoInstance

Cost = tuple[float, float, int, str]
"""A cost pair, and what decides between equal ones."""

_PREFILL, _DECODE = Role.PREFILL, Role.DECODE  # an attribute of an enum is slow to read
_WITHIN_SLO, _PREFILLED_HERE = DispatchReason.WITHIN_SLO, DispatchReason.PREFILLED_HERE


_UNKNOWN_COST = math.inf
"""NaN (the one value that differs from itself) compares with nothing: such a cost counts as the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipProposalRules:
    """When a flip may be asked for."""

    enabled: bool = False
    max_decode_load: float = 0.5
    """D→P is wanted only while the decode load LD is below this (L_SHRINK)."""
    to_decode_cooldown_until_s: float = -math.inf
    """P→D is wanted only from this Unix time on: the end of the cooldown."""


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
    """Who computes a prompt of `tokens` tokens that the router does not believe to be cached.

    Only serving instances whose KV some serving decode instance can read, and none of `exclude`. With
    no such instance the answer is `NoInstance`: the decode instance then computes the prompt itself.
    `delays` are seconds by prefill instance.
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
            or decode_instances[0].identity is candidate.identity
            or _any_can_read(decode_instances, candidate.identity)
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
    """Who answers a prompt of `tokens` tokens whose KV lies on `prefilled_on` (None: nowhere).

    `delays` are those of instances that get it late, in prompt tokens that each could compute meanwhile. If
    no decode instance serves, a prefill instance takes it (`OTHER_ROLE`): every engine does both.
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
        Role.DECODE, least, f"{considered}, least over by {least.cost[1]:.0f} tokens; {reason}"
    )


def compute_decode_load(decode_instances: Iterable[InstanceView], slo: Slo) -> float | None:
    """LD: mean inter-token latency of the decode instances over S_D. One without requests counts as 0.

    None where one has requests and its latency is not known: an unknown load is not a low one.
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
    """Why a decode instance should flip, or None if it should not.

    A prompt that is too long for the SLO even on an instance without a queue is no reason: it would be
    late there, too, and the next long one would have yet another instance flipped.
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
    """Why a prefill instance should flip, or None if it should not; it must be of use to this request."""
    if not rules.enabled or now_s < rules.to_decode_cooldown_until_s:
        return None
    candidates = [p for p in instances if p.serving and p.role is Role.PREFILL]
    if len(candidates) <= 1 or all(tokens > p.decode_model.max_tokens(slo.tpot_s) for p in candidates):
        return None
    return f"{len(candidates)} prefill instances, cooldown over"


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
    """The costs of those that serve, do not play the `excluded_role` role, and can read the KV of
    `source`."""
    return [
        _compute_decode_cost(instance, tokens, slo)
        for instance in instances
        if instance.serving
        and instance.role is not excluded_role
        and instance.name not in exclude
        and (source is None or source is instance.identity or _can_read(source, instance.identity))
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
    """What a hand-off of so many tokens takes longer, in the unit of `delays`."""
    delay = delays.get(name)
    return 0.0 if delay is None else delay[0] + delay[1] * tokens


def _choose_within(costs: Sequence[Cost], bound: float) -> Dispatch | None:
    best = min(costs)
    if best[1] > bound:  # the least of all need not be the least of those that pass
        best = min((cost for cost in costs if cost[1] <= bound), default=best)
    first, second, _, name = best
    return Dispatch(name, _WITHIN_SLO, (first, second)) if second <= bound else None


def _choose_cheapest(costs: Sequence[Cost]) -> Dispatch:
    first, second, _, name = min(costs)
    return Dispatch(name, DispatchReason.LEAST_COST, (first, second))


def _can_read(source: EngineIdentity | None, reader: EngineIdentity | None) -> bool:
    if source is None or reader is None or source is reader:
        return True
    return can_transfer(source, reader).allowed


def _any_can_read(decode_instances: Sequence[InstanceView], source: EngineIdentity | None) -> bool:
    return any(_can_read(source, reader.identity) for reader in decode_instances)
