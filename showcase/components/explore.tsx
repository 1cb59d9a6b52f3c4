"use client";
import { useDeferredValue, useEffect, useMemo, useState } from "react";
import { start } from "@/lib/blocks";
import { useLibrary, useTotals, type Explored } from "@/lib/explore";
import { commit, count, day, nats, percent } from "@/lib/words";
import { Choice } from "./choice";
import { CopyExample } from "./copy_example";
import { HeadGrid } from "./head_grid";
import { HeadView } from "./head_view";

export const POLICY_WORDS: Record<string, string> = {
  effect: "by effect", kl: "by KL", mass: "by mass", entropy_budget: "by entropy", uniform: "uniform",
};
const MAPS = [["share", "blocks given"], ["entropy", "entropy"], ["kl", "KL lost"], ["carry", "carries a copy"]] as const;
type MapName = (typeof MAPS)[number][0];

/** The room. What it is about comes as text: React looks at every number of anything else that a server hands over. */
export function Explore({ text }: { text: string }) {
  const about = useMemo<Explored>(() => JSON.parse(text), [text]);
  const { model, n, percents, policies } = about;
  const always = about.always.sinks + about.always.locals, all = model.layers * model.q_heads;
  const [chosen, setChosen] = useState(about.copy.heads[4]);
  const [budget, setBudget] = useState(about.opening.percent);
  const [policy, setPolicy] = useState(policies[0]);
  const later = useDeferredValue(budget); // the chosen head is painted first, all others right after
  const [map, setMap] = useState<MapName>("share");
  const totals = useTotals(about);
  const { library, version, load, problem } = useLibrary(about);
  const layer = Math.floor(chosen / model.q_heads);
  useEffect(() => load([layer]), [load, layer]);
  useEffect(() => map === "kl" ? load(Array.from({ length: model.layers }, (_, i) => i), true) : undefined, [load, map, model.layers]);
  const place = policies.indexOf(policy);
  const read = map === "kl" ? version : 0; // no other map shows what is read layer by layer
  const figures = useMemo(() => mapFigures(about, map, (head) => {
    const total = totals(place, later, head), found = library.made.get(head);
    return total === null ? null : { share: total / start(n), kl: found ? found.keeps(total, always).kl : null };
  }), [about, map, totals, place, later, n, always, library, read]);
  const made = library.made.size, head = library.head(chosen);
  const whole = about.whole[policy], at = budget - percents[0];
  return (
    <>
      <Controls about={about} budget={budget} setBudget={setBudget} policy={policy} setPolicy={setPolicy} />
      <section aria-labelledby="heads" className="mt-8">
        <div className="mb-3 flex flex-wrap items-end gap-x-8 gap-y-3">
          <div className="mr-auto">
            <h2 id="heads" className="text-2xl">{all} heads of SmolLM2-135M</h2>
            <p className="text-sm text-muted">Layers across, heads down. Click one, or walk with the arrow keys.</p>
          </div>
          <Choice name="map" label="Colour" options={MAPS} value={map} onChange={setMap} />
        </div>
        <HeadGrid layers={model.layers} heads={model.q_heads} chosen={chosen} onChoose={setChosen} label="Heads by layer"
          value={figures.scaled} shown={figures.shown} />
        <p className="number mt-2 text-xs text-muted" aria-live="polite">
          {figures.words}{map === "kl" && made < all ? `, ${made} of ${all} heads read` : ""}
        </p>
      </section>
      <section aria-labelledby="model" className="mt-10 border-t border-rule pt-6">
        <h2 id="model" className="sr-only">The whole model at this budget</h2>
        <dl className="grid grid-cols-2 gap-x-8 gap-y-4 sm:grid-cols-4">
          <Figure name="KL, all heads" value={nats(whole.kl[at])} raw={whole.kl[at]} id="model-kl" />
          <Figure name="mass kept" value={percent(whole.mass[at], 1)} raw={whole.mass[at]} id="model-mass" />
          <Figure name="recall of the heaviest" value={percent(whole.recall[at], 1)} raw={whole.recall[at]} id="model-recall" />
          <Figure name="blocks" value={count(Math.round((budget / 100) * all * start(n)))} raw={budget} id="model-blocks" />
        </dl>
      </section>
      {problem && <p role="alert" className="mt-6 text-accent">The masses could not be read: {problem}</p>}
      <div className="mt-10 min-h-[40rem]">
        {head && totals(place, budget, chosen) !== null && (
          <HeadView head={head} number={chosen} heads={model.q_heads} always={always} block={about.block}
            entropy={about.entropy[layer][chosen % model.q_heads]} budget={budget} policy={policy} setPolicy={setPolicy}
            options={policies.map((name, i) => ({ name, total: totals(i, budget, chosen)! }))} />
        )}
      </div>
      <CopyExample about={about} budget={later} policy={policy} totals={totals} onChoose={setChosen} />
      <p className="mt-12 max-w-3xl text-xs text-muted">
        {about.document.name.replace("book: ", "").replaceAll("_", " ")}, {count(about.document.tokens)} tokens in blocks of {about.block}; plans by a
        profile of {about.profile.documents} other texts. A row is the mean over the {about.block} queries of a block, KL the mean
        over rows of −log(kept mass). Masses as 16-bit shares in <code>benchmarks/results/{about.folder}</code>, made by{" "}
        <code>{about.command}</code> on {about.environment.cpu.replaceAll("(R)", "")}, {day(about.environment.utc)}, commit {commit(about.environment.commit)}.
      </p>
    </>
  );
}

