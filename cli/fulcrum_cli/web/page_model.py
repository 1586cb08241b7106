"""Builds what the page shows from what was observed of a service. Pure.

The result is JSON for `web/src/model.ts`, which names and documents the same fields.

`feed` calls it twice a second, `simulation.page_states` for a simulated run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.web.decision_log import LoggedDecision
from fulcrum_cli.web.reading_window import Latency, RecentTraffic
from fulcrum_cli.web.router_reading import InstanceLoad, RouterReading
from fulcrum_core.api.pdassignment import PDAssignment, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Phase, Role

FLOWS_MAX = 300
"""Pairs of instances whose traffic is shown; those with the most."""
_MISSED_PROBES_MIN = 2
"""Probes missed in a row from which an engine counts as not responding; a busy machine may miss one."""

_PROBLEM_MAX = 300
"""Characters that are shown of why an instance gets no work: an engine's last words may have many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageObservation:
    """State of one service, as far as it was observed."""

    service: PDService
    instances: Mapping[str, PDInstance]
    assignment: PDAssignment | None
    reading: RouterReading | None
    traffic: RecentTraffic
    decisions: Sequence[LoggedDecision]
    source: str
    """Name of the target, for people."""
    unavailable: tuple[str, ...] = ()
    """Components that do not respond; their values are outdated."""
    controls: Mapping[str, Any] | None = None
    """State of the load, if the page may change it and the instances; None: it only shows."""


def build_page(observation: PageObservation, *, now_s: float) -> dict[str, Any]:
    """Return the state of the page at `now_s` (unix time)."""
    service, traffic, reading = observation.service, observation.traffic, observation.reading
    slo = service.spec.slo.to_slo()
    tiles = _build_tiles(observation, now_s=now_s)
    numbers = {tile["name"]: number for number, tile in enumerate(tiles)}
    return {
        "service": service.metadata.name,
        "namespace": service.metadata.namespace,
        "model": service.spec.model,
        "simulated": service.spec.engine.is_simulated,
        "mode": service.spec.autoscaling.mode.value,
        "source": observation.source,
        "at_s": round(now_s, 2),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "attained": service.spec.slo.attainment / 100},
        "tiles": tiles,
        "flows": _list_flows(traffic, numbers),
        "rates": {
            "offered": round(traffic.offered_rps, 2),
            "output_tokens": round(traffic.output_tokens_rps, 1),
            "transfers": round(sum(traffic.transfer_rps.values()), 2),
            "local_prefills": round(traffic.local_prefill_rps, 2),
        },
        "waiting": reading.waiting if reading else 0,
        "ttft": _latency(traffic.ttft),
        "tpot": _latency(traffic.tpot),
        "attained": _share(traffic.attained),
        "tiers": [
            {
                "name": t.name,
                "attained": _share(t.attained),
                "offered": round(t.offered_rps, 2),
                "refused": round(t.refused_rps, 2),
            }
            for t in traffic.tiers
        ],
        "desired": _count_split(tile["assigned"] for tile in tiles),
        "actual": _count_split(tile["role"] for tile in tiles if tile["serving"]),
        "flips": observation.assignment.spec.flips if observation.assignment else 0,
        "decisions": [
            {"at_s": round(d.at_s, 2), "headline": d.headline, "reason": d.reason, "to": d.to}
            for d in observation.decisions
        ],
        "unavailable": list(observation.unavailable),
        "controls": observation.controls,
    }


def _build_tiles(observation: PageObservation, *, now_s: float) -> list[dict[str, Any]]:
    """Return the instances, sorted by pool and name."""
    roles = observation.assignment.spec.roles if observation.assignment else {}
    loads = observation.reading.instances if observation.reading else {}
    listed = sorted(
        observation.instances.items(), key=lambda item: (item[1].spec.pool, _natural_key(item[0]))
    )
    return [
        _build_tile(name, instance, roles.get(name), loads.get(name), now_s=now_s)
        for name, instance in listed
    ]


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `chat-2` before `chat-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _build_tile(
    name: str,
    instance: PDInstance,
    entry: RoleAssignment | None,
    load: InstanceLoad | None,
    *,
    now_s: float,
) -> dict[str, Any]:
    assigned = Role(entry.role) if entry else None
    load = load or InstanceLoad()
    role = load.role or instance.status.role or assigned
    return {
        "name": name,
        "pool": instance.spec.pool,
        "role": role,
        "assigned": assigned,
        "flipping": role is not Role.BOTH and assigned not in (None, role),
        "since_s": round(now_s - entry.since, 1) if entry else None,
        "pinned": bool(entry and (entry.pinned_until or 0.0) > now_s),
        "cordoned": bool(entry and entry.cordoned),
        "phase": instance.status.phase,
        "problem": _describe_problem(instance, load),
        "serving": load.serving,
        "queued_s": round(load.prefill_queued_s, 2),
        "prefills": load.prefill_legs,
        "decodes": load.decode_legs,
        "tokens": load.decode_tokens,
        "kv": _share(load.kv_usage),
    }


def _describe_problem(instance: PDInstance, load: InstanceLoad) -> str:
    """Describe why the instance gets no work though it should; empty if it does."""
    status = instance.status
    if status.phase is Phase.FAILED or status.reason:
        return _cut(status.message or status.reason or "the engine failed")
    if load.missed_probes >= _MISSED_PROBES_MIN:
        return f"not responding, {load.missed_probes} probes missed"
    return "ejected after failures" if load.ejected else ""


def _cut(text: str) -> str:
    return text if len(text) <= _PROBLEM_MAX else f"{text[: _PROBLEM_MAX - 1]}…"


def _list_flows(traffic: RecentTraffic, numbers: Mapping[str, int]) -> list[tuple[int, int, float]]:
    """Return the busiest pairs: indices of the prefill and the decode tile, and requests a second."""
    busiest = sorted(traffic.transfer_rps.items(), key=lambda item: (-item[1], item[0]))[:FLOWS_MAX]
    return [
        (numbers[prefill], numbers[decode], round(rate, 2))
        for (prefill, decode), rate in busiest
        if prefill in numbers and decode in numbers
    ]


def _count_split(roles: Iterable[Role | None]) -> tuple[int, int]:
    listed = list(roles)
    return listed.count(Role.PREFILL), listed.count(Role.DECODE)


def _latency(latency: Latency) -> dict[str, float | None]:
    return {"p50_s": _round_s(latency.p50_s), "p99_s": _round_s(latency.p99_s)}


def _round_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _share(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
