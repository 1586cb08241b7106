"""The arrivals of a run: a recorded workload at another rate, and long enough to be scored."""

from collections.abc import Sequence

from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import Slo
from fulcrum_simulator.workload import (
    LengthLimit,
    OverlongRequests,
    WorkloadRequest,
    jitter_arrivals,
    repeat_until,
    scale_rate,
    shift_arrivals,
    speed_up_arrivals,
)

DURATION_MIN_S = 600.0
TTFT_OBJECTIVES_MIN = 50
"""Shortest run: 600 s and 50 times the TTFT objective. In a shorter one a queue has no time to grow."""


def prepare_load(
    recorded: Sequence[WorkloadRequest], *, scale: float, speed: float, slo: Slo, seed: int
) -> list[WorkloadRequest]:
    """Multiply the rate by `scale`, divide all times by `speed`, start at 0, and repeat a load too short.

    Arrivals move by up to half the gap to the next one, as the seed says; with seed 0 none moves.
    """
    scaled = recorded if scale == 1.0 else scale_rate(recorded, scale, seed=seed)
    if not scaled:
        return []
    started = shift_arrivals(jitter_arrivals(scaled, seed=seed), -scaled[0].arrival_s)
    duration_s = max(DURATION_MIN_S, TTFT_OBJECTIVES_MIN * slo.ttft_s)
    return repeat_until(list(speed_up_arrivals(started, speed)), duration_s)


def leave_out_overlong(
    recorded: Sequence[WorkloadRequest], profile: EngineProfile
) -> tuple[list[WorkloadRequest], OverlongRequests | None]:
    """Leave out the requests that do not fit into the KV cache of an engine."""
    limit = LengthLimit(profile.kv_blocks * profile.block_size)
    return list(limit.filter(recorded)), limit.overlong
