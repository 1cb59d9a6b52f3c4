"use client";
import { useEffect, useMemo, useRef, useState } from "react";
import type { RunAbout } from "@/lib/data";
import { address, count, nats, percent } from "@/lib/words";
import { Choice } from "./choice";
import { HeadGrid } from "./head_grid";
import { Lines } from "./lines";

interface Series<T> {
  steps: number[];
  values: T[];
}

interface RunMetrics {
  single: Record<string, Series<number>>;
  heads: Record<string, Series<number[][]>>;
}

const HEAD_WORDS: Record<string, string> = { entropy: "entropy", attn_mass_recall: "attention mass recall", block_density: "block density", kl: "KL" };

/** The last value at or before a step. */
function latest<T>(series: Series<T> | undefined, step: number): T | null {
  if (!series || series.steps[0] > step) return null;
  let low = 0, high = series.steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (series.steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return series.values[low];
}

function ticks(min: number, max: number): number[] {
  const rough = (max - min) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough)!;
  const ticks = [];
  for (let tick = Math.floor(min / size) * size; tick <= max + size / 2; tick += size) ticks.push(Number(tick.toPrecision(6)));
  return ticks;
}

export function Replay({ runs }: { runs: RunAbout[] }) {
  const [name, setName] = useState(runs[0].name);
  const about = runs.find((run) => run.name === name)!;
  const [metrics, setMetrics] = useState<RunMetrics | null>(null);
  useEffect(() => {
    let isCurrent = true;
    setMetrics(null);
    fetch(address(`/data/runs/${name}.json`)).then((answer) => answer.json()).then(({ series }) => isCurrent && setMetrics(series));
    return () => { isCurrent = false; };
  }, [name]);
  return (
    <>
      {runs.length > 1 && <Choice name="run" label="Run" options={runs.map((run) => [run.name, run.note?.title ?? run.name] as const)} value={name} onChange={setName} />}
      <div className="mt-6">
        <h2 className="text-2xl">{about.note?.title ?? about.name}</h2>
        {about.note?.description && <p className="mt-1 max-w-2xl text-muted">{about.note.description}</p>}
        {about.note?.command && <p className="mt-1 text-xs text-muted"><code>{about.note.command}</code></p>}
      </div>
      <div className="min-h-[44rem]">{metrics && <Player key={name} about={about} metrics={metrics} />}</div>
    </>
  );
}

function Player({ about, metrics }: { about: RunAbout; metrics: RunMetrics }) {
  const last = about.steps - 1;
  const [step, setStep] = useState(last);
  const [isPlaying, setPlaying] = useState(false);
  const clock = useRef(0);
  useEffect(() => {
    if (!isPlaying) return;
    let before = performance.now();
    const turn = (now: number) => {
      setStep((at) => Math.min(last, at + Math.max(1, Math.round(((now - before) / 12000) * last))));
      before = now;
      clock.current = requestAnimationFrame(turn);
    };
    clock.current = requestAnimationFrame(turn);
    return () => cancelAnimationFrame(clock.current);
  }, [isPlaying, last]);
  useEffect(() => { if (step >= last) setPlaying(false); }, [step, last]);
  const lines = useMemo(() => {
    const upTo = (series?: Series<number>) => series ? series.steps.map((x, i) => ({ x, y: series.values[i] })).filter(({ x }) => x <= step) : [];
    return [
      { name: "loss", colour: "var(--faint)", points: upTo(metrics.single.loss) },
      { name: "validation loss", colour: "var(--accent)", isStrong: true, points: upTo(metrics.single.validation_loss) },
    ].filter(({ points }) => points.length);
  }, [metrics, step]);
  const values = metrics.single.loss?.values ?? [0, 1];
  const number = (name: string, digits: number) => latest(metrics.single[name], step)?.toFixed(digits) ?? "–";
  const budget = latest(metrics.single.budget, step);
  return (
    <>
      <div className="mt-4 flex items-center gap-4">
        <button type="button" className="button w-20" onClick={() => { if (step >= last) setStep(0); setPlaying(!isPlaying); }}>{isPlaying ? "Pause" : "Play"}</button>
        <input type="range" className="slider" min={0} max={last} value={step} aria-label="Step" aria-valuetext={`step ${step + 1} of ${about.steps}`}
          style={{ "--at": `${(100 * step) / (last || 1)}%` } as React.CSSProperties} onChange={(event) => { setPlaying(false); setStep(Number(event.target.value)); }} />
      </div>
      <dl className="mt-4 grid grid-cols-2 gap-x-8 gap-y-4 sm:grid-cols-5">
        {[["step", `${count(step + 1)}`, step], ["loss", number("loss", 3), latest(metrics.single.loss, step)],
          ["validation loss", number("validation_loss", 3), latest(metrics.single.validation_loss, step)],
          ["blocks computed", budget === null ? "all" : percent(budget, 1), budget], ["gradient norm", number("gradient_norm", 2), latest(metrics.single.gradient_norm, step)],
        ].map(([words, shown, raw]) => (
          <div key={words}>
            <dt className="text-xs text-muted">{words}</dt>
            <dd className="figure text-3xl" data-metric={words} data-value={raw ?? ""}>{shown}</dd>
          </div>
        ))}
      </dl>
      <div className="mt-6 max-w-4xl">
        <Lines label="Loss by step" lines={lines} marker={step} height={340}
          marks={about.marks.filter((mark) => mark.step <= step).map((mark) => ({ x: mark.step, words: mark.kind }))}
          x={{ label: "step", ticks: ticks(0, last).filter((t) => t <= last), shown: count, range: [0, last || 1] }}
          y={{ label: "loss, nats per token", ticks: ticks(Math.min(...values), Math.max(...values)), shown: (v) => String(v) }} />
      </div>
      <Marks about={about} />
      <Heads metrics={metrics} step={step} />
    </>
  );
}

