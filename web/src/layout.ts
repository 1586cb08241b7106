// The place of each tile: prefill instances left of decode instances, as requests flow, and grouped by pool. All tiles have
// one size: the largest with which both sides fit. Pure.

import type { Tile } from "./model";

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface PoolLabel {
  text: string;
  x: number;
  y: number;
}

export interface Layout {
  /** By instance name. */
  boxes: Map<string, Box>;
  labels: PoolLabel[];
  router: Box;
  prefill: Box;
  decode: Box;
  /** Point from which answers go to the clients. */
  exit: { x: number; y: number };
  detail: "full" | "short" | "tiny";
}

const ROUTER_WIDTH = 108;
const EXIT_WIDTH = 44;
const LANE = { wide: 76, narrow: 34 };
const PADDING = 12;
const SIDE_HEADER = 30;
const POOL_LABEL = 20;
const TILE_WIDTH_MAX = 208;
const FULL_HEIGHT = { min: 102, max: 128 };
const FULL_WIDTH_MIN = 112;
const SHORT_WIDTH_MIN = 34;
/** One side has room for this share of all tiles, so that a flip rarely changes the size. */
const HEADROOM = 0.62;

type Side = "prefill" | "decode";

export function sideOf(tile: Tile): Side {
  return tile.role === "Prefill" ? "prefill" : "decode";
}

interface Grid {
  width: number;
  height: number;
  gap: number;
  columns: number;
}

function gridOf(width: number, sideWidth: number): Grid {
  const gap = width >= FULL_WIDTH_MIN ? 10 : width >= SHORT_WIDTH_MIN ? 6 : width >= 12 ? 3 : 2;
  const height = width >= FULL_WIDTH_MIN ? FULL_HEIGHT.min : width;
  return { width, height, gap, columns: Math.max(1, Math.floor((sideWidth + gap) / (width + gap))) };
}

function countByPool(tiles: Tile[]): Map<string, number> {
  const counts = new Map<string, number>();
  for (const tile of tiles) counts.set(tile.pool, (counts.get(tile.pool) ?? 0) + 1);
  return counts;
}

function heightOf(counts: Map<string, number>, atLeast: number, grid: Grid, labelled: boolean): number {
  let rows = 0;
  for (const count of counts.values()) rows += Math.ceil(count / grid.columns);
  rows = Math.max(rows, Math.ceil(atLeast / grid.columns));
  return rows * (grid.height + grid.gap) + (labelled ? counts.size * POOL_LABEL : 0);
}

/** The largest grid with which both sides fit into their height. */
function chooseGrid(sides: Map<string, number>[], total: number, side: Box, labelled: boolean): Grid {
  for (let width = Math.min(TILE_WIDTH_MAX, side.width); width > 4; width -= width > 40 ? 4 : 1) {
    const grid = gridOf(width, side.width);
    if (sides.every((counts) => heightOf(counts, total * HEADROOM, grid, labelled) <= side.height)) return grid;
  }
  return gridOf(4, side.width);
}

export function layOut(tiles: Tile[], width: number, height: number): Layout {
  const lane = width >= 760 ? LANE.wide : LANE.narrow;
  const sideWidth = Math.max(60, (width - ROUTER_WIDTH - EXIT_WIDTH - 3 * lane) / 2);
  const side = (x: number): Box => ({ x, y: 0, width: sideWidth, height });
  const prefill = side(ROUTER_WIDTH + lane);
  const decode = side(prefill.x + sideWidth + lane);
  const inner: Box = {
    x: 0, y: 0, width: sideWidth - 2 * PADDING, height: height - SIDE_HEADER - PADDING,
  };
  const bySide = { prefill: tiles.filter((t) => sideOf(t) === "prefill"), decode: tiles.filter((t) => sideOf(t) === "decode") };
  const labelled = new Set(tiles.map((tile) => tile.pool)).size > 1;
  const grid = chooseGrid([countByPool(bySide.prefill), countByPool(bySide.decode)], tiles.length, inner, labelled);
  const used = Math.max(...[bySide.prefill, bySide.decode].map((s) => heightOf(countByPool(s), tiles.length * HEADROOM, grid, labelled)));
  if (grid.width >= FULL_WIDTH_MIN) {
    const rows = Math.round((used - (labelled ? POOL_LABEL : 0)) / (grid.height + grid.gap));
    grid.height += Math.max(0, Math.min(FULL_HEIGHT.max - grid.height, (inner.height - used) / Math.max(1, rows)));
  }
  const layout: Layout = {
    boxes: new Map(), labels: [], prefill, decode,
    router: { x: 0, y: height / 2 - 62, width: ROUTER_WIDTH, height: 124 },
    exit: { x: width - EXIT_WIDTH / 2, y: height / 2 },
    detail: grid.width >= FULL_WIDTH_MIN ? "full" : grid.width >= SHORT_WIDTH_MIN ? "short" : "tiny",
  };
  place(bySide.prefill, prefill, grid, labelled, layout);
  place(bySide.decode, decode, grid, labelled, layout);
  return layout;
}

function place(tiles: Tile[], side: Box, grid: Grid, labelled: boolean, layout: Layout): void {
  const needed = heightOf(countByPool(tiles), 0, grid, labelled) - grid.gap;
  const free = side.height - SIDE_HEADER - PADDING - needed;
  let [pool, column, y] = ["", 0, SIDE_HEADER + Math.max(0, free) / 2];
  const step = grid.height + grid.gap;
  const used = grid.columns * (grid.width + grid.gap) - grid.gap;
  const left = side.x + PADDING + Math.max(0, side.width - 2 * PADDING - used) / 2;
  for (const tile of tiles) {
    if (tile.pool !== pool || column === grid.columns) {
      if (pool) y += step;
      column = 0;
    }
    if (labelled && tile.pool !== pool) {
      layout.labels.push({ text: tile.pool, x: left, y });
      y += POOL_LABEL;
    }
    pool = tile.pool;
    layout.boxes.set(tile.name, {
      x: left + column * (grid.width + grid.gap), y, width: grid.width, height: grid.height,
    });
    column++;
  }
}
