// The fleet: the router, a tile for each instance, and the requests between them.

import { Component, type RefObject } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { FlowCanvas } from "./flow";
import { formatAge, formatCount, formatPercent, formatSeconds, plural } from "./format";
import { layOut, type Box, type Layout } from "./layout";
import type { State, Tile } from "./model";

const FLIPPED_S = 4;
/** With more tiles than this they jump to a new place instead of gliding there: animating them costs frames. */
const GLIDING_TILES_MAX = 200;
/** With more tiles than this their fill changes in steps. */
const SMOOTH_TILES_MAX = 16;

export function describeTile(tile: Tile): string {
  const role = tile.flipping ? `${tile.role}, flipping to ${tile.assigned}` : (tile.role ?? "no role");
  const state = tile.problem || (tile.phase === "Serving" ? "serving" : tile.phase.toLowerCase());
  const work = [
    tile.prefills ? `${plural(tile.prefills, "prompt")} in prefill` : "",
    tile.decodes ? `${plural(tile.decodes, "answer")} in decode` : "",
    `${formatSeconds(tile.queued_s)} of prefill work queued`,
    `KV cache ${formatPercent(tile.kv)}`,
  ];
  return [
    tile.name, role, state, tile.cordoned ? "cordoned" : "", tile.pinned ? "pinned" : "", ...work,
  ].filter(Boolean).join(", ");
}

function letterOf(tile: Tile): string {
  return tile.role === "Prefill" ? "P" : tile.role === "Decode" ? "D" : tile.role === "Both" ? "B" : "?";
}

function classOf(tile: Tile, detail: Layout["detail"], selected: boolean): string {
  const names = ["tile", detail, tile.role === "Prefill" ? "is-prefill" : "is-decode"];
  if (tile.flipping) names.push("flipping");
  else if (tile.since_s !== null && tile.since_s < FLIPPED_S) names.push("flipped");
  if (tile.problem || tile.phase === "Failed") names.push("broken");
  else if (!tile.serving) names.push("idle");
  if (tile.cordoned) names.push("cordoned");
  if (selected) names.push("selected");
  return names.join(" ");
}

/** How full the instance is in its role: queue against the TTFT objective, or KV cache. */
function fillOf(tile: Tile, ttft_s: number): number {
  return Math.min(1, tile.role === "Prefill" ? tile.queued_s / ttft_s : (tile.kv ?? 0));
}

interface GaugeProps {
  label: string;
  share: number;
  text: string;
}

function Gauge({ label, share, text }: GaugeProps) {
  return (
    <span class="gauge">
      <span>{label}</span>
      <span class="gauge-text">{text}</span>
      <span class={share > 1 ? "gauge-bar over" : "gauge-bar"}>
        <span style={{ transform: `scaleX(${Math.min(1, share).toFixed(3)})` }} />
      </span>
    </span>
  );
}

interface TileProps {
  tile: Tile;
  box: Box;
  detail: Layout["detail"];
  ttft_s: number;
  selected: boolean;
  focusable: boolean;
  onSelect: (name: string) => void;
}

function statusOf(tile: Tile): string {
  if (tile.problem) return tile.problem;
  if (tile.cordoned) return "cordoned: no new requests";
  if (tile.phase !== "Serving") return tile.phase.toLowerCase();
  if (tile.flipping) return `flipping to ${tile.assigned}`;
  return tile.role === "Prefill"
    ? plural(tile.prefills, "prompt")
    : plural(tile.decodes, "answer");
}

class TileView extends Component<TileProps> {
  private signature = "";

  override shouldComponentUpdate(next: TileProps): boolean {
    const { x, y, width, height } = next.box;
    // The age of a role changes a tile only shortly after a flip; small tiles show little more than their fill.
    const signature = [
      x, y, width, height, classOf(next.tile, next.detail, next.selected), next.focusable,
      fillOf(next.tile, next.ttft_s).toFixed(2), next.detail === "full" ? describeTile(next.tile) : "",
    ].join();
    const changed = signature !== this.signature;
    this.signature = signature;
    return changed;
  }

  override render({ tile, box, detail, ttft_s, selected, focusable, onSelect }: TileProps) {
    return (
      <button
        type="button"
        class={classOf(tile, detail, selected)}
        style={{ transform: `translate(${box.x}px, ${box.y}px)`, width: `${box.width}px`, height: `${box.height}px` }}
        aria-label={describeTile(tile)}
        aria-pressed={selected}
        title={detail === "full" ? undefined : describeTile(tile)}
        tabIndex={focusable ? 0 : -1}
        data-name={tile.name}
        onClick={() => onSelect(tile.name)}
      >
        <span class="fill" style={{ transform: `scaleY(${fillOf(tile, ttft_s).toFixed(3)})` }} />
        {detail === "short" && (
          <span class="tile-short">
            <b>{letterOf(tile)}</b>
            <span>{tile.name.slice(tile.name.lastIndexOf("-") + 1)}</span>
          </span>
        )}
        {detail === "full" && (
          <span class="tile-full">
            <span class="tile-head">
              <b class="letter">{letterOf(tile)}</b>
              <span class="tile-name">{tile.name}</span>
              {tile.pinned && <span class="mark">pinned</span>}
            </span>
            <span class="tile-status">{statusOf(tile)}</span>
            <Gauge label="queue" share={tile.queued_s / ttft_s} text={formatSeconds(tile.queued_s)} />
            <Gauge label="KV" share={tile.kv ?? 0} text={formatPercent(tile.kv)} />
          </span>
        )}
      </button>
    );
  }
}

