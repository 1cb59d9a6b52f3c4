// The built-in page: lists runs, draws what one of them tells, and follows it while it goes on.
import { Chart, heat } from "/page/draw.js";

const CHARTS = ["loss", "validation_loss", "gradient_norm", "learning_rate", "tokens_per_second",
  "step_seconds", "drift", "heads_lost", "work_excess"];
const TILES = ["loss", "tokens_per_second", "gradient_norm", "learning_rate", "budget", "skipped_total",
  "failed_saves", "goodput", "drift", "work_excess"];
const POINTS = 800;
const at = (id) => document.getElementById(id);
const shown = (x, unit = "") => x === null || x === undefined ? "–"
  : unit === "share" ? `${(100 * x).toFixed(1)}%`
  : Number.isInteger(x) ? x.toLocaleString("en") : Math.abs(x) >= 1e4 ? Math.round(x).toLocaleString("en")
  : String(Number(Number(x).toPrecision(4)));

let metrics = {}, current = null, stream = null, charts = new Map(), heads = null, cell = [0, 0];
let refreshing = 0;

class NeedsToken extends Error {}

async function ask(path) {
  const answer = await fetch(`/api/v1${path}`, { credentials: "same-origin" });
  if (answer.status === 401) throw new NeedsToken();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

async function open(token) {
  const answer = await fetch("/api/v1/session", {
    method: "POST", headers: { Authorization: `Bearer ${token}` }, credentials: "same-origin" });
  return answer.ok;
}

function say(words) { if (at("connection").textContent !== words) at("connection").textContent = words; }

async function start() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    await open(given);
  }
  try {
    metrics = Object.fromEntries((await ask("/metrics")).map((m) => [m.name, m]));
  } catch (error) {
    if (!(error instanceof NeedsToken)) return setTimeout(start, 2000);
    at("login").hidden = false;
    say("a token is needed");
    at("token").focus();
    return undefined;
  }
  at("login").hidden = true;
  const live = await (await fetch("/live.json", { credentials: "same-origin" })).json();
  if (live.has_showcase && location.pathname === "/") return location.replace("/"); // this page stood in for it
  at("showcase").hidden = !live.has_showcase;
  list();
  return undefined;
}

at("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await open(at("token").value.trim())) { at("token").value = ""; start(); }
  else at("login-problem").textContent = "This is not the token.";
});

// Plain lines about what is not shown; empty if everything is.
function count(number, one, many) { return number ? `${shown(number)} ${number === 1 ? one : many}` : ""; }

function droppedWords(about) {
  const parts = [count(about.dropped_lines, "line", "lines"), count(about.dropped_values, "value", "values")].filter(Boolean);
  return parts.length ? `${parts.join(" and ")} of metrics.jsonl dropped: not readable or out of range.` : "";
}

function serverNotes(status) {
  return [
    status.problem ? `What is shown may be old: ${status.problem}.` : "",
    status.runs_unreadable ? `${count(status.runs_unreadable, "run", "runs")} unreadable.` : "",
    droppedWords(status),
    status.runs_left_out ? `${count(status.runs_left_out, "run", "runs")} not shown: the limit is ${shown(status.max_things)}.` : "",
    status.documents_left_out ? `${count(status.documents_left_out, "document", "documents")} not shown: the limit is ${shown(status.max_things)} of a kind.` : "",
    status.is_search_cut ? `The search for runs ended after ${shown(status.max_entries)} files; there may be more.` : "",
  ].filter(Boolean).join(" ");
}

function note(id, words) { if (at(id).textContent !== words) at(id).textContent = words; }

