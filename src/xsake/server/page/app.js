// Built-in page: lists runs, plots the metrics of one of them, and follows live updates.
import { Chart, heat } from "/page/draw.js";

const CHARTS = ["loss", "validation_loss", "gradient_norm", "learning_rate", "tokens_per_second",
  "step_seconds", "drift", "drifted_heads", "work_excess"];
const TILES = ["loss", "tokens_per_second", "gradient_norm", "learning_rate", "budget", "skipped_total",
  "failed_saves", "goodput", "drift", "work_excess"];
const POINTS = 800;
const at = (id) => document.getElementById(id);
const format = (x, unit = "") => x === null || x === undefined ? "–"
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

async function logIn(token) {
  const answer = await fetch("/api/v1/session", {
    method: "POST", headers: { Authorization: `Bearer ${token}` }, credentials: "same-origin" });
  return answer.ok;
}

function setStatus(text) { if (at("connection").textContent !== text) at("connection").textContent = text; }

async function start() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    await logIn(given);
  }
  try {
    metrics = Object.fromEntries((await ask("/metrics")).map((m) => [m.name, m]));
  } catch (error) {
    if (!(error instanceof NeedsToken)) return setTimeout(start, 2000);
    at("login").hidden = false;
    setStatus("a token is required");
    at("token").focus();
    return undefined;
  }
  at("login").hidden = true;
  const live = await (await fetch("/live.json", { credentials: "same-origin" })).json();
  if (live.has_showcase && location.pathname === "/") return location.replace("/"); // this page served as the login form
  at("showcase").hidden = !live.has_showcase;
  list();
  return undefined;
}

at("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await logIn(at("token").value.trim())) { at("token").value = ""; start(); }
  else at("login-problem").textContent = "Wrong token.";
});

// Notes about data that is not shown; empty if everything is.
function count(number, one, many) { return number ? `${format(number)} ${number === 1 ? one : many}` : ""; }

function droppedNote(about) {
  const parts = [count(about.dropped_lines, "line", "lines"), count(about.dropped_values, "value", "values")].filter(Boolean);
  return parts.length ? `${parts.join(" and ")} of metrics.jsonl dropped: invalid or out of range.` : "";
}

function serverNotes(status) {
  return [
    status.problem ? `Data may be stale: ${status.problem}.` : "",
    status.runs_unreadable ? `${count(status.runs_unreadable, "run", "runs")} unreadable.` : "",
    droppedNote(status),
    status.runs_left_out ? `${count(status.runs_left_out, "run", "runs")} not shown: the limit is ${format(status.max_things)}.` : "",
    status.documents_left_out ? `${count(status.documents_left_out, "document", "documents")} not shown: the limit is ${format(status.max_things)} per type.` : "",
    status.is_search_cut ? `The scan for runs ended after ${format(status.max_entries)} files; there may be more.` : "",
  ].filter(Boolean).join(" ");
}

function note(id, text) { if (at(id).textContent !== text) at(id).textContent = text; }

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
      small.textContent = `${run.state}, step ${format(run.step + 1)}${run.steps ? ` of ${format(run.steps)}` : ""}`;
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
    if (!stream) setStatus("connected");
  } catch (error) {
    if (error instanceof NeedsToken) return start();
    setStatus("no response from the server");
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
  stream.onopen = () => setStatus("live");
  stream.onerror = () => setStatus("connection lost, reconnecting");
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
    const selected = at("metric").value || "attn_mass_recall";
    at("metric").replaceChildren(...run.heads.map((name) => new Option(name.replaceAll("_", " "), name)));
    at("metric").value = run.heads.includes(selected) ? selected : run.heads[0];
  }
  if (run.heads.length) await loadHeads();
}

function summary(run) {
  at("run-name").textContent = [run.folder, "run"].includes(run.name) ? run.folder : `${run.name} (${run.folder})`;
  if (at("state").textContent !== run.state) at("state").textContent = run.state;
  at("state").className = `badge ${run.state}`;
  const updated = new Date(run.last_update_time * 1000).toLocaleTimeString("en-GB");
  at("progress-words").textContent = `step ${format(run.step + 1)}${run.steps ? ` of ${format(run.steps)}` : ""}, last update at ${updated}`;
  note("run-notes", [run.problem ? `Unreadable: ${run.problem}.` : "", droppedNote(run)].filter(Boolean).join(" "));
  at("progress").value = run.steps ? (run.step + 1) / run.steps : 0;
}

