"""The system's clocks, for shells. Pure code takes the time as an argument; tests have their own clocks."""

import time


class SystemClock:
    """`fulcrum_core.ports.Clock` read from the system."""

    def now_s(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()
