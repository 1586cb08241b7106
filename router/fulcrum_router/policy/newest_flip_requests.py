"""The newest flip request for each role. A reader passes the number of the last one that it has seen.

Of several requests for one role the newest is enough, since the autoscaler decides by the state that it reads
then. A request for the other role needs its own decision: a flip to decode may be refused (floor, pin) where
a flip to prefill is granted. `fleet.flip_requests` adds the waiting for the router; the simulated router uses
these alone.
"""

from fulcrum_core.router_state import FlipRequest
from fulcrum_core.values import Role


class NewestFlipRequests:
    """The newest flip request for each role, with numbers in the order of submission."""

    def __init__(self) -> None:
        self.last: FlipRequest | None = None
        """The newest of all."""
        self._by_role: dict[Role, FlipRequest] = {}

    @property
    def seq(self) -> int:
        """Number of the last flip request; 0: none yet."""
        return self.last.seq if self.last else 0

    def submit(self, role: Role, reason: str) -> None:
        """Replace the flip request for `role`."""
        self.last = self._by_role[role] = FlipRequest(seq=self.seq + 1, role=role, reason=reason)

    def find_after(self, seq: int) -> FlipRequest | None:
        """Return the last flip request, with the newest for the other role; only those after number `seq`."""
        last = self.last
        if last is None or last.seq <= seq:
            return None
        for request in self._by_role.values():
            if request is not last and request.seq > seq:
                return last.model_copy(update={"other": request})
        return last
