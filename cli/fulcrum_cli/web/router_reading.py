"""One reading of a router's metrics: the few families that the live page shows. Pure.

The metrics are the same in a local run and in a cluster, where the state port takes no token of a person.
`sources` fetches the text, and `feed` parses it here.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fulcrum_core.values import Role

_PREFIX = "fulcrum_router_"
_INSTANCE_PREFIX = "instance_"
_INSTANCE_FIELDS: Mapping[str, str] = {
    "serving": "serving",
    "prefill_queued_seconds": "prefill_queued_s",
    "prefill_legs": "prefill_legs",
    "decode_legs": "decode_legs",
    "decode_tokens": "decode_tokens",
    "kv_usage_ratio": "kv_usage",
    "missed_probes": "missed_probes",
    "ejected": "ejected",
}
_FAMILIES = (
    "requests_total", "requests_offered_total", "requests_slo_met_total", "ttft_seconds_bucket",
    "tpot_seconds_bucket", "kv_transfers_total", "local_prefills_total", "output_tokens_total",
    "waiting_requests", "assignment_generation", "active",
    *(_INSTANCE_PREFIX + name for name in _INSTANCE_FIELDS),
)  # fmt: skip
_LINE = re.compile(rf"^{_PREFIX}({'|'.join(_FAMILIES)})(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SCORED_OUTCOMES = ("ok", "failed", "refused", "broken", "left_late")
"""Outcomes of the requests that met their objectives or missed them."""

_REFUSED_OUTCOMES = ("refused", "limited")
"""Outcomes of the requests that were refused because of the load or of a rate limit."""

_ROLES = {role.lower(): role for role in Role}

Buckets = Mapping[float, float]
"""Cumulative counts by the upper edge of the bucket, in seconds."""


@dataclass(slots=True)
class InstanceLoad:
    """The router's figures of one instance."""

    role: Role | None = None
    serving: bool = False
    prefill_queued_s: float = 0.0
    prefill_legs: int = 0
    decode_legs: int = 0
    decode_tokens: int = 0
    kv_usage: float | None = None
    missed_probes: int = 0
    ejected: bool = False


@dataclass(slots=True)
class TierCounts:
    """Requests of one tier since the router started."""

    offered: float = 0.0
    scored: float = 0.0
    met: float = 0.0
    refused: float = 0.0


@dataclass(slots=True)
class RouterReading:
    """What the router reported at `at_s`; counts are those since it started."""

    at_s: float
    instances: dict[str, InstanceLoad] = field(default_factory=dict)
    tiers: dict[str, TierCounts] = field(default_factory=dict)
    transfers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """KV transfers by prefill and decode instance."""
    ttft: dict[float, float] = field(default_factory=dict)
    tpot: dict[float, float] = field(default_factory=dict)
    """Buckets of the latencies, over all tiers."""
    local_prefills: float = 0.0
    output_tokens: float = 0.0
    waiting: int = 0
    generation: int = 0
    active: bool = True

    @property
    def offered(self) -> float:
        """Requests that arrived, over all tiers."""
        return sum(tier.offered for tier in self.tiers.values())


def parse_reading(exposition: str, *, at_s: float) -> RouterReading:
    """Return the reading in the text of the router's `/metrics`; lines that it does not know are skipped."""
    reading = RouterReading(at_s)
    for family, labels, value in _iter_samples(exposition):
        if family.startswith(_INSTANCE_PREFIX):
            _add_instance_sample(reading, family.removeprefix(_INSTANCE_PREFIX), labels, value)
        else:
            _add_sample(reading, family, labels, value)
    return reading


def _iter_samples(exposition: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family, labels, text in _LINE.findall(exposition):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            yield family, dict(_LABEL.findall(labels)), value


def _add_instance_sample(reading: RouterReading, name: str, labels: Mapping[str, str], value: float) -> None:
    load = reading.instances.setdefault(labels.get("instance", ""), InstanceLoad())
    load.role = _ROLES.get(labels.get("role", ""))
    match name:
        case "serving" | "ejected":
            setattr(load, name, bool(value))
        case "prefill_queued_seconds" | "kv_usage_ratio":
            setattr(load, _INSTANCE_FIELDS[name], value)
        case _:
            setattr(load, _INSTANCE_FIELDS[name], int(value))


def _add_sample(reading: RouterReading, family: str, labels: Mapping[str, str], value: float) -> None:
    match family:
        case "requests_total" | "requests_offered_total" | "requests_slo_met_total":
            _add_tier_sample(reading, family, labels, value)
        case "ttft_seconds_bucket":
            _add_bucket(reading.ttft, labels, value)
        case "tpot_seconds_bucket":
            _add_bucket(reading.tpot, labels, value)
        case "kv_transfers_total":
            reading.transfers[labels.get("prefill", ""), labels.get("decode", "")] += int(value)
        case "local_prefills_total":
            reading.local_prefills += value
        case "output_tokens_total":
            reading.output_tokens += value
        case "waiting_requests":
            reading.waiting = int(value)
        case "assignment_generation":
            reading.generation = int(value)
        case "active":
            reading.active = bool(value)


def _add_bucket(buckets: dict[float, float], labels: Mapping[str, str], count: float) -> None:
    try:
        edge = float(labels.get("le", ""))
    except ValueError:
        return
    buckets[edge] = buckets.get(edge, 0.0) + count


def _add_tier_sample(reading: RouterReading, family: str, labels: Mapping[str, str], value: float) -> None:
    tier = reading.tiers.setdefault(labels.get("tier", ""), TierCounts())
    if family == "requests_offered_total":
        tier.offered += value
    elif family == "requests_slo_met_total":
        tier.met += value
    outcome = labels.get("outcome")
    if outcome in _SCORED_OUTCOMES:
        tier.scored += value
    if outcome in _REFUSED_OUTCOMES:
        tier.refused += value
