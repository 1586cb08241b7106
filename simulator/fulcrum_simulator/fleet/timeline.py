"""What a run looked like over time: roles, queues, KV use, and the SLO attainment of its arrivals.

`router` takes the samples during the run; `fulcrum simulate` plots them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fulcrum_core.values import Role, Slo
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.routed_instance import RoutedInstance


class Sample(NamedTuple):
    """The fleet at one time."""

    at_s: float
    prefill_instances: int
    decode_instances: int
    both_instances: int
    """Those that serve both phases."""
    waiting: int
    """Requests that wait in the router."""
    prefill_queued_s: float
    """Predicted time until the prefill work in flight is done, over all instances."""
    decode_legs: int
    kv_usage: float
    """Mean over the instances, 0 to 1."""


def take_sample(instances: Sequence[RoutedInstance], waiting: int, now_s: float) -> Sample:
    """Describe the fleet as it is now. Instances that do not serve count in no role."""
    roles = Counter(routed.record.role for routed in instances if routed.record.serving)
    return Sample(
        at_s=now_s,
        prefill_instances=roles[Role.PREFILL],
        decode_instances=roles[Role.DECODE],
        both_instances=roles[Role.BOTH],
        waiting=waiting,
        prefill_queued_s=math.fsum(routed.record.ledger.remaining_s(now_s) for routed in instances),
        decode_legs=sum(routed.record.ledger.decode_legs for routed in instances),
        kv_usage=math.fsum(routed.instance.engine.kv_usage for routed in instances) / len(instances),
    )


def thin_out(samples: Sequence[Sample], count_max: int) -> list[Sample]:
    """Keep at most `count_max` samples, at equal distances."""
    step = max(1, math.ceil(len(samples) / count_max))
    return list(samples[::step])


def attainment_over_time(
    records: Sequence[RequestResult], slo: Slo, windows: int
) -> list[tuple[float, float | None]]:
    """Return the start of each window and the SLO attainment of its arrivals; None: there were none.

    The windows have equal lengths, and there are at most `windows`.
    """
    if not records:
        return []
    first_s, last_s = records[0].request.arrival_s, records[-1].request.arrival_s
    length_s = max((last_s - first_s) / windows, 1.0)
    offered: dict[int, int] = {}
    met: dict[int, int] = {}
    for record in records:
        window = min(windows - 1, int((record.request.arrival_s - first_s) / length_s))
        offered[window] = offered.get(window, 0) + 1
        met[window] = met.get(window, 0) + record.meets(slo)
    return [
        (first_s + window * length_s, met[window] / offered[window] if window in offered else None)
        for window in range(max(offered) + 1)
    ]
