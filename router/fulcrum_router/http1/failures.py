"""Why a leg failed: the label in metrics and logs, and the exception that legs raise."""

from enum import StrEnum


class Failure(StrEnum):
    """Cause of a failed leg."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    """No connection within the time-out, or no route: a dead node refuses nothing."""
    EJECTED = "ejected"
    """The instance was ejected or removed while the leg waited for it."""
    CLOSED = "closed"
    TIMEOUT = "timeout"
    STATUS = "status"
    ABORTED = "aborted"
    MALFORMED = "malformed"
    NO_KV_TRANSFER_PARAMS = "no_kv_transfer_params"
    LEASE_EXPIRED = "lease_expired"
    """The response was so late that its KV may have been fetched after the lease had expired."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


class LegFailed(Exception):
    """A leg that ended without a usable response. `status` is the engine's HTTP status, 0 if it sent none."""

    def __init__(
        self, failure: Failure, detail: str, *, status: int = 0, may_have_started: bool = True
    ) -> None:
        super().__init__(detail)
        self.failure, self.detail, self.status = failure, detail, status
        self.may_have_started = may_have_started
        """Whether the engine may have started the request, and so may have fetched the prompt's KV."""
