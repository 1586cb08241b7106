"""Writes the figures of simulated runs as lines and tables for people.

The command `simulate` prints them; the figures are computed in `fulcrum_simulator.fleet.report`.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.api.meta import format_duration
from fulcrum_simulator.fleet.options import BEST_STATIC
from fulcrum_simulator.fleet.policy_runs import PolicyRuns, SeedRun


def format_report(report: dict[str, Any]) -> str:
    """Return the figures as lines for people."""
    requests, flips, goodput = report["requests"], report["flips"], report["goodput"]
    slo = report["slo"]
    stages, instance_time = report["request_time_s"], report["instance_time"]
    lines = (
        f"{report['policy']} on {report['instances']} x {report['profile']}, seed {report['seed']}",
        f"  SLO attainment   {_percent(report['attainment'])} of {requests['scored']:,} scored requests of "
        f"{requests['offered']:,} offered (TTFT {format_duration(slo['ttft_s'])}, "
        f"TPOT {format_duration(slo['tpot_s'])}); "
        f"{_percent(report['attainment_by_arrow'])} by Arrow's definitions",
        *(
            f"  tier {tier:<11} {_percent(found['attainment'])} of {found['scored']:,}, "
            f"{found['refused']} refused, {found['failed']} failed"
            for tier, found in report["tiers"].items()
        ),
        f"  goodput          {_number(goodput['requests_per_s'])} of "
        f"{_number(goodput['offered_requests_per_s'])} requests/s, "
        f"{_number(goodput['output_tokens_per_s'])} output tokens/s, "
        f"{_percent(goodput['token_share'])} of all tokens",
        f"  not ok           {requests['refused']} refused, {requests['failed']} failed, "
        f"{requests['broken']} broken, "
        f"{requests['unfinished']} unfinished",
        f"  TTFT             {_latencies(report['ttft_s'])}",
        f"  TPOT             {_latencies(report['tpot_s'])}",
        f"  flips            {flips['count']} ({flips['to_prefill']} to prefill, "
        f"{flips['to_decode']} to decode), {flips['refused']} refused, "
        f"{flips['requests']} requested by the router",
        f"  a request's time {_stages(stages)}",
        f"  no prefill leg   {requests['without_prefill_leg']:,} of {requests['ok']:,} ok, not in the line "
        f"above: {_stages(report['request_time_without_prefill_leg_s'])}",
        "  instances' time  " + ", ".join(f"{name} {_percent(s)}" for name, s in instance_time.items()),
    )
    return "\n".join(lines)


def _stages(stages: dict[str, float | None]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_time(seconds)}" for name, seconds in stages.items())


def _latencies(summary: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {_time(value)}" for name, value in summary.items())


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def format_spread(runs: Sequence[SeedRun]) -> list[str]:
    """Return the smallest and the largest figure of all seeds; nothing for one seed."""
    if len(runs) == 1:
        return []
    attainment = [100 * run.attainment for run in runs]
    rates = [run.report["goodput"]["offered_requests_per_s"] or 0.0 for run in runs]
    return [
        f"  {len(runs)} seeds          SLO attainment {min(attainment):.1f} to {max(attainment):.1f} %, "
        f"mean {fmean(attainment):.1f} %; offered {min(rates):.2f} to {max(rates):.2f} requests/s, "
        f"mean {fmean(rates):.2f}"
    ]


def format_comparison(names: Sequence[str], compared: Sequence[PolicyRuns]) -> list[str]:
    """Return a table with a line for each policy: the median of its seeds, and their range in brackets.

    `names`: by which names they were asked for.
    """
    header = ("POLICY", "OFFERED/S", "SLO %", "TOKENS %", "GOODPUT/S", "FLIPS", "TTFT P90 s", "TPOT P90 ms")
    return format_columns(header, *map(_format_row, names, compared))


def _format_row(name: str, runs: PolicyRuns) -> tuple[str, ...]:
    reports = [run.report for run in runs.runs]
    return (
        f"{runs.policy} ({name})" if name.startswith(BEST_STATIC) else str(runs.policy),
        _range([each["goodput"]["offered_requests_per_s"] for each in reports], 2),
        _range([_times(100, each["attainment"]) for each in reports], 1),
        _range([_times(100, each["goodput"]["token_share"]) for each in reports], 1),
        _range([each["goodput"]["requests_per_s"] for each in reports], 2),
        _range([each["flips"]["count"] for each in reports], 0),
        _range([each["ttft_s"]["p90"] for each in reports], 2),
        _range([_times(1000, each["tpot_s"]["p90"]) for each in reports], 0),
    )


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _range(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = f"{median(known):.{digits}f}"
    low, high = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return middle if low == high else f"{middle} [{low} {high}]"
