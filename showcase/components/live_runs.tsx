"use client";
import { useEffect, useState } from "react";
import { address, count } from "@/lib/words";

interface Live {
  id: string;
  name: string;
  folder: string;
  state: string;
  step: number;
  steps: number | null;
  loss: number | null;
}

/** Inside `xsake serve`: the runs that it watches. Elsewhere: nothing. */
export function LiveRuns() {
  const [runs, setRuns] = useState<Live[] | null>(null);
  useEffect(() => {
    let isShown = true;
    const ask = async () => {
      const { is_live } = await (await fetch(address("/live.json"))).json();
      while (is_live && isShown) {
        const answer = await fetch("/api/v1/runs");
        if (!answer.ok) return;
        setRuns(await answer.json());
        await new Promise((resolve) => setTimeout(resolve, 3000));
      }
    };
    ask().catch(() => setRuns(null));
    return () => { isShown = false; };
  }, []);
  if (!runs) return null;
  return (
    <section aria-labelledby="live" className="mb-12">
      <h2 id="live" className="text-2xl">Runs of this server</h2>
      <ul className="mt-3 border-t border-rule" data-live>
        {runs.map((run) => (
          <li key={run.id} className="number flex flex-wrap items-baseline gap-x-6 border-b border-rule py-3">
            <span className="font-serif text-lg">{run.name === "run" ? run.folder : run.name}</span>
            <span className={run.state === "running" ? "text-accent" : "text-muted"}>{run.state}</span>
            <span className="text-muted">step {count(run.step + 1)}{run.steps ? ` of ${count(run.steps)}` : ""}</span>
            {run.loss !== null && <span>loss {run.loss.toFixed(3)}</span>}
          </li>
        ))}
        {!runs.length && <li className="py-3 text-muted">None yet. xsake train in a folder that is served starts one.</li>}
      </ul>
      <a className="link mt-3 inline-block" href="/page/">Open the dashboard</a>
    </section>
  );
}
