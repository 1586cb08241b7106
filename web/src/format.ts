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

export function formatClock(at_s: number): string {
  return new Date(at_s * 1000).toLocaleTimeString([], { hour12: false });
}

export function formatAge(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export function plural(count: number, noun: string): string {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}
