"""Dispatch written for reading: every instance is looked at for every request, nothing is prepared.

`test_dispatch_policy` compares it with the shipped dispatch.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import EngineIdentity, Role
from fulcrum_router.policy import Dispatch, DispatchReason, SourcePairs, TransferDelay, Work
from fulcrum_router.policy.instance_record import InstanceRecord

Cost = tuple[float, float, int, str]


def choose_prefill(
    fleet: Sequence[InstanceRecord],
    work: Work,
    *,
    now_s: float,
    exclude: Collection[str],
    delays: Mapping[str, TransferDelay],
) -> Dispatch | None:
    """Arrow's Algorithm 1 for a prompt; None: no instance."""
    decode = [i for i in fleet if i.serving and i.role is not Role.PREFILL]
    found = [
        i
        for i in fleet
        if i.serving
        and i.role is not Role.DECODE
        and i.name not in exclude
        and (not decode or any(_can_read(i.identity, d.identity) for d in decode))
    ]
    costs = [_prefill_cost(i, work, now_s, delays.get(i.name, TransferDelay())) for i in found]
    start_s = min((_start_s(d, work, now_s) for d in decode), default=0.0)
    left_s = work.deadline_s - now_s
    return _choose(costs, [cost for cost in costs if cost[1] + start_s <= left_s])


def choose_decode(
    fleet: Sequence[InstanceRecord],
    work: Work,
    *,
    now_s: float,
    source: InstanceRecord | None,
    exclude: Collection[str],
    pairs: SourcePairs,
) -> Dispatch | None:
    """Arrow's Algorithm 1 for a decode leg; None: no instance."""
    if (
        source is not None
        and source.role is not Role.PREFILL
        and source.serving
        and source.name not in exclude
    ):
        return Dispatch(
            source.name, DispatchReason.PREFILLED_HERE, _decode_cost(source, work, now_s, None)[:2]
        )
    identity = None if source is None else source.identity
    found = [i for i in fleet if i.serving and i.name not in exclude and _can_read(identity, i.identity)]
    costs = [_decode_cost(i, work, now_s, pairs) for i in found if i.role is not Role.PREFILL]
    if costs:
        return _choose(costs, [cost for cost in costs if cost[1] <= 0.0])
    others = [_decode_cost(i, work, now_s, None) for i in found]
    if not others:
        return None
    first, second, _, name = min(others)
    return Dispatch(name, DispatchReason.OTHER_ROLE, (first, second))


def _choose(costs: list[Cost], within: list[Cost]) -> Dispatch | None:
    if not costs:
        return None
    first, second, _, name = min(within or costs)
    return Dispatch(name, DispatchReason.WITHIN_SLO if within else DispatchReason.LEAST_COST, (first, second))


def _prefill_cost(instance: InstanceRecord, work: Work, now_s: float, delay: TransferDelay) -> Cost:
    ledger, model = instance.ledger, instance.prefill_model
    batch_s = instance.decode_model.itl_s(ledger.decode_tokens) if ledger.decode_tokens else 0.0
    tokens = max(0, work.prompt_tokens - work.cached_tokens.get(instance.name, 0))
    seconds = _known(model.ttft_s(tokens) + ledger.remaining_s(now_s))
    transfer_s = delay.fixed_s + delay.s_per_token * work.prompt_tokens
    return instance.error_share + batch_s, seconds + transfer_s, ledger.decode_legs, instance.name


def _decode_cost(instance: InstanceRecord, work: Work, now_s: float, pairs: SourcePairs | None) -> Cost:
    ledger = instance.ledger
    excess_s = instance.decode_model.itl_s(_batch(instance, work)) - work.slo.tpot_s
    prefill_s = _known(instance.error_share + ledger.remaining_s(now_s))
    if pairs is not None:
        prefill_s += pairs.compute_delay_s(pairs.by_decode.get(instance.name), work.prompt_tokens, now_s)
    return prefill_s, excess_s, ledger.decode_legs, instance.name


def _start_s(instance: InstanceRecord, work: Work, now_s: float) -> float:
    ledger = instance.ledger
    itl_s = instance.decode_model.itl_s(_batch(instance, work))
    return _known(itl_s + ledger.remaining_s(now_s))


def _batch(instance: InstanceRecord, work: Work) -> int:
    return instance.ledger.decode_tokens + instance.ledger.reserved_tokens + work.prompt_tokens


def _known(seconds: float) -> float:
    return math.inf if math.isnan(seconds) else seconds


def _can_read(source: EngineIdentity | None, reader: EngineIdentity | None) -> bool:
    return source is None or reader is None or can_transfer(source, reader).allowed
