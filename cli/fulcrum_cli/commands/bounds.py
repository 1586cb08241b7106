"""`fulcrum bounds`: shows which rates of a recorded workload no scheduler can exceed.

It also shows rates that named disciplines reach. Nothing is started and no policy is simulated: the formulas
are in `fulcrum_simulator.bounds`, and `simulate` runs policies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulcrum_cli.option_values import parse_choice, parse_duration_s
from fulcrum_cli.simulation.options import INSTANCES_MAX
from fulcrum_cli.terminal.output import OutputFormat, format_columns, format_seconds, render_document
from fulcrum_cli.terminal.printable import make_printable
from fulcrum_cli.trace_summary import describe_trace
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.bounds import (
    UniformFleet,
    compute_fluid_rate,
    compute_metric_rate,
    find_decode_burst_rate,
    find_fcfs_rate,
    find_fixed_split_rate,
    find_moving_split_rate,
    find_prefill_burst_rate,
    mean_rate,
)
from fulcrum_simulator.workload import (
    Trace,
    WorkloadRequest,
    leave_out_prefix_hits,
    load_trace,
)

_FLUID, _HEAVIEST_REFUSED, _BURSTS = "fluid work", "heaviest refused", ("prefill burst", "decode burst")


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    rate_rps: float
    meaning: str

    def dump(self) -> dict[str, Any]:
        """Return the row for programs; its rate is null if there is no limit."""
        rate_rps = self.rate_rps if math.isfinite(self.rate_rps) else None
        return {"name": self.name, "ratePerSecond": rate_rps, "meaning": self.meaning}


def run(
    trace: Path,
    *,
    instances: int,
    profile: str,
    slo_ttft: str,
    slo_tpot: str,
    attainment_percent: float,
    resplit: str | None,
    prefix_cache: bool,
    output: str | None,
) -> None:
    """Print the bounds and references of the workload as a table or a document.

    Args:
        trace: recorded workload.
        instances: number of instances.
        profile: engine profile.
        slo_ttft: TTFT objective.
        slo_tpot: TPOT objective.
        attainment_percent: percentage of requests that must meet both, above 0 to 100.
        resplit: interval at which the split may change; None: no rows for splits.
        prefix_cache: leave out prompt tokens that a cache would serve.
        output: output format; None: a table.

    Raises:
        InvalidInput: for an option or a file that breaks a rule.
    """
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    fleet = _make_fleet(instances, profile, slo_ttft=slo_ttft, slo_tpot=slo_tpot)
    if not 0 < attainment_percent <= 100:
        raise InvalidInput("--attainment", attainment_percent, "must be above 0 and at most 100")
    interval_s = parse_duration_s("--resplit", resplit)
    loaded = load_trace(trace)
    if prefix_cache:
        loaded = replace(loaded, requests=tuple(leave_out_prefix_hits(loaded.requests)))
    requests = loaded.requests
    rows = _compute_rows(requests, fleet, attainment=attainment_percent / 100)
    if interval_s is not None:
        rows += _compute_split_rows(
            requests, fleet, attainment=attainment_percent / 100, interval_s=interval_s
        )
    if output_format is None:
        print("\n".join(_format_table(rows, loaded, fleet, attainment_percent=attainment_percent)))
    else:
        print(
            render_document(_dump(rows, loaded, fleet, attainment_percent=attainment_percent), output_format)
        )


def _make_fleet(instances: int, profile: str, *, slo_ttft: str, slo_tpot: str) -> UniformFleet:
    if not 1 <= instances <= INSTANCES_MAX:
        raise InvalidInput("--instances", instances, f"must be between 1 and {INSTANCES_MAX}")
    slo = Slo(parse_duration_s("--slo-ttft", slo_ttft), parse_duration_s("--slo-tpot", slo_tpot))
    return UniformFleet(instances, load_profile(profile), slo)


def _compute_rows(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float
) -> tuple[_Row, ...]:
    return (
        _Row(_FLUID, compute_fluid_rate(requests, fleet), "all requests served: the work fits the instances"),
        _Row(
            _HEAVIEST_REFUSED,
            compute_metric_rate(requests, fleet, attainment=attainment),
            "the heaviest requests refused: the work of the others fits the instances",
        ),
        _Row(
            _BURSTS[0],
            find_prefill_burst_rate(requests, fleet, attainment=attainment),
            "bursts of prompts, each within the TTFT objective",
        ),
        _Row(
            _BURSTS[1],
            find_decode_burst_rate(requests, fleet, attainment=attainment),
            "bursts of output, each within both objectives",
        ),
        _Row(
            "FCFS prefill",
            find_fcfs_rate(requests, fleet, attainment=attainment),
            "no bound: prompts first come, first served on all instances, no decode",
        ),
        _Row(
            "FCFS, late refused",
            find_fcfs_rate(requests, fleet, attainment=attainment, refuse_late=True),
            "no bound: the same, prompts that would be late are refused",
        ),
    )


def _compute_split_rows(
    requests: Sequence[WorkloadRequest], fleet: UniformFleet, *, attainment: float, interval_s: float
) -> tuple[_Row, ...]:
    fixed_rps = find_fixed_split_rate(requests, fleet, attainment=attainment)
    moving_rps = find_moving_split_rate(requests, fleet, attainment=attainment, interval_s=interval_s)
    return (
        _Row("fixed split", fixed_rps, "no bound: the best split into prefill and decode that never changes"),
        _Row(
            "moving split",
            moving_rps,
            f"no bound: the split chosen every {format_seconds(interval_s)} with all arrivals known",
        ),
    )


def _format_table(
    rows: Sequence[_Row], trace: Trace, fleet: UniformFleet, *, attainment_percent: float
) -> list[str]:
    slo = fleet.slo
    return [
        f"{describe_trace(trace)}; {fleet.instances} × {make_printable(fleet.profile.name)}",
        f"{attainment_percent:g} % within TTFT {format_seconds(slo.ttft_s)} "
        f"and TPOT {format_seconds(slo.tpot_s)}",
        "",
        *format_columns(
            ("RATE OF", "REQUESTS/S", "WHAT LIMITS"),
            *((row.name, _format_rate(row.rate_rps), row.meaning) for row in rows),
        ),
        "",
        f"highest rate if all are served: {_format_rate(_lowest(rows, _FLUID, *_BURSTS))}; "
        f"if some may be refused: {_format_rate(_lowest(rows, _HEAVIEST_REFUSED, *_BURSTS))}",
    ]


def _lowest(rows: Sequence[_Row], *names: str) -> float:
    return min(row.rate_rps for row in rows if row.name in names)


def _format_rate(rate_rps: float) -> str:
    return f"{rate_rps:.3g}" if math.isfinite(rate_rps) else "no limit"


def _dump(
    rows: Sequence[_Row], trace: Trace, fleet: UniformFleet, *, attainment_percent: float
) -> dict[str, Any]:
    return {
        "workload": {
            "layout": trace.layout,
            "requests": len(trace.requests),
            "failed": trace.failed,
            "ratePerSecond": mean_rate(trace.requests),
        },
        "instances": fleet.instances,
        "profile": fleet.profile.name,
        "slo": {"ttftSeconds": fleet.slo.ttft_s, "tpotSeconds": fleet.slo.tpot_s},
        "attainmentPercent": attainment_percent,
        "bounds": [row.dump() for row in rows],
    }
