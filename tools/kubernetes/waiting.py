"""Waiting for what other processes do: a condition, a deadline, and words for what did not come."""

import http.client
import time
from collections.abc import Callable

POLL_S = 0.05


def wait_for(condition: Callable[[], bool | None], description: str, *, timeout_s: float = 120.0) -> float:
    """Polls until the condition holds and returns the seconds that took; an error in it means not yet.

    None is the answer of what can only fail. Nothing but these is one: an empty list would seem to hold.
    Raises TimeoutError, with the last error as its cause.
    """
    begin = time.monotonic()
    while (error := _find_failure(condition)) is not None:
        if time.monotonic() - begin > timeout_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {description}") from error
        time.sleep(POLL_S)
    return time.monotonic() - begin


def succeeds(function: Callable[..., object], *arguments: object) -> bool:
    """False for a false answer and for an error: what is asked for may not be there yet."""
    return _find_failure(lambda: function(*arguments)) is None


def _find_failure(condition: Callable[[], object]) -> Exception | None:
    try:
        result = condition()
    except (OSError, RuntimeError, ValueError, LookupError, http.client.HTTPException) as error:
        return error
    return RuntimeError("the condition returned False") if result is False else None
