// The last two minutes of the figures, for the small charts.

import type { State } from "./model";

const SAMPLES_MAX = 240;

export interface Sample {
  at_s: number;
  ttft_s: number | null;
  tpot_s: number | null;
  attained: number | null;
  offered: number;
  prefillShare: number | null;
}

export function addSample(history: Sample[], state: State): Sample[] {
  const [prefill, decode] = state.desired;
  const last = history.at(-1);
  if (last && state.at_s < last.at_s) return addSample([], state); // a replay was moved back
  if (last && state.replay && state.at_s === last.at_s) return history; // the replay is paused
  const sample: Sample = {
    at_s: state.at_s,
    ttft_s: state.ttft.p99_s,
    tpot_s: state.tpot.p99_s,
    attained: state.attained,
    offered: state.rates.offered,
    prefillShare: prefill + decode ? prefill / (prefill + decode) : null,
  };
  return [...history.slice(1 - SAMPLES_MAX), sample];
}