export function Figure({ name, value, raw, id }: { name: string; value: string; raw: number; id: string }) {
  return (
    <div>
      <dt className="text-xs text-muted">{name}</dt>
      <dd className="figure text-3xl" id={id} data-value={raw}>{value}</dd>
    </div>
  );
}

function Controls({ about, budget, setBudget, policy, setPolicy }: {
  about: Explored;
  budget: number;
  setBudget: (value: number) => void;
  policy: string;
  setPolicy: (value: string) => void;
}) {
  const [least, most] = [about.percents[0], about.percents.at(-1)!];
  return (
    <div className="sticky top-[3.3rem] z-10 -mx-4 border-y border-rule bg-paper/95 px-4 py-3 backdrop-blur-sm sm:-mx-8 sm:px-8">
      <div className="flex flex-wrap items-end gap-x-8 gap-y-2">
        <div className="min-w-52 flex-1">
          <label htmlFor="budget" className="flex items-baseline justify-between">
            <span className="eyebrow">Budget</span>
            <output htmlFor="budget" className="figure text-2xl leading-none">{budget}%</output>
          </label>
          <input id="budget" type="range" className="slider" min={least} max={most} value={budget} aria-valuetext={`${budget} percent of the visible blocks`}
            style={{ "--at": `${(100 * (budget - least)) / (most - least)}%` } as React.CSSProperties}
            onChange={(event) => setBudget(Number(event.target.value))} />
        </div>
        <Choice name="policy" label="Shared out" value={policy} onChange={setPolicy}
          options={about.policies.map((name) => [name, POLICY_WORDS[name] ?? name] as const)} />
      </div>
    </div>
  );
}

/** What the map of heads shows: a value from 0 to 1 for its ink, words for people. */
function mapFigures(about: Explored, map: MapName, of: (head: number) => { share: number; kl: number | null } | null) {
  const q = about.model.q_heads, by = (table: number[][]) => (head: number) => table[Math.floor(head / q)][head % q];
  if (map === "entropy") {
    const entropy = by(about.entropy), most = Math.max(...about.entropy.flat());
    return { scaled: (x: number) => entropy(x) / most, shown: (x: number) => `entropy ${entropy(x).toFixed(2)} nats`,
      words: `entropy of a query's attention over tokens, up to ${most.toFixed(2)} nats` };
  }
  if (map === "carry") {
    const most = by(about.copy.with), least = by(about.copy.without);
    return { scaled: (x: number) => Math.max(0, most(x) - least(x)) / Math.max(...about.copy.with.flat()),
      shown: (x: number) => `${percent(most(x), 1)} of its attention on the passage, ${percent(least(x), 1)} without the copy`,
      words: "attention that a copied passage draws to the place it was copied from" };
  }
  if (map === "kl") {
    return { scaled: (x: number) => { const kl = of(x)?.kl ?? null; return kl === null ? null : Math.min(1, kl / 0.5); },
      shown: (x: number) => { const kl = of(x)?.kl ?? null; return kl === null ? "not read yet" : `KL ${nats(kl)} nats`; },
      words: "KL(sparse ‖ dense) of each head at this budget, full ink at 0.5 nats" };
  }
  return { scaled: (x: number) => of(x)?.share ?? null, shown: (x: number) => { const share = of(x)?.share; return share === undefined ? "not read yet" : `${percent(share, 1)} of its blocks`; },
    words: "share of its blocks that each head is given, full ink at all of them" };
}
