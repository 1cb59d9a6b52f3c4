// Lets every page of out/ be painted before the scripts that move it are asked for: its words, links and numbers need none.
// The scripts ask browsers to compile all of their functions while they arrive, off the thread that paints: most are called at once.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const SCRIPT = /<script src="([^"]+)" async=""><\/script>/g, EARLY = /<link rel="preload" as="script"[^>]*>/g;

for (const name of readdirSync("out", { recursive: true }).filter((each) => each.endsWith(".html"))) {
  const path = join("out", name), page = readFileSync(path, "utf8");
  const addresses = [...page.matchAll(SCRIPT)].map(([, address]) => address);
  if (!addresses.length) throw new Error(`${path}: no scripts as Next.js writes them; has their form changed?`);
  const ask = `for(const a of ${JSON.stringify(addresses)}){const s=document.createElement("script");s.async=true;s.src=a;document.head.append(s)}`;
  // A page in a hidden tab is not painted, and need not wait for it.
  const later = `<script>{let isAsked;const ask=()=>{if(isAsked)return;isAsked=true;${ask}};
new PerformanceObserver(ask).observe({type:"paint",buffered:true});addEventListener("load",()=>setTimeout(ask,1000))}</script>`;
  writeFileSync(path, page.replaceAll(SCRIPT, "").replaceAll(EARLY, "").replace("</head>", `${later}</head>`));
}

const chunks = join("out", "_next", "static", "chunks");
for (const name of readdirSync(chunks).filter((each) => each.endsWith(".js"))) {
  writeFileSync(join(chunks, name), `//# allFunctionsCalledOnLoad\n${readFileSync(join(chunks, name), "utf8")}`);
}
