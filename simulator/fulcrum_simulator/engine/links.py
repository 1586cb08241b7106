"""The wire between two engines: queues at both ends, and the one-time handshake of a pair.

Pure bookkeeping of who is busy until when. The discrete-event simulator holds both ends and uses
`reserve_transfer`; an engine server holds one end and reserves that alone.
"""

from dataclasses import dataclass

HANDSHAKE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReservation:
    """A reserved span of time on a link."""

    start_s: float
    end_s: float


@dataclass(slots=True)
class LinkEnd:
    """One direction of one engine's network: transfers run one after another, as they were reserved."""

    busy_until_s: float = 0.0

    def reserve(self, duration_s: float, *, now_s: float) -> LinkReservation:
        """The first free span of `duration_s` from `now_s` on."""
        start_s = max(now_s, self.busy_until_s)
        self.busy_until_s = start_s + duration_s
        return LinkReservation(start_s=start_s, end_s=self.busy_until_s)


def estimate_transfer_s(kv_bytes: int, *, link_bytes_per_s: float, link_setup_s: float) -> float:
    """Time on the wire of one pull: setup + bytes / link."""
    return link_setup_s + kv_bytes / link_bytes_per_s


def reserve_transfer(
    egress: LinkEnd, ingress: LinkEnd, duration_s: float, *, now_s: float
) -> LinkReservation:
    """The first span in which the giver's egress and the taker's ingress are both free; takes it on both."""
    slot = egress.reserve(duration_s, now_s=max(now_s, ingress.busy_until_s))
    ingress.busy_until_s = slot.end_s
    return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """When a first contact ends, and whether the peer answered."""

    end_s: float
    ok: bool


class HandshakeQueue:
    """A taker's first contacts: once per peer engine id, one after another.

    An unreachable peer blocks all further first contacts for `HANDSHAKE_TIMEOUT_S`; known peers are not
    delayed.
    """

    def __init__(self, handshake_s: float) -> None:
        self._handshake_s = handshake_s
        self._known: dict[str, float] = {}
        self._queue = LinkEnd()

    def knows(self, engine_id: str) -> bool:
        """Whether a handshake with this engine was started and did not fail."""
        return engine_id in self._known

    def reserve_handshake(self, engine_id: str, *, reachable: bool, now_s: float) -> HandshakeResult:
        """When this peer's blocks can be read: at once if known, else after the handshakes before it."""
        if engine_id in self._known:
            return HandshakeResult(end_s=max(now_s, self._known[engine_id]), ok=True)
        slot = self._queue.reserve(self._handshake_s if reachable else HANDSHAKE_TIMEOUT_S, now_s=now_s)
        if reachable:
            self._known[engine_id] = slot.end_s
        return HandshakeResult(end_s=slot.end_s, ok=reachable)

    def forget(self, engine_id: str) -> None:
        """Drop a peer (its time to live ran out, or it died): the next pull shakes hands again."""
        self._known.pop(engine_id, None)
