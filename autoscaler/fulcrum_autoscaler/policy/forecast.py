"""Forecast of the work that will arrive: rates between two sums of the router's demand. Used by `balanced`.

The rates are taken over the shortest of the last intervals in which enough requests arrived, so that a busy
service is judged by its last seconds and a quiet one by its last half minute.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fulcrum_core.router_state import DemandState, DemandSums, RouterState

REQUESTS_MIN = 40
"""Arrivals from which the rates are computed, if the last `SPAN_MAX_S` had as many."""
SPAN_MAX_S = 30.0
SAMPLES_MAX = 64
"""Snapshots that are kept; with more ticks in `SPAN_MAX_S`, every second one is dropped."""


@dataclass(frozen=True, slots=True)
class DemandSample:
    """The router's sums at one time, unix seconds."""

    at_s: float
    demand: DemandState


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What arrives in one second."""

    requests: float
    prefill: float
    """Seconds of prefill work: the prefill instances that would be busy all the time."""
    output_tokens: float
    token_steps: float
    """KV tokens times decode steps; times the inter-token latency: the KV tokens in use, in the long run."""


def add_sample(samples: tuple[DemandSample, ...], state: RouterState) -> tuple[DemandSample, ...]:
    """Append the state's sums, and drop what is too old.

    After a restart of the router only the new sums count; without any in the state, none are kept.
    """
    if state.demand is None:
        return ()
    if samples and (state.at_s <= samples[-1].at_s):
        return samples
    if samples and state.demand.requests < samples[-1].demand.requests:
        samples = ()
    kept = tuple(sample for sample in samples if sample.at_s >= state.at_s - SPAN_MAX_S)
    if len(kept) >= SAMPLES_MAX:
        kept = kept[::2]
    return (*kept, DemandSample(state.at_s, state.demand))


def compute_rates(samples: tuple[DemandSample, ...]) -> Rates | None:
    """Compute the rates of the last seconds; None with fewer than two samples.

    Work that was withdrawn does not count. It may have been counted before the first sample, which then makes
    a rate too low, but never negative.
    """
    if len(samples) < 2:
        return None
    last = samples[-1]
    arrived = _count_served(last.demand)
    first = next(
        (s for s in reversed(samples[:-1]) if arrived - _count_served(s.demand) >= REQUESTS_MIN), samples[0]
    )
    span_s = last.at_s - first.at_s
    now, before = last.demand, first.demand

    def rate(read: Callable[[DemandSums], float]) -> float:
        withdrawn = read(now.withdrawn) - read(before.withdrawn)
        return max(0.0, read(now) - read(before) - withdrawn) / span_s

    return Rates(
        requests=rate(lambda sums: sums.requests),
        prefill=rate(lambda sums: sums.prefill_s),
        output_tokens=rate(lambda sums: sums.output_tokens),
        token_steps=rate(lambda sums: sums.token_steps),
    )


def _count_served(demand: DemandState) -> int:
    return demand.requests - demand.withdrawn.requests
