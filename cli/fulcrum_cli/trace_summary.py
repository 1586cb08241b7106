"""Describes a recorded workload in one line, so that the layout that was found in its file can be checked.

The commands `bounds` and `simulate` print the line.
"""

from fulcrum_core.formatting import format_count
from fulcrum_simulator.bounds import mean_rate
from fulcrum_simulator.workload import Trace


def describe_trace(trace: Trace) -> str:
    """Return the number of requests, the layout and the rate; no rate for a single time of arrival."""
    requests = trace.requests
    failed = f", {trace.failed:,} that failed left out" if trace.failed else ""
    text = f"{format_count(len(requests), 'request')}{failed} ({trace.layout} layout)"
    if requests[-1].arrival_s <= requests[0].arrival_s:
        return text
    return f"{text}, {mean_rate(requests):.3g} a second as recorded"
