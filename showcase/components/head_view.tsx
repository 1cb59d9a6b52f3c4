"use client";
import { useMemo, useState } from "react";
import { rowCounts, start, type Head } from "@/lib/blocks";
import { count, nats, percent } from "@/lib/words";
import { BlocksCanvas } from "./blocks_canvas";
import { Figure, POLICY_WORDS } from "./explore";
import { Lines } from "./lines";

/** One head: its blocks, what it keeps, its mass curve, and a comparison of policies. */
export function HeadView({ head, number, heads, always, block, entropy, budget, policy, setPolicy, options }: {
  head: Head;
  number: number;
  heads: number;
  always: number;
  block: number;
  entropy: number;
  budget: number;
  policy: string;
  setPolicy: (value: string) => void;
  options: { name: string; total: number }[];
}) {
  const [cell, setCell] = useState<[number, number] | null>(null);
  const total = options.find(({ name }) => name === policy)!.total;
  const kept = useMemo(() => head.keeps(total, always), [head, total, always]);
  const curve = useMemo(() => head.curve(always), [head, always]);
  const name = `Layer ${Math.floor(number / heads)}, head ${number % heads}`;
  return (
    <section aria-labelledby="head">
      <div className="grid gap-x-12 gap-y-8 lg:grid-cols-[minmax(0,32rem)_1fr]">
        <div>
          <h2 id="head" className="mb-3 text-2xl">{name}</h2>
          <BlocksCanvas head={head} total={total} always={always} className="aspect-square w-full rounded-sm"
            label={`Blocks of ${name.toLowerCase()}: ${count(total)} of ${count(start(head.n))} computed`}
            onPoint={(row, column) => setCell(row === null ? null : [row, column])} />
          <p className="number mt-2 flex min-h-10 flex-wrap content-start items-center gap-x-4 text-xs text-muted">
            {cell ? <CellDetails head={head} cell={cell} total={total} always={always} block={block} /> : (
              <>
                <Key colour="var(--accent)" words="computed" /><Key colour="var(--faint)" words="skipped" />
                <span>ink: attention mass, logarithmic. Queries down, keys across.</span>
              </>
            )}
          </p>
        </div>
        <div>
          <dl className="grid grid-cols-2 gap-x-6 gap-y-5 sm:grid-cols-3">
            <Figure name="KL" value={nats(kept.kl)} raw={kept.kl} id="head-kl" />
            <Figure name="mass kept" value={percent(kept.mass, 1)} raw={kept.mass} id="head-mass" />
            <Figure name="recall of the heaviest" value={percent(kept.recall, 1)} raw={kept.recall} id="head-recall" />
            <Figure name="blocks" value={count(total)} raw={total} id="head-blocks" />
            <Figure name="of those it sees" value={percent(total / start(head.n), 1)} raw={total / start(head.n)} id="head-share" />
            <Figure name="entropy, nats" value={entropy.toFixed(2)} raw={entropy} id="head-entropy" />
          </dl>
          <h3 className="mt-8 mb-1 text-lg">Mass kept by share of blocks</h3>
          <Lines label={`Mass kept by ${name.toLowerCase()}`} height={260} marker={total / start(head.n)}
            x={{ label: "share of its blocks", ticks: [0, 0.25, 0.5, 0.75, 1], shown: (v) => percent(v), range: [0, 1] }}
            y={{ label: "mass kept", ticks: [0, 0.25, 0.5, 0.75, 1], shown: (v) => percent(v), range: [0, 1] }}
            lines={[
              { name: "heaviest first", colour: "var(--faint)", isDashed: true, points: curve.map((p) => ({ x: p.share, y: p.best })) },
              { name: "as the selector takes them", colour: "var(--accent)", isStrong: true, points: curve.map((p) => ({ x: p.share, y: p.selected })) },
            ]} />
          <p className="flex flex-wrap gap-x-4 text-xs text-muted">
            <Key colour="var(--accent)" words="selector order" /><Key colour="var(--faint)" words="by true mass (oracle)" />
          </p>
        </div>
      </div>
      <h3 className="mt-10 mb-3 text-lg">The same {budget}% of the model, shared out in five ways: what this head gets</h3>
      <ul className="grid grid-cols-2 gap-4 sm:grid-cols-3 lg:grid-cols-5">
        {options.map((option) => {
          const found = head.keeps(option.total, always), words = POLICY_WORDS[option.name] ?? option.name;
          return (
            <li key={option.name}>
              <button type="button" onClick={() => setPolicy(option.name)} aria-pressed={option.name === policy} data-policy={option.name} data-kl={found.kl}
                className="group w-full rounded border border-transparent p-2 text-left hover:border-rule aria-pressed:border-accent">
                <BlocksCanvas head={head} total={option.total} always={always} isLater className="aspect-square w-full"
                  label={`${words}: ${count(option.total)} blocks`} />
                <span className="mt-2 block text-sm font-medium">{words}</span>
                <span className="number block text-xs text-muted">{percent(option.total / start(head.n))} of its blocks</span>
                <span className="number block text-xs text-muted">KL {nats(found.kl)}, recall {percent(found.recall)}</span>
              </button>
            </li>
          );
        })}
      </ul>
    </section>
  );
}

function Key({ colour, words }: { colour: string; words: string }) {
  return <span className="inline-flex items-center gap-1.5"><span className="inline-block size-2.5 rounded-[1px]" style={{ background: colour }} />{words}</span>;
}

function CellDetails({ head, cell: [row, column], total, always, block }: { head: Head; cell: [number, number]; total: number; always: number; block: number }) {
  const place = start(row) + column, mass = head.codes[place] / 65535;
  const isKept = head.places[place] < rowCounts(total, head.n, always)[row];
  return (
    <span>
      Queries {count(row * block)}–{count((row + 1) * block - 1)} on keys {count(column * block)}–{count((column + 1) * block - 1)}:{" "}
      {percent(mass, 2)} of their attention, {isKept ? "computed" : "skipped"}
    </span>
  );
}
