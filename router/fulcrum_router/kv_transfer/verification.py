"""The proof that each hand-off carries: was it fetched, and was it fetched in time?

A lease that has run out shows nowhere in a decode engine's response, whose tokens may then be another
prompt's. So what comes late is held back until the giver has said that it let nothing expire. What was
fetched, the decode engine's usage tells; where the client did not ask for that, it does not see it.
"""

import time
from dataclasses import dataclass
from typing import Self

import structlog

from fulcrum_core.api import conditions
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import PromptUsage, parse_usage
from fulcrum_router.http1.framing import find_chunks, frame_chunk
from fulcrum_router.policy import PairKey, TransferOutcome, TransferPairs, classify_transfer
from fulcrum_router.policy.pair_record import DEFAULT_BLOCK_TOKENS, HANDSHAKE_TIMEOUT_S, TransferPair

log = structlog.get_logger()

USABLE_LEASE_FRACTION = 1 / 2
"""Of its lease: a hand-off that is older is not used. The decode instance's queue counts against it, too."""
_ON_TIME_LEASE_FRACTION = 5 / 6
"""Of its lease: what a decode leg answers until then was fetched while the blocks were held."""
_MAX_RESPONSE_DELAY_S = 1.0
"""For so long a response of the giver, whose clock begins with it, may have been on its way."""
EMPTY_CHOICES = b'"choices":[]'
"""What the event with the usage has, and no other."""


@dataclass(slots=True, kw_only=True, eq=False)
class KvTransfer:
    """A hand-off that a decode leg was given."""

    source: Instance
    decode: Instance
    pair: TransferPair
    tokens: int
    needs_handshake: bool
    """Whether the two had to shake hands."""
    decode_was_idle: bool
    """Whether the decode instance had nothing else to do."""
    deadline_s: float
    """Until when a response shows that the lease was kept."""
    strips_usage: bool
    expired_before: float | None
    """Hand-offs that the giver had let expire when this one began; None: it was not asked."""
    usage: PromptUsage | None = None
    sent_s: float = 0.0
    """When decode was given it, by the last connection that was tried."""

    @classmethod
    def create(
        cls,
        pairs: TransferPairs,
        source: Instance,
        decode: Instance,
        *,
        tokens: int,
        received_after_s: float,
        strips_usage: bool = False,
        expired_before: float | None = None,
    ) -> Self:
        """As `decode` gets it now; `source` cannot have given it before `received_after_s`."""
        pair = pairs[PairKey(source.name, decode.name)]
        return cls(
            source=source,
            decode=decode,
            pair=pair,
            tokens=tokens,
            needs_handshake=pair.warm_until_s <= time.monotonic(),
            decode_was_idle=not decode.ledger.legs,
            deadline_s=received_after_s + _max_on_time_age_s(source.kv_lease_s),
            strips_usage=strips_usage,
            expired_before=expired_before,
        )

    @property
    def lease_s(self) -> float:
        """Its giver's."""
        return self.source.kv_lease_s

    @property
    def is_late(self) -> bool:
        """Whether what comes now need not have been fetched in time."""
        return time.monotonic() > self.deadline_s

    @property
    def may_be_late(self) -> bool:
        """Whether it may be fetched too late, though its response is not waited for any more."""
        return self.is_late or self.decode.health.unresponsive_since_s is not None

    def extract_usage(self, framed: bytes, *, chunked: bool) -> bytes:
        """Events that may hold the usage: read it, and take it out where the client did not ask for it."""
        start = framed.rfind(EMPTY_CHOICES)
        usage = parse_usage(framed[start:])
        if usage is None:
            return framed
        self.usage = usage
        return strip_usage_events(framed) if self.strips_usage and chunked else framed


def _max_on_time_age_s(lease_s: float) -> float:
    """How old a hand-off may be when decode answers, for it to have been fetched within its lease."""
    return min(_ON_TIME_LEASE_FRACTION * lease_s, lease_s - _MAX_RESPONSE_DELAY_S)


