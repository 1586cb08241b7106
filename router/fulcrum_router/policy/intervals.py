"""Intervals at which the router's policies see the world. The simulator uses the same."""

PROBE_INTERVAL_S = 1.0
"""Between two reads of an engine's metrics."""
SWEEP_INTERVAL_S = 0.1
"""Between two checks of all time-outs and of the waiting room; a time-out ends up to so much late."""
CANARY_IDLE_S = 300.0
"""Between two canaries on a pair without traffic."""
