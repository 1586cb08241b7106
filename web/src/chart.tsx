// A small chart: one line over at most two minutes, with a dashed line at the objective. The figures are shown as text next
// to the chart. A page that was opened just now has a time axis of half a minute: else the line would be a dot at its end.

const WIDTH = 120;
const HEIGHT = 34;
const SAMPLES_MIN = 60;

interface Props {
  values: (number | null)[];
  objective?: number;
  /** Upper end of the scale; by default it follows from the largest value and the objective. */
  max?: number;
  area?: boolean;
}

export function Chart({ values, objective, max, area }: Props) {
  const known = values.filter((value) => value !== null);
  const top = max ?? Math.max(objective ? objective * 1.25 : 0, ...known, 1e-9) * 1.05;
  const shown = Math.max(SAMPLES_MIN, values.length);
  const x = (index: number) => ((index + shown - values.length) / (shown - 1)) * WIDTH;
  const y = (value: number) => HEIGHT - Math.min(1, value / top) * HEIGHT;
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  const first = values.findIndex((value) => value !== null);
  const closed = area && first >= 0 ? `${path}L${WIDTH} ${HEIGHT}L${x(first).toFixed(1)} ${HEIGHT}Z` : "";
  return (
    <svg class="chart" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      {area && <rect class="chart-rest" width={WIDTH} height={HEIGHT} />}
      {closed && <path class="chart-area" d={closed} />}
      {objective !== undefined && (
        <line class="chart-objective" x1="0" x2={WIDTH} y1={y(objective)} y2={y(objective)} />
      )}
      {!area && <path class="chart-line" d={path} />}
    </svg>
  );
}
