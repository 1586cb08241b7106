// Requests as dots on a canvas: from the router to a prefill instance, with its KV to a decode instance, and as an
// answer to the client. Dots are aggregated: above `DOTS_A_SECOND` one dot stands for several requests.

import type { Box, Layout } from "./layout";
import type { State } from "./model";

const DOTS_A_SECOND = 80;
const LEG_S = [0.7, 0.65, 0.7];
const PAUSE_S = 0.18;
const LINES_MAX = { few: 120, many: 50 };
const FRAME_S_MAX = 0.1;

interface Dot {
  /** Name of the prefill instance; null: the decode instance computes the prompt itself. */
  prefill: string | null;
  decode: string;
  age_s: number;
  offset: number;
}

interface Size {
  width: number;
  height: number;
}

interface Point {
  x: number;
  y: number;
}

const rightOf = (box: Box): Point => ({ x: box.x + box.width, y: box.y + box.height / 2 });
const leftOf = (box: Box): Point => ({ x: box.x, y: box.y + box.height / 2 });

function bezier(from: Point, to: Point, t: number): Point {
  const bend = (to.x - from.x) / 2;
  const u = 1 - t;
  const [a, b, c, d] = [u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t];
  return {
    x: a * from.x + b * (from.x + bend) + c * (to.x - bend) + d * to.x,
    y: a * from.y + b * from.y + c * to.y + d * to.y,
  };
}

export class FlowCanvas {
  private dots: Dot[] = [];
  private layout: Layout | null = null;
  private state: State | null = null;
  private cumulative: number[] = [];
  /** Requests a second: all of them, and those of the flows that the server sent. */
  private rate = 0;
  private total = 0;
  private due = 0;
  private last_ms = 0;
  private request = 0;
  private colours: string[] = [];
  private size: Size = { width: 0, height: 0 };
  private readonly still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(private readonly laneCanvas: HTMLCanvasElement, private readonly dotCanvas: HTMLCanvasElement) {
    this.request = requestAnimationFrame(this.draw);
  }

  close(): void {
    cancelAnimationFrame(this.request);
  }

  /** Requests that one dot stands for. */
  get requestsPerDot(): number {
    return Math.max(1, Math.ceil(this.rate / DOTS_A_SECOND));
  }

  update(state: State, layout: Layout, size: Size): void {
    this.state = state;
    this.layout = layout;
    this.size = size;
    this.rate = state.rates.transfers + state.rates.local_prefills;
    this.total = 0;
    this.cumulative = state.flows.map((flow) => (this.total += flow[2]));
    this.total += state.rates.local_prefills;
    this.colours = ["--prefill", "--transfer", "--decode"].map((name) => this.readColour(name));
    this.drawLanes(state, layout, this.readColour("--lane"));
  }

  /** Returns a colour of the current theme. A canvas cannot evaluate `light-dark()`, which the variable contains. */
  private readColour(variable: string): string {
    this.laneCanvas.style.color = `var(${variable})`;
    return getComputedStyle(this.laneCanvas).color;
  }

  private draw = (now_ms: number): void => {
    this.request = requestAnimationFrame(this.draw);
    const passed_s = Math.min(FRAME_S_MAX, (now_ms - this.last_ms) / 1000);
    this.last_ms = now_ms;
    if (!this.layout || !this.state || this.still.matches) return;
    this.spawn(passed_s, this.state);
    this.drawDots(passed_s, this.layout);
  };

