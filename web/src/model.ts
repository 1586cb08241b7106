// What the server sends: one state of one service, twice a second. `cli/fulcrum_cli/web/page_model.py` builds it.
// Times are seconds (`at_s` is unix time, in a simulated run the time since its start), shares are 0 to 1, and null means unknown.

export type Role = "Prefill" | "Decode" | "Both";

export interface Tile {
  name: string;
  pool: string;
  /** Role by which the router dispatches. */
  role: Role | null;
  /** Role in the PDAssignment; it differs while a flip is under way. */
  assigned: Role | null;
  flipping: boolean;
  /** Since the role was assigned. */
  since_s: number | null;
  pinned: boolean;
  cordoned: boolean;
  phase: string;
  /** Why the instance gets no requests although its role and phase allow them; empty: no problem. */
  problem: string;
  serving: boolean;
  /** Predicted time until the prefill work on the instance is done. */
  queued_s: number;
  prefills: number;
  decodes: number;
  tokens: number;
  kv: number | null;
}

/** Index of the prefill and of the decode tile, and requests a second. */
export type Flow = [prefill: number, decode: number, rate: number];

export interface Latency {
  p50_s: number | null;
  p99_s: number | null;
}

export interface Decision {
  at_s: number;
  headline: string;
  reason: string;
  to: Role | null;
}

export interface Controls {
  loads: string[];
  load: string;
  started: boolean;
  /** Latencies are caused by the machine, not by the engine model. */
  too_slow: boolean;
}

/** Position in a recording, in seconds from its beginning. */
export interface Replay {
  position_s: number;
  duration_s: number;
  playing: boolean;
  speed: number;
  speeds: number[];
}

export interface State {
  service: string;
  namespace: string;
  model: string;
  simulated: boolean;
  mode: string;
  source: string;
  at_s: number;
  /** attained: null if the simulated run had no such objective. */
  slo: { ttft_s: number; tpot_s: number; attained: number | null };
  /** Sorted by pool and name. */
  tiles: Tile[];
  flows: Flow[];
  /** Of all pairs; `flows` has the busiest only. */
  rates: { offered: number; output_tokens: number; transfers: number; local_prefills: number };
  waiting: number;
  ttft: Latency;
  tpot: Latency;
  attained: number | null;
  /** `offered` and `refused` are requests a second; refused: not admitted, or over a rate limit. */
  tiers: { name: string; attained: number | null; offered: number; refused: number }[];
  desired: [prefill: number, decode: number];
  actual: [prefill: number, decode: number];
  flips: number;
  /** Oldest first. */
  decisions: Decision[];
  unavailable: string[];
  /** Only in `fulcrum play`. */
  controls: Controls | null;
  /** Only in `fulcrum web --replay`. */
  replay?: Replay;
}
