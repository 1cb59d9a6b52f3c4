// What must be true in each room. Expected numbers are read from the repository, not from the site.
import assert from "node:assert/strict";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const root = resolve(dirname(fileURLToPath(import.meta.url)), "..", "..");
const results = join(root, "benchmarks", "results");
const lines = (file) => readFileSync(join(results, file), "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));
const explored = () => JSON.parse(readFileSync(join(results, "hads", "explore_4096_32", "explore.json"), "utf8"));

async function number(page, selector) {
  return Number(await page.locator(selector).getAttribute("data-value"));
}

function near(found, expected, what) {
  assert.ok(Math.abs(found - expected) <= 1e-9 * Math.max(1, Math.abs(expected)), `${what}: ${found}, expected ${expected}`);
}

async function home(page) {
  const found = await page.locator("[data-source]").evaluateAll((parts) =>
    parts.map((part) => [part.dataset.source, part.querySelector("[data-figure]").textContent]));
  assert.equal(found.length, 4);
  for (const [source, figure] of found) {
    if (source === "certificates/") {
      const names = readdirSync(join(root, "certificates")), tpus = names.filter((name) => name.startsWith("tpu_")).length;
      assert.match(await page.locator("[data-source='certificates/']").textContent(), new RegExp(`${tpus} TPU and ${names.length - tpus} GPU targets`));
      const all = names.flatMap((name) => JSON.parse(readFileSync(join(root, "certificates", name), "utf8")).outcomes);
      const compiled = all.filter((each) => each.case.expects === "compiles" && each.verdict === "compiled");
      assert.equal(figure, String(compiled.length));
      continue;
    }
    const [file, line] = source.split(":"), row = lines(file)[line - 1];
    if (row.experiment === "prefill") {
      const ratio = row.ratios.find(({ baseline }) => baseline === "xsake").median;
      assert.equal(figure, `${ratio.toFixed(2)}×`);
      const loss = lines("hads/plan_loss.jsonl").find((each) => each.plan === row.side && each.rule === "plan" && each.context === row.shape.q_tokens && each.split === "test");
      const said = await page.locator(`[data-source="${source}"]`).textContent();
      assert.ok(said.includes(`+${(100 * loss.perplexity_gap.value).toFixed(1)}%`), `no loss of ${row.side} in: ${said}`);
    } else if (row.experiment === "memory") {
      const dense = lines(file).find((each) => each.side === "jax.nn");
      assert.equal(figure, `${((100 * row.temp_bytes) / dense.temp_bytes).toFixed(1)}%`);
    } else {
      assert.equal(figure, `+${(100 * row.perplexity_gap.value).toFixed(1)}%`);
    }
  }
  await page.getByRole("link", { name: "benchmark row" }).first().click();
  await page.waitForSelector("[data-raw]");
  const [file, line] = found[0][0].split(":");
  assert.deepEqual(JSON.parse(await page.locator("[data-raw]").textContent()), lines(file)[line - 1]);
  await page.keyboard.press("Escape");
  await page.getByRole("link", { name: "XSAKE" }).click();
  await page.waitForSelector("[data-figure]");
  const theme = await page.evaluate(() => document.documentElement.dataset.theme);
  await page.getByRole("button", { name: /^Use / }).click();
  assert.notEqual(await page.evaluate(() => document.documentElement.dataset.theme), theme);
}

/** One of several radio buttons, by keyboard. */
async function pick(page, name, value) {
  const radio = page.locator(`input[name="${name}"][value="${value}"]`);
  await radio.focus();
  await page.keyboard.press("Space");
  assert.ok(await radio.isChecked(), `${name} ${value} cannot be chosen`);
}

async function choose(page, head, q) {
  await page.locator(`[role=gridcell][data-head="${head}"]`).click();
  await page.getByRole("heading", { name: `Layer ${Math.floor(head / q)}, head ${head % q}`, exact: true }).waitFor();
}

async function setBudget(page, percent) {
  const slider = page.locator("#budget");
  await slider.focus();
  const now = Number(await slider.inputValue());
  if (Math.abs(now - percent) > 20) await slider.fill(String(percent));
  else for (let step = 0; step < Math.abs(now - percent); step++) await page.keyboard.press(now < percent ? "ArrowRight" : "ArrowLeft");
  await page.waitForFunction((value) => document.querySelector("output").textContent === `${value}%`, percent);
}

async function explore(page, { mostRepaint }) {
  const about = explored(), q = about.model.q_heads;
  await page.waitForSelector("#head-kl");
  for (const row of about.reference.filter(({ percent, head, policy }) =>
    [5, 30, 80].includes(percent) && head % 2 && ["effect", "uniform"].includes(policy))) {
    await choose(page, row.head, q);
    await pick(page, "policy", row.policy);
    await setBudget(page, row.percent);
    await page.waitForFunction((blocks) => document.querySelector("#head-blocks").dataset.value === String(blocks), row.blocks);
    const where = `${row.policy} at ${row.percent}% in head ${row.head}`;
    near(await number(page, "#head-kl"), row.kl, `KL, ${where}`);
    near(await number(page, "#head-mass"), row.mass, `mass, ${where}`);
    near(await number(page, "#head-recall"), row.recall, `recall, ${where}`);
    const at = about.percents.indexOf(row.percent);
    near(await number(page, "#model-kl"), about.whole[row.policy].kl[at], `KL of the model, ${where}`);
    assert.equal(await page.locator("section canvas").first().getAttribute("data-drawn"), String(row.blocks));
  }
  await page.locator("[role=gridcell][tabindex='0']").focus();
  await page.keyboard.press("ArrowLeft");
  await page.keyboard.press("ArrowUp");
  const repaint = await page.evaluate(repaintTimes);
  const middle = repaint.toSorted((a, b) => a - b)[Math.floor(repaint.length / 2)];
  await pick(page, "map", "kl");
  await page.waitForFunction(() => !document.body.textContent.includes("heads read"), undefined, { timeout: 300_000 });
  await page.locator("#copy").scrollIntoViewIfNeeded();
  await page.waitForSelector("[data-survives=effect]");
  const effect = await number(page, "[data-survives=effect]"), uniform = await number(page, "[data-survives=uniform]");
  assert.ok(effect > 0 && effect <= 1 && uniform > 0 && uniform <= 1);
  if (process.argv.includes("--timed")) assert.ok(middle < mostRepaint, `${middle} ms from slider to paint`);
  return `slider to paint ${middle.toFixed(0)} ms`;
}

/** Runs in the page: from an input event of the slider to the frame after it was drawn. */
async function repaintTimes() {
  const slider = document.querySelector("#budget"), found = [];
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  for (let percent = 20; percent < 45; percent++) {
    const begin = performance.now();
    set.call(slider, String(percent));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => { const channel = new MessageChannel(); channel.port1.onmessage = done; channel.port2.postMessage(0); }));
    found.push(performance.now() - begin);
  }
  return found;
}

