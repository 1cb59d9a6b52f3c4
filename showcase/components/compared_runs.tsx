"use client";
import type { Comparison } from "@/lib/data";
import { address, commit, count, day, percent } from "@/lib/words";
import { Lines } from "./lines";

const COLOURS: Record<string, string> = { dense: "var(--ink)", hads: "var(--accent)" };

/** Validation loss of several sides and seeds, from one file of rows. */
export function ComparedRuns({ found }: { found: Comparison }) {
  const { about, runs, gaps } = found;
  const losses = runs.flatMap(({ validation }) => validation.map(([, loss]) => loss));
  const least = Math.floor(Math.min(...losses) * 2) / 2, most = Math.ceil(Math.max(...losses) * 2) / 2;
  const ticks = Array.from({ length: Math.round((most - least) * 2) + 1 }, (_, i) => least + i / 2);
  const last = Math.max(...runs.flatMap(({ validation }) => validation.map(([step]) => step)));
  return (
    <section className="mt-16" aria-label="Comparison of runs">
      <h2 className="text-2xl">Comparison of variants</h2>
      <p className="mt-1 mb-4 max-w-2xl text-sm text-muted">
        {runs.length} runs of {count(about.steps)} steps at {count(about.context)} tokens; a seed has the same first weights and the same
        texts on every side. Validation loss is that of the attention that was trained.
      </p>
      <Lines label="Validation loss by step and side" height={340}
        x={{ label: "step", ticks: [0, Math.round(last / 2), last], shown: count }}
        y={{ label: "validation loss, nats per token", ticks, shown: (v) => v.toFixed(1) }}
        lines={runs.map(({ side, seed, validation }) => ({
          name: `${side}, seed ${seed}`, colour: COLOURS[side] ?? "var(--faint)", isStrong: side === "hads",
          points: validation.map(([x, y]) => ({ x, y })),
        }))} />
      <div className="relative mt-4 overflow-x-auto" tabIndex={0} role="region" aria-label="Last validation losses">
        <table className="table number max-w-3xl">
          <thead><tr><th>side</th><th>seed</th><th>last validation loss</th><th>seconds</th></tr></thead>
          <tbody>
            {runs.map(({ side, seed, seconds, validation }) => (
              <tr key={`${side} ${seed}`}>
                <td style={{ color: COLOURS[side] ?? "var(--muted)" }}>{side}</td><td>{seed}</td>
                <td data-last={`${side}-${seed}`}>{validation.at(-1)![1].toFixed(4)}</td><td>{count(Math.round(seconds))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <ul className="mt-3 text-sm text-muted">
        {gaps.map((gap) => (
          <li key={gap.gap_of}>
            {gap.gap_of}: perplexity {gap.gaps.map((x) => `${x < 0 ? "" : "+"}${percent(x, 1)}`).join(", ")} compared with dense
            {gap.mean !== undefined && gap.half_width_95 !== undefined && `, mean ${percent(gap.mean, 1)} ± ${percent(gap.half_width_95, 1)} (95%, over seeds)`}
          </li>
        ))}
      </ul>
      <p className="mt-2 text-xs text-muted">
        {about.environment.cpu.replaceAll("(R)", "")}, {day(about.environment.utc)}, commit {commit(about.environment.commit)}.{" "}
        <a className="link" href={address(`/data/rows/${found.file}`)} download>download {found.file}</a>
      </p>
    </section>
  );
}