def strip_usage_events(framed: bytes) -> bytes:
    """The chunks without the event that has no choices; the others as they are.

    A chunk holds whole events here. One that does not is let through: better an event too many than one lost.
    """
    kept: list[bytes] = []
    position = 0
    for start, end, after in find_chunks(framed):
        content = framed[start:end]
        if EMPTY_CHOICES in content and content.startswith(b"data:") and content.endswith(b"\n\n"):
            events = content[:-2].split(b"\n\n")
            rest = b"".join(event + b"\n\n" for event in events if EMPTY_CHOICES not in event)
            kept.append(frame_chunk(rest) if rest else b"")
        else:
            kept.append(framed[position:after])
        position = after
    return b"".join((*kept, framed[position:]))


def verify_transfer(transfer: KvTransfer, *, time_to_first_event_s: float | None) -> None:
    """Count a hand-off whose response is whole; `time_to_first_event_s`: what its first event took, of a
    stream."""
    decode, pair, usage = transfer.decode, transfer.pair, transfer.usage
    if usage is not None and usage.prompt_tokens == 1:
        return  # the last token is always computed: of this prompt nothing was to be fetched
    cached = usage.cached_tokens if usage else None
    if cached is not None:
        decode.reports_cached_tokens = True
    elif usage is not None and decode.reports_cached_tokens:
        cached = 0  # some versions leave a zero out
    identity = decode.identity
    outcome = classify_transfer(
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=cached,
        block_tokens=identity.block_size if identity else DEFAULT_BLOCK_TOKENS,
    )
    if time_to_first_event_s is not None and transfer.decode_was_idle and outcome is TransferOutcome.VERIFIED:
        pair.record_duration(
            time_to_first_event_s,
            tokens=transfer.tokens,
            recompute_s=decode.prefill_model.ttft_s(transfer.tokens),
            cold=transfer.needs_handshake,
            step_s=decode.decode_model.itl_s(transfer.tokens),
            wire_s=_fabric_time_s(transfer),
        )
    pair.record(outcome, now_s=time.monotonic(), reason=_find_miss_reason(transfer, time_to_first_event_s))
    if outcome is TransferOutcome.RECOMPUTED:
        log.warning(
            "prompt recomputed by decode",
            prefill=transfer.source.name,
            decode=decode.name,
            cached_tokens=cached,
        )


def _fabric_time_s(transfer: KvTransfer) -> float:
    """The longest that its KV takes over the slower of the two fabrics; 0: one is not known."""
    sides = transfer.source.identity, transfer.decode.identity
    known = [
        side.kv_transfer_s_per_1k_tokens
        for side in sides
        if side is not None and side.kv_transfer_s_per_1k_tokens
    ]
    return transfer.tokens / 1_000 * max(known) if len(known) == len(sides) else 0.0


def _find_miss_reason(transfer: KvTransfer, time_to_first_event_s: float | None) -> str:
    """What a miss would come from, as far as can be told: engines that refuse each other do so at once."""
    if time_to_first_event_s is None or not transfer.needs_handshake:
        return ""
    if is_handshake_timeout(time_to_first_event_s):
        return conditions.HANDSHAKE_FAILED
    return "" if transfer.pair.has_transferred else conditions.INCOMPATIBLE


def is_handshake_timeout(took_s: float) -> bool:
    """Whether decode took so long for a hand-off that it has waited for a peer in vain."""
    return took_s > 0.9 * HANDSHAKE_TIMEOUT_S


def record_miss(pairs: TransferPairs, source: Instance, decode: Instance, reason: str) -> None:
    """Count a hand-off that was not used, or not answered."""
    pairs[PairKey(source.name, decode.name)].record(
        TransferOutcome.RECOMPUTED, now_s=time.monotonic(), reason=reason
    )
