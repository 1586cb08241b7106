"""Why a leg failed: the label in metrics and logs, and what the journey of its request decides from."""

from enum import StrEnum


class Failure(StrEnum):
    """Cause of a failed leg."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    """No connection within the time-out, or no route: a dead node refuses nothing."""
    EJECTED = "ejected"
    """The instance was ejected while the leg waited for it."""
    REMOVED = "removed"
    """The instance was removed, or got another address, while the leg waited for it."""
    CLOSED = "closed"
    TIMEOUT = "timeout"
    TOO_LONG = "too_long"
    """The engine was working, and the whole response took longer than its tokens allow: never retried."""
    STATUS = "status"
    ABORTED = "aborted"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    """The response is larger than the router buffers; the request asked for it."""
    NO_SOCKET = "no_socket"
    """The router itself has no free socket or port."""
    NO_KV_TRANSFER_PARAMS = "no_kv_transfer_params"
    LEASE_EXPIRED = "lease_expired"
    """The response was so late that its KV may have been fetched after the lease had expired."""

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call