async function list() {
  try {
    const [runs, status] = await Promise.all([ask("/runs"), ask("/status")]);
    note("notes", serverNotes(status));
    at("no-runs").hidden = runs.length > 0;
    const items = runs.map((run) => {
      const item = document.createElement("li"), button = document.createElement("button");
      const small = document.createElement("small");
      button.type = "button";
      button.append(run.name === "run" ? run.folder : run.name, small);
      small.textContent = `${run.state}, step ${shown(run.step + 1)}${run.steps ? ` of ${shown(run.steps)}` : ""}`;
      if (run.id === current) button.setAttribute("aria-current", "true");
      button.dataset.id = run.id;
      button.addEventListener("click", () => choose(run.id));
      item.append(button);
      return item;
    });
    const focused = document.activeElement?.dataset?.id;
    at("runs").replaceChildren(...items);
    if (focused) at("runs").querySelector(`[data-id="${focused}"]`)?.focus();
    if (!current && runs.length) choose(runs[0].id);
    if (!stream) say("connected");
  } catch (error) {
    if (error instanceof NeedsToken) return start();
    say("the server does not answer");
  }
  return setTimeout(list, 3000);
}

async function choose(id) {
  current = id;
  charts = new Map();
  heads = null;
  at("charts").replaceChildren();
  at("run").hidden = false;
  for (const button of at("runs").querySelectorAll("button")) {
    if (button.dataset.id === id) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  stream?.close();
  stream = new EventSource(`/api/v1/runs/${id}/events`);
  stream.onopen = () => say("live");
  stream.onerror = () => say("connection lost, trying again");
  stream.addEventListener("update", (event) => follow(JSON.parse(event.data)));
  await refresh();
}

async function refresh() {
  const id = current, run = await ask(`/runs/${id}`);
  if (id !== current) return;
  summary(run);
  tiles(run);
  at("config").textContent = JSON.stringify(run.config, null, 2);
  const names = CHARTS.filter((name) => run.series.includes(name));
  for (const name of names) if (!charts.has(name)) add(name);
  await loadCharts();
  at("heads").hidden = run.heads.length === 0;
  const options = [...at("metric").options].map((option) => option.value);
  if (run.heads.join() !== options.join()) {
    const wanted = at("metric").value || "kept_mass";
    at("metric").replaceChildren(...run.heads.map((name) => new Option(name.replace("_", " "), name)));
    at("metric").value = run.heads.includes(wanted) ? wanted : run.heads[0];
  }
  if (run.heads.length) await loadHeads();
}

function summary(run) {
  at("run-name").textContent = [run.folder, "run"].includes(run.name) ? run.folder : `${run.name} (${run.folder})`;
  if (at("state").textContent !== run.state) at("state").textContent = run.state;
  at("state").className = `badge ${run.state}`;
  const told = new Date(run.last_told * 1000).toLocaleTimeString("en-GB");
  at("progress-words").textContent = `step ${shown(run.step + 1)}${run.steps ? ` of ${shown(run.steps)}` : ""}, last told at ${told}`;
  note("run-notes", [run.problem ? `Unreadable: ${run.problem}.` : "", droppedWords(run)].filter(Boolean).join(" "));
  at("progress").value = run.steps ? (run.step + 1) / run.steps : 0;
}

function tiles(run) {
  const values = { ...run.latest, goodput: run.goodput, skipped_total: run.skipped_total };
  at("tiles").replaceChildren(...TILES.filter((name) => values[name] !== undefined && values[name] !== null).map((name) => {
    const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name.replaceAll("_", " ");
    dt.title = `${metrics[name]?.meaning} (${metrics[name]?.unit})`;
    dd.textContent = shown(values[name], metrics[name]?.unit);
    dd.dataset.name = name;
    box.append(dt, dd);
    return box;
  }));
}

function add(name) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const title = document.createElement("strong"), words = document.createElement("span");
  const canvas = document.createElement("canvas");
  title.textContent = `${name.replaceAll("_", " ")}${metrics[name].unit === "1" ? "" : `, ${metrics[name].unit}`}`;
  words.setAttribute("role", "status");
  caption.append(title, words);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  figure.append(caption, canvas);
  at("charts").append(figure);
  const chart = new Chart(canvas, (text) => {
    words.textContent = text;
    canvas.setAttribute("aria-label", `${name.replaceAll("_", " ")} over the steps. ${text}`);
  }, () => load(chart));
  chart.name = name;
  charts.set(name, chart);
}

