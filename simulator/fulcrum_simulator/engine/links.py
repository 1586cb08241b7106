"""Computes when KV transfers and handshakes between two engines end; transfers nothing.

`reserve_transfer` and `HandshakeQueue` are for simulations that hold both engines of a transfer. An engine
server holds one end of each link, reserves that end alone, and does real handshakes.
"""

from dataclasses import dataclass

HANDSHAKE_TIMEOUT_S = 5.0
"""Time after which a handshake with an unreachable prefill instance fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReservation:
    """A reserved span of time on a link."""

    start_s: float
    end_s: float


@dataclass(slots=True)
class LinkEnd:
    """One direction of one engine's network link.

    Transfers run one after another, in order of reservation.
    """

    busy_until_s: float = 0.0

    def reserve(self, duration_s: float, *, now_s: float) -> LinkReservation:
        """Reserve `duration_s` after all earlier reservations, from `now_s` on."""
        start_s = max(now_s, self.busy_until_s)
        self.busy_until_s = start_s + duration_s
        return LinkReservation(start_s=start_s, end_s=self.busy_until_s)


def estimate_transfer_s(kv_bytes: int, *, link_bytes_per_s: float, link_setup_s: float) -> float:
    """Return the duration of one pull: link_setup_s + kv_bytes / link_bytes_per_s."""
    return link_setup_s + kv_bytes / link_bytes_per_s


def reserve_transfer(
    egress: LinkEnd, ingress: LinkEnd, duration_s: float, *, now_s: float
) -> LinkReservation:
    """Reserve `duration_s` after all earlier reservations of the prefill instance's egress and of the decode
    instance's ingress.
    """
    slot = egress.reserve(duration_s, now_s=max(now_s, ingress.busy_until_s))
    ingress.busy_until_s = slot.end_s
    return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """The end time of a handshake, and whether it succeeded."""

    end_s: float
    ok: bool


class HandshakeQueue:
    """The handshakes of one decode instance: one per engine id of a prefill instance, one after another.

    The handshake comes with the first pull. An unreachable prefill instance delays all later handshakes by
    `HANDSHAKE_TIMEOUT_S`. Pulls from known instances are not delayed.
    """

    def __init__(self, handshake_s: float) -> None:
        self._handshake_s = handshake_s
        self._known: dict[str, float] = {}
        self._queue = LinkEnd()

    def assume_known(self, engine_id: str) -> None:
        """Count the handshake with this engine as done."""
        self._known[engine_id] = 0.0

    def reserve_handshake(self, engine_id: str, *, reachable: bool, now_s: float) -> HandshakeResult:
        """Return when the engine's blocks can be pulled: now if its handshake is done, else when that
        handshake ends.
        """
        if engine_id in self._known:
            return HandshakeResult(end_s=max(now_s, self._known[engine_id]), ok=True)
        slot = self._queue.reserve(self._handshake_s if reachable else HANDSHAKE_TIMEOUT_S, now_s=now_s)
        if reachable:
            self._known[engine_id] = slot.end_s
        return HandshakeResult(end_s=slot.end_s, ok=reachable)