async function benchmarks(page) {
  await page.waitForSelector("[data-row]");
  const timed = await page.locator("button[data-row]").evaluateAll((bars) => bars.map((bar) => [bar.dataset.row, bar.querySelector("[data-shown]").textContent]));
  assert.ok(timed.length >= 10, `${timed.length} bars`);
  for (const [id, shown] of timed) {
    const [file, line] = id.split(":"), median = lines(file)[line - 1].seconds.median;
    const expected = median >= 100 ? `${median.toFixed(0)} s` : median >= 1 ? `${median.toFixed(1)} s` : `${(1e3 * median).toPrecision(3)} ms`;
    assert.equal(shown, expected, id);
  }
  await page.locator("button[data-row]").first().click();
  const [file, line] = timed[0][0].split(":");
  assert.deepEqual(JSON.parse(await page.locator("[data-raw]").textContent()), lines(file)[line - 1]);
  await page.getByRole("button", { name: "Close" }).click();
  await pick(page, "peer", "torch.flex");
  assert.ok((await page.locator("button[data-row]").count()) < timed.length);
  await pick(page, "room", "memory");
  await page.getByRole("heading", { name: "Temporary memory" }).waitFor();
  await pick(page, "room", "quality");
  await page.waitForSelector("[data-rule=hads]");
  const shown = await page.locator("[data-rule=hads]").textContent();
  const row = lines("hads/ladder_4096_64.jsonl").find((each) => each.rule === "hads" && each.budget === 0.3);
  assert.equal(shown, row.kl.toFixed(4));
}

async function training(page) {
  const folder = join(results, "training");
  const runs = existsSync(folder) ? readdirSync(folder).filter((name) => existsSync(join(folder, name, "metrics.jsonl"))) : [];
  if (!runs.length) {
    assert.match(await page.locator("[data-missing]").textContent(), /xsake train/);
    return;
  }
  await page.waitForSelector("[data-metric=loss]");
  const metrics = readFileSync(join(folder, runs[0], "metrics.jsonl"), "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const losses = new Map(metrics.filter((line) => "loss" in line).map((line) => [line.step, line.loss]));
  const last = Math.max(...losses.keys());
  for (const step of [last, Math.floor(last / 2), 0]) {
    await page.locator("input[aria-label=Step]").fill(String(step));
    await page.waitForFunction((value) => document.querySelector("[data-metric=step]").dataset.value === String(value), step);
    near(Number(await page.locator("[data-metric=loss]").getAttribute("data-value")), losses.get(step), `loss of step ${step}`);
  }
  await page.getByRole("button", { name: "Play" }).click();
  await page.waitForFunction(() => Number(document.querySelector("[data-metric=step]").dataset.value) > 0);
}

async function proof(page) {
  for (const name of readdirSync(join(root, "certificates"))) {
    const { target, outcomes } = JSON.parse(readFileSync(join(root, "certificates", name), "utf8"));
    const expected = outcomes.filter((each) => each.case.expects === "compiles");
    const took = expected.filter(({ verdict }) => verdict === "compiled");
    assert.equal(await page.locator(`[data-target="${target}"] [data-compiled]`).textContent(), `${took.length} of ${expected.length}`);
  }
  if (existsSync(join(results, "faults.json"))) {
    const { faults } = JSON.parse(readFileSync(join(results, "faults.json"), "utf8"));
    for (const each of faults) assert.match(await page.locator(`[data-fault="${each.fault}"]`).textContent(), new RegExp(`${each.passes} of ${each.n}`));
  } else {
    assert.match(await page.locator("[data-missing]").first().textContent(), /just faults/);
  }
  await page.getByText("By model and pass").click();
}

export const ROOMS = { "": home, "explore/": explore, "benchmarks/": benchmarks, "training/": training, "proof/": proof };
