// From the repository's files to what pages read: a changed row changes it, a wrong one ends the build.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { counted } from "../scripts/runs.mjs";

const here = resolve(dirname(fileURLToPath(import.meta.url)), "..");
let folder, repository, out;

before(() => {
  folder = mkdtempSync(join(tmpdir(), "showcase-"));
  repository = join(folder, "repository");
  out = join(folder, "out");
  for (const part of ["schemas", "certificates", "benchmarks/results"]) cpSync(join(here, "..", part), join(repository, part), { recursive: true });
});
after(() => rmSync(folder, { recursive: true }));

const gather = () => spawnSync(process.execPath, [join(here, "scripts", "data.mjs"), repository, out], { encoding: "utf8" });
const made = (name) => JSON.parse(readFileSync(join(out, "data", `${name}.json`), "utf8"));
const rowsPath = () => join(repository, "benchmarks", "results", "causal.jsonl");

test("rows are passed on as they are, with their file and line", () => {
  assert.equal(gather().status, 0);
  const rows = made("rows"), lines = readFileSync(rowsPath(), "utf8").trim().split("\n");
  for (const [place, line] of lines.entries()) {
    assert.deepEqual(rows.find(({ id }) => id === `causal.jsonl:${place + 1}`).row, JSON.parse(line));
  }
});

test("no row of ours is shown as a peer's, native sparse attention included", () => {
  assert.equal(gather().status, 0);
  for (const { id, row } of made("rows")) {
    assert.equal(typeof row.is_own, "boolean", id);
    assert.equal(row.is_own, !/jax\.nn|jax matmul|jnp|NumPy|torch|tokamax|ejkernel|transformers/.test(row.implementation), id);
  }
  assert.ok(made("rows").some(({ row }) => row.experiment === "native_sparse" && row.is_own));
});

test("a changed row changes what pages read", () => {
  const [first, ...others] = readFileSync(rowsPath(), "utf8").trim().split("\n"), row = JSON.parse(first);
  writeFileSync(rowsPath(), [JSON.stringify({ ...row, seconds: { median: 7, q25: 6, q75: 8 } }), ...others].join("\n"));
  assert.equal(gather().status, 0);
  assert.equal(made("rows").find(({ id }) => id === "causal.jsonl:1").row.seconds.median, 7);
  writeFileSync(rowsPath(), [first, ...others].join("\n"));
});

test("a row that does not fit the schema ends the build and is named", () => {
  const kept = readFileSync(rowsPath(), "utf8");
  writeFileSync(rowsPath(), kept.replace('"threads":2', '"threads":"two"'));
  const { status, stderr } = gather();
  assert.notEqual(status, 0);
  assert.match(stderr, /causal\.jsonl:1 does not fit schemas\/benchmark_row/);
  writeFileSync(rowsPath(), kept);
});

test("a folder with metrics appears as a run, and faults as a table", () => {
  const run = join(repository, "benchmarks", "results", "training", "new");
  mkdirSync(run, { recursive: true });
  writeFileSync(join(run, "metrics.jsonl"), '{"event":"began","from_step":0}\n{"step":0,"loss":5.5}\n{"step":1,"loss":5.25}\n{"step":1,"entropy":[[1,2]]}\n');
  writeFileSync(join(repository, "benchmarks", "results", "faults.json"), JSON.stringify({ environment: {}, is_quick: true, faults: [] }));
  writeFileSync(join(repository, "benchmarks", "results", "training", "sides.jsonl"),
    '{"steps":2,"context":64}\n{"side":"dense","seed":0,"seconds":1,"validation":[[0,5.5],[1,5.0]]}\n{"gap_of":"hads","seeds":[0],"gaps":[0.01]}\n');
  assert.equal(gather().status, 0);
  const sides = made("comparisons").find(({ file }) => file === "training/sides.jsonl");
  assert.deepEqual([sides.about.steps, sides.runs.length, sides.gaps[0].gaps], [2, 1, [0.01]]);
  const about = made("runs").find(({ name }) => name === "new");
  assert.deepEqual([about.steps, about.first_loss, about.last_loss, about.marks], [2, 5.5, 5.25, []]);
  assert.deepEqual(made("faults").faults, []);
});

test("steps that a later life did again count once, as it did them", () => {
  const text = [{ event: "began", from_step: 0 }, { step: 0, loss: 3 }, { step: 1, loss: 2 }, { step: 2, loss: 1 },
    { event: "began", from_step: 1 }, { step: 1, loss: 2.5 }, { step: 2, loss: 1.5, is_skipped: true }, { event: "ended", ending: "done" }]
    .map((line) => JSON.stringify(line)).join("\n") + '\n{"step": 3, "lo';
  const { steps, marks, lives } = counted(text);
  assert.deepEqual(steps.map(({ loss }) => loss), [3, 2.5, 1.5]);
  assert.deepEqual(marks, [{ step: 1, kind: "resumed", lost: 2 }, { step: 2, kind: "refused update", lost: 0 }]);
  assert.equal(lives, 2);
});
