"""The system clock as the port `Clock`, for code that tests and simulations run with another clock.

The router's data path reads `time.monotonic()` itself. Pure code takes the time as an argument.
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
