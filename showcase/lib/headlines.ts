// The four figures of the first page: which rows they are, and how they are written.
import { certificates, endToEnd, rows, type Row } from "./data";
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

function prefill(): Headline | null {
  const found = newest(rows.filter(({ row }) => row.experiment === "prefill" && row.side === "plan"));
  const ratio = found?.row.ratios?.find(({ baseline }) => baseline === "jax.nn");
  if (!found || !ratio || !found.row.seconds) return null;
  const { row } = found;
  return {
    figure: times(1 / ratio.median),
    title: "faster through a whole model",
    detail: `SmolLM2-135M reads ${count(row.shape.q_tokens)} tokens in ${seconds(row.seconds!.median)} by a plan of ` +
      `${percent(row.budget ?? 1)} of the blocks, choosing included: ${times(ratio.median)} the time of ` +
      "jax.nn.dot_product_attention in the same model.",
    hardware: `${machine(row)}, ${row.dtype}`,
    source: found.id, link: `/benchmarks/?row=${encodeURIComponent(found.id)}`,
  };
}

function quality(): Headline | null {
  const found = endToEnd.filter(({ rule }) => rule.startsWith("hads"))
    .toSorted((a, b) => a.perplexity_gap.value - b.perplexity_gap.value)
    .find(({ rule }) => rule === "hads, by effect");
  if (!found) return null;
  return {
    figure: `+${percent(found.perplexity_gap.value, 1)}`,
    title: "perplexity at 30% of the cost of attention",
    detail: `${found.perplexity.value.toFixed(2)} against ${found.perplexity_dense.value.toFixed(2)} dense, ` +
      `${found.documents} documents of ${count(found.context)} tokens that calibration never saw; the next token is ` +
      `the same ${percent(found.agreement.value, 1)} of the time.`,
    hardware: `SmolLM2-135M, blocks of ${found.block}, ${found.environment.cores} cores of an ${clean(found.environment.cpu)}`,
    source: found.id, link: `/benchmarks/?row=${encodeURIComponent(found.id)}`,
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
