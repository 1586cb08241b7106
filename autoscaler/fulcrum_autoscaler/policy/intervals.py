"""Pauses of the autoscaler between its decisions, as constants that the simulator uses, too.

`loop` and the simulated autoscaler wait by them. The tick interval is a setting of each service instead.
"""

ACKNOWLEDGEMENT_TIMEOUT_S = 0.25
"""Longest wait for the router to apply the generation on which a decision is based."""
REFUSAL_PAUSE_S = 0.1
"""Pause after a refused flip request: an overloaded router sends one with every client request."""
