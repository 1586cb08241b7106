// Numbers as people read them.

export const NONE = "–";

export function formatSeconds(seconds: number | null): string {
  if (seconds === null) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(2)} s`;
}

export function formatPercent(share: number | null, digits = 0): string {
  return share === null ? NONE : `${(share * 100).toFixed(digits)} %`;
}

export function formatCount(count: number): string {
  if (count >= 10_000) return `${(count / 1000).toFixed(0)}k`;
  if (count >= 1_000) return `${(count / 1000).toFixed(1)}k`;
  return count >= 100 || Number.isInteger(count) ? count.toFixed(0) : count.toFixed(1);
}

/** Earlier times are not unix time: they count from the start of a simulated run. */
const FIRST_CLOCK_S = 1e9;

export function formatClock(at_s: number): string {
  if (at_s < FIRST_CLOCK_S) return formatElapsed(at_s);
  return new Date(at_s * 1000).toLocaleTimeString([], { hour12: false });
}

export function formatElapsed(seconds: number): string {
  const [minutes, rest] = [Math.floor(seconds / 60), Math.floor(seconds % 60)];
  return `${minutes}:${String(rest).padStart(2, "0")}`;
}

export function formatAge(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export function plural(count: number, noun: string): string {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}
