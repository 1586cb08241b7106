// Below the fleet: the selected instance with its buttons, the load, and the replay. Buttons that change the service or the
// load exist only in `fulcrum play`.

import { useState } from "preact/hooks";
import { act } from "./connection";
import { describeAge, describeTile } from "./fleet";
import { formatElapsed, plural } from "./format";
import type { Controls, Replay, State, Tile } from "./model";

interface Notice {
  ok: boolean;
  message: string;
}

type Run = (action: Record<string, string | number>) => void;

export function Panel({ state, selected }: { state: State; selected: string | null }) {
  const [notice, setNotice] = useState<Notice | null>(null);
  const [busy, setBusy] = useState(false);
  const tile = state.tiles.find((each) => each.name === selected);
  const run: Run = async (action) => {
    setBusy(true);
    setNotice(await act(action));
    setBusy(false);
  };
  return (
    <section class="panel" aria-label="Selected instance and load">
      {state.replay && <ReplayButtons replay={state.replay} run={run} />}
      {state.controls && <LoadButtons controls={state.controls} busy={busy} run={run} />}
      <div class="instance">
        {tile ? (
          <Details tile={tile} />
        ) : (
          <p class="hint">
            Select an instance to {state.controls ? "flip, drain or kill it" : "see its figures"}.
          </p>
        )}
        {tile && state.controls && <InstanceButtons tile={tile} busy={busy} run={run} />}
      </div>
      <p class={notice?.ok === false ? "notice bad" : "notice"} role="status">
        {notice?.message ?? ""}
      </p>
    </section>
  );
}

function ReplayButtons({ replay, run }: { replay: Replay; run: Run }) {
  const [dragged, setDragged] = useState<number | null>(null);
  const position = dragged ?? Math.round(replay.position_s);
  return (
    <div class="replay" role="group" aria-label="Replay">
      <button type="button" onClick={() => run({ action: replay.playing ? "pause" : "play" })}>
        {replay.playing ? "Pause" : "Play"}
      </button>
      <input
        type="range"
        min={0}
        max={Math.ceil(replay.duration_s)}
        value={position}
        aria-label="Position"
        aria-valuetext={formatElapsed(position)}
        onInput={(event) => setDragged(Number(event.currentTarget.value))}
        onChange={(event) => {
          run({ action: "seek", position_s: Number(event.currentTarget.value) });
          setDragged(null);
        }}
      />
      <span class="caption">
        {formatElapsed(position)} of {formatElapsed(replay.duration_s)}
      </span>
      {replay.speeds.map((speed) => (
        <button
          type="button"
          key={speed}
          aria-pressed={speed === replay.speed}
          onClick={() => run({ action: "speed", speed })}
        >
          {speed}×
        </button>
      ))}
    </div>
  );
}

function LoadButtons({ controls, busy, run }: { controls: Controls; busy: boolean; run: Run }) {
  return (
    <div class="loads" role="group" aria-label="Load">
      <span class="caption">Load</span>
      {controls.loads.map((load) => (
        <button
          type="button"
          key={load}
          aria-pressed={load === controls.load}
          disabled={busy || !controls.started}
          onClick={() => run({ action: "load", load })}
        >
          {load}
        </button>
      ))}
      {!controls.loads.includes(controls.load) && <span class="caption">{controls.load}</span>}
    </div>
  );
}

function Details({ tile }: { tile: Tile }) {
  return (
    <p class="details" aria-label={describeTile(tile)}>
      <b>{tile.name}</b>
      <span>{describeAge(tile)}</span>
      <span>{tile.problem || tile.phase}</span>
      <span>pool {tile.pool}</span>
      <span>{plural(tile.tokens, "token")} in decode</span>
    </p>
  );
}

function InstanceButtons({ tile, busy, run }: { tile: Tile; busy: boolean; run: Run }) {
  const to = tile.assigned === "Prefill" ? "Decode" : "Prefill";
  const instance = tile.name;
  return (
    <div class="actions" role="group" aria-label={`Actions on ${instance}`}>
      <button type="button" disabled={busy} onClick={() => run({ action: "flip", instance, to })}>
        Flip to {to}
      </button>
      <button
        type="button"
        disabled={busy}
        onClick={() => run({ action: tile.cordoned ? "undrain" : "drain", instance })}
      >
        {tile.cordoned ? "Undo drain" : "Drain"}
      </button>
      <button type="button" class="danger" disabled={busy} onClick={() => run({ action: "kill", instance })}>
        Kill engine
      </button>
    </div>
  );
}
