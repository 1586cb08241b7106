"""Waits for a condition of other processes, with a deadline and a description for the error.

Test clusters, their tests and `bench` use it, without an event loop; `tests/waiting.py` is for tests on one.
"""

import http.client
import time
from collections.abc import Callable

POLL_S = 0.05


def wait_for(
    condition: Callable[[], bool | None],
    description: str,
    *,
    timeout_s: float = 120.0,
    interval_s: float = POLL_S,
) -> float:
    """Poll until the condition is true and return the seconds that took; an exception counts as false.

    The condition returns True, False, or None (true unless it raised); other values count as true.
    `interval_s` is the time between two polls; use a longer one if a poll costs the machine something.

    Raises:
        TimeoutError: with the last exception as its cause.
    """
    begin = time.monotonic()
    while (error := _find_failure(condition)) is not None:
        if time.monotonic() - begin > timeout_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {description}") from error
        time.sleep(interval_s)
    return time.monotonic() - begin


def succeeds(function: Callable[..., object], *arguments: object) -> bool:
    """Call the function; return False if it returned False or raised an error of I/O or of lookup."""
    return _find_failure(lambda: function(*arguments)) is None


def _find_failure(condition: Callable[[], object]) -> Exception | None:
    try:
        result = condition()
    except (OSError, RuntimeError, ValueError, LookupError, http.client.HTTPException) as error:
        return error
    return RuntimeError("the condition returned False") if result is False else None
