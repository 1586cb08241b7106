"""Workloads: recorded and generated request arrivals, and transforms of arrival times.

Sends nothing; see `client`.
"""

from fulcrum_simulator.workload.composed import COMPOSED
from fulcrum_simulator.workload.generated import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    GeneratedWorkload,
    LengthDistribution,
    MixPeriod,
    TrafficMix,
    WorkloadPhase,
    generate_bursty,
    generate_moving,
    generate_steady,
)
from fulcrum_simulator.workload.prefix_hits import find_block_tokens, leave_out_prefix_hits
from fulcrum_simulator.workload.requests import LengthLimit, OverlongRequests, WorkloadRequest
from fulcrum_simulator.workload.traces import REQUESTS_MAX, TOKENS_MAX, Trace, load_trace
from fulcrum_simulator.workload.transforms import (
    compute_repeat_period_s,
    jitter_arrivals,
    repeat_until,
    scale_rate,
    shift_arrivals,
    speed_up_arrivals,
)

__all__ = [
    "CHAT",
    "CODE",
    "COMPOSED",
    "DECODE_HEAVY",
    "PREFILL_HEAVY",
    "REQUESTS_MAX",
    "TOKENS_MAX",
    "GeneratedWorkload",
    "LengthDistribution",
    "LengthLimit",
    "MixPeriod",
    "OverlongRequests",
    "Trace",
    "TrafficMix",
    "WorkloadPhase",
    "WorkloadRequest",
    "compute_repeat_period_s",
    "find_block_tokens",
    "generate_bursty",
    "generate_moving",
    "generate_steady",
    "jitter_arrivals",
    "leave_out_prefix_hits",
    "load_trace",
    "repeat_until",
    "scale_rate",
    "shift_arrivals",
    "speed_up_arrivals",
]
