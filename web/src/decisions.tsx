// The last decisions, newest first, each with its reason.

import { formatClock } from "./format";
import type { Decision } from "./model";

const SHOWN_MAX = 40;

export function Decisions({ decisions }: { decisions: Decision[] }) {
  const newest = decisions.slice(-SHOWN_MAX).reverse();
  return (
    <section class="decisions" aria-labelledby="decisions-title">
      <h2 id="decisions-title">Decisions</h2>
      <div role="log" aria-relevant="additions" tabIndex={0} aria-labelledby="decisions-title">
        <ol>
          {newest.map((decision) => (
            <li key={`${decision.at_s} ${decision.headline}`} class={classOf(decision)}>
              <time dateTime={new Date(decision.at_s * 1000).toISOString()}>{formatClock(decision.at_s)}</time>
              <b>{decision.headline}</b>
              <p>{decision.reason || "no reason given"}</p>
            </li>
          ))}
          {newest.length === 0 && <li>No decision yet.</li>}
        </ol>
      </div>
    </section>
  );
}

function classOf(decision: Decision): string {
  return decision.to === "Prefill" ? "is-prefill" : decision.to === "Decode" ? "is-decode" : "unwritten";
}
