// Gathers what the pages show from the repository's own files; it computes no figure of its own.
//
//   node scripts/data.mjs [repository [folder to write to]]
//
// data/*.json is read by the pages while they are built; public/data is what people download.
// A row that does not fit its schema ends the build.
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";
import Ajv2020 from "ajv/dist/2020.js";
import { compileFromFile } from "json-schema-to-typescript";
import { readRun } from "./runs.mjs";

const here = resolve(dirname(fileURLToPath(import.meta.url)), "..");
const root = resolve(process.argv[2] ?? join(here, ".."));
const results = join(root, "benchmarks", "results");
const out = resolve(process.argv[3] ?? here);
const OPENING = 30; // percent of the blocks that Explore opens with
const data = join(out, "data"), downloads = join(out, "public", "data");

const text = (path) => readFileSync(path, "utf8");
const lines = (path) => text(path).split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
const listed = (folder, ending) =>
  existsSync(folder) ? readdirSync(folder).filter((name) => name.endsWith(ending)).sort() : [];

function validator(name) {
  const ajv = new Ajv2020({ allErrors: true, strict: false });
  const check = ajv.compile(JSON.parse(text(join(root, "schemas", `${name}.schema.json`))));
  return (value, where) => {
    if (check(value)) return value;
    throw new Error(`${where} does not fit schemas/${name}.schema.json: ${ajv.errorsText(check.errors)}`);
  };
}

/** Files of benchmark rows: those whose first line says so; each row knows its file and line. */
function benchmarkRows() {
  const check = validator("benchmark_row"), rows = [];
  for (const folder of ["", "hads"]) {
    for (const name of listed(join(results, folder), ".jsonl")) {
      const file = join(folder, name), found = lines(join(results, file));
      if (found[0]?.schema_version !== 1 || !("side" in found[0])) continue;
      found.forEach((row, place) => {
        rows.push({ id: `${file}:${place + 1}`, file, line: place + 1, row: check(row, `${file}:${place + 1}`) });
      });
    }
  }
  return rows;
}

/** Rules at equal counts of blocks: one entry per context and block size; variants of ours alone are left out. */
function ladders() {
  return listed(join(results, "hads"), ".jsonl").filter((name) => /^ladder_\d+_\d+\.jsonl$/.test(name)).map((name) => {
    const [head, ...rows] = lines(join(results, "hads", name));
    const file = `hads/${name}`;
    return {
      file, documents: head.documents.length, environment: head.environment,
      context: rows[0].context, block: rows[0].block,
      rows: rows.map(({ kl_by_document, ...row }, place) => ({ id: `${file}:${place + 2}`, ...row })),
    };
  });
}

function endToEnd() {
  return listed(join(results, "hads"), ".jsonl").filter((name) => name.startsWith("end_to_end_")).flatMap((name) => {
    const [head, ...rows] = lines(join(results, "hads", name));
    return rows.map((row, place) => ({
      id: `hads/${name}:${place + 2}`, file: `hads/${name}`, environment: head.environment, ...row,
    }));
  });
}

function planLosses() {
  const path = join(results, "hads", "plan_loss.jsonl");
  return existsSync(path) ? lines(path).map((row, place) => ({ id: `hads/plan_loss.jsonl:${place + 1}`, file: "hads/plan_loss.jsonl", ...row })) : [];
}

const COMPILERS = ["libtpu", "nvidia-cuda-nvcc", "jax"];

function certificates() {
  const check = validator("certificate"), folder = join(root, "certificates");
  return listed(folder, ".json").map((name) => {
    const found = check(JSON.parse(text(join(folder, name))), `certificates/${name}`);
    const { outcomes, ...about } = found;
    const inOrder = outcomes.toSorted((one, other) => one.made_at.localeCompare(other.made_at));
    return {
      file: `certificates/${name}`, ...about,
      compiler: COMPILERS.filter((each) => each in about.versions).map((each) => `${each} ${about.versions[each]}`).join(", "),
      commits: [...new Set(inOrder.map(({ commit }) => commit))],
      outcomes: outcomes.map(({ case: own, verdict, as_expected, facts }) => ({
        name: own.name, shape: own.shape, pass: own.pass_name, tokens: own.tokens, budget: own.budget,
        dtype: own.dtype, traced: own.traced, expects: own.expects, because: own.because, verdict, as_expected,
        vmem_bytes: facts?.vmem_bytes ?? null, spills: facts?.spills ?? null,
      })),
    };
  });
}

