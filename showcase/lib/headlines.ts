// The four figures of the first page: which rows they are, and how they are written.
import { certificates, planLosses, rows, type Row } from "./data";
import { bytes, count, percent, seconds, times } from "./words";

export interface Headline {
  figure: string;
  title: string;
  detail: string;
  hardware: string;
  source: string;
  link: string;
}

const newest = (found: Row[]) => found.toSorted((a, b) => b.row.utc.localeCompare(a.row.utc))[0];
const machine = (row: { cpu: string; threads: number }) => `${row.threads} threads of an ${clean(row.cpu)}`;
const clean = (cpu: string) => cpu.replaceAll("(R)", "").replace(/ @.*/, "").replace(/ +/g, " ").trim();

const WEIGHTS = "SmolLM2-135M, weights dequantised from 4 bits";

/** A speed with the loss of the same plan, or none. */
function prefill(): Headline | null {
  const timed = newest(rows.filter(({ row }) => row.experiment === "prefill" && row.side === "plan_8192_64_30"))
    ?? newest(rows.filter(({ row }) => row.experiment === "prefill" && row.side === "plan_4096_64"));
  const ratio = timed?.row.ratios?.find(({ baseline }) => baseline === "xsake");
  const loss = planLosses.find(({ plan, rule, context, split }) =>
    plan === timed?.row.side && rule === "plan" && context === timed.row.shape.q_tokens && split === "test");
  if (!timed || !ratio || !loss || !timed.row.seconds) return null;
  const { row } = timed;
  return {
    figure: times(ratio.median),
    title: `the time of dense prefill, for +${percent(loss.perplexity_gap.value, 1)} perplexity`,
    detail: `${row.side} reads ${count(row.shape.q_tokens)} tokens in ${seconds(row.seconds!.median)} with ` +
      `${percent(row.budget ?? 1)} of the blocks, selection included, compared with our own dense attention; perplexity of the ` +
      `same plan on ${loss.documents} documents.`,
    hardware: `${WEIGHTS}, ${machine(row)}, ${row.dtype}`,
    source: timed.id, link: `/benchmarks/?row=${encodeURIComponent(timed.id)}`,
  };
}

/** The best quality, with the time of the same plan. */
function quality(): Headline | null {
  const plan = "plan_4096_32";
  const loss = planLosses.find((row) => row.plan === plan && row.rule === "plan" && row.context === 8192 && row.split === "test");
  const timed = newest(rows.filter(({ row }) => row.experiment === "attention by a plan" && row.side === plan));
  const ratio = timed?.row.ratios?.find(({ baseline }) => baseline === "dense");
  if (!loss || !timed || !ratio) return null;
  return {
    figure: `+${percent(loss.perplexity_gap.value, 1)}`,
    title: `perplexity at ${times(ratio.median)} the time of dense attention`,
    detail: `${plan}: ${loss.perplexity.value.toFixed(2)} against ${loss.perplexity_dense.value.toFixed(2)} dense, ` +
      `${loss.documents} documents of ${count(loss.context)} tokens that calibration never read, ` +
      `${percent(loss.effective)} of the work; the next token is the same ${percent(loss.agreement.value, 1)} of the time.`,
    hardware: `${WEIGHTS}, ${machine(timed.row)}, ${timed.row.dtype}`,
    source: loss.id, link: `/benchmarks/?room=quality&row=${encodeURIComponent(loss.id)}`,
  };
}

function memory(): Headline | null {
  const all = rows.filter(({ row }) => row.experiment === "memory" && row.temp_bytes);
  const dense = all.find(({ row }) => row.side === "jax.nn");
  const own = all.find(({ row }) => row.side === "xsake causal" && row.shape.q_tokens === dense?.row.shape.q_tokens);
  if (!dense || !own) return null;
  const ratio = own.row.temp_bytes! / dense.row.temp_bytes!;
  return {
    figure: percent(ratio, 1),
    title: "of the memory, forward and backward",
    detail: `${bytes(own.row.temp_bytes!)} of temporary memory against ${bytes(dense.row.temp_bytes!)} for ` +
      `jax.nn.dot_product_attention at ${count(own.row.shape.q_tokens)} tokens, full causal, as the compiler plans it.`,
    hardware: `${machine(own.row)}, ${own.row.dtype}`,
    source: own.id, link: `/benchmarks/?room=memory&row=${encodeURIComponent(own.id)}`,
  };
}

function compiled(): Headline | null {
  if (!certificates.length) return null;
  const outcomes = certificates.flatMap((each) => each.outcomes);
  const accepted = outcomes.filter(({ expects, verdict }) => expects === "compiles" && verdict === "compiled");
  const refused = outcomes.filter(({ expects, verdict }) => expects === "refused" && verdict === "refused");
  const tpus = certificates.filter(({ family }) => family === "tpu").length;
  return {
    figure: count(accepted.length),
    title: `kernels taken by the compilers of ${tpus} TPU and ${certificates.length - tpus} GPU targets`,
    detail: `Forward and gradients for heads of real models, and ${refused.length} controls refused as they must be. ` +
      "Compiled without the hardware: never run on a TPU or GPU, so no speed is claimed.",
    hardware: certificates.map(({ target }) => target).join(", "),
    source: "certificates/", link: "/proof/",
  };
}

export const headlines = [prefill(), quality(), memory(), compiled()].filter((x) => x !== null);
