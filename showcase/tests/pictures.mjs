// Pictures of every room: node tests/pictures.mjs [folder] [--view] [room ...]
// Whole pages, in both sizes and colours; with --view what is seen first, as the documentation shows it.
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { browser, SIZES } from "./browser.mjs";
import { serve } from "./server.mjs";

const given = process.argv.slice(2), isView = given.includes("--view");
const [folder = "pictures", ...asked] = given.filter((word) => word !== "--view");
const rooms = asked.length ? asked : ["home", "explore", "benchmarks", "training", "proof"];
const LOOKS = isView ? [["desktop", "light"], ["phone", "dark"]] : ["phone", "desktop"].flatMap((size) => [[size, "light"], [size, "dark"]]);

async function settled(page, room) {
  await page.goto(`${site.place}/${room === "home" ? "" : `${room}/`}`, { waitUntil: "networkidle", timeout: 300_000 });
  await page.evaluate(() => document.fonts.ready);
  if (room !== "explore") return;
  await page.waitForSelector("#head-kl", { timeout: 300_000 });
  if (isView) {
    await page.evaluate(() => document.querySelector("#budget").closest(".sticky").scrollIntoView());
    return;
  }
  await page.locator("#copy").scrollIntoViewIfNeeded();
  await page.waitForSelector("[data-survives]", { timeout: 300_000 });
  await page.evaluate(() => scrollTo(0, 0));
}

mkdirSync(folder, { recursive: true });
const site = await serve("out"), own = await browser();
for (const [size, theme] of LOOKS) {
  const page = await own.newPage({ viewport: SIZES[size], colorScheme: theme, deviceScaleFactor: 1, reducedMotion: "reduce" });
  for (const room of rooms) {
    await settled(page, room);
    await page.waitForTimeout(500);
    await page.screenshot({ path: join(folder, `${room}_${size}_${theme}.png`), fullPage: !isView, timeout: 300_000 });
  }
  await page.close();
}
await own.close();
site.close();
