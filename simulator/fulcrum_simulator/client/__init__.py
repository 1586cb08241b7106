"""The load generator: sends a workload to a service, checks the responses byte by byte, measures
latencies.
"""

from fulcrum_simulator.client.generator import LoadGenerator, LoadTarget
from fulcrum_simulator.client.outcomes import (
    Latencies,
    LoadReport,
    LoadResults,
    OutcomeKind,
    RequestOutcome,
    summarize_latencies,
)

__all__ = [
    "Latencies",
    "LoadGenerator",
    "LoadReport",
    "LoadResults",
    "LoadTarget",
    "OutcomeKind",
    "RequestOutcome",
    "summarize_latencies",
]
