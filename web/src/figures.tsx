// The row of figures: latencies against their objectives, attainment, traffic, and the split.

import type { ComponentChildren } from "preact";
import { Chart } from "./chart";
import { formatCount, formatPercent, formatSeconds, NONE } from "./format";
import type { Sample } from "./history";
import type { Latency, State } from "./model";

interface CardProps {
  title: string;
  name?: string;
  verdict?: "met" | "missed" | null;
  children: ComponentChildren;
}

function Card({ title, name = title, verdict, children }: CardProps) {
  return (
    <section class="card" aria-label={name}>
      <h2>
        {title}
        {verdict && (
          <span class={`verdict ${verdict}`}>{verdict === "met" ? "✓ met" : "✗ missed"}</span>
        )}
      </h2>
      {children}
    </section>
  );
}

function judge(value: number | null, met: (value: number) => boolean): "met" | "missed" | null {
  return value === null ? null : met(value) ? "met" : "missed";
}

interface LatencyProps {
  title: string;
  name?: string;
  latency: Latency;
  objective: number;
  values: (number | null)[];
}

function LatencyCard({ title, name, latency, objective, values }: LatencyProps) {
  return (
    <Card title={title} name={name} verdict={judge(latency.p99_s, (value) => value <= objective)}>
      <p class="big">
        {formatSeconds(latency.p99_s)} <small>p99</small>
      </p>
      <Chart values={values} objective={objective} />
      <p class="small">
        p50 {formatSeconds(latency.p50_s)} · objective {formatSeconds(objective)}
      </p>
    </Card>
  );
}

function describeTiers(state: State): string {
  return state.tiers.map((tier) => `${tier.name} ${formatPercent(tier.attained)}${describeRefused(tier.refused)}`).join(" · ");
}

function describeRefused(rate: number): string {
  return rate > 0 ? `, ${formatCount(Math.max(rate, 0.1))}/s refused` : "";
}

export function Figures({ state, history }: { state: State; history: Sample[] }) {
  const { slo, rates } = state;
  const goal = slo.attained;
  const [prefill, decode] = state.desired;
  const lagging = String(state.desired) !== String(state.actual);
  return (
    <div class="figures">
      <LatencyCard
        title="Time to first token"
        latency={state.ttft}
        objective={slo.ttft_s}
        values={history.map((sample) => sample.ttft_s)}
      />
      <LatencyCard
        title="Time per token"
        name="Time per output token"
        latency={state.tpot}
        objective={slo.tpot_s}
        values={history.map((sample) => sample.tpot_s)}
      />
      <Card title="SLO attainment" verdict={goal === null ? null : judge(state.attained, (value) => value >= goal)}>
        <p class="big">
          {formatPercent(state.attained, 1)} <small>last 10 s</small>
        </p>
        <Chart values={history.map((sample) => sample.attained)} objective={goal ?? undefined} max={1.02} />
        <p class="small">{state.tiers.length > 1 ? describeTiers(state) : goal === null ? "no objective" : `objective ${formatPercent(goal)}`}</p>
      </Card>
      <Card title="Requests">
        <p class="big">
          {formatCount(rates.offered)} <small>per second</small>
        </p>
        <Chart values={history.map((sample) => sample.offered)} />
        <p class="small">
          {formatCount(Math.round(rates.output_tokens))} tokens/s · {formatCount(state.waiting)} waiting
          {describeRefused(state.tiers.reduce((sum, tier) => sum + tier.refused, 0))}
        </p>
      </Card>
      <Card title="Split, prefill to decode">
        <p class="big split">
          <span class="is-prefill">{prefill}</span>
          <span class="colon">:</span>
          <span class="is-decode">{decode}</span>
        </p>
        <Chart values={history.map((sample) => sample.prefillShare)} max={1} area />
        <p class="small">
          {state.flips} {state.flips === 1 ? "flip" : "flips"} ·{" "}
          {lagging ? `router uses ${state.actual.join(":")}` : state.actual[0] + state.actual[1] ? "as assigned" : NONE}
        </p>
      </Card>
    </div>
  );
}
