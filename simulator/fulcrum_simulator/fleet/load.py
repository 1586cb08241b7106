"""The arrivals of a run: a workload at another rate, from 0 on, and long enough to be scored.

A trace is sped up, as in published measurements: its bursts and phases become shorter, too. A composed
workload gets another rate, and its phases keep their length. The requests that a router recorded are replayed
as they were. `policy_runs` asks for the arrivals of each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import Slo
from fulcrum_simulator.workload import (
    COMPOSED,
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
        return prepare_load(self.requests, scale=self.scale, speed=self.speed * factor, slo=slo, seed=seed)


@dataclass(frozen=True, slots=True)
class ReplayedLoad:
    """The requests of a service as it recorded them: neither moved nor repeated, at factor 1 only."""

    name: str
    requests: Sequence[WorkloadRequest]

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:  # noqa: ARG002
        """See `Load`."""
        assert factor == 1.0
        return list(self.requests)


@dataclass(frozen=True, slots=True)
class ComposedLoad:
    """A composed workload; `scale` and the factor multiply its rate."""

    name: str
    profile: EngineProfile
    scale: float = 1.0

    def prepare(self, factor: float, *, slo: Slo, seed: int) -> list[WorkloadRequest]:
        """See `Load`."""
        requests, _ = leave_out_overlong(COMPOSED[self.name](self.scale * factor, seed), self.profile)
        return _repeat_if_short(requests, slo)


def prepare_load(
    recorded: Sequence[WorkloadRequest], *, scale: float, speed: float, slo: Slo, seed: int
) -> list[WorkloadRequest]:
    """Multiply the rate by `scale`, divide all times by `speed`, start at 0, and repeat a load too short.

    Arrivals move by up to half the gap to the neighbour on that side, as the seed says; with 0 none moves.
    """
    scaled = recorded if scale == 1.0 else scale_rate(recorded, scale, seed=seed)
    if not scaled:
        return []
    started = list(shift_arrivals(scaled, -scaled[0].arrival_s))
    return _repeat_if_short(list(speed_up_arrivals(jitter_arrivals(started, seed=seed), speed)), slo)


def _repeat_if_short(requests: Sequence[WorkloadRequest], slo: Slo) -> list[WorkloadRequest]:
    return repeat_until(requests, max(DURATION_MIN_S, TTFT_OBJECTIVES_MIN * slo.ttft_s))


def leave_out_overlong(
    recorded: Sequence[WorkloadRequest], profile: EngineProfile
) -> tuple[list[WorkloadRequest], OverlongRequests | None]:
    """Leave out the requests that do not fit into the KV cache of an engine."""
    limit = LengthLimit(profile.kv_blocks * profile.block_size)
    return list(limit.filter(recorded)), limit.overlong