  /** Clears a canvas for the next drawing, in the stage's size. */
  private clear(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
    const ratio = Math.min(2, devicePixelRatio || 1);
    const [width, height] = [Math.round(this.size.width * ratio), Math.round(this.size.height * ratio)];
    const context = canvas.getContext("2d")!;
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.size.width, this.size.height);
    return context;
  }

  /** Draws the busiest pairs as lines whose width shows the rate. */
  private drawLanes(state: State, layout: Layout, colour: string): void {
    const context = this.clear(this.laneCanvas);
    context.strokeStyle = colour;
    const [prefilled, decoded] = [new Map<Box, number>(), new Map<Box, number>()];
    for (const [prefill, decode, rate] of state.flows.slice(0, layout.detail === "tiny" ? LINES_MAX.many : LINES_MAX.few)) {
      const p = layout.boxes.get(state.tiles[prefill]!.name);
      const d = layout.boxes.get(state.tiles[decode]!.name);
      if (!p || !d) continue;
      this.line(context, rightOf(p), leftOf(d), rate);
      prefilled.set(p, (prefilled.get(p) ?? 0) + rate);
      decoded.set(d, (decoded.get(d) ?? 0) + rate);
    }
    for (const [box, rate] of prefilled) this.line(context, rightOf(layout.router), leftOf(box), rate);
    for (const [box, rate] of decoded) this.line(context, rightOf(box), layout.exit, rate);
  }

  private line(context: CanvasRenderingContext2D, from: Point, to: Point, rate: number): void {
    const bend = (to.x - from.x) / 2;
    context.lineWidth = Math.min(5, 0.75 + Math.sqrt(rate / this.requestsPerDot));
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.bezierCurveTo(from.x + bend, from.y, to.x - bend, to.y, to.x, to.y);
    context.stroke();
  }

  private spawn(passed_s: number, state: State): void {
    this.due += (this.rate / this.requestsPerDot) * passed_s;
    for (; this.due >= 1; this.due--) {
      const drawn = Math.random() * this.total;
      const index = this.cumulative.findIndex((sum) => drawn < sum);
      const flow = state.flows[index];
      const decode = flow ? state.tiles[flow[1]] : state.tiles.find((tile) => tile.role !== "Prefill");
      if (!decode) continue;
      const prefill = flow ? state.tiles[flow[0]]!.name : null;
      // Spread over the time of this frame, so that dots do not come in groups.
      this.dots.push({ prefill, decode: decode.name, age_s: -Math.random() * 0.15, offset: Math.random() - 0.5 });
    }
  }

  private drawDots(passed_s: number, layout: Layout): void {
    const alive: Dot[] = [];
    const batches: Path2D[] = [new Path2D(), new Path2D(), new Path2D()];
    for (const dot of this.dots) {
      dot.age_s += passed_s;
      if (dot.age_s < 0) {
        alive.push(dot);
        continue;
      }
      const found = locate(dot, layout);
      if (!found) continue;
      alive.push(dot);
      if (found.leg < 0) continue;
      const { x, y } = found.point;
      batches[found.leg]!.moveTo(x + 3, y);
      batches[found.leg]!.arc(x, y, 3, 0, 7);
    }
    const context = this.clear(this.dotCanvas);
    batches.forEach((batch, leg) => {
      context.fillStyle = this.colours[leg]!;
      context.fill(batch);
    });
    this.dots = alive;
  }
}

/** Place and leg of a dot; leg -1: it is inside an instance. Null: it has reached the clients, or an instance is gone. */
function locate(dot: Dot, layout: Layout): { point: Point; leg: number } | null {
  const decode = layout.boxes.get(dot.decode);
  const prefill = dot.prefill === null ? null : layout.boxes.get(dot.prefill);
  if (!decode || prefill === undefined) return null;
  const spread = (point: Point, box: Box): Point => ({ x: point.x, y: point.y + dot.offset * box.height * 0.4 });
  const start = spread(rightOf(layout.router), layout.router);
  const legs: [Point, Point, number][] = prefill
    ? [
        [start, spread(leftOf(prefill), prefill), 0],
        [spread(rightOf(prefill), prefill), spread(leftOf(decode), decode), 1],
        [spread(rightOf(decode), decode), layout.exit, 2],
      ]
    : [
        [start, spread(leftOf(decode), decode), 0],
        [spread(rightOf(decode), decode), layout.exit, 2],
      ];
  let age_s = dot.age_s;
  for (const [from, to, leg] of legs) {
    const duration_s = LEG_S[leg]!;
    if (age_s < duration_s) return { point: bezier(from, to, age_s / duration_s), leg };
    age_s -= duration_s;
    if (age_s < PAUSE_S) return { point: to, leg: -1 };
    age_s -= PAUSE_S;
  }
  return null;
}
