"""Compared policies that choose a split at intervals. They exist only in the simulator.

The Dynamo-like and the Narwhal-like planner imitate published systems; the third knows the whole workload.
`docs/simulate.md` describes all three. The number of instances is fixed and all have the same hardware:
a planner can only change roles. It returns the split; `SplitController` flips the instances.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Role, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTraffic:
    """Traffic of the last `TRAFFIC_WINDOW_S`: rate of requests, mean lengths of prompts and outputs."""

    rate_rps: float
    input_tokens: float
    output_tokens: float


TRAFFIC_WINDOW_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerView:
    """What a planner knows at one time. The models are means of those that the router has learned."""

    now_s: float
    state: RouterState
    traffic: RecentTraffic
    prefill_model: PrefillModel
    decode_model: DecodeModel
    kv_capacity_tokens: int
    slo: Slo

    def list_role(self, role: Role) -> list[InstanceState]:
        """Return the serving instances of a role."""
        return [each for each in self.state.instances if each.serving and each.role is role]


class SplitPlanner(Protocol):
    """Chooses a split at every `interval_s`."""

    @property
    def interval_s(self) -> float:
        """Seconds between two plans."""

    def plan(self, view: PlannerView) -> tuple[int, str]:
        """Return the desired number of prefill instances, and the reason."""


class DynamoLikePlanner:
    """NVIDIA Dynamo's planner: every 180 s a split by forecast, otherwise at most one flip by load every 5 s.

    Forecast: the traffic of the last window repeats (Dynamo's constant predictor). The instances are divided
    in proportion to `compute_needs`. Load: a role gets one more instance if all of its instances exceed their
    objective, and the other role, with one instance less, would stay below 0.8 of its own.
    """

    interval_s = 5.0

    def __init__(self) -> None:
        self._forecast_at_s = 0.0

    def plan(self, view: PlannerView) -> tuple[int, str]:
        """See `SplitPlanner`."""
        prefill, decode = view.list_role(Role.PREFILL), view.list_role(Role.DECODE)
        total = len(prefill) + len(decode)
        if view.now_s - self._forecast_at_s >= TRAFFIC_WINDOW_S and view.traffic.rate_rps:
            self._forecast_at_s = view.now_s
            need = compute_needs(view)
            if need[0] + need[1] > 0:
                share = need[0] / (need[0] + need[1])
                return min(max(1, round(total * share)), total - 1), "forecast of 180 s"
        own_s = view.prefill_model.ttft_s(view.traffic.input_tokens)
        slo = view.slo
        late = bool(prefill) and all(each.prefill_queued_s + own_s > slo.ttft_s for each in prefill)
        slow = bool(decode) and all((each.itl_s or 0.0) > slo.tpot_s for each in decode)
        if late and not slow and len(decode) > 1 and _keeps_decode(decode, view):
            return len(prefill) + 1, "every prefill instance exceeds the TTFT objective"
        if slow and not late and len(prefill) > 1 and _keeps_prefill(prefill, own_s, view):
            return len(prefill) - 1, "every decode instance exceeds the TPOT objective"
        return len(prefill), "load within the objectives"


_SPARE = 0.8


def _keeps_decode(decode: Sequence[InstanceState], view: PlannerView) -> bool:
    tokens = sum(each.decode_tokens for each in decode) / (len(decode) - 1)
    fits = tokens < _SPARE * view.kv_capacity_tokens
    return fits and view.decode_model.itl_s(tokens) < _SPARE * view.slo.tpot_s


def _keeps_prefill(prefill: Sequence[InstanceState], own_s: float, view: PlannerView) -> bool:
    queued_s = sum(each.prefill_queued_s for each in prefill) / (len(prefill) - 1)
    return queued_s < _SPARE * (view.slo.ttft_s - own_s)


def compute_needs(view: PlannerView) -> tuple[float, float]:
    """Return how many prefill and decode instances the traffic keeps busy, with TPOT within its objective.

    Prefill: rate · T(n). Decode: rate · m · I / batch. T(n): prefill time of the mean prompt; m: mean output
    tokens; I: ITL of the largest batch within the TPOT objective and the KV capacity.
    """
    traffic, slo = view.traffic, view.slo
    prefill = traffic.rate_rps * view.prefill_model.ttft_s(traffic.input_tokens)
    context = traffic.input_tokens + traffic.output_tokens / 2
    tokens_max = min(view.decode_model.max_tokens(slo.tpot_s), float(view.kv_capacity_tokens))
    batch = max(1.0, tokens_max / context) if context else 1.0
    itl_s = view.decode_model.itl_s(batch * context)
    return prefill, traffic.rate_rps * traffic.output_tokens * itl_s / batch


class NarwhalLikePlanner:
    """Narwhal's planner: of the current split and its two neighbours, the one with the lowest score.

    The score is the worst ratio of predicted TTFT, TPOT and KV use to its limit. A neighbour must be better
    by `deadband` in two plans in a row.
    """

    interval_s = 5.0
    deadband = 0.1

    def __init__(self) -> None:
        self._proposed: int | None = None

    def plan(self, view: PlannerView) -> tuple[int, str]:
        """See `SplitPlanner`."""
        prefill, decode = view.list_role(Role.PREFILL), view.list_role(Role.DECODE)
        now, total = len(prefill), len(prefill) + len(decode)
        if total < 2:
            return now, "fewer than two instances serve"
        scores = {
            count: _score(view, count, total - count) for count in range(max(1, now - 1), min(total, now + 2))
        }
        best = min(scores, key=lambda count: (scores[count], abs(count - now), count))
        confirmed = self._proposed == best
        better = best != now and scores[best] < scores.get(now, math.inf) - self.deadband
        self._proposed = best if better else None
        if better and confirmed:
            return best, f"worst ratio {scores[best]:.2f} instead of {scores.get(now, math.inf):.2f}"
        return now, "no neighbour was better twice in a row"


def _score(view: PlannerView, prefill: int, decode: int) -> float:
    """Return the worst ratio of predicted TTFT, TPOT and KV use to its limit, for a split."""
    instances, traffic, slo = view.state.instances, view.traffic, view.slo
    own_s = view.prefill_model.ttft_s(traffic.input_tokens)
    busy = min(0.98, traffic.rate_rps * own_s / prefill)
    backlog_s = sum(each.prefill_queued_s for each in instances) / prefill
    ttft_s = backlog_s + own_s * (1.0 + busy / (1.0 - busy) / prefill)
    tokens = sum(each.decode_tokens for each in instances) / decode
    tpot_s = view.decode_model.itl_s(tokens)
    return max(ttft_s / slo.ttft_s, tpot_s / slo.tpot_s, tokens / view.kv_capacity_tokens)


class KnownSplitPlanner:
    """The policy clairvoyant: returns a split per interval that was computed beforehand from all requests."""

    def __init__(self, interval_s: float, prefill: Sequence[int]) -> None:
        self.interval_s = interval_s
        self._prefill = prefill

    @property
    def first_prefill(self) -> int:
        """Prefill instances with which the run starts."""
        return self._prefill[0]

    def plan(self, view: PlannerView) -> tuple[int, str]:
        """See `SplitPlanner`."""
        number = min(round(view.now_s / self.interval_s), len(self._prefill) - 1)
        return self._prefill[number], "all requests are known"


def measure_traffic(
    arrivals: Sequence[tuple[float, int]], outputs: Sequence[int], *, window_s: float
) -> RecentTraffic:
    """Measure the traffic of a window.

    Args:
        arrivals: Arrival and prompt tokens of each request that arrived in the window.
        outputs: Output tokens of those of these requests that have ended.
        window_s: Length of the window.
    """
    return RecentTraffic(
        rate_rps=len(arrivals) / window_s if window_s > 0 else 0.0,
        input_tokens=fmean(tokens for _, tokens in arrivals) if arrivals else 0.0,
        output_tokens=fmean(outputs) if outputs else 0.0,
    )