function tiles(run) {
  const values = { ...run.latest, goodput: run.goodput, skipped_total: run.skipped_total };
  at("tiles").replaceChildren(...TILES.filter((name) => values[name] !== undefined && values[name] !== null).map((name) => {
    const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name.replaceAll("_", " ");
    dt.title = `${metrics[name]?.meaning} (${metrics[name]?.unit})`;
    dd.textContent = format(values[name], metrics[name]?.unit);
    dd.dataset.name = name;
    box.append(dt, dd);
    return box;
  }));
}

function add(name) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const title = document.createElement("strong"), value = document.createElement("span");
  const canvas = document.createElement("canvas");
  title.textContent = `${name.replaceAll("_", " ")}${metrics[name].unit === "1" ? "" : `, ${metrics[name].unit}`}`;
  value.setAttribute("role", "status");
  caption.append(title, value);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  figure.append(caption, canvas);
  at("charts").append(figure);
  const chart = new Chart(canvas, (text) => {
    value.textContent = text;
    canvas.setAttribute("aria-label", `${name.replaceAll("_", " ")} over the steps. ${text}`);
  }, () => load(chart));
  chart.name = name;
  charts.set(name, chart);
}

// Charts of the whole run share one request.
async function loadCharts() {
  const all = [...charts.values()], isWhole = (chart) => chart.range[0] === 0 && chart.range[1] === Infinity;
  const whole = all.filter(isWhole), id = current;
  await Promise.all(all.filter((chart) => !isWhole(chart)).map(load));
  if (!whole.length) return;
  const query = new URLSearchParams([["points", POINTS], ...whole.map((chart) => ["name", chart.name])]);
  const curves = await ask(`/runs/${id}/series?${query}`);
  if (id !== current) return;
  for (const chart of whole) if (isWhole(chart)) chart.show(curves.steps, curves.series[chart.name], curves.resolution);
}

async function load(chart) {
  const [begin, end] = chart.range;
  const query = new URLSearchParams({ name: chart.name, points: POINTS, begin: Math.floor(begin) });
  if (Number.isFinite(end)) query.set("end", Math.ceil(end));
  const id = current, curves = await ask(`/runs/${id}/series?${query}`);
  if (id === current) chart.show(curves.steps, curves.series[chart.name], curves.resolution);
}

async function loadHeads() {
  heads = await ask(`/runs/${current}/heads/${at("metric").value}`);
  const flat = heads.values.flat().filter((x) => x !== null);
  const min = Math.min(...flat), max = Math.max(...flat);
  at("heads-words").textContent = `${metrics[heads.metric].meaning}${heads.unit === "share" ? "" : `, in ${heads.unit}`}, at step ${format(heads.step)}; rows are layers, columns heads`;
  at("scale-least").textContent = format(min, heads.unit);
  at("scale-most").textContent = format(max, heads.unit);
  heat(at("heat"), heads.values, min, max, cell);
  const row = (values, tag, label) => {
    const tr = document.createElement("tr"), th = document.createElement("th");
    th.scope = "row"; th.textContent = label;
    tr.append(th, ...values.map((x) => { const td = document.createElement(tag); td.textContent = x; if (tag === "th") td.scope = "col"; return td; }));
    return tr;
  };
  at("heads-table").replaceChildren(row(heads.values[0].map((_, i) => `head ${i}`), "th", "layer"),
    ...heads.values.map((values, layer) => row(values.map((x) => format(x)), "td", layer)));
  showCell();
}

function showCell() {
  const [layer, head] = cell, value = heads?.values[layer]?.[head];
  const text = `layer ${layer}, head ${head}: ${format(value, heads?.unit)}${heads?.unit === "share" ? "" : ` ${heads?.unit ?? ""}`}`;
  if (at("cell").textContent !== text) at("cell").textContent = text;
}

at("metric").addEventListener("change", loadHeads);
at("heat-frame").addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!moves[event.key] || !heads) return;
  event.preventDefault();
  const last = [heads.values.length - 1, heads.values[0].length - 1];
  cell = cell.map((x, i) => Math.max(0, Math.min(last[i], x + moves[event.key][i])));
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
  showCell();
}

function follow(update) {
  if (update.summary.id !== current) return;
  setStatus("live");
  summary(update.summary);
  const last = update.lines.at(-1);
  for (const [name, value] of Object.entries(last ?? {})) {
    const dd = at("tiles").querySelector(`[data-name="${name}"]`);
    if (dd) dd.textContent = format(value, metrics[name]?.unit);
  }
  // Request new points at most once a second; the server downsamples them.
  if (!refreshing) refreshing = setTimeout(() => { refreshing = 0; refresh().catch(() => {}); }, 1000);
}

addEventListener("resize", () => { for (const chart of charts.values()) chart.draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) chart.draw();
  if (heads) redrawHeat();
});
start();
