// How numbers are written; the numbers themselves come from files.

export const percent = (share: number, digits = 0) => `${(100 * share).toFixed(digits)}%`;

export function times(ratio: number): string {
  return ratio >= 10 ? `${ratio.toFixed(0)}×` : ratio >= 1 ? `${ratio.toFixed(1)}×` : `${ratio.toFixed(2)}×`;
}

export function seconds(value: number): string {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return value >= 1e-3 ? `${(1e3 * value).toPrecision(3)} ms` : `${(1e6 * value).toPrecision(3)} µs`;
}

export function bytes(value: number): string {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} GB`;
  return value >= 1e6 ? `${(value / 1e6).toPrecision(3)} MB` : `${(value / 1e3).toPrecision(3)} kB`;
}

/** A whole number with commas; the browser's own way to write one takes a phone 0.2 s the first time. */
export const count = (value: number) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

export const nats = (value: number) =>
  value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(value < 0.1 ? 4 : 3);

export const day = (utc: string) => utc.slice(0, 10);

export const commit = (hash: string | null) => (hash ? hash.slice(0, 8) : "no commit");

/** Where a file of the site is, wherever the site is. */
export const address = (path: string) => `${process.env.NEXT_PUBLIC_BASE ?? ""}${path}`;
