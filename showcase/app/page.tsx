import Link from "next/link";
import { headlines } from "@/lib/headlines";
import { plans } from "@/lib/data";
import { HeadMap } from "@/components/head_map";
import { address } from "@/lib/words";

const STEPS = [
  ["Measure", "the attention mass of every head, block by block, in one dense pass.", "xsake calibrate MODEL"],
  ["Plan", "the blocks of each head, within an exact budget.", "xsake plan show plan.json"],
  ["Run", "kernels that skip blocks, forward and backward.", "xsake.attention(q, k, v, mask=…)"],
  ["Prove", "the loss, and compilation for each hardware target.", "xsake evaluate --plan plan.json"],
];

const ROOMS = [
  ["/explore/", "Explore HADS", "270 heads of a real model: selected blocks by budget."],
  ["/benchmarks/", "Benchmarks", "Speed, memory and quality compared with peers. Every bar opens its row."],
  ["/training/", "Training replay", "A real run step by step: loss, heads, budgets and faults."],
  ["/proof/", "Proof", "Compiler certificates, numerical errors and fault tolerance."],
];

export default function Home() {
  const plan = plans.find(({ file }) => file.includes("4096_32")) ?? plans[0];
  return (
    <>
      <section className="grid items-center gap-10 pt-12 pb-14 sm:pt-20 lg:grid-cols-[1fr_24rem] lg:gap-14">
        <div>
          <p className="eyebrow">Sparse attention for JAX</p>
          <h1 className="mt-3 text-[2.6rem] leading-[1.04] sm:text-6xl">
            Compute the blocks that matter. Measure what the others&nbsp;held.
          </h1>
          <p className="lede mt-6">
            Heads differ: some need all visible blocks, others a few percent. XSAKE calibrates each head, plans its blocks under a
            budget, runs kernels that skip the rest forward and backward, and measures the loss.
          </p>
        </div>
        {plan && <HeadMap plan={plan} />}
      </section>

      <section aria-labelledby="figures" className="border-t border-ink pt-6">
        <h2 id="figures" className="sr-only">Four figures</h2>
        <div className="grid gap-x-10 gap-y-10 sm:grid-cols-2 lg:grid-cols-4">
          {headlines.map((each) => (
            <article key={each.title} data-source={each.source}>
              <p className="figure text-5xl" data-figure>{each.figure}</p>
              <h3 className="mt-1 text-lg leading-snug">{each.title}</h3>
              <p className="mt-2 text-sm text-muted">{each.detail}</p>
              <p className="mt-2 text-xs text-muted">{each.hardware}</p>
              <Link prefetch={false} className="link mt-2 inline-block text-sm" href={each.link}>
                benchmark row<span className="sr-only">: {each.title}</span>
              </Link>
            </article>
          ))}
        </div>
      </section>

      <section aria-labelledby="flow" className="mt-20">
        <h2 id="flow" className="text-3xl">Workflow</h2>
        <ol className="mt-6 grid gap-8 sm:grid-cols-2 lg:grid-cols-4">
          {STEPS.map(([name, text, command], index) => (
            <li key={name}>
              <p className="figure text-2xl text-accent" aria-hidden="true">{index + 1}</p>
              <h3 className="text-lg">{name}</h3>
              <p className="mt-1 text-sm text-muted">{text}</p>
              <code className="mt-3 block rounded bg-blank px-3 py-2 text-xs break-words">{command}</code>
            </li>
          ))}
        </ol>
      </section>

      <section aria-labelledby="rooms" className="mt-20">
        <h2 id="rooms" className="text-3xl">Pages</h2>
        <ul className="mt-6 border-t border-rule">
          {ROOMS.map(([path, name, text]) => (
            <li key={path} className="border-b border-rule">
              <Link prefetch={false} href={path} className="group grid gap-1 py-5 sm:grid-cols-[16rem_1fr_2rem] sm:items-baseline">
                <span className="font-serif text-2xl group-hover:text-accent">{name}</span>
                <span className="text-muted">{text}</span>
                <span aria-hidden="true" className="hidden text-right text-accent sm:block">→</span>
              </Link>
            </li>
          ))}
        </ul>
        <p className="mt-6 text-sm text-muted">
          Raw files: <a className="link" href={address("/data/rows/causal.jsonl")}>rows of a benchmark</a>, and others on their pages.
        </p>
      </section>
    </>
  );
}
