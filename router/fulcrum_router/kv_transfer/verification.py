"""Verify each KV transfer: did the decode instance fetch the KV, and before the lease expired?

The cached tokens in the decode engine's usage show whether the KV was fetched: `verify_transfer` compares
them with the prompt after a response is complete, and records outcome and duration in the pair
(`TransferPairs`). An expired lease is not visible in the response, whose tokens may then belong to another
prompt: `KvTransfer.is_late` says whether that is possible, and `data_path.lease_check` then asks the prefill
instance.
"""

import time

import structlog

from fulcrum_core.api import conditions
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.policy import PairKey, TransferOutcome, TransferPairs, classify_transfer
from fulcrum_router.policy.kv_pairs.kv_lease import max_on_time_age_s
from fulcrum_router.policy.kv_pairs.pair_record import DEFAULT_BLOCK_TOKENS, HANDSHAKE_TIMEOUT_S

log = structlog.get_logger()


class KvTransfer:
    """One KV transfer: the prompt that a decode leg fetches from a prefill instance."""

    __slots__ = (
        "counted_tokens",
        "deadline_s",
        "decode",
        "decode_was_idle",
        "expired_before",
        "needs_handshake",
        "pair",
        "sent_s",
        "source",
        "tokens",
        "usage",
    )

    def __init__(
        self,
        pairs: TransferPairs,
        source: Instance,
        decode: Instance,
        *,
        tokens: int,
        counted_tokens: int | None = None,
        received_after_s: float,
        decode_was_idle: bool,
        expired_before: float | None = None,
    ) -> None:
        self.source = source
        """The prefill instance."""
        self.decode = decode
        self.pair = pairs[PairKey(source.name, decode.name)]
        self.tokens = tokens
        """Length of the prompt."""
        self.needs_handshake = self.pair.warm_until_s <= time.monotonic()
        """Whether the two engines have no connection yet, so that the transfer includes their handshake."""
        self.decode_was_idle = decode_was_idle
        """Whether the decode instance had no other legs: only then is the duration measured."""
        self.deadline_s = received_after_s + max_on_time_age_s(source.kv_lease_s)
        """Latest response time that shows that the KV was fetched within the lease.

        The lease began at `received_after_s` or later.
        """
        self.expired_before = expired_before
        """`source.expired_transfers` when the prefill leg was sent; None: not known."""
        self.counted_tokens = counted_tokens
        """Length of the prompt as the prefill engine counted it; None: not reported."""
        self.usage: Usage | None = None
        """The decode engine's usage; None: not reported."""
        self.sent_s = 0.0
        """When the decode leg was sent on the last connection that was tried."""

    @property
    def lease_s(self) -> float:
        """Lease granted by the prefill instance, in seconds."""
        return self.source.kv_lease_s

    @property
    def is_late(self) -> bool:
        """Whether a response that comes now may use KV that was fetched after the lease expired."""
        return time.monotonic() > self.deadline_s

    @property
    def may_be_late(self) -> bool:
        """Whether the engine may still fetch the KV too late after the router stopped waiting for it."""
        return self.is_late or self.decode.health.unresponsive_since_s is not None


def verify_transfer(transfer: KvTransfer, *, time_to_first_byte_s: float | None) -> None:
    """Record the outcome of a transfer whose response is complete.

    `time_to_first_byte_s` is counted from sending the decode leg; None if it was not a stream.
    """
    decode, pair, usage = transfer.decode, transfer.pair, transfer.usage
    if usage is not None and usage.prompt_tokens == 1:
        return  # the last token is always computed, so there was nothing to fetch
    if usage is None and decode.reports_cached_tokens:
        pair.counts[TransferOutcome.UNKNOWN] += 1
        return  # as a stream of an HTTP/1.0 client: that refutes no problem of the pair
    cached = usage.cached_tokens if usage else None
    if cached is not None:
        decode.reports_cached_tokens = True
    elif usage is not None and decode.reports_cached_tokens:
        cached = 0  # some versions of vLLM omit a zero
    if usage is not None and transfer.counted_tokens not in (None, usage.prompt_tokens):
        _record_other_prompt(transfer, usage)
        return
    identity = decode.identity
    outcome = classify_transfer(
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=cached,
        block_tokens=identity.block_size if identity else DEFAULT_BLOCK_TOKENS,
    )
    if time_to_first_byte_s is not None and transfer.decode_was_idle and outcome is TransferOutcome.VERIFIED:
        pair.record_duration(
            time_to_first_byte_s,
            tokens=transfer.tokens,
            recompute_s=decode.prefill_model.ttft_s(transfer.tokens),
            cold=transfer.needs_handshake,
            step_s=decode.decode_model.itl_s(transfer.tokens),
            wire_s=_fabric_time_s(transfer),
        )
    pair.record(outcome, now_s=time.monotonic(), reason=_find_miss_reason(transfer, time_to_first_byte_s))
    if outcome is TransferOutcome.RECOMPUTED:
        log.warning(
            "prompt recomputed by decode",
            prefill=transfer.source.name,
            decode=decode.name,
            cached_tokens=cached,
        )


def _record_other_prompt(transfer: KvTransfer, usage: Usage) -> None:
    """The two engines read the same request as different prompts, so that one used KV of another prompt."""
    log.error(
        "prefill and decode count different prompt tokens",
        prefill=transfer.source.name,
        decode=transfer.decode.name,
        prefill_tokens=transfer.counted_tokens,
        decode_tokens=usage.prompt_tokens,
    )
    transfer.pair.record(TransferOutcome.RECOMPUTED, now_s=time.monotonic(), reason=conditions.INCOMPATIBLE)


def _fabric_time_s(transfer: KvTransfer) -> float:
    """Longest time for the KV over the slower of the two fabrics, in seconds; 0 if either is not known."""
    sides = transfer.source.identity, transfer.decode.identity
    known = [
        side.kv_transfer_s_per_1k_tokens
        for side in sides
        if side is not None and side.kv_transfer_s_per_1k_tokens
    ]
    return transfer.tokens / 1_000 * max(known) if len(known) == len(sides) else 0.0


def _find_miss_reason(transfer: KvTransfer, time_to_first_byte_s: float | None) -> str:
    """Reason of a miss if the transfer shows it: incompatible engines refuse the handshake at once."""
    if time_to_first_byte_s is None or not transfer.needs_handshake:
        return ""
    if is_handshake_timeout(time_to_first_byte_s):
        return conditions.HANDSHAKE_FAILED
    return "" if transfer.pair.has_transferred else conditions.INCOMPATIBLE


def is_handshake_timeout(took_s: float) -> bool:
    """Whether the duration shows that the decode engine waited for the handshake until it timed out."""
    return took_s > 0.9 * HANDSHAKE_TIMEOUT_S


def record_miss(pairs: TransferPairs, source: Instance, decode: Instance, reason: str) -> None:
    """Record a transfer that was not used, or whose prompt the decode instance recomputed."""
    pairs[PairKey(source.name, decode.name)].record(
        TransferOutcome.RECOMPUTED, now_s=time.monotonic(), reason=reason
    )
