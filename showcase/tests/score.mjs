// Lighthouse's opinion of Home and Explore, the median of a few runs; not a part of the gate: node tests/score.mjs
import { spawn } from "node:child_process";
import { mkdirSync, readFileSync } from "node:fs";
import { program } from "./browser.mjs";
import { serve } from "./server.mjs";

const LEAST = 0.95, RUNS = 5, ROOMS = ["", "explore/"];
// The phone is Lighthouse's own: a slow network, and a quarter of this machine's speed.
const SCREENS = { desktop: ["--preset=desktop"], phone: [] };
const site = await serve("out");
mkdirSync("pictures", { recursive: true });
let isLow = false;
for (const [room, screen] of ROOMS.flatMap((room) => Object.keys(SCREENS).map((screen) => [room, screen]))) {
  const file = `pictures/lighthouse_${room.replace("/", "") || "home"}_${screen}.json`;
  const asked = ["--yes", "lighthouse@12.8.2", `${site.place}/${room}`, "--quiet", "--output=json", `--output-path=${file}`,
    "--only-categories=performance,accessibility", ...SCREENS[screen], "--chrome-flags=--headless=new --no-sandbox --disable-gpu"];
  const found = [];
  for (let number = 0; number < RUNS; number++) {
    const { status } = await run(asked);
    if (status) process.exit(status);
    found.push(JSON.parse(readFileSync(file, "utf8")).categories);
  }
  const scores = Object.keys(found[0]).map((name) => {
    const scores = found.map((each) => each[name].score).sort((one, other) => one - other), middle = scores[RUNS >> 1];
    isLow ||= middle < LEAST;
    return `${found[0][name].title} ${Math.round(100 * middle)} [${Math.round(100 * scores[0])}, ${Math.round(100 * scores.at(-1))}]`;
  });
  console.log(`/${room} on a ${screen}: ${scores.join(", ")}`);
}
site.close();
process.exit(isLow ? 1 : 0);

async function run(asked) {
  const made = spawn("npx", asked, { stdio: "inherit", env: { ...process.env, CHROME_PATH: program() } });
  return new Promise((done) => made.on("exit", (status) => done({ status })));
}
