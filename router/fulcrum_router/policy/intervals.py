"""Intervals of the router's probes, checks of time-outs and canaries, which the simulator uses, too.

Constants only: `server`, `observe.engines` and `canaries` wait by them, and so do the simulated router's
events.
"""

PROBE_INTERVAL_S = 1.0
"""Time between two reads of an engine's metrics."""
SWEEP_INTERVAL_S = 0.1
"""Time between two checks of all time-outs and of the waiting room, by which a time-out can be late."""
CANARY_IDLE_S = 300.0
"""Time between two canaries on a pair without traffic."""
