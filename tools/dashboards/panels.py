"""Build Grafana's JSON: panels whose description says what to do, and the dashboard around them.

The types of Grafana's SDK check the layout of the file, not the queries. Schema version 41.

The modules of the dashboards call it; it knows no metric.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableModel,
    VariableOption,
    VariableRefresh,
)

from tools.dashboards.queries import FLIPS, SELECTOR, Query

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8
_BY_THRESHOLD = dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)
ROLE_COLORS = {"prefill": "orange", "decode": "blue"}
"""Colours of series whose name begins with a role: those of the live page."""
_DASHED = {"fill": "dash", "dash": [6, 6]}
_RATES = ("ops", "reqps")
PART_COLORS = {
    "admission": "yellow",
    "waiting": "red",
    "retries": "purple",
    "prefill_queue": "super-light-orange",
    "transfer": "green",
    "decode_queue": "super-light-blue",
    "slow_client": "#8e8e8e",
}
"""Colours of the parts of a request's time; prefill and decode have those of the roles."""
_STYLES: dict[str, dict[str, Any]] = {
    " assigned": {"custom.lineStyle": _DASHED},
    " threshold": {"custom.lineStyle": _DASHED, "color": {"mode": "fixed", "fixedColor": "purple"}},
    "objective": {"custom.lineStyle": _DASHED, "color": {"mode": "fixed", "fixedColor": "red"}},
    "forecast": {"custom.lineStyle": _DASHED},
    "p50": {"custom.lineStyle": {"fill": "dot", "dash": [2, 6]}},
    "p90": {"custom.lineStyle": _DASHED},
    "p99.9": {"custom.lineWidth": 2},
}
"""How lines are drawn, by the end of their name: quantiles of many tiers can be told apart in any colours."""
Panel = timeseries.Panel | stat.Panel | statetimeline.Panel | statushistory.Panel


def lines(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    stacked: bool = False,
    width: int = _WIDTH,
    limit: float | None = None,
    top: float | None = None,
    colors: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """A panel of lines; `text` says what to do, `limit` is a threshold, the axis reaches at least `top`.

    `colors`: fixed ones, by the names of series.
    """
    panel = timeseries.Panel().title(title).description(text).datasource(_SOURCE).unit(unit)
    panel = panel.span(width).height(_HEIGHT).line_width(1).fill_opacity(0).axis_soft_min(0)
    styles = {
        f"/^(to )?{role}( |$)/": {"color": {"mode": "fixed", "fixedColor": color}}
        for role, color in ROLE_COLORS.items()
    } | {
        f"/{end}$/": style
        for end, style in _STYLES.items()
        if any(query.legend.endswith(end) for query in queries)
    }
    styles |= {
        f"/^{name}$/": {"color": {"mode": "fixed", "fixedColor": color}}
        for name, color in (colors or {}).items()
    }
    for pattern, style in styles.items():
        values = [DynamicConfigValue(id_val=name, value=value) for name, value in style.items()]
        panel = panel.override_by_regexp(pattern, values)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = panel.legend(legend.show_legend(True))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(50).min(0)
    if limit is not None:
        panel = panel.thresholds(_thresholds([(None, "green"), (limit, "red")])).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    if top is None and unit in _RATES:
        top = 0.1  # else the axis of a rate that is 0 reaches to 100
    if top is not None:
        panel = panel.axis_soft_max(top)
    for number, query in enumerate(queries):
        panel = panel.with_target(_build_target(query, number))
    return panel


def figure(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str = "short",
    width: int = 6,
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),),
) -> stat.Panel:
    """A panel with one number for each series; `steps`: lowest value and colour of each step.

    Without steps Grafana would draw all numbers from 80 on in red.
    """
    panel = stat.Panel().title(title).description(text).datasource(_SOURCE).unit(unit)
    panel = panel.thresholds(_thresholds(steps)).color_scheme(_BY_THRESHOLD)
    return panel.span(width).height(4).with_target(_build_target(query, 0))


