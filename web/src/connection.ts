// The connection to the server: a stream of states, and actions. The token comes in the fragment of the address, which
// browsers do not send to a server; it is kept for reloads of this tab.

import type { State } from "./model";

export type Connection = "connecting" | "open" | "lost" | "refused";

const TOKEN_KEY = "fulcrum-token";
const RETRY_MS = [500, 1000, 2000, 4000];

function readToken(): string {
  const given = location.hash.slice(1);
  if (given) {
    sessionStorage.setItem(TOKEN_KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  return given || sessionStorage.getItem(TOKEN_KEY) || "";
}

const token = readToken();

function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  return fetch(path, { ...init, headers, credentials: "omit", cache: "no-store" });
}

async function readError(response: Response): Promise<string> {
  try {
    return ((await response.json()) as { error: string }).error;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Yields the data of each server-sent event. */
async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      yield text.slice("data: ".length, end);
      text = text.slice(end + 2);
    }
  }
}

/** Calls `onState` for every state, and connects again after a failure; after a refusal it gives up. */
export async function follow(
  onState: (state: State) => void,
  onConnection: (connection: Connection, why: string) => void,
): Promise<void> {
  for (let failures = 0; ; failures++) {
    try {
      const response = await call("/api/states");
      if (response.status === 401 || response.status === 403) {
        onConnection("refused", await readError(response));
        return;
      }
      if (!response.ok || !response.body) throw new Error(await readError(response));
      for await (const event of readEvents(response.body)) {
        failures = 0;
        onConnection("open", "");
        onState(JSON.parse(event) as State);
      }
      onConnection("lost", "the server closed the connection");
    } catch (error) {
      onConnection("lost", error instanceof Error ? error.message : String(error));
    }
    const waitMs = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

/** Sends an action of a button; returns whether it succeeded, and a message for the user. */
export async function act(action: Record<string, string | number>): Promise<{ ok: boolean; message: string }> {
  try {
    const response = await call("/api/actions", { method: "POST", body: JSON.stringify(action) });
    if (!response.ok) return { ok: false, message: await readError(response) };
    return { ok: true, message: ((await response.json()) as { message: string }).message };
  } catch {
    return { ok: false, message: "the server does not respond" };
  }
}
