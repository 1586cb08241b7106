// Draws the panels of a dashboard file with Grafana's own published components, from a Prometheus.
//
// index.html?dashboard=URL&prometheus=URL&now=UNIX_TIME&seconds=N&vars=JSON. Lines and figures are Grafana's; state timelines and status
// histories, whose components Grafana does not publish, are simple stand-ins. When all is drawn, the title is READY and
// `window.panels` lists title, type and names of the series of each panel.
import { useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import {
  applyFieldOverrides, createTheme, dateTime, FieldType, getFieldDisplayValues,
  ReducerID, standardFieldConfigEditorRegistry, ThemeContext, toDataFrame,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import "@grafana/react-data-grid/lib/styles.css";
import "uplot/dist/uPlot.min.css";

const theme = createTheme({ colors: { mode: "dark" } });
const same = (value) => value;
const plain = ["unit", "min", "max", "decimals", "displayName", "noValue", "thresholds", "mappings", "links", "color"];
const custom = [
  "drawStyle", "lineInterpolation", "lineWidth", "lineStyle", "fillOpacity", "gradientMode", "showPoints", "pointSize",
  "stacking", "spanNulls", "axisPlacement", "axisLabel", "axisSoftMin", "axisSoftMax", "scaleDistribution", "hideFrom",
  "thresholdsStyle",
];
const item = (path, isCustom) => ({
  id: isCustom ? `custom.${path}` : path, path, isCustom, name: path, settings: {}, process: same,
  shouldApply: () => true, override: same, getItemsCount: () => 0, editor: () => null,
});
standardFieldConfigEditorRegistry.setInit(() => [
  ...plain.map((path) => item(path, false)),
  ...custom.map((path) => item(path, true)),
]);

const options = new URLSearchParams(location.search);
const variables = JSON.parse(options.get("vars"));
const names = Object.keys(variables).sort((one, other) => other.length - one.length);
const putIn = (expr) => names.reduce((text, name) => text.replaceAll(`$${name}`, variables[name]), expr);

async function query(expr, range) {
  const parameters = new URLSearchParams({
    query: putIn(expr), start: range.from.valueOf() / 1000, end: range.to.valueOf() / 1000, step: 1,
  });
  const response = await fetch(`${options.get("prometheus")}/api/v1/query_range?${parameters}`);
  return (await response.json()).data.result;
}

const nameSeries = (target, labels) =>
  (target.legendFormat || "").replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "") || "value";

// Prometheus leaves out times without a value; Grafana shows them as gaps.
function fillGaps(values, range) {
  const known = new Map(values.map(([time, value]) => [Math.round(time), Number(value)]));
  const first = Math.round(range.from.valueOf() / 1000);
  const times = Array.from({ length: Math.round((range.to.valueOf() - range.from.valueOf()) / 1000) }, (_, i) => first + i);
  return [times.map((time) => time * 1000), times.map((time) => known.get(time) ?? null)];
}

async function readFrames(panel, range) {
  const data = [];
  for (const target of panel.targets ?? []) {
    for (const series of await query(target.expr, range)) {
      if (series.values.every(([, value]) => value === "NaN")) continue;
      const name = nameSeries(target, series.metric);
      const [times, values] = fillGaps(series.values, range);
      data.push(toDataFrame({
        refId: target.refId, name,
        fields: [
          { name: "Time", type: FieldType.time, config: {}, values: times },
          {
            name: "Value", type: FieldType.number, labels: series.metric,
            config: { displayNameFromDS: name }, values: values.map((value) => (Number.isNaN(value) ? null : value)),
          },
        ],
      }));
    }
  }
  const fieldConfig = structuredClone(panel.fieldConfig ?? { defaults: {}, overrides: [] });
  fieldConfig.defaults.color ??= { mode: panel.type === "stat" ? "thresholds" : "palette-classic" };
  for (const step of fieldConfig.defaults.thresholds?.steps ?? []) step.value ??= -Infinity;
  fieldConfig.overrides ??= [];
  return applyFieldOverrides({ data, fieldConfig, theme, replaceVariables: same, timeZone: "utc" });
}

function Rows({ panel, data, width, height }) {
  const mappings = panel.fieldConfig.defaults.mappings?.[0]?.options ?? {};
  const steps = panel.fieldConfig.defaults.thresholds?.steps ?? [];
  const color = (value) => {
    if (value === null || value === undefined) return "transparent";
    const named = mappings[String(value)]?.color;
    const step = steps.filter((each) => value >= (each.value ?? -Infinity)).at(-1);
    return theme.visualization.getColorByName(named ?? step?.color ?? "grey");
  };
  const rowHeight = height / Math.max(1, data.length);
  return (
    <svg width={width} height={height}>
      {data.map((frame, row) => {
        const values = frame.fields[1].values;
        const cell = (width - 250) / values.length;
        return (
          <g key={row}>
            <text x={0} y={(row + 0.65) * rowHeight} fill="#ccccdc" fontSize={Math.min(12, rowHeight)}>{frame.name}</text>
            {values.map((value, column) => (
              <rect key={column} x={250 + column * cell} y={row * rowHeight + 1} width={cell + 0.5}
                height={Math.max(1, rowHeight - 2)} fill={color(value)} />
            ))}
          </g>
        );
      })}
    </svg>
  );
}

function Body({ panel, data, range, width, height }) {
  if (data.length === 0) return <div className="no-data">No data</div>;
  if (panel.type === "timeseries") {
    const legend = { showLegend: true, displayMode: "list", placement: "bottom", calcs: [], ...panel.options?.legend };
    return <TimeSeries frames={data} width={width} height={height} timeRange={range} timeZone="utc" legend={legend} />;
  }
  if (panel.type === "stat") {
    const values = getFieldDisplayValues({
      data, theme, replaceVariables: same, timeZone: "utc", sparkline: true,
      fieldConfig: { defaults: {}, overrides: [] }, reduceOptions: { values: false, calcs: [ReducerID.lastNotNull] },
    });
    return (
      <div style={{ display: "flex" }}>
        {values.map((value, number) => (
          <BigValue key={number} theme={theme} width={width / values.length} height={height} value={value.display}
            sparkline={value.sparkline} colorMode="value" graphMode="area" justifyMode="auto"
            textMode={values.length > 1 ? "value_and_name" : "auto"} />
        ))}
      </div>
    );
  }
  return <Rows panel={panel} data={data} width={width} height={height} />;
}

function Dashboard() {
  const [state, setState] = useState();
  useEffect(() => {
    const read = async () => {
      const dashboard = await (await fetch(options.get("dashboard"))).json();
      const to = dateTime(1000 * Number(options.get("now")));
      const from = dateTime(to.valueOf() - 1000 * Number(options.get("seconds")));
      const range = { from, to, raw: { from, to } };
      const panels = await Promise.all(
        dashboard.panels.map(async (panel) => [panel, panel.type === "row" ? [] : await readFrames(panel, range)]),
      );
      setState({ dashboard, range, panels });
    };
    read().catch((error) => { document.title = `ERROR ${error.message}`; });
  }, []);
  useEffect(() => {
    if (!state) return;
    window.panels = state.panels.filter(([panel]) => panel.type !== "row").map(([panel, data]) => ({
      title: panel.title, type: panel.type, series: data.map((frame) => frame.name),
    }));
    document.title = "READY";
  });
  if (!state) return null;
  const column = innerWidth / 24;
  const row = 36;
  const bottom = Math.max(...state.panels.map(([{ gridPos }]) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <h3 style={{ padding: 8 }}>{state.dashboard.title}</h3>
      <div style={{ position: "relative", height: bottom * row }}>
        {state.panels.map(([panel, data], number) => {
          const { x, y, w, h } = panel.gridPos;
          const [width, height] = [w * column - 8, h * row - 8];
          return (
            <div key={number} style={{ position: "absolute", left: x * column + 4, top: y * row, width, height }}>
              {panel.type === "row" ? <h4 style={{ padding: 4 }}>{panel.title}</h4> : (
                <PanelChrome title={panel.title} description={panel.description} width={width} height={height} padding="md">
                  {(innerWidth, innerHeight) => (
                    <Body panel={panel} data={data} range={state.range} width={innerWidth} height={innerHeight} />
                  )}
                </PanelChrome>
              )}
            </div>
          );
        })}
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById("root")).render(<Dashboard />);
