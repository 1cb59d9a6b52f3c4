"use client";

export interface Bar {
  id: string;
  label: string;
  note?: string;
  value: number;
  low?: number;
  high?: number;
  shown: string;
  isOwn: boolean;
}

/** Bars from zero, each a button that opens its row. */
export function Bars({ bars, onOpen }: { bars: Bar[]; onOpen: (id: string) => void }) {
  const most = Math.max(...bars.map(({ value, high }) => high ?? value));
  return (
    <ul className="space-y-1">
      {bars.map((bar) => (
        <li key={bar.id}>
          <button type="button" onClick={() => onOpen(bar.id)} data-row={bar.id}
            className="group grid w-full grid-cols-[1fr_auto] items-center gap-x-4 rounded px-1 py-1 text-left hover:bg-blank sm:grid-cols-[13rem_1fr_6rem]">
            <span className="text-sm">{bar.label}{bar.note && <span className="block text-xs text-muted">{bar.note}</span>}</span>
            <span className="order-3 col-span-2 mt-1 block h-3.5 sm:order-none sm:col-span-1 sm:mt-0">
              <span className="relative block h-full">
                <span className="absolute inset-y-0 left-0 rounded-r-[2px]"
                  style={{ width: `${(100 * bar.value) / most}%`, background: bar.isOwn ? "var(--accent)" : "var(--faint)" }} />
                {bar.low !== undefined && bar.high !== undefined && (
                  <span className="absolute top-1/2 h-[1.5px] bg-ink"
                    style={{ left: `${(100 * bar.low) / most}%`, width: `${(100 * (bar.high - bar.low)) / most}%` }} />
                )}
              </span>
            </span>
            <span className="number text-right text-sm" data-shown>{bar.shown}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}
