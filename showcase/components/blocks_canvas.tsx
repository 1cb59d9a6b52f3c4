"use client";
import { useEffect, useRef, useState } from "react";
import { rowCounts, start, type Head } from "@/lib/blocks";

const SHADES = 256, LEAST = 1e-5; // masses below it look empty

function parsed(colour: string): [number, number, number] {
  const hex = colour.trim().replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)) as [number, number, number];
}

/** Colours of kept and of dropped blocks by mass, as pixels. */
function palette(): { kept: Uint32Array; dropped: Uint32Array; hidden: number } {
  const style = getComputedStyle(document.documentElement);
  const [blank, accent, faint, paper] = ["--blank", "--accent", "--faint", "--paper"].map((name) => parsed(style.getPropertyValue(name)));
  const pixel = (c: number[]) => ((255 << 24) | (c[2] << 16) | (c[1] << 8) | c[0]) >>> 0;
  const mixed = (to: number[], share: number) => pixel(blank.map((x, i) => Math.round(x + (to[i] - x) * share)));
  const kept = new Uint32Array(SHADES), dropped = new Uint32Array(SHADES);
  for (let shade = 0; shade < SHADES; shade++) {
    kept[shade] = mixed(accent, 0.16 + 0.84 * (shade / (SHADES - 1)));
    dropped[shade] = mixed(faint, 0.85 * (shade / (SHADES - 1)));
  }
  return { kept, dropped, hidden: pixel(paper) };
}

/** The shade of each code, logarithmic: every shade is filled in from the least code that rounds to it. */
const shades = new Uint8Array(65536);
for (let shade = 1; shade < SHADES; shade++) {
  shades.fill(shade, Math.ceil(65535 * LEAST ** (1 - (shade - 0.5) / (SHADES - 1))));
}

/** Redraws when the colours of the page change. */
export function useTheme(): number {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const changed = () => setVersion((x) => x + 1);
    window.addEventListener("themechange", changed);
    return () => window.removeEventListener("themechange", changed);
  }, []);
  return version;
}

/** Rows of a head from `first` on: kept blocks in the accent, dropped ones grey, ink for mass. Those that may come later (`isLater`) each have a task of their own. */
export function BlocksCanvas({ head, total, always, first = 0, isLater, label, className, onPoint }: {
  head: Head;
  total: number;
  always: number;
  first?: number;
  isLater?: boolean;
  label: string;
  className?: string;
  onPoint?: (row: number | null, column: number) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = useTheme();
  const draw = () => {
    const context = canvas.current?.getContext("2d");
    if (!context) return;
    const { n, codes, places } = head, colours = palette(), counts = rowCounts(total, n, always);
    const image = context.createImageData(n, n - first), pixels = new Uint32Array(image.data.buffer);
    pixels.fill(colours.hidden);
    for (let row = first; row < n; row++) {
      for (let column = 0, block = start(row), at = (row - first) * n; column <= row; column++, block++, at++) {
        pixels[at] = (places[block] < counts[row] ? colours.kept : colours.dropped)[shades[codes[block]]];
      }
    }
    context.putImageData(image, 0, 0);
    canvas.current!.dataset.drawn = String(total);
  };
  useEffect(() => {
    if (!isLater) return draw();
    const task = setTimeout(draw);
    return () => clearTimeout(task);
  }, [head, total, always, first, isLater, theme]);
  const point = (event: React.PointerEvent<HTMLCanvasElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * head.n);
    const row = first + Math.floor(((event.clientY - box.top) / box.height) * (head.n - first));
    onPoint?.(row >= column && row < head.n ? row : null, column);
  };
  return (
    <canvas ref={canvas} width={head.n} height={head.n - first} role="img" aria-label={label} className={className}
      onPointerMove={onPoint && point} onPointerLeave={() => onPoint?.(null, 0)} />
  );
}