// Charts that show the whole run are asked for at once.
async function loadCharts() {
  const all = [...charts.values()], isWhole = (chart) => chart.range[0] === 0 && chart.range[1] === Infinity;
  const whole = all.filter(isWhole), id = current;
  await Promise.all(all.filter((chart) => !isWhole(chart)).map(load));
  if (!whole.length) return;
  const query = new URLSearchParams([["points", POINTS], ...whole.map((chart) => ["name", chart.name])]);
  const found = await ask(`/runs/${id}/series?${query}`);
  if (id !== current) return;
  for (const chart of whole) if (isWhole(chart)) chart.show(found.steps, found.series[chart.name], found.resolution);
}

async function load(chart) {
  const [begin, end] = chart.range;
  const query = new URLSearchParams({ name: chart.name, points: POINTS, begin: Math.floor(begin) });
  if (Number.isFinite(end)) query.set("end", Math.ceil(end));
  const id = current, found = await ask(`/runs/${id}/series?${query}`);
  if (id === current) chart.show(found.steps, found.series[chart.name], found.resolution);
}

async function loadHeads() {
  heads = await ask(`/runs/${current}/heads/${at("metric").value}`);
  const flat = heads.values.flat().filter((x) => x !== null);
  const least = Math.min(...flat), most = Math.max(...flat);
  at("heads-words").textContent = `${metrics[heads.metric].meaning}${heads.unit === "share" ? "" : `, in ${heads.unit}`}, at step ${shown(heads.step)}; rows are layers, columns heads`;
  at("scale-least").textContent = shown(least, heads.unit);
  at("scale-most").textContent = shown(most, heads.unit);
  heat(at("heat"), heads.values, least, most, cell);
  const row = (values, tag, label) => {
    const tr = document.createElement("tr"), th = document.createElement("th");
    th.scope = "row"; th.textContent = label;
    tr.append(th, ...values.map((x) => { const td = document.createElement(tag); td.textContent = x; if (tag === "th") td.scope = "col"; return td; }));
    return tr;
  };
  at("heads-table").replaceChildren(row(heads.values[0].map((_, i) => `head ${i}`), "th", "layer"),
    ...heads.values.map((values, layer) => row(values.map((x) => shown(x)), "td", layer)));
  tellCell();
}

function tellCell() {
  const [layer, head] = cell, value = heads?.values[layer]?.[head];
  const words = `layer ${layer}, head ${head}: ${shown(value, heads?.unit)}${heads?.unit === "share" ? "" : ` ${heads?.unit ?? ""}`}`;
  if (at("cell").textContent !== words) at("cell").textContent = words;
}

at("metric").addEventListener("change", loadHeads);
at("heat-frame").addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!moves[event.key] || !heads) return;
  event.preventDefault();
  const most = [heads.values.length - 1, heads.values[0].length - 1];
  cell = cell.map((x, i) => Math.max(0, Math.min(most[i], x + moves[event.key][i])));
  redrawHeat();
});
at("heat").addEventListener("pointermove", (event) => {
  if (!heads) return;
  const box = at("heat").getBoundingClientRect();
  cell = [Math.min(heads.values.length - 1, Math.max(0, Math.floor(heads.values.length * (event.clientY - box.top) / box.height))),
    Math.min(heads.values[0].length - 1, Math.max(0, Math.floor(heads.values[0].length * (event.clientX - box.left) / box.width)))];
  redrawHeat();
});

function redrawHeat() {
  const flat = heads.values.flat().filter((x) => x !== null);
  heat(at("heat"), heads.values, Math.min(...flat), Math.max(...flat), cell);
  tellCell();
}

function follow(update) {
  if (update.summary.id !== current) return;
  say("live");
  summary(update.summary);
  const last = update.lines.at(-1);
  for (const [name, value] of Object.entries(last ?? {})) {
    const dd = at("tiles").querySelector(`[data-name="${name}"]`);
    if (dd) dd.textContent = shown(value, metrics[name]?.unit);
  }
  // New points are asked for at most once a second: the server has them at the right width.
  if (!refreshing) refreshing = setTimeout(() => { refreshing = 0; refresh().catch(() => {}); }, 1000);
}

addEventListener("resize", () => { for (const chart of charts.values()) chart.draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) chart.draw();
  if (heads) redrawHeat();
});
start();
