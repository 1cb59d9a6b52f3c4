import type { Metadata } from "next";
import { Missing, PageHead } from "@/components/page_head";
import { Replay } from "@/components/replay";
import { LiveRuns } from "@/components/live_runs";
import { ComparedRuns } from "@/components/compared_runs";
import { comparisons, runs } from "@/lib/data";

export const metadata: Metadata = { title: "Training replay" };

const COMMAND = `xsake data build --train-tokenizer 8192 --text openwebtext.txt -o corpus
xsake train run.toml                      # writes metrics.jsonl and config.json into its folder
cp -r run benchmarks/results/training/    # without its checkpoints
just showcase`;

export default function Page() {
  return (
    <>
      <PageHead eyebrow="Training replay" title="Training replay">
        <p>
          Loss, budgets and heads from the metrics of a run, step by step, with stops, restarts and skipped updates.
        </p>
      </PageHead>
      <LiveRuns />
      {runs.length ? <Replay runs={runs} /> : (
        <Missing what="No run has been recorded for this build" command={COMMAND}>
          A folder under <code>benchmarks/results/training</code> with a <code>metrics.jsonl</code> appears here.
        </Missing>
      )}
      {comparisons.map((found) => <ComparedRuns key={found.file} found={found} />)}
    </>
  );
}
