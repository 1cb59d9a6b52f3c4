"use client";
import { memo, useEffect, useRef, useState } from "react";
import { carriedMass } from "@/lib/blocks";
import { useCarriers, type Explored } from "@/lib/explore";
import { count, percent } from "@/lib/words";
import { BlocksCanvas } from "./blocks_canvas";
import { POLICY_WORDS } from "./explore";

/** A text that ends with a copy of its beginning: which heads fetch it, and whether they still can. */
export const CopyExample = memo(function CopyExample({ about, budget, policy, totals, onChoose }: {
  about: Explored;
  budget: number;
  policy: string;
  totals: (policy: number, percent: number, head: number) => number | null;
  onChoose: (head: number) => void;
}) {
  const section = useRef<HTMLElement>(null);
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const watcher = new IntersectionObserver(([entry]) => entry.isIntersecting && setNear(true), { rootMargin: "400px" });
    if (section.current) watcher.observe(section.current);
    return () => watcher.disconnect();
  }, []);
  const carriers = useCarriers(about, isNear);
  const always = about.always.sinks + about.always.locals, copied = about.copy.tokens / about.block, first = about.n - copied;
  const q = about.model.q_heads, named = (head: number) => `layer ${Math.floor(head / q)}, head ${head % q}`;
  const survives = (name: string) => {
    const place = about.policies.indexOf(name);
    let kept = 0, all = 0;
    carriers?.forEach((head, i) => {
      const found = carriedMass(head, totals(place, budget, about.copy.heads[i]) ?? 0, always, copied);
      kept += found.kept;
      all += found.all;
    });
    return all ? kept / all : null;
  };
  const isReady = carriers && totals(0, budget, 0) !== null;
  return (
    <section ref={section} aria-labelledby="copy" className="mt-20 min-h-96 border-t border-ink pt-8">
      <h2 id="copy" className="text-3xl">A passage fetched from {count(about.context - about.copy.tokens)} tokens back</h2>
      <p className="mt-2 max-w-2xl text-muted">
        The same text, its last {about.copy.tokens} tokens replaced by its first {about.copy.tokens}. A head that can copy looks back at where the
        words stood: the thin diagonal on the left. These twelve heads do it most.
      </p>
      <blockquote className="mt-4 max-w-2xl border-l-2 border-accent pl-4 font-serif text-lg leading-snug">
        {about.copy.passage.slice(0, 330).replace(/\s\S*$/, "")} …
      </blockquote>
      {isReady && (
        <>
          <dl className="mt-6 flex flex-wrap gap-x-10 gap-y-3">
            {about.policies.map((name) => {
              const share = survives(name)!;
              return (
                <div key={name} className={name === policy ? "text-accent" : ""}>
                  <dt className="text-xs">{POLICY_WORDS[name] ?? name}</dt>
                  <dd className="figure text-2xl" data-survives={name} data-value={share}>{percent(share, 1)}</dd>
                </div>
              );
            })}
          </dl>
          <p className="mt-1 text-xs text-muted">of what these heads fetch survives at {budget}%</p>
          <ul className="mt-6 grid gap-x-8 gap-y-5 md:grid-cols-2">
            {carriers.map((head, i) => {
              const number = about.copy.heads[i], layer = Math.floor(number / q);
              const total = totals(about.policies.indexOf(policy), budget, number)!;
              const found = carriedMass(head, total, always, copied);
              return (
                <li key={number}>
                  <p className="number mb-1 flex flex-wrap gap-x-3 text-xs">
                    <button type="button" className="link" onClick={() => { onChoose(number); document.getElementById("head")?.scrollIntoView({ block: "center" }); }}>
                      {named(number)}
                    </button>
                    <span className="text-muted">
                      {percent(about.copy.with[layer][number % q])} of its attention on the passage, {percent(about.copy.without[layer][number % q], 1)} without the
                      copy; keeps {percent(found.kept / found.all)}
                    </span>
                  </p>
                  <BlocksCanvas head={head} total={total} always={always} first={first} isLater className="h-16 w-full"
                    label={`Rows of the copy in ${named(number)}: ${percent(found.kept / found.all)} of the passage's mass kept`} />
                </li>
              );
            })}
          </ul>
          <p className="mt-2 text-xs text-muted">Rows: the copy, {copied} blocks of queries. Columns: the whole text, its beginning on the left.</p>
        </>
      )}
    </section>
  );
});
