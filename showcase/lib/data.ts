// What scripts/data.mjs gathered, with types made from the schemas; read while the pages are built.
// Read and not imported: a bundler may write a number anew, and drop its last digit.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { BenchmarkRow } from "@/types/benchmark_row";
import type { Explored } from "./explore";

const file = <T>(name: string): T => JSON.parse(readFileSync(join(process.cwd(), "data", `${name}.json`), "utf8"));

export interface Row {
  id: string;
  file: string;
  line: number;
  row: BenchmarkRow;
}

export interface LadderRow {
  id: string;
  rule: string;
  budget: number;
  effective: number;
  kl: number;
  kl_p95: number;
  kl_worst_head: number;
  kept: number;
  blocks: number;
}

export interface Ladder {
  file: string;
  documents: number;
  context: number;
  block: number;
  environment: { cpu: string; cores: number; utc: string; commit: string };
  rows: LadderRow[];
}

interface Interval {
  value: number;
  low: number | null;
  high: number | null;
}

interface Loss {
  id: string;
  file: string;
  context: number;
  block: number;
  rule: string;
  effective: number;
  documents: number;
  perplexity_dense: Interval;
  perplexity: Interval;
  perplexity_gap: Interval;
  kl: Interval;
  agreement: Interval;
}

/** The model with a committed plan, or with a window that costs as much. */
export interface PlanLoss extends Loss {
  plan: string;
  split: "calibration" | "test" | "fresh";
  kl_second_half?: Interval;
  perplexity_gap_second_half?: Interval;
}

export interface EndToEnd extends Loss {
  budget: number;
  far_copy: Record<string, { dense: number; candidate: number }>;
  environment: { cpu: string; cores: number };
}

export interface Outcome {
  name: string;
  shape: string;
  pass: string;
  tokens: number;
  budget: number;
  dtype: string;
  traced: boolean;
  expects: "compiles" | "refused";
  because: string | null;
  verdict: string;
  as_expected: boolean;
  vmem_bytes: number | null;
  spills: number | null;
}

export interface Certificate {
  file: string;
  family: string;
  target: string;
  topology: string;
  device_kind: string;
  made_at: string;
  compiler: string;
  commits: string[];
  versions: Record<string, string>;
  outcomes: Outcome[];
}

export interface Fault {
  fault: string;
  name: string;
  gate: string;
  is_met: boolean;
  n: number;
  passes: number;
  timed: string;
  seconds_p50: number | null;
  seconds_p95: number | null;
  utc?: string;
}

export interface Mark {
  step: number;
  kind: string;
  lost: number;
}

export interface RunAbout {
  name: string;
  config: Record<string, unknown> | null;
  note: { title?: string; description?: string; command?: string; environment?: Record<string, unknown> } | null;
  lives: number;
  marks: Mark[];
  steps: number;
  first_loss: number | null;
  last_loss: number | null;
}

export interface Comparison {
  file: string;
  about: { steps: number; batch: number; context: number; window_share?: number; hads_budget?: number; environment: { cpu: string; utc: string; commit: string | null } };
  runs: { side: string; seed: number; seconds: number; validation: [number, number][] }[];
  gaps: { gap_of: string; seeds: number[]; gaps: number[]; mean?: number; half_width_95?: number }[];
}

export interface Plan {
  file: string;
  summary: string;
  context: number;
  block: number;
  budget: number;
  effective: number;
  policy: string;
  shares: number[][];
}

export interface Numerics {
  file: string;
  groups: { implementation: string; dtype: string; rows: number; within: number; most: number }[];
}

export interface Faults {
  environment: { cpu: string; utc: string; commit: string | null };
  is_quick: boolean;
  faults: Fault[];
}

export const rows = file<Row[]>("rows");
export const ladders = file<Ladder[]>("ladders");
export const endToEnd = file<EndToEnd[]>("end_to_end");
export const planLosses = file<PlanLoss[]>("plan_losses");
export const certificates = file<Certificate[]>("certificates");
export const numerics = file<Numerics | null>("numerics");
export const plans = file<Plan[]>("plans");
export const runs = file<RunAbout[]>("runs");
export const comparisons = file<Comparison[]>("comparisons");
export const faults = file<Faults | null>("faults");
export const explored = file<(Explored & { reference?: unknown }) | null>("explore");