function Marks({ about }: { about: RunAbout }) {
  if (!about.marks.length) return <p className="text-sm text-muted">No faults: {about.lives === 1 ? "one attempt, no skipped updates" : `${about.lives} attempts`}.</p>;
  return (
    <ul className="number text-sm text-muted">
      {about.marks.map((mark) => (
        <li key={`${mark.step} ${mark.kind}`}><span className="text-accent">step {count(mark.step)}</span>: {mark.kind}{mark.kind === "resumed" ? `, ${count(mark.lost)} steps recomputed` : ""}</li>
      ))}
    </ul>
  );
}

function Heads({ metrics, step }: { metrics: RunMetrics; step: number }) {
  const names = Object.keys(metrics.heads);
  const [metric, setMetric] = useState(names.includes("attn_mass_recall") ? "attn_mass_recall" : names[0]);
  const [chosen, setChosen] = useState(0);
  if (!names.length) return null;
  const matrix = latest(metrics.heads[metric], step);
  const max = metric === "entropy" || metric === "kl" ? Math.max(1e-9, ...metrics.heads[metric].values.flat(2)) : 1;
  const layers = metrics.heads[metric].values[0].length, heads = metrics.heads[metric].values[0][0].length;
  const at = (head: number) => matrix?.[Math.floor(head / heads)]?.[head % heads] ?? null;
  const shown = (head: number) => { const value = at(head); return value === null ? "not probed yet" : max === 1 ? percent(value, 1) : `${nats(value)} nats`; };
  const series = metrics.heads[metric];
  return (
    <section aria-labelledby="probe" className="mt-12">
      <div className="mb-3 flex flex-wrap items-end gap-x-8 gap-y-3">
        <h2 id="probe" className="mr-auto text-2xl">Heads at step {count(step + 1)}</h2>
        <Choice name="metric" label="Probe" options={names.map((name) => [name, HEAD_WORDS[name] ?? name] as const)} value={metric} onChange={setMetric} />
      </div>
      <div className="grid gap-8 lg:grid-cols-2">
        <div>
          <HeadGrid layers={layers} heads={heads} chosen={chosen} onChoose={setChosen} label={`${HEAD_WORDS[metric]} by layer and head`}
            value={(head) => { const value = at(head); return value === null ? null : value / max; }} shown={shown} />
          <p className="mt-2 text-xs text-muted">Layers across, heads down. Layer {Math.floor(chosen / heads)}, head {chosen % heads}: {shown(chosen)}.</p>
        </div>
        <Lines label={`${HEAD_WORDS[metric]} of all heads by step`} height={260} marker={step}
          x={{ label: "step", ticks: ticks(0, series.steps.at(-1)!).filter((t) => t <= series.steps.at(-1)!), shown: count }}
          y={{ label: HEAD_WORDS[metric], ticks: ticks(Math.min(...series.values.flat(2)), Math.max(...series.values.flat(2))), shown: (v) => String(v) }}
          lines={[...Array(layers * heads).keys()].sort((a, b) => Number(a === chosen) - Number(b === chosen)).map((head) => ({
            name: `layer ${Math.floor(head / heads)}, head ${head % heads}`, colour: head === chosen ? "var(--accent)" : "var(--rule)", isStrong: head === chosen,
            points: series.steps.map((x, i) => ({ x, y: series.values[i][Math.floor(head / heads)][head % heads] })),
          }))} />
      </div>
    </section>
  );
}
