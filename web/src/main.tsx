// The page: connects, keeps the last states, and draws them.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { follow, type Connection } from "./connection";
import { Decisions } from "./decisions";
import { Figures } from "./figures";
import { Fleet } from "./fleet";
import { addSample, type Sample } from "./history";
import type { State } from "./model";
import { Panel } from "./panel";
import { applyTheme, ThemeButton } from "./theme";

interface View {
  state: State | null;
  history: Sample[];
}

function Page() {
  const [view, setView] = useState<View>({ state: null, history: [] });
  const [[connection, why], setConnection] = useState<[Connection, string]>(["connecting", ""]);
  const [selected, setSelected] = useState<string | null>(null);
  useEffect(() => {
    void follow(
      (state) => setView(({ history }) => ({ state, history: addSample(history, state) })),
      (connection, why) => setConnection((last) => (last[0] === connection ? last : [connection, why])),
    );
  }, []);
  const { state, history } = view;
  return (
    <>
      <Header state={state} connection={connection} />
      {connection === "refused" && <Alert text={`The server refused this page: ${why}.`} />}
      {connection === "lost" && <Alert text="Connection lost; the figures below are old. Connecting again …" />}
      {state && state.unavailable.length > 0 && (
        <Alert text={`Not responding: ${state.unavailable.join(", ")}. The figures from there are old.`} />
      )}
      {state?.controls?.too_slow && (
        <Alert text="Machine too slow: engine steps are late, so latencies are higher than the engine model says." />
      )}
      {state ? (
        <main>
          <Figures state={state} history={history} />
          <Fleet state={state} selected={selected} onSelect={setSelected} />
          <Decisions decisions={state.decisions} />
          <Panel state={state} selected={selected} />
        </main>
      ) : (
        connection !== "refused" && <p class="hint wait">Waiting for the first state …</p>
      )}
    </>
  );
}

function Alert({ text }: { text: string }) {
  return (
    <p class="alert" role="alert">
      {text}
    </p>
  );
}

const CONNECTIONS: Record<Connection, string> = {
  connecting: "connecting", open: "live", lost: "connection lost", refused: "refused",
};

function Header({ state, connection }: { state: State | null; connection: Connection }) {
  return (
    <header>
      <h1>
        <svg viewBox="0 0 32 32" aria-hidden="true">
          <path class="beam" d="M3 9 29 15" />
          <path class="pivot" d="M16 13 23 28H9Z" />
          <circle class="left" cx="6" cy="6" r="4" />
          <circle class="right" cx="26" cy="10.6" r="4" />
        </svg>
        fulcrum{state && <span class="service">{state.service}</span>}
      </h1>
      {state && (
        <p class="about">
          {state.model}
          {state.simulated && ", simulated"} · autoscaling {state.mode} · {state.source}
        </p>
      )}
      <span class={`connection ${connection}`}>
        {connection === "open" && state?.replay ? "replay" : CONNECTIONS[connection]}
      </span>
      <ThemeButton />
    </header>
  );
}

applyTheme();
render(<Page />, document.getElementById("page")!);
