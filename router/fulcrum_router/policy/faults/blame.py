"""Who caused the failure of a leg: the engine, the load, the client, the network or the router.

Only engine and network count towards ejecting the instance (`is_sickness`). After shed load dispatch
prefers other instances for a while. A request that asks for too large an answer, or a router without sockets,
says nothing about the instance. Whether a 5xx (except 503) or a 4xx (except 429) is the engine's fault is not
decided here: `data_path.leg_outcomes` waits for what other engines answer.

The legs report with it what happened to an instance, and the router's `Health` records counts it.
"""

from enum import StrEnum

from fulcrum_router.policy.faults.failures import Failure


class Blame(StrEnum):
    """Who caused the failure of a leg."""

    ENGINE = "engine"
    LOAD = "load"
    """The engine works, and has more work than it can do in time."""
    CLIENT = "client"
    NETWORK = "network"
    ROUTER = "router"

    __hash__ = str.__hash__  # counted on the data path: an enum's own hash is a Python call


SHED_STATUSES = frozenset({429, 503})
"""HTTP statuses with which an engine refuses work because it has too much."""
_BLAME = {
    Failure.REFUSED: Blame.NETWORK,
    Failure.UNREACHABLE: Blame.NETWORK,
    Failure.NO_SOCKET: Blame.ROUTER,
    Failure.EJECTED: Blame.ENGINE,
    Failure.REMOVED: Blame.ROUTER,
    Failure.CLOSED: Blame.ENGINE,
    Failure.ABORTED: Blame.ENGINE,
    Failure.MALFORMED: Blame.ENGINE,
    Failure.NO_KV_TRANSFER_PARAMS: Blame.ENGINE,
    Failure.TOO_LARGE: Blame.CLIENT,
    Failure.LEASE_EXPIRED: Blame.LOAD,
}
_LATE = (Failure.TIMEOUT, Failure.TOO_LONG)
_CONSEQUENCES = frozenset({Failure.EJECTED, Failure.NO_KV_TRANSFER_PARAMS})
"""Failures that are known of the instance already, or concern its settings and not its health."""


def find_blame(failure: Failure, *, status: int, probes_answered: bool) -> Blame:
    """Find who caused a failure. Not for those of `is_ambiguous` and `is_rejection`: see `LegOutcomes`.

    Args:
        failure: Why the leg failed.
        status: HTTP status of the engine; 0: none.
        probes_answered: Whether the engine answers probes: one that is late with a leg then has a queue.
    """
    if failure is Failure.STATUS:
        if status in SHED_STATUSES:
            return Blame.LOAD
        return Blame.CLIENT if 400 <= status < 500 else Blame.ENGINE
    if failure in _LATE:
        return Blame.LOAD if probes_answered else Blame.ENGINE
    return _BLAME[failure]


def is_sickness(failure: Failure, blame: Blame) -> bool:
    """Whether the failure counts towards ejecting the instance.

    Not if it is ejected already, nor if its settings are the cause (no KV transfer parameters).
    """
    return blame in (Blame.ENGINE, Blame.NETWORK) and failure not in _CONSEQUENCES


def is_rejection(failure: Failure, status: int) -> bool:
    """Whether the engine rejected the request: a 4xx other than 429."""
    return failure is Failure.STATUS and 400 <= status < 500 and status not in SHED_STATUSES


def needs_another_engine(status: int) -> bool:
    """Whether to ask other engines before a client gets a response with this status.

    Also if it is a redirect or a success other than 200: no engine that works responds so, and one that
    always does would look like the one with the least work.
    """
    return status >= 500 or status in SHED_STATUSES or (status != 200 and status < 400)


def is_ambiguous(failure: Failure, status: int) -> bool:
    """Whether engine or request may have caused the failure: a 5xx that sheds no load.

    The response of another engine distinguishes them: the same from two engines is caused by the request.
    """
    return failure is Failure.STATUS and status >= 500 and status not in SHED_STATUSES
