"""The load generator: sends a workload to a service, checks the responses byte by byte, measures latencies.

`fulcrum play`, tests and `bench` use it. What arrives when is the workload's (`fulcrum_simulator.workload`).
"""

from fulcrum_simulator.client.generator import LoadGenerator, LoadTarget, split_address
from fulcrum_simulator.client.outcomes import (
    Latencies,
    LoadOutcome,
    LoadReport,
    LoadResults,
    OutcomeKind,
    TierCounts,
    summarize_latencies,
)

__all__ = [
    "Latencies",
    "LoadGenerator",
    "LoadOutcome",
    "LoadReport",
    "LoadResults",
    "LoadTarget",
    "OutcomeKind",
    "TierCounts",
    "split_address",
    "summarize_latencies",
]