function useSize(): [RefObject<HTMLDivElement | null>, { width: number; height: number }] {
  const ref = useRef<HTMLDivElement>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => {
      const { width, height } = entry!.contentRect;
      setSize({ width: Math.floor(width), height: Math.floor(height) });
    });
    observer.observe(ref.current!);
    return () => observer.disconnect();
  }, []);
  return [ref, size];
}

/** Arrow keys move the focus to the nearest tile in that direction. */
function findNeighbour(layout: Layout, from: string, key: string): string | null {
  const start = layout.boxes.get(from);
  const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  if (!start || !direction) return null;
  let [best, bestCost] = [null as string | null, Infinity];
  for (const [name, box] of layout.boxes) {
    const [dx, dy] = [box.x - start.x, box.y - start.y];
    const along = dx * direction[0]! + dy * direction[1]!;
    const across = Math.abs(dx * direction[1]!) + Math.abs(dy * direction[0]!);
    const cost = along + 3 * across;
    if (along > 1 && cost < bestCost) [best, bestCost] = [name, cost];
  }
  return best;
}

interface FleetProps {
  state: State;
  selected: string | null;
  onSelect: (name: string | null) => void;
}

export function Fleet({ state, selected, onSelect }: FleetProps) {
  const [stage, size] = useSize();
  const lanes = useRef<HTMLCanvasElement>(null);
  const dots = useRef<HTMLCanvasElement>(null);
  const flow = useRef<FlowCanvas | null>(null);
  const layout = useMemo(
    () => (size.width ? layOut(state.tiles, size.width, size.height) : null),
    [state.tiles, size],
  );
  useEffect(() => {
    flow.current = new FlowCanvas(lanes.current!, dots.current!);
    return () => flow.current!.close();
  }, []);
  useEffect(() => {
    if (layout) flow.current!.update(state, layout, size);
  }, [state, layout]);

  const onKeyDown = (event: KeyboardEvent) => {
    const name = (event.target as HTMLElement).dataset["name"];
    if (!layout || !name) return;
    if (event.key === "Escape") onSelect(null);
    const next = findNeighbour(layout, name, event.key);
    if (!next) return;
    event.preventDefault();
    onSelect(next);
    stage.current!.querySelector<HTMLElement>(`[data-name="${CSS.escape(next)}"]`)?.focus();
  };
  const focusable = selected && layout?.boxes.has(selected) ? selected : state.tiles[0]?.name;
  const perDot = flow.current?.requestsPerDot ?? 1;
  const count = state.tiles.length;
  const motion = `${count <= GLIDING_TILES_MAX ? "gliding" : ""} ${count <= SMOOTH_TILES_MAX ? "smooth" : ""}`;
  return (
    <section class="fleet" aria-label="Fleet">
      <div class={`stage ${motion}`} ref={stage}>
        {layout && (
          <>
            <Side box={layout.prefill} role="prefill" title="Prefill" count={state.tiles.filter((t) => t.role === "Prefill").length} />
            <Side box={layout.decode} role="decode" title="Decode" count={state.tiles.filter((t) => t.role !== "Prefill").length} />
          </>
        )}
        <canvas ref={lanes} aria-hidden="true" />
        <canvas ref={dots} aria-hidden="true" />
        {layout && (
          <>
            <div class="router" style={boxStyle(layout.router)}>
              <b>Router</b>
              <span class="router-rate">{formatCount(state.rates.offered)}/s</span>
              <span>{formatCount(state.waiting)} waiting</span>
            </div>
            <span class="exit" style={{ transform: `translate(${layout.exit.x - 22}px, ${layout.exit.y - 22}px)` }}>
              to clients
            </span>
            {layout.labels.map((label) => (
              <span class="pool" key={`${label.x}-${label.text}`} style={{ transform: `translate(${label.x}px, ${label.y}px)` }}>
                pool {label.text}
              </span>
            ))}
            <div role="group" aria-label="Instances; the arrow keys move between them" onKeyDown={onKeyDown}>
              {state.tiles.map((tile) => (
                <TileView
                  key={tile.name}
                  tile={tile}
                  box={layout.boxes.get(tile.name)!}
                  detail={layout.detail}
                  ttft_s={state.slo.ttft_s}
                  selected={tile.name === selected}
                  focusable={tile.name === focusable}
                  onSelect={(name) => onSelect(name === selected ? null : name)}
                />
              ))}
            </div>
          </>
        )}
      </div>
      <Legend perDot={perDot} detail={layout?.detail ?? "full"} />
    </section>
  );
}

function boxStyle(box: Box) {
  return { transform: `translate(${box.x}px, ${box.y}px)`, width: `${box.width}px`, height: `${box.height}px` };
}

interface SideProps {
  box: Box;
  role: "prefill" | "decode";
  title: string;
  count: number;
}

function Side({ box, role, title, count }: SideProps) {
  return (
    <div class={`side is-${role}`} style={boxStyle(box)}>
      <h3>
        {title} <span>{plural(count, "instance")}</span>
      </h3>
    </div>
  );
}

function Legend({ perDot, detail }: { perDot: number; detail: Layout["detail"] }) {
  return (
    <p class="legend">
      <span><i class="dot prompt" /> prompt</span>
      <span><i class="dot kv" /> KV transfer</span>
      <span><i class="dot answer" /> answer</span>
      <span>{perDot === 1 ? "one dot is one request" : `one dot is ${perDot} requests`}</span>
      {detail !== "full" && <span>fill: prefill queue as a share of the TTFT objective, or KV cache in use</span>}
      <span><i class="ring" /> flipped just now</span>
    </p>
  );
}

export function describeAge(tile: Tile): string {
  return tile.since_s === null ? "" : `${tile.role} for ${formatAge(tile.since_s)}`;
}
