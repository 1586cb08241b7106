"""The arrivals of a run: a workload at another rate, from 0 on, and long enough to be scored.

A trace is sped up, as in published measurements: its bursts and phases become shorter, too. A composed
workload gets another rate, and its phases keep their length. The requests that a router recorded are replayed
as they were. `policy_runs` and the bench of policies ask for the arrivals of each run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from fulcrum_core.api.meta import format_duration
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_count
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import Slo
from fulcrum_simulator.workload import (
    COMPOSED,
    REQUESTS_MAX,
    LengthLimit,
    OverlongRequests,
    WorkloadRequest,
    compute_repeat_period_s,
    jitter_arrivals,
    repeat_until,
    scale_rate,
    shift_arrivals,
    speed_up_arrivals,
)

DURATION_MIN_S = 600.0
TTFT_OBJECTIVES_MIN = 50
"""Shortest run: 600 s and 50 times the TTFT objective. In a shorter one a queue has no time to grow."""
DURATION_MAX_S = 366 * 86400.0
"""Longest run. Router and autoscaler also work between arrivals, so that its length takes time, too."""
REPEATED_MAX = 1_000_000
"""Most requests of a load that is repeated: 1,600 a second for 600 s."""


class Load(Protocol):
    """A workload whose rate can be multiplied by a factor."""

    @property
    def name(self) -> str:
        """Shown to people."""

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:
        """Return the arrivals at `factor` times the rate. The seed decides all that is random in them."""


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A trace whose rate is multiplied by `scale`, with its times divided by `speed` and the factor."""

    name: str
    requests: Sequence[WorkloadRequest]
    scale: float = 1.0
    speed: float = 1.0

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:
        """See `Load`."""
        speed = self.speed * factor
        return prepare_load(self.requests, scale=self.scale, speed=speed, slo=slo, seed=seed, name=self.name)


@dataclass(frozen=True, slots=True)
class ReplayedLoad:
    """The requests of a service as it recorded them: neither moved nor repeated, at factor 1 only."""

    name: str
    requests: Sequence[WorkloadRequest]

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:  # noqa: ARG002
        """See `Load`."""
        assert factor == 1.0
        _check_duration(self.requests, self.name)
        return list(self.requests)


@dataclass(frozen=True, slots=True)
class ComposedLoad:
    """A composed workload; `scale` and the factor multiply its rate."""

    name: str
    profile: EngineProfile
    scale: float = 1.0

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:
        """See `Load`."""
        scale = self.scale * factor
        _check_count(_count_composed(self.name), scale, self.name)
        # A rate below that may be rounded to 0.
        generated = COMPOSED[self.name](max(scale, sys.float_info.min), seed)
        if not generated:
            raise InvalidInput("--scale", scale, f"leaves no request of {self.name}")
        requests, _ = leave_out_overlong(generated, self.profile)
        if not requests:
            count = format_count(len(generated), "request")
            raise InvalidInput(self.name, count, "has no request that fits the profile's KV cache")
        return _repeat_if_short(requests, slo, self.name)


@cache
def _count_composed(name: str) -> int:
    """Return how many requests a composed workload has at scale 1; other seeds differ by little."""
    return len(COMPOSED[name](1.0, 1))


def prepare_load(
    recorded: Sequence[WorkloadRequest],
    *,
    scale: float,
    speed: float,
    slo: Slo,
    seed: int,
    name: str = "the load",
) -> list[WorkloadRequest]:
    """Multiply the rate by `scale`, divide all times by `speed`, start at 0, and repeat a load too short.

    Arrivals move by up to half the gap to the neighbour on that side, as the seed says; with 0 none moves.

    Raises:
        InvalidInput: if no request is left, or if there are too many, or for too long a time.
    """
    _check_count(len(recorded), scale, name)
    scaled = recorded if scale == 1.0 else scale_rate(recorded, scale, seed=seed)
    if not scaled:
        raise InvalidInput("--scale", scale, f"leaves no request of {name}")
    started = list(shift_arrivals(scaled, -scaled[0].arrival_s))
    requests = list(speed_up_arrivals(jitter_arrivals(started, seed=seed), speed))
    _check_duration(requests, name)
    return _repeat_if_short(requests, slo, name)


def _repeat_if_short(requests: Sequence[WorkloadRequest], slo: Slo, name: str) -> list[WorkloadRequest]:
    duration_s = max(DURATION_MIN_S, TTFT_OBJECTIVES_MIN * slo.ttft_s)
    if duration_s > DURATION_MAX_S:
        rule = f"makes a run of {TTFT_OBJECTIVES_MIN} times that: a run lasts at most 366 days"
        raise InvalidInput("--slo-ttft", format_duration(slo.ttft_s), rule)
    period_s = compute_repeat_period_s(requests)
    if 0 < period_s < duration_s and len(requests) * (duration_s / period_s) > REPEATED_MAX:
        span = f"{format_count(len(requests), 'request')} in {requests[-1].arrival_s:g} s"
        rule = (
            f"must be repeated to last {duration_s:g} s: "
            f"at its rate that makes more than {REPEATED_MAX:,} requests"
        )
        raise InvalidInput(name, span, rule)
    return repeat_until(requests, duration_s)


def _check_count(requests: int, scale: float, name: str) -> None:
    """Refuse a scale before the copies are made."""
    if requests * scale > REQUESTS_MAX:
        rule = f"makes {requests * scale:,.0f} requests of {name}: the limit is {REQUESTS_MAX:,}"
        raise InvalidInput("--scale", f"{scale:g}", rule)


def _check_duration(requests: Sequence[WorkloadRequest], name: str) -> None:
    last_s = requests[-1].arrival_s
    if not last_s <= DURATION_MAX_S:  # not a number is refused, too
        raise InvalidInput(name, f"{last_s:g} s", "must last at most 366 days")


def leave_out_overlong(
    recorded: Sequence[WorkloadRequest], profile: EngineProfile
) -> tuple[list[WorkloadRequest], OverlongRequests | None]:
    """Leave out the requests that do not fit into the KV cache of an engine."""
    limit = LengthLimit(profile.kv_blocks * profile.block_size)
    return list(limit.filter(recorded)), limit.overlong
