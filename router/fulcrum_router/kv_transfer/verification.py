"""The proof that each hand-off carries: was it fetched, and was it fetched in time?

A lease that has run out shows nowhere in a decode engine's answer, whose tokens may then be another
prompt's. So what comes late is held back until the giver has said that it let nothing expire. What was
fetched, the decode engine's usage tells; where the client did not ask for that, it does not see it.
"""

import time
from dataclasses import dataclass
from typing import Self

import structlog

from fulcrum_core.api import conditions as words
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import Usage, read_usage
from fulcrum_router.http1.framing import chunk, chunk_spans
from fulcrum_router.policy import PairKey, PairMap, Proof, judge
from fulcrum_router.policy.pairs import DEFAULT_BLOCK_TOKENS, HANDSHAKE_TIMEOUT_S, Pair

log = structlog.get_logger()

HALF = 1 / 2
"""Of its lease: a hand-off that is older is not used. The decode instance's queue counts against it, too."""
_IN_TIME = 5 / 6
"""Of its lease: what a decode leg answers until then was fetched while the blocks were held."""
_UNDER_WAY_S = 1.0
"""For so long an answer of the giver, whose clock begins with it, may have been on its way."""
NO_CHOICES = b'"choices":[]'
"""What the event with the usage has, and no other."""


@dataclass(slots=True, kw_only=True, eq=False)
class Handed:
    """A hand-off that a decode leg was given."""

    source: Instance
    decode: Instance
    pair: Pair
    tokens: int
    cold: bool
    """Whether the two had to shake hands."""
    alone: bool
    """Whether the decode instance had nothing else to do."""
    deadline_s: float
    """Until when an answer shows that the lease was kept."""
    hides_usage: bool
    expired_before: float | None
    """Hand-offs that the giver had let expire when this one began; None: it was not asked."""
    usage: Usage | None = None
    sent_s: float = 0.0
    """When decode was given it, by the last connection that was tried."""

    @classmethod
    def of(
        cls,
        pairs: PairMap,
        source: Instance,
        decode: Instance,
        *,
        tokens: int,
        stamp_s: float,
        hides_usage: bool = False,
        expired_before: float | None = None,
    ) -> Self:
        """As `decode` gets it now; `source` cannot have given it before `stamp_s`."""
        pair = pairs[PairKey(source.name, decode.name)]
        return cls(
            source=source,
            decode=decode,
            pair=pair,
            tokens=tokens,
            cold=pair.warm_until_s <= time.monotonic(),
            alone=not decode.ledger.legs,
            deadline_s=stamp_s + _in_time_s(source.kv_lease_s),
            hides_usage=hides_usage,
            expired_before=expired_before,
        )

    @property
    def lease_s(self) -> float:
        """Its giver's."""
        return self.source.kv_lease_s

    @property
    def late(self) -> bool:
        """Whether what comes now need not have been fetched in time."""
        return time.monotonic() > self.deadline_s

    @property
    def may_be_late(self) -> bool:
        """Whether it may be fetched too late, though its answer is not waited for any more."""
        return self.late or self.decode.health.hangs_since_s is not None

    def read_events(self, framed: bytes, *, chunked: bool) -> bytes:
        """Events that may hold the usage: read it, and take it out where the client did not ask for it."""
        start = framed.rfind(NO_CHOICES)
        usage = read_usage(framed[start:])
        if usage is None:
            return framed
        self.usage = usage
        return without_usage(framed) if self.hides_usage and chunked else framed


def _in_time_s(lease_s: float) -> float:
    """How old a hand-off may be when decode answers, for it to have been fetched within its lease."""
    return min(_IN_TIME * lease_s, lease_s - _UNDER_WAY_S)


def without_usage(framed: bytes) -> bytes:
    """The chunks without the event that has no choices; the others as they are.

    A chunk holds whole events here. One that does not is let through: better an event too many than one lost.
    """
    kept: list[bytes] = []
    position = 0
    for start, end, after in chunk_spans(framed):
        content = framed[start:end]
        if NO_CHOICES in content and content.startswith(b"data:") and content.endswith(b"\n\n"):
            events = content[:-2].split(b"\n\n")
            rest = b"".join(event + b"\n\n" for event in events if NO_CHOICES not in event)
            kept.append(chunk(rest) if rest else b"")
        else:
            kept.append(framed[position:after])
        position = after
    return b"".join((*kept, framed[position:]))


def prove(handed: Handed, *, first_s: float | None) -> None:
    """Count a hand-off whose answer is whole; `first_s`: what its first event took, of a stream."""
    decode, pair, usage = handed.decode, handed.pair, handed.usage
    if usage is not None and usage.prompt_tokens == 1:
        return  # the last token is always computed: of this prompt nothing was to be fetched
    cached = usage.cached_tokens if usage else None
    if cached is not None:
        decode.tells_cached = True
    elif usage is not None and decode.tells_cached:
        cached = 0  # some versions leave a zero out
    identity = decode.identity
    proof = judge(
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=cached,
        block_tokens=identity.block_size if identity else DEFAULT_BLOCK_TOKENS,
    )
    if first_s is not None and handed.alone and proof is Proof.PROVEN:
        pair.timed(
            first_s,
            tokens=handed.tokens,
            recompute_s=decode.prefill_model.ttft_s(handed.tokens),
            cold=handed.cold,
            step_s=decode.decode_model.itl_s(handed.tokens),
            wire_s=_wire_s(handed),
        )
    pair.record(proof, now_s=time.monotonic(), why=_why(handed, first_s))
    if proof is Proof.RECOMPUTED:
        log.warning(
            "hand-off recomputed", prefill=handed.source.name, decode=decode.name, cached_tokens=cached
        )


def _wire_s(handed: Handed) -> float:
    """The longest that its KV takes over the slower of the two fabrics; 0: one is not known."""
    sides = handed.source.identity, handed.decode.identity
    known = [side.kv_wire_s for side in sides if side is not None and side.kv_wire_s]
    return handed.tokens / 1_000 * max(known) if len(known) == len(sides) else 0.0


def _why(handed: Handed, first_s: float | None) -> str:
    """What a miss would come from, as far as can be told: engines that refuse each other do so at once."""
    if first_s is None or not handed.cold:
        return ""
    if has_timed_out(first_s):
        return words.HANDSHAKE_FAILED
    return "" if handed.pair.met else words.NOT_COMPATIBLE


def has_timed_out(took_s: float) -> bool:
    """Whether decode took so long for a hand-off that it has waited for a peer in vain."""
    return took_s > 0.9 * HANDSHAKE_TIMEOUT_S


def missed(pairs: PairMap, source: Instance, decode: Instance, why: str) -> None:
    """Count a hand-off that was not used, or not answered."""
    pairs[PairKey(source.name, decode.name)].record(Proof.RECOMPUTED, now_s=time.monotonic(), why=why)
