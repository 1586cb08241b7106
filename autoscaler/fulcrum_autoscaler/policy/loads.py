"""The load of each role relative to its objective: LP and LD of Arrow's Algorithm 2.

LP = mean over prefill instances of queued prefill seconds / TTFT objective, LD = mean over decode instances
of inter-token latency / TPOT objective. Two things are added to Arrow's LD, since an engine whose KV cache is
full is fast, and lets requests wait: KV tokens / 0.8 of the cache counts if it is more, and 1 if requests
wait in the router for room in decode.

An idle instance has load 0. The load of an instance is unknown if its queued seconds or its latency are NaN,
infinite or negative, or if it decodes and reports no latency. An unknown load counts as 0 in `low` and as 1
in `high`, as the horizontal pod autoscaler treats missing pods; `high` is no upper bound, since a load can be
above 1. A rule that adds a decode instance must hold for decode's `low` and prefill's `high`, a rule that
removes one for decode's `high` (`arrow`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fulcrum_autoscaler.policy.observation import Observation
from fulcrum_core.formatting import format_count
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import Role, Slo

KV_LOAD_OF_ONE = 0.8
"""Share of the KV cache that counts as a load of 1: from there on prompts may wait for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Mean load of one role as a ratio to its objective; `low` equals `high` if all loads are known."""

    low: float
    """Mean with each unknown load counted as 0."""
    high: float
    """Mean with each unknown load counted as 1."""
    instances: int
    """Serving instances of the role."""
    unknown: int
    """Instances among them whose load is unknown."""

    def __str__(self) -> str:
        if self.unknown:
            of_all = format_count(self.instances, "instance")
            return f"{self.low:.2f} to {self.high:.2f} ({self.unknown} of {of_all} without a figure)"
        return f"{self.low:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The load of both roles; None if no instance serves the role or none has a known load."""

    prefill: Load | None
    decode: Load | None

    def __str__(self) -> str:
        return f"prefill load {self.prefill or 'unknown'}, decode load {self.decode or 'unknown'}"


def measure_loads(observation: Observation, slo: Slo) -> Loads:
    """Compute LP and LD over the serving instances."""
    return Loads(
        prefill=_mean(_prefill_load(state, slo) for state in observation.serving_states(Role.PREFILL)),
        decode=_mean(_decode_load(state, slo) for state in observation.serving_states(Role.DECODE)),
    )


def _prefill_load(state: InstanceState, slo: Slo) -> float | None:
    return _ratio(state.prefill_queued_s, slo.ttft_s)


def _decode_load(state: InstanceState, slo: Slo) -> float | None:
    if state.decode_legs == 0 and state.decode_tokens == 0:
        return 0.0
    load = _ratio(state.itl_s, slo.tpot_s)
    if load is None:
        return None
    if state.decode_is_full:
        load = max(load, 1.0)
    if state.kv_capacity_tokens:
        load = max(load, state.decode_tokens / (KV_LOAD_OF_ONE * state.kv_capacity_tokens))
    return load


def _ratio(measured_s: float | None, objective_s: float) -> float | None:
    if measured_s is None or not math.isfinite(measured_s) or measured_s < 0:
        return None
    return measured_s / objective_s


def _mean(ratios: Iterable[float | None]) -> Load | None:
    all_ratios = list(ratios)
    known = [ratio for ratio in all_ratios if ratio is not None]
    if not known:
        return None
    unknown = len(all_ratios) - len(known)
    total = math.fsum(known)  # exact, so that the order of instances does not matter
    return Load(
        low=total / len(all_ratios),
        high=(total + unknown) / len(all_ratios),
        instances=len(all_ratios),
        unknown=unknown,
    )
