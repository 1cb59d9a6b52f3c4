"use client";
import { useMemo, useState } from "react";
import type { Row } from "@/lib/data";
import { address, commit, count, day, percent, seconds, times } from "@/lib/words";
import { Bars } from "./bars";
import { Choice } from "./choice";

const bucket = (budget: number | null | undefined) => (budget == null ? "100" : String(Math.round(100 * budget)));

interface Run {
  key: string;
  title: string;
  about: string;
  rows: Row[];
}

/** Rows of one interleaved run over the same blocks, slowest last. */
function runsOf(rows: Row[]): Run[] {
  const groups = new Map<string, Row[]>();
  for (const row of rows) {
    if (!row.row.seconds || row.row.direction === "build") continue;
    const { experiment, run, shape, direction } = row.row;
    const key = [experiment, run, shape.q_tokens, direction].join("|");
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  return [...groups].map(([key, found]) => {
    const { row } = found[0], { shape } = row;
    const heads = shape.q_heads === shape.kv_heads ? `${shape.q_heads} heads` : `${shape.q_heads} heads on ${shape.kv_heads} kv heads`;
    return {
      key, title: `${TITLES[row.experiment] ?? row.experiment}, ${experimentDetail(row)}`,
      about: `${(row.direction ?? "forward").replace("+", " and ")}, ${count(shape.q_tokens)} tokens, ${heads} of ${shape.head_dim}, ${row.dtype}, ` +
        `${row.threads} threads of ${row.cpu.replaceAll("(R)", "")}, ${day(row.utc)}, commit ${commit(row.commit)}`,
      rows: found.toSorted((a, b) => a.row.seconds!.median - b.row.seconds!.median),
    };
  });
}

/** Distinguishing fields of two runs of one experiment. */
function experimentDetail(row: Row["row"]): string {
  const tokens = `${count(row.shape.q_tokens)} tokens`;
  return row.experiment === "same_blocks" ? `${bucket(row.budget)}% of them, ${tokens}` : tokens;
}

const TITLES: Record<string, string> = {
  attention: "Forward passes of one process", causal: "Full causal attention", backward: "Forward and backward", ragged: "Every head its own sparsity",
  same_blocks: "The same blocks through others", prefill: "A whole model reads a prompt",
  "attention by a plan": "Attention of all layers of a model, by a plan",
};

export function Speed({ rows, onOpen }: { rows: Row[]; onOpen: (id: string) => void }) {
  const runs = useMemo(() => runsOf(rows), [rows]);
  const timed = runs.flatMap((run) => run.rows);
  const tokens = [...new Set(timed.map(({ row }) => row.shape.q_tokens))].sort((a, b) => a - b);
  const budgets = [...new Set(timed.map(({ row }) => bucket(row.budget)))].sort((a, b) => Number(b) - Number(a));
  const peers = [...new Set(timed.filter((row) => !row.row.is_own).map(({ row }) => row.side))].sort();
  const [length, setLength] = useState("all");
  const [budget, setBudget] = useState("all");
  const [peer, setPeer] = useState("all");
  const shown = runs.filter((run) =>
    (length === "all" || String(run.rows[0].row.shape.q_tokens) === length) &&
    (budget === "all" || run.rows.some((row) => row.row.is_own && bucket(row.row.budget) === budget)) &&
    (peer === "all" || run.rows.some(({ row }) => row.side === peer)));
  return (
    <>
      <div className="flex flex-wrap gap-x-8 gap-y-4">
        <Choice name="tokens" label="Tokens" value={length} onChange={setLength}
          options={[["all", "all"], ...tokens.map((t) => [String(t), count(t)] as const)]} />
        <Choice name="budget" label="Budget" value={budget} onChange={setBudget}
          options={[["all", "all"], ...budgets.map((b) => [b, `${b}%`] as const)]} />
        <Choice name="peer" label="Peer" value={peer} onChange={setPeer}
          options={[["all", "all"], ...peers.map((p) => [p, p] as const)]} />
      </div>
      <div className="mt-8 grid gap-x-12 gap-y-12 lg:grid-cols-2">
        {shown.map((run) => <RunChart key={run.key} run={run} peer={peer} onOpen={onOpen} />)}
        {!shown.length && <p className="text-muted">No measurement. Use <code>xsake bench attention --help</code>.</p>}
      </div>
    </>
  );
}

function RunChart({ run, peer, onOpen }: { run: Run; peer: string; onOpen: (id: string) => void }) {
  const visible = peer === "all" ? run.rows : run.rows.filter((row) => row.row.is_own || row.row.side === peer);
  return (
    <section>
      <h2 className="text-2xl">{run.title}</h2>
      <p className="mt-1 mb-4 text-xs text-muted">{run.about}</p>
      <Bars onOpen={onOpen} bars={visible.map((each) => ({
        id: each.id, label: each.row.side,
        note: [each.row.budget != null && each.row.budget < 1 ? `${percent(each.row.budget)} of the blocks` : "",
          ...(each.row.ratios ?? []).filter(({ baseline }) => peer === "all" || baseline === peer)
            .map(({ baseline, median }) => `${times(median)} of ${baseline}`)].filter(Boolean).join(", "),
        value: each.row.seconds!.median, low: each.row.seconds!.q25, high: each.row.seconds!.q75,
        shown: seconds(each.row.seconds!.median), isOwn: !!each.row.is_own,
      }))} />
      <a className="link mt-2 inline-block text-xs" href={address(`/data/rows/${run.rows[0].file}`)} download>
        download {run.rows[0].file}
      </a>
    </section>
  );
}
