"use client";
import type { Row } from "@/lib/data";
import { address, bytes, count, seconds } from "@/lib/words";
import { Bars } from "./bars";
import { Lines } from "./lines";

export function Memory({ rows, onOpen }: { rows: Row[]; onOpen: (id: string) => void }) {
  const planned = rows.filter(({ row }) => row.experiment === "memory" && row.temp_bytes);
  const sides = [...new Set(planned.map(({ row }) => row.side))];
  const built = rows.filter(({ row }) => row.direction === "build" && row.seconds);
  const ragged = rows.filter(({ row }) => row.experiment === "ragged" && row.seconds);
  const raggedSides = [...new Set(ragged.map(({ row }) => row.side))];
  const colours = ["var(--accent)", "var(--ink)", "var(--faint)", "var(--muted)"];
  return (
    <div className="grid gap-x-12 gap-y-12 lg:grid-cols-2">
      <section>
        <h2 className="text-2xl">Temporary memory</h2>
        <p className="mt-1 mb-4 text-xs text-muted">Forward and backward, as the compiler plans it; nothing was run for these rows.</p>
        <Bars onOpen={onOpen} bars={planned.toSorted((a, b) => a.row.temp_bytes! - b.row.temp_bytes!).map(({ id, row }) => ({
          id, label: row.side, note: `${count(row.shape.q_tokens)} tokens`, value: row.temp_bytes!, shown: bytes(row.temp_bytes!),
          isOwn: !!row.is_own,
        }))} />
        <a className="link mt-2 inline-block text-xs" href={address("/data/rows/memory.jsonl")} download>download memory.jsonl</a>
      </section>
      <section>
        <h2 className="text-2xl">How memory grows with length</h2>
        <p className="mt-1 mb-4 text-xs text-muted">Both axes logarithmic: a slope of one is linear growth.</p>
        <Lines label="Temporary memory by tokens" onOpen={onOpen} height={320}
          x={{ label: "tokens", ticks: [8192, 16384, 32768], shown: count, isLog: true }}
          y={{ label: "temporary bytes", ticks: [1e8, 1e9, 1e10, 1e11], shown: bytes, isLog: true }}
          lines={sides.map((side, place) => ({
            name: side, colour: side.startsWith("jax") ? "var(--ink)" : colours[place % 2 ? 0 : 2], isStrong: place === 1,
            points: planned.filter(({ row }) => row.side === side).map(({ id, row }) => ({ x: row.shape.q_tokens, y: row.temp_bytes!, id })),
          }))} />
        <p className="text-xs text-muted">{sides.join(", ")}; the dense one has a single row.</p>
      </section>
      <section>
        <h2 className="text-2xl">How time grows with length</h2>
        <p className="mt-1 mb-4 text-xs text-muted">Our own call over the same kind of heads at each length.</p>
        <Bars onOpen={onOpen} bars={raggedSides.flatMap((side) => ragged.filter(({ row }) => row.side === side)
          .toSorted((a, b) => a.row.shape.q_tokens - b.row.shape.q_tokens).map(({ id, row }) => ({
            id, label: side, note: `${count(row.shape.q_tokens)} tokens`, value: row.seconds!.median, low: row.seconds!.q25,
            high: row.seconds!.q75, shown: seconds(row.seconds!.median), isOwn: !!row.is_own,
          })))} />
      </section>
      <section>
        <h2 className="text-2xl">Building a layout</h2>
        <p className="mt-1 mb-4 text-xs text-muted">From a mask to the list of blocks, all heads different.</p>
        <Bars onOpen={onOpen} bars={built.map(({ id, row }) => ({
          id, label: `${count(row.shape.q_tokens)} tokens, ${row.shape.q_heads} heads`,
          note: row.peak_bytes ? `${bytes(row.peak_bytes)} of memory` : undefined,
          value: row.seconds!.median, low: row.seconds!.q25, high: row.seconds!.q75, shown: seconds(row.seconds!.median), isOwn: !!row.is_own,
        }))} />
      </section>
    </div>
  );
}
