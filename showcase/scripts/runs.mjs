// Reads a run's metrics.jsonl the way xsake.observability does: each step as it was done last.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";

const SINGLE = ["loss", "validation_loss", "gradient_norm", "learning_rate", "tokens_per_second", "step_seconds",
  "budget", "is_skipped", "drift", "failed_saves"];
const BY_HEAD = ["entropy", "attn_mass_recall", "block_density", "kl"];
const RENAMED = { kept_mass: "attn_mass_recall", budget_spent: "block_density" }; // in runs of 0.1.0

function parsed(line) {
  try {
    const value = JSON.parse(line);
    if (!value || typeof value !== "object" || Array.isArray(value)) return null;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [RENAMED[name] ?? name, each]));
  } catch {
    return null; // a line that a crash left unfinished is no line
  }
}

/** Lines that count, and what happened on the way: lives that began again, updates that were refused. */
export function counted(text) {
  const steps = [], marks = [];
  let lives = 0, last = -1;
  for (const line of text.split("\n").map(parsed)) {
    if (!line) continue;
    if (line.event === "began") {
      while (steps.length && steps.at(-1).step >= line.from_step) steps.pop();
      lives += 1;
      if (lives > 1) marks.push({ step: line.from_step, kind: "resumed", lost: Math.max(0, last + 1 - line.from_step) });
    } else if (line.event === "ended") {
      if (line.ending !== "done") marks.push({ step: Math.max(0, last), kind: line.ending, lost: 0 });
    } else if (Number.isInteger(line.step)) {
      steps.push(line);
      last = line.step;
      if (line.is_skipped) marks.push({ step: line.step, kind: "refused update", lost: 0 });
    }
  }
  return { steps, marks, lives };
}

export function readRun(folder, name) {
  const { steps, marks, lives } = counted(readFileSync(join(folder, "metrics.jsonl"), "utf8"));
  const series = {}, heads = {};
  for (const line of steps) {
    for (const metric of SINGLE) {
      if (typeof line[metric] !== "number" && typeof line[metric] !== "boolean") continue;
      (series[metric] ??= { steps: [], values: [] }).steps.push(line.step);
      series[metric].values.push(Number(line[metric]));
    }
    for (const metric of BY_HEAD) {
      if (!Array.isArray(line[metric])) continue;
      (heads[metric] ??= { steps: [], values: [] }).steps.push(line.step);
      heads[metric].values.push(line[metric]);
    }
  }
  const readJson = (file) => existsSync(join(folder, file)) ? JSON.parse(readFileSync(join(folder, file), "utf8")) : null;
  const about = {
    name, config: readJson("config.json"), note: readJson("about.json"), lives, marks,
    steps: steps.length ? steps.at(-1).step + 1 : 0,
    first_loss: series.loss?.values[0] ?? null, last_loss: series.loss?.values.at(-1) ?? null,
  };
  return { about, series: { single: series, heads } };
}