function numerics() {
  const path = join(results, "numerics.jsonl");
  if (!existsSync(path)) return null;
  const groups = new Map();
  for (const row of lines(path)) {
    const name = `${row.implementation} ${row.dtype}`;
    const group = groups.get(name) ?? { implementation: row.implementation, dtype: row.dtype, rows: 0, within: 0, most: 0 };
    group.rows += 1;
    group.within += row.is_within_budget ? 1 : 0;
    group.most = Math.max(group.most, row.allowance_used);
    groups.set(name, group);
  }
  return { file: "numerics.jsonl", groups: [...groups.values()] };
}

function plans() {
  const check = validator("plan"), folder = join(results, "hads");
  return listed(folder, ".json").filter((name) => name.startsWith("plan_")).map((name) => {
    const found = check(JSON.parse(text(join(folder, name))), name);
    return {
      file: `hads/${name}`, summary: found.summary, model: found.model, block: found.block,
      context: found.calibration.context, budget: found.budget, effective: found.effective_budget,
      policy: found.policy.name, shares: found.heads.map((layer) => layer.map((head) => head.share)),
    };
  });
}

/** What a visitor meets first goes with the page: blocks of every head by policy, at one budget. */
function opening({ model, policies, percents }, file) {
  const bytes = gunzipSync(readFileSync(file)), totals = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  const all = model.layers * model.q_heads, first = (policy) => (policy * percents.length + percents.indexOf(OPENING)) * all;
  return { percent: OPENING, totals: policies.map((_, policy) => [...totals.subarray(first(policy), first(policy) + all)]) };
}

function explored() {
  const folders = existsSync(join(results, "hads"))
    ? readdirSync(join(results, "hads")).filter((name) => existsSync(join(results, "hads", name, "explore.json")))
    : [];
  if (!folders.length) return null;
  const folder = folders.sort().at(-1);
  cpSync(join(results, "hads", folder), join(downloads, "explore"), { recursive: true });
  const about = JSON.parse(text(join(results, "hads", folder, "explore.json")));
  return { folder: `hads/${folder}`, ...about, opening: opening(about, join(results, "hads", folder, "totals.bin.gz")) };
}

function runs() {
  const folder = join(results, "training");
  const names = existsSync(folder) ? readdirSync(folder, { withFileTypes: true }) : [];
  const found = names.filter((entry) => entry.isDirectory() && existsSync(join(folder, entry.name, "metrics.jsonl")))
    .map((entry) => readRun(join(folder, entry.name), entry.name));
  mkdirSync(join(downloads, "runs"), { recursive: true });
  for (const { about, series } of found) {
    writeFileSync(join(downloads, "runs", `${about.name}.json`), JSON.stringify({ about, series }));
  }
  return found.map(({ about }) => about);
}

/** Runs of several sides and seeds beside each other: a head line, a line per run, and the gaps. */
function comparisons() {
  const folder = join(results, "training");
  return listed(folder, ".jsonl").map((name) => ({ name, found: lines(join(folder, name)) }))
    .filter(({ found }) => found.some((row) => "side" in row && Array.isArray(row.validation)))
    .map(({ name, found: [about, ...rows] }) => {
      cpSync(join(folder, name), join(downloads, "rows", "training", name));
      return { file: `training/${name}`, about, runs: rows.filter((row) => "side" in row), gaps: rows.filter((row) => "gap_of" in row) };
    });
}

function faults() {
  const path = join(results, "faults.json");
  return existsSync(path) ? JSON.parse(text(path)) : null;
}

async function types() {
  mkdirSync(join(out, "types"), { recursive: true });
  for (const name of ["benchmark_row", "certificate", "plan"]) {
    const made = await compileFromFile(join(root, "schemas", `${name}.schema.json`), {
      bannerComment: "// Made from schemas/ by scripts/data.mjs; do not edit.", additionalProperties: false,
    });
    writeFileSync(join(out, "types", `${name}.d.ts`), made);
  }
}

for (const folder of [data, downloads]) {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
}
const save = (name, value) => writeFileSync(join(data, `${name}.json`), JSON.stringify(value));
save("rows", benchmarkRows());
save("ladders", ladders());
save("end_to_end", endToEnd());
save("plan_losses", planLosses());
save("certificates", certificates());
save("numerics", numerics());
save("plans", plans());
save("explore", explored());
save("runs", runs());
save("comparisons", comparisons());
save("faults", faults());
for (const name of listed(results, ".jsonl")) cpSync(join(results, name), join(downloads, "rows", name));
for (const name of [...listed(join(results, "hads"), ".jsonl"), ...listed(join(results, "hads"), ".json")]) {
  cpSync(join(results, "hads", name), join(downloads, "rows", "hads", name));
}
cpSync(join(root, "certificates"), join(downloads, "certificates"), { recursive: true });
if (existsSync(join(results, "faults.json"))) cpSync(join(results, "faults.json"), join(downloads, "rows", "faults.json"));
await types();
console.log(`data of ${root} is in place`);
