"""Draws simulated runs over time as one HTML file that needs no network: roles, queues, KV, attainment.

The command `simulate` calls it. All values come from `fulcrum_simulator.fleet.timeline`.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.fleet.run import RunResult
from fulcrum_simulator.fleet.timeline import attainment_over_time, thin_out

POINTS_MAX = 1_000
WINDOWS = 60
PREFILL_COLOUR, DECODE_COLOUR, OTHER_COLOUR = "#d1813a", "#3a7bd1", "#4a4a4a"

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family: sans-serif"><h1>{title}</h1>
{figures}
</body></html>
"""


def write_plot(path: Path, title: str, results: Sequence[RunResult]) -> None:
    """Write one page with a figure for each run.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    figures = [
        _build_figure(result).to_html(full_html=False, include_plotlyjs=number == 0)
        for number, result in enumerate(results)
    ]
    page = _PAGE.format(title=escape(title), figures="\n".join(figures))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidInput("--plot", path, f"cannot be written: {error.strerror}") from error


def _build_figure(result: RunResult) -> Any:
    from plotly.subplots import make_subplots

    titles = ("instances", "queued prefill, s · decode requests", "KV use, %", "SLO attainment, %")
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.04, subplot_titles=titles)
    samples = thin_out(result.samples, POINTS_MAX)
    times = [sample.at_s for sample in samples]
    _add_roles(figure, times, [s.prefill_instances for s in samples], [s.decode_instances for s in samples])
    queues = (
        ("queued prefill, s", [s.prefill_queued_s for s in samples], PREFILL_COLOUR),
        ("decode requests", [s.decode_legs for s in samples], DECODE_COLOUR),
    )
    for name, values, colour in queues:
        _add_line(figure, 2, times, values, name=name, colour=colour)
    _add_line(figure, 3, times, [100 * s.kv_usage for s in samples], name="KV use", colour=OTHER_COLOUR)
    windows = attainment_over_time(result.records, result.options.slo, WINDOWS)
    figure.add_scatter(
        x=[at_s for at_s, _ in windows],
        y=[100 * share for _, share in windows],
        name="SLO attainment",
        mode="markers+lines",
        line={"color": OTHER_COLOUR},
        row=4,
        col=1,
    )
    figure.update_layout(title=str(result.options.policy), height=760, hovermode="x unified")
    figure.update_xaxes(title_text="s", row=4, col=1)
    return figure


def _add_roles(figure: Any, times: list[float], prefill: list[int], decode: list[int]) -> None:
    """Stack the instances of both roles."""
    for name, counts, colour in (("prefill", prefill, PREFILL_COLOUR), ("decode", decode, DECODE_COLOUR)):
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
