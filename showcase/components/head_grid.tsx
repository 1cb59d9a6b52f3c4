"use client";
import { memo, useRef } from "react";

/** Layers across, heads down: one cell per head; arrow keys walk, a click chooses. */
export const HeadGrid = memo(function HeadGrid({ layers, heads, value, shown, chosen, onChoose, label }: {
  layers: number;
  heads: number;
  value: (head: number) => number | null;
  shown: (head: number) => string;
  chosen: number;
  onChoose: (head: number) => void;
  label: string;
}) {
  const grid = useRef<HTMLDivElement>(null);
  const walk = (event: React.KeyboardEvent) => {
    const steps: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = Math.min(layers - 1, Math.max(0, Math.floor(chosen / heads) + step[0]));
    const head = Math.min(heads - 1, Math.max(0, (chosen % heads) + step[1]));
    onChoose(layer * heads + head);
    grid.current?.querySelector<HTMLElement>(`[data-head="${layer * heads + head}"]`)?.focus();
  };
  // One ear for all cells, and a tooltip only where the mouse is: a phone has hundreds of cells to set up.
  const choose = (event: React.MouseEvent) => {
    const { head } = (event.target as HTMLElement).dataset;
    if (head !== undefined) onChoose(Number(head));
  };
  const report = ({ target }: React.MouseEvent) => {
    const cell = target as HTMLElement;
    if (cell.dataset.head !== undefined) cell.title = cell.ariaLabel ?? "";
  };
  const columns = { gridTemplateColumns: `1.1rem repeat(${layers}, minmax(0, 1fr))` };
  return (
    <>
      <div ref={grid} role="grid" aria-label={label} onKeyDown={walk} onClick={choose} onMouseOver={report} className="space-y-px">
        {Array.from({ length: heads }, (_, row) => (
          <div key={row} role="row" className="grid gap-px" style={columns}>
            <span role="rowheader" aria-label={`Head ${row}`} className="flex items-center text-[0.625rem] text-muted">{row}</span>
            {Array.from({ length: layers }, (_, layer) => {
              const head = layer * heads + row, share = value(head);
              return (
                <div key={layer} role="gridcell" tabIndex={head === chosen ? 0 : -1} aria-selected={head === chosen} data-head={head}
                  aria-label={`Layer ${layer}, head ${row}: ${shown(head)}`} className="cell"
                  style={{ background: share === null ? "var(--blank)" : `color-mix(in oklab, var(--accent) ${(6 + 94 * share).toFixed(1)}%, var(--blank))` }} />
              );
            })}
          </div>
        ))}
      </div>
      <div className="mt-1 grid gap-px text-[0.625rem] text-muted" aria-hidden="true" style={columns}>
        <span />
        {Array.from({ length: layers }, (_, layer) => <span key={layer} className="text-center">{layer % 5 ? "" : layer}</span>)}
      </div>
    </>
  );
});
