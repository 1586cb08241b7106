"""The load generator: offers a workload to a service, checks every byte of the answers, measures."""

from fulcrum_simulator.client.generator import LoadGenerator, Target
from fulcrum_simulator.client.outcomes import Ending, Latencies, Outcome, Report, Tally, latencies, percentile

__all__ = [
    "Ending",
    "Latencies",
    "LoadGenerator",
    "Outcome",
    "Report",
    "Tally",
    "Target",
    "latencies",
    "percentile",
]