def timeline(
    title: str, text: str, query: Query, *, names: Sequence[tuple[str, str]], width: int = 24
) -> statetimeline.Panel:
    """A panel with a row of states for each series; `names`: name and colour of the values 0, 1, …"""
    options = {
        str(value): ValueMappingResult(text=name, color=color, index=value)
        for value, (name, color) in enumerate(names)
    }
    panel = statetimeline.Panel().title(title).description(text).datasource(_SOURCE)
    panel = panel.mappings([ValueMap(options=options)])
    return panel.span(width).height(_HEIGHT).merge_values(True).with_target(_build_target(query, 0))


def heat_map(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str,
    steps: Sequence[tuple[float | None, str]],
) -> statushistory.Panel:
    """A panel with a row of cells for each series; `steps`: lowest value and colour of each step."""
    panel = statushistory.Panel().title(title).description(text).datasource(_SOURCE).unit(unit)
    panel = panel.thresholds(_thresholds(steps)).color_scheme(_BY_THRESHOLD).show_value(VisibilityMode.NEVER)
    return panel.span(2 * _WIDTH).height(_HEIGHT).with_target(_build_target(query, 0))


def build_dashboard(
    title: str,
    text: str,
    rows: Sequence[tuple[str, Sequence[Panel]]],
    *,
    inputs: Sequence[tuple[str, str, str]] = (),
    filters: Mapping[str, str] | None = None,
) -> str:
    """Build a dashboard with rows of panels, and flips as annotations; return its JSON.

    Its uid is made of its title. `inputs`: name, label and default of variables that users type; `filters`:
    labels of which users choose some values, with the metric that has them.
    """
    builder = _start_dashboard(title, text)
    for variable in _list_variables(inputs, filters or {}):
        builder = builder.with_variable(variable)
    for row, panels in rows:
        builder = builder.with_row(dashboard.Row(row))
        for panel in panels:
            builder = builder.with_panel(panel)
    document = json.loads(JSONEncoder().encode(builder.build()))
    _widen_single_panels(document["panels"])
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _start_dashboard(title: str, text: str) -> dashboard.Dashboard:
    """Return a dashboard without variables and panels: a link to the others, and flips as annotations."""
    builder = dashboard.Dashboard(f"Fulcrum / {title}").description(text).tags(["fulcrum"])
    builder = builder.uid(f"fulcrum-{title.lower().replace(' ', '-')}").refresh("30s").time("now-1h", "now")
    others = dashboard.DashboardLink("Fulcrum").type(DashboardLinkType.DASHBOARDS).tags(["fulcrum"])
    flips = dashboard.AnnotationQuery().name("Flips").datasource(_SOURCE).enable(True)
    return (
        builder.tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others.keep_time(True).include_vars(True))
        .annotation(flips.icon_color("blue").expr(FLIPS))
    )


def _list_variables(
    inputs: Sequence[tuple[str, str, str]], filters: Mapping[str, str]
) -> Iterator[Builder[VariableModel]]:
    yield dashboard.DatasourceVariable("datasource").type("prometheus")
    yield _query_variable("namespace", "label_values(fulcrum_router_active, namespace)")
    yield _query_variable("service", 'label_values(fulcrum_router_active{namespace="$namespace"}, service)')
    for name, metric in filters.items():
        chosen = _query_variable(name, f"label_values({metric}{{{SELECTOR}}}, {name})").multi(True)
        everything = VariableOption(selected=True, text="All", value="$__all")
        yield chosen.include_all(True).all_value(".*").current(everything)
    for name, label, default in inputs:
        yield dashboard.TextBoxVariable(name).label(label).default_value(default)


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).datasource(_SOURCE).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    thresholds = [Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(thresholds)


def _widen_single_panels(panels: Sequence[dict[str, Any]]) -> None:
    """Give a panel the whole width if its right half would be empty."""
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    for place in (panel["gridPos"] for panel in panels):
        if (place["w"], place["x"]) == (_WIDTH, 0) and (_WIDTH, place["y"]) not in places:
            place["w"] = 2 * _WIDTH


def _build_target(query: Query, number: int) -> prometheus.Dataquery:
    """Build the query of a panel; Grafana names the queries of a panel by letters."""
    target = prometheus.Dataquery().datasource(_SOURCE).expr(query.expr).legend_format(query.legend)
    if query.exemplars:
        target = target.exemplar(True)
    return target.ref_id(chr(ord("A") + number)).range()
