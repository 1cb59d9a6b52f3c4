"use client";
import { useState } from "react";
import type { EndToEnd, Ladder, PlanLoss, Row } from "@/lib/data";
import { address, commit, count, day, nats, percent, times } from "@/lib/words";
import { Choice } from "./choice";
import { Lines } from "./lines";

const FIRST = ["hads", "uniform, sampled", "entropy_budget, sampled", "a_shape", "flexprefill", "minference", "sparge", "sliding_window", "oracle_model"];
const isOurs = (rule: string) => rule.startsWith("hads");

interface Measured {
  rows: Row[];
  ladders: Ladder[];
  endToEnd: EndToEnd[];
  planLosses: PlanLoss[];
  onOpen: (id: string) => void;
}

export function Quality({ rows, ladders, endToEnd, planLosses, onOpen }: Measured) {
  const widest = ladders.toSorted((a, b) => b.documents - a.documents)[0];
  const [which, setWhich] = useState(widest?.file ?? "");
  const [chosen, setChosen] = useState<string[]>(FIRST);
  const ladder = ladders.find(({ file }) => file === which);
  const rules = ladder ? [...new Set(ladder.rows.map(({ rule }) => rule))] : [];
  return (
    <>
      {ladder && (
        <section>
          <h2 className="text-2xl">Rules and policies at equal counts of blocks</h2>
          <p className="mt-1 mb-4 max-w-2xl text-sm text-muted">
            What attention of SmolLM2-135M loses when each rule chooses the same number of blocks: KL(sparse ‖ dense), mean over
            queries, heads and {ladder.documents} test documents. Lower is better; the oracle knows the true masses. Every rule is
            charged whole blocks, also those whose own kernels take single columns of keys, such as MInference. A rank here is not a
            rank by the loss of the whole model, which the tables below show.
          </p>
          <Choice name="ladder" label="Tokens" value={which} onChange={setWhich}
            options={ladders.map(({ file, context, block }) => [file, `${count(context)}, blocks of ${block}`] as const)} />
          <div className="mt-4 grid gap-8 lg:grid-cols-[1fr_16rem]">
            <div>
              <Lines label="KL by budget and rule" onOpen={onOpen} height={430}
                x={{ label: "share of the visible blocks", ticks: [0.1, 0.2, 0.3, 0.4, 0.5], shown: (v) => percent(v) }}
                y={{ label: "KL, nats", ticks: [0.02, 0.05, 0.1, 0.2, 0.5, 1], shown: String, isLog: true }}
                lines={rules.filter((rule) => chosen.includes(rule)).map((rule) => ({
                  name: rule, isStrong: isOurs(rule), isDashed: rule.startsWith("oracle"),
                  colour: isOurs(rule) ? "var(--accent)" : rule.startsWith("oracle") ? "var(--ink)" : "var(--faint)",
                  points: ladder.rows.filter((row) => row.rule === rule).toSorted((a, b) => a.budget - b.budget)
                    .map((row) => ({ x: row.budget, y: row.kl, id: row.id })),
                }))} />
              <p className="text-xs text-muted">
                {ladder.environment.cpu.replaceAll("(R)", "")}, {day(ladder.environment.utc)}, commit {commit(ladder.environment.commit)}.{" "}
                <a className="link" href={address(`/data/rows/${ladder.file}`)} download>download {ladder.file}</a>
              </p>
            </div>
            <fieldset>
              <legend className="eyebrow mb-2">Rules, with KL at 30%</legend>
              <div className="max-h-[26rem] overflow-y-auto pr-2 text-sm" tabIndex={0} role="group" aria-label="Rules">
                {rules.map((rule) => {
                  const at = ladder.rows.find((row) => row.rule === rule && row.budget === 0.3);
                  return (
                    <label key={rule} className="flex items-baseline gap-2 py-0.5">
                      <input type="checkbox" checked={chosen.includes(rule)} className="accent-(--accent)"
                        onChange={() => setChosen(chosen.includes(rule) ? chosen.filter((x) => x !== rule) : [...chosen, rule])} />
                      <span className={isOurs(rule) ? "text-accent" : ""}>{rule.replaceAll("_", " ")}</span>
                      <span className="number ml-auto text-muted" data-rule={rule}>{at ? nats(at.kl) : "–"}</span>
                    </label>
                  );
                })}
              </div>
            </fieldset>
          </div>
        </section>
      )}
      <PlanLosses rows={rows} planLosses={planLosses} onOpen={onOpen} />
      <section className="mt-16">
        <h2 className="text-2xl">The whole model at 30% of the cost of attention</h2>
        <p className="mt-1 mb-4 max-w-2xl text-sm text-muted">
          Errors of sparse layers propagate through the model; the cost of selection is included. Far copy: loss on a passage
          that occurred this number of tokens earlier.
        </p>
        <div className="relative overflow-x-auto" tabIndex={0} role="region" aria-label="End to end">
          <table className="table number">
            <thead><tr><th>rule</th><th>blocks of</th><th>documents</th><th>perplexity</th><th>more than dense</th><th>KL of predictions</th><th>same next token</th><th>far copy 1,024</th><th>far copy 4,096</th></tr></thead>
            <tbody>
              {endToEnd.map((row) => (
                <tr key={row.id}>
                  <td><button type="button" className="link text-left" data-row={row.id} onClick={() => onOpen(row.id)}>{row.rule}</button></td>
                  <td>{row.block}</td><td>{row.documents}</td><td>{row.perplexity.value.toFixed(2)}</td>
                  <td data-gap>{percent(row.perplexity_gap.value, 1)}</td><td>{nats(row.kl.value)}</td><td>{percent(row.agreement.value, 1)}</td>
                  {["1024", "4096"].map((gap) => (
                    <td key={gap}>{row.far_copy[gap] ? `${row.far_copy[gap].candidate.toFixed(2)} (dense ${row.far_copy[gap].dense.toFixed(2)})` : "–"}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
    </>
  );
}

/** Every committed plan: its loss, and its time in the same line. */
function PlanLosses({ rows, planLosses, onOpen }: Pick<Measured, "rows" | "planLosses" | "onOpen">) {
  const timeOf = ({ plan, rule, context }: PlanLoss) => rows.findLast(({ row }) => rule === "plan" &&
    row.experiment === "attention by a plan" && row.side === plan && row.shape.q_tokens === context)
    ?.row.ratios?.find(({ baseline }) => baseline === "dense")?.median;
  return (
    <section className="mt-16">
      <h2 className="text-2xl">Committed plans: loss and time</h2>
      <p className="mt-1 mb-4 max-w-2xl text-sm text-muted">
        SmolLM2-135M, weights dequantised from 4 bits, at 30% of the work of attention, selection included. Time: attention of all
        layers compared with our own dense attention, where it was measured. Fresh documents were drawn after all methods and
        settings were chosen. Windows cost as much as the plan of their line.
      </p>
      <div className="relative overflow-x-auto" tabIndex={0} role="region" aria-label="Committed plans">
        <table className="table number">
          <thead><tr><th>plan</th><th>attention</th><th>tokens</th><th>documents</th><th>perplexity, more than dense</th><th>in the second half</th><th>KL of predictions</th><th>time</th></tr></thead>
          <tbody>
            {planLosses.map((row) => {
              const time = timeOf(row);
              return (
                <tr key={row.id}>
                  <td><button type="button" className="link text-left" data-row={row.id} onClick={() => onOpen(row.id)}>{row.plan}</button></td>
                  <td>{row.rule.replaceAll("_", " ")}</td><td>{count(row.context)}</td><td>{row.documents} {row.split}</td>
                  <td data-gap>{percent(row.perplexity_gap.value, 1)}</td>
                  <td>{row.perplexity_gap_second_half ? percent(row.perplexity_gap_second_half.value, 1) : "–"}</td>
                  <td>{nats(row.kl.value)}</td><td>{time ? times(time) : "–"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </section>
  );
}
