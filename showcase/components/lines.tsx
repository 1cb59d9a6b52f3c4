"use client";
import { useMemo } from "react";

export interface Line {
  name: string;
  colour: string;
  isStrong?: boolean;
  isDashed?: boolean;
  points: { x: number; y: number; id?: string }[];
}

interface Axis {
  label: string;
  ticks: number[];
  shown: (value: number) => string;
  isLog?: boolean;
  range?: [number, number];
}

const WIDTH = 720, LEFT = 52, RIGHT = 12, TOP = 22, BOTTOM = 40;

/** A line chart; points with an id can be opened. */
export function Lines({ lines, x, y, height = 360, label, marker, onOpen, marks = [] }: {
  lines: Line[];
  x: Axis;
  y: Axis;
  height?: number;
  label: string;
  marker?: number;
  marks?: { x: number; words: string }[];
  onOpen?: (id: string) => void;
}) {
  const inside = height - TOP - BOTTOM;
  const scale = useMemo(() => {
    const range = (axis: Axis, values: number[]) => axis.range ?? [Math.min(...values, ...axis.ticks), Math.max(...values, ...axis.ticks)];
    const [x0, x1] = range(x, lines.flatMap(({ points }) => points.map((p) => p.x)));
    const [y0, y1] = range(y, lines.flatMap(({ points }) => points.map((p) => p.y)));
    const place = (axis: Axis, value: number, low: number, high: number) => axis.isLog
      ? (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (value - low) / (high - low || 1);
    return {
      x: (value: number) => LEFT + (WIDTH - LEFT - RIGHT) * place(x, value, x0, x1),
      y: (value: number) => TOP + inside * (1 - Math.min(1, Math.max(0, place(y, value, y0, y1)))),
    };
  }, [lines, x, y, inside]);
  return (
    <svg viewBox={`0 0 ${WIDTH} ${height}`} className="w-full" role="group" aria-label={label}>
      {y.ticks.map((tick) => (
        <g key={tick}>
          <line x1={LEFT} x2={WIDTH - RIGHT} y1={scale.y(tick)} y2={scale.y(tick)} stroke="var(--rule)" />
          <text x={LEFT - 8} y={scale.y(tick) + 4} textAnchor="end" fontSize="12" fill="var(--muted)">{y.shown(tick)}</text>
        </g>
      ))}
      {x.ticks.map((tick) => (
        <text key={tick} x={scale.x(tick)} y={height - BOTTOM + 18} textAnchor="middle" fontSize="12" fill="var(--muted)">{x.shown(tick)}</text>
      ))}
      <text x={WIDTH - RIGHT} y={height - 4} textAnchor="end" fontSize="12" fill="var(--muted)">{x.label}</text>
      <text x={LEFT} y={TOP - 10} fontSize="12" fill="var(--muted)">{y.label}</text>
      {marks.map((mark) => (
        <g key={`${mark.x}/${mark.words}`}>
          <line x1={scale.x(mark.x)} x2={scale.x(mark.x)} y1={TOP + 6} y2={TOP + inside} stroke="var(--accent)" strokeDasharray="2 4" />
          <text x={scale.x(mark.x) + 4} y={TOP + 18} fontSize="11" fill="var(--accent)">{mark.words}</text>
        </g>
      ))}
      {lines.map((line) => (
        <path key={line.name} fill="none" stroke={line.colour} strokeWidth={line.isStrong ? 2.5 : 1.4} strokeLinejoin="round"
          strokeDasharray={line.isDashed ? "4 4" : undefined}
          d={line.points.map((p, i) => `${i ? "L" : "M"}${scale.x(p.x).toFixed(1)} ${scale.y(p.y).toFixed(1)}`).join("")} />
      ))}
      {marker !== undefined && (
        <line x1={scale.x(marker)} x2={scale.x(marker)} y1={TOP} y2={TOP + inside} stroke="var(--ink)" strokeWidth="1" />
      )}
      {onOpen && lines.flatMap((line) => line.points.filter(({ id }) => id).map((p) => (
        <circle key={p.id} cx={scale.x(p.x)} cy={scale.y(p.y)} r={line.isStrong ? 4.5 : 3.5} fill={line.colour} stroke="var(--paper)"
          tabIndex={0} role="button" aria-label={`${line.name}: ${y.label} ${y.shown(p.y)} at ${x.shown(p.x)}`} data-row={p.id}
          className="cursor-pointer" onClick={() => onOpen(p.id!)}
          onKeyDown={(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), onOpen(p.id!))} />
      )))}
    </svg>
  );
}
