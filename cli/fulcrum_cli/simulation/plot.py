"""Draws simulated runs over time as one HTML file that needs no network: roles, queues, KV, attainment.

The command `simulate` calls it. All values come from `fulcrum_simulator.fleet.timeline`.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from fulcrum_core.api.meta import format_duration
from fulcrum_simulator.fleet.run import RunResult
from fulcrum_simulator.fleet.timeline import Sample, attainment_over_time, thin_out

POINTS_MAX = 1_000
WINDOWS = 60
PREFILL_COLOUR, DECODE_COLOUR, OTHER_COLOUR = "#d1813a", "#3a7bd1", "#4a4a4a"

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family: sans-serif"><h1>{title}</h1>
{figures}
</body></html>
"""


def render_plot(title: str, results: Sequence[RunResult]) -> str:
    """Return one page with a figure for each run."""
    queue_max = max((max(s.waiting, s.decode_legs) for result in results for s in result.samples), default=0)
    figures = [
        _build_figure(result, queue_max).to_html(full_html=False, include_plotlyjs=number == 0)
        for number, result in enumerate(results)
    ]
    return _PAGE.format(title=escape(title), figures="\n".join(figures))


def _build_figure(result: RunResult, queue_max: int) -> Any:
    from plotly.subplots import make_subplots

    titles = ("instances", "requests", "prefill work in instances, s", "KV use, %", "SLO attainment, %")
    figure = make_subplots(rows=5, cols=1, shared_xaxes=True, vertical_spacing=0.04, subplot_titles=titles)
    samples = thin_out(result.samples, POINTS_MAX)
    times = [sample.at_s for sample in samples]
    _add_roles(figure, times, samples)
    lines = (
        (2, "waiting in the router", [s.waiting for s in samples], PREFILL_COLOUR),
        (2, "in decode", [s.decode_legs for s in samples], DECODE_COLOUR),
        (3, "prefill work", [s.prefill_queued_s for s in samples], PREFILL_COLOUR),
        (4, "KV use", [100 * s.kv_usage for s in samples], OTHER_COLOUR),
    )
    for row, name, values, colour in lines:
        _add_line(figure, row, times, values, name=name, colour=colour)
    windows = attainment_over_time(result.records, result.options.slo, WINDOWS)
    figure.add_scatter(
        x=[at_s for at_s, _ in windows],
        y=[None if share is None else 100 * share for _, share in windows],
        name="SLO attainment",
        mode="markers+lines",
        line={"color": OTHER_COLOUR},
        row=5,
        col=1,
    )
    legend = {"orientation": "h", "y": -0.08}
    figure.update_layout(title=_describe(result), height=900, hovermode="x unified", legend=legend)
    figure.update_xaxes(title_text="s", row=5, col=1)
    highest = len(result.first_roles), queue_max, None, 105, 105
    for row, value in enumerate(highest, start=1):
        figure.update_yaxes(range=[0, value] if value else None, rangemode="tozero", row=row, col=1)
    return figure


def _describe(result: RunResult) -> str:
    options, scored = result.options, result.scored
    met = sum(record.meets(options.slo) for record in scored)
    span_s = result.last_arrival_s - result.first_scored_s
    objectives = f"TTFT {format_duration(options.slo.ttft_s)}, TPOT {format_duration(options.slo.tpot_s)}"
    rate = f", {len(scored) / span_s:.2f} requests/s" if span_s else ""
    attainment = f"{100 * met / len(scored):.1f} %" if scored else "none"
    return f"{options.policy}{rate}, seed {options.seed}: SLO attainment {attainment} ({objectives})"


def _add_roles(figure: Any, times: list[float], samples: Sequence[Sample]) -> None:
    """Stack the instances of all roles that occur."""
    roles = (
        ("prefill", [sample.prefill_instances for sample in samples], PREFILL_COLOUR),
        ("decode", [sample.decode_instances for sample in samples], DECODE_COLOUR),
        ("prefill and decode", [sample.both_instances for sample in samples], OTHER_COLOUR),
    )
    for name, counts, colour in roles:
        if any(counts):
            figure.add_scatter(
                x=times,
                y=counts,
                name=f"{name} instances",
                stackgroup="roles",
                line={"shape": "hv", "color": colour, "width": 0.5},
                row=1,
                col=1,
            )


def _add_line(
    figure: Any, row: int, times: list[float], values: Sequence[float], *, name: str, colour: str
) -> None:
    figure.add_scatter(x=times, y=values, name=name, mode="lines", line={"color": colour}, row=row, col=1)
