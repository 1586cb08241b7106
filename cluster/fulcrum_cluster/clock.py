"""Implements the port `Clock` with the system's clock; tests and simulations pass another implementation.

The router's data path and some other code read `time.monotonic()` themselves. Pure code takes the time as an
argument.
"""

import time


class SystemClock:
    """`fulcrum_core.ports.Clock` read from the system."""

    def now_s(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()
