"""The port by which `decode_response` calls the leg in `decode`: its events, and what the leg decides.

So `decode_response` does not import the leg, and its tests pass another observer.
"""

from typing import Protocol

from fulcrum_router.data_path.continuation import Continuation


class ResponseObserver(Protocol):
    """The leg of a response, as the response calls it."""

    @property
    def max_response_s(self) -> float:
        """Seconds that the stream may take, however steadily its bytes come."""

    def count_tokens(self, events: int) -> int:
        """Output tokens of the next events of the stream, which have several tokens each."""

    def record_first_byte(self, now_s: float) -> None:
        """The first byte is sent to the client."""

    def doubts_rejection(self) -> bool:
        """Whether a 4xx of the engine fails the leg, so that another engine is asked."""

    def start_lease_check(self) -> None:
        """The response is withheld: have `check_kv_leases` run."""

    @property
    def continuation(self) -> Continuation | None:
        """What is kept of the stream; its `stream` is set if another engine has begun it."""

    def extend_deadline(self, now_s: float) -> float:
        """No byte of the head came up to the deadline; see `ResponseHandler.extend_deadline`."""
