// Walks every room in a real Chromium, on a phone and on a desktop, and holds every page to its files.
//
//   node tests/walk.mjs [folder of the built site] [--only=training/] [--timed]
//
// --timed also holds the slider to its limit, which a busy machine would miss.
// Without a Chromium it says so and ends well: a machine without one can still build the site.
import assert from "node:assert/strict";
import { gzipSync } from "node:zlib";
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { browser, program, SIZES } from "./browser.mjs";
import { serve } from "./server.mjs";
import { ROOMS } from "./rooms.mjs";

const words = process.argv.slice(2), folder = words.find((word) => !word.startsWith("--")) ?? "out";
const only = words.find((word) => word.startsWith("--only="))?.slice("--only=".length);
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const MOST_SCRIPT = 300 * 1024, MOST_REPAINT = 50;

if (!program()) {
  console.log("no Chromium on this machine: the walk is left out (Debian: apt-get install chromium)");
  process.exit(0);
}

async function accessible(page, where) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const messages = violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html, any }) => `${html.slice(0, 160)} ${any[0]?.message ?? ""}`).join(" | ")}`);
  assert.deepEqual(messages, [], `${where} is not readable by all`);
}

/** Bytes of script that a first visit loads, compressed. */
function watch(page, place) {
  const seen = { scripts: [], problems: [], foreign: [] };
  page.on("request", (request) => { if (!request.url().startsWith(place) && !request.url().startsWith("data:")) seen.foreign.push(request.url()); });
  page.on("response", (response) => {
    if (response.status() >= 400) seen.problems.push(`${response.status()} ${response.url()}`);
    if (response.request().resourceType() === "script") seen.scripts.push(response.body().then((body) => gzipSync(body).length));
  });
  page.on("pageerror", (error) => seen.problems.push(String(error)));
  page.on("console", (message) => { if (message.type() === "error") seen.problems.push(message.text()); });
  return seen;
}

const site = await serve(folder), own = await browser();
const begin = Date.now();
let failed = 0;
for (const [size, viewport] of Object.entries(SIZES)) {
  for (const [room, walk] of Object.entries(ROOMS)) {
    if (only !== undefined && room !== only) continue;
    const context = await own.newContext({ viewport, reducedMotion: "reduce", colorScheme: size === "phone" ? "dark" : "light" });
    context.setDefaultTimeout(120_000);
    const page = await context.newPage(), seen = watch(page, site.place);
    try {
      await page.goto(`${site.place}/${room}`, { waitUntil: "load" });
      await page.waitForLoadState("networkidle");
      const scripts = (await Promise.all(seen.scripts)).reduce((a, b) => a + b, 0);
      assert.ok(scripts > 0 && scripts < MOST_SCRIPT, `${scripts} bytes of script`);
      const messages = await walk(page, { size, mostRepaint: MOST_REPAINT });
      await accessible(page, `${room || "home"} (${size})`);
      const isWide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth + 1);
      assert.equal(isWide, false, "the page scrolls sideways");
      assert.deepEqual(seen.foreign, [], "requests to other hosts");
      assert.deepEqual(seen.problems, [], "browser errors");
      console.log(`${size} /${room}: well, ${(scripts / 1024).toFixed(0)} kB of script${messages ? `, ${messages}` : ""}`);
    } catch (error) {
      failed += 1;
      console.error(`${size} /${room}: ${error.stack ?? error}`);
    }
    await context.close();
  }
}
await own.close();
site.close();
const pages = readdirSync(folder, { recursive: true }).filter((name) => name.endsWith(".html"));
for (const name of pages) {
  const html = readFileSync(join(folder, name), "utf8");
  assert.doesNotMatch(html, /https?:\/\/(?!www\.w3\.org)/, `${name} names another host`);
}
console.log(`${failed ? `${failed} failed` : "all rooms hold"}, ${((Date.now() - begin) / 1000).toFixed(0)} s`);
process.exit(failed ? 1 : 0);
