"""What the requests of a simulated run do at a time, in the figures that the live page shows. Pure.

`page_states` asks second by second. In a running service the router's metrics say this.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from fulcrum_cli.web.reading_window import FLOW_WINDOW_S, WINDOW_S, Latency, RecentTraffic, TierAttainment
from fulcrum_cli.web.router_reading import InstanceLoad, RouterReading
from fulcrum_core.values import Role
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import RunResult
from fulcrum_simulator.percentile import percentile
from fulcrum_simulator.routing import Outcome

_UNNAMED_TIER = "default"


class PageRequests:
    """The requests of one run. Call `advance` with times that only grow, then read."""

    def __init__(self, result: RunResult) -> None:
        self._slo, self._kv_tokens = result.options.slo, result.options.profile.kv_capacity_tokens
        self._arrivals = deque(sorted(result.records, key=lambda record: record.request.arrival_s))
        self._active: list[RequestResult] = []
        self._recent: deque[RequestResult] = deque()
        """Requests that ended in the last `WINDOW_S` seconds."""
        self._now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Move on to a time."""
        self._now_s = now_s
        while self._arrivals and self._arrivals[0].request.arrival_s <= now_s:
            self._active.append(self._arrivals.popleft())
        ended = [record for record in self._active if _end_s(record) <= now_s]
        self._active = [record for record in self._active if _end_s(record) > now_s]
        self._recent.extend(sorted(ended, key=_end_s))
        while self._recent and _end_s(self._recent[0]) < now_s - WINDOW_S:
            self._recent.popleft()

    def read_loads(self, roles: Mapping[str, Role]) -> RouterReading:
        """Return the work of each instance, and how many requests wait."""
        now_s = self._now_s
        loads = {name: InstanceLoad(role=role, serving=True, kv_usage=0.0) for name, role in roles.items()}
        waiting = 0
        for record in self._active:
            if record.prefill and record.prefill_sent_s <= now_s < _prefill_end_s(record):
                load = loads[record.prefill]
                load.prefill_legs += 1
                load.prefill_queued_s = max(load.prefill_queued_s, _prefill_end_s(record) - now_s)
                self._add_kv(load, record.request.input_tokens)
            elif record.decode and _prefill_end_s(record) <= now_s:
                load = loads[record.decode]
                load.decode_legs += 1
                load.decode_tokens += (tokens := record.request.input_tokens + _count_output(record, now_s))
                self._add_kv(load, tokens)
            else:
                waiting += 1
        return RouterReading(now_s, instances=loads, waiting=waiting)

    def read_traffic(self) -> RecentTraffic:
        """Return rates, latencies and attainment of the last seconds."""
        known, since_s = [*self._recent, *self._active], self._now_s - FLOW_WINDOW_S
        transfers = Counter(
            (record.prefill, record.decode)
            for record in known
            if record.prefill and record.decode and since_s < _prefill_end_s(record) <= self._now_s
        )
        local = [
            record.first_token_s
            for record in known
            if record.decode and not record.prefill and record.first_token_s is not None
        ]
        tokens = sum(
            _count_output(record, self._now_s) - _count_output(record, since_s)
            for record in known
            if record.first_token_s is not None
        )
        return RecentTraffic(
            offered_rps=self._count_arrivals(known, FLOW_WINDOW_S) / FLOW_WINDOW_S,
            output_tokens_rps=tokens / FLOW_WINDOW_S,
            local_prefill_rps=sum(since_s < at_s <= self._now_s for at_s in local) / FLOW_WINDOW_S,
            transfer_rps={pair: count / FLOW_WINDOW_S for pair, count in transfers.items()},
            ttft=self._summarize(lambda record: record.ttft_s),
            tpot=self._summarize(lambda record: record.tpot_s),
            attained=self._attainment(self._recent),
            tiers=self._judge_tiers(known),
        )

    def _add_kv(self, load: InstanceLoad, tokens: int) -> None:
        load.kv_usage = min(1.0, (load.kv_usage or 0.0) + tokens / self._kv_tokens)

    def _count_arrivals(self, known: Sequence[RequestResult], window_s: float) -> int:
        return sum(record.request.arrival_s > self._now_s - window_s for record in known)

    def _summarize(self, read: Callable[[RequestResult], float | None]) -> Latency:
        values = [value for record in self._recent if (value := read(record)) is not None]
        return Latency(percentile(values, 50), percentile(values, 99))

    def _attainment(self, ended: Sequence[RequestResult] | deque[RequestResult]) -> float | None:
        return sum(record.meets(self._slo) for record in ended) / len(ended) if ended else None

    def _judge_tiers(self, known: Sequence[RequestResult]) -> tuple[TierAttainment, ...]:
        names = sorted({record.request.tier or _UNNAMED_TIER for record in known})
        return tuple(self._judge_tier(name, known) for name in names)

    def _judge_tier(self, name: str, known: Sequence[RequestResult]) -> TierAttainment:
        ended = [record for record in self._recent if (record.request.tier or _UNNAMED_TIER) == name]
        of_tier = [record for record in known if (record.request.tier or _UNNAMED_TIER) == name]
        return TierAttainment(
            name=name,
            attained=self._attainment(ended),
            offered_rps=self._count_arrivals(of_tier, WINDOW_S) / WINDOW_S,
            refused_rps=sum(record.outcome is Outcome.REFUSED for record in ended) / WINDOW_S,
        )


def _end_s(record: RequestResult) -> float:
    """When a request ended. A failed one counts from the last event that is known of it."""
    if record.last_token_s is not None:
        return record.last_token_s
    if record.outcome is None:
        return math.inf
    return max(record.request.arrival_s, record.prefill_sent_s, record.first_token_s or 0.0)


def _prefill_end_s(record: RequestResult) -> float:
    """When the prompt was computed; without a prefill leg decode computes it, from the arrival on."""
    if not record.prefill:
        return record.request.arrival_s
    return math.inf if record.prefill_end_s is None else record.prefill_end_s


def _count_output(record: RequestResult, at_s: float) -> int:
    """Output tokens by a time, as if they came at equal distances."""
    first_s, last_s = record.first_token_s, record.last_token_s
    if first_s is None or at_s < first_s:
        return 0
    if last_s is None or at_s >= last_s or last_s <= first_s:
        return record.output_tokens if last_s is not None else 1
    return 1 + int((record.output_tokens - 1) * (at_s - first_s) / (last_s - first_s))
