// Plots series and heat maps on canvases.
const STOPS = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];

function ramp(share) {
  const x = Math.max(0, Math.min(1, share)) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(x));
  return `rgb(${STOPS[i].map((from, c) => Math.round(from + (STOPS[i + 1][c] - from) * (x - i))).join()})`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const digits = (x) => String(Number(Number(x).toPrecision(4)));

function resize(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

export class Chart {
  constructor(canvas, describe, reload) {
    Object.assign(this, { canvas, describe, reload, range: [0, Infinity], steps: [], mean: [], least: [], most: [], cursor: null, resolution: 1 });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(), share = (event.clientX - box.left - 52) / (box.width - 60);
      this.cursor = Math.max(0, Math.min(this.steps.length - 1, Math.round(share * (this.steps.length - 1))));
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
  }

  key(event) {
    const last = this.steps.length - 1, at = this.cursor ?? last;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (event.key in moves) this.cursor = Math.max(0, Math.min(last, moves[event.key]));
    else if (event.key === "0") { this.range = [0, Infinity]; this.cursor = null; this.reload(); }
    else if (event.key === "+" || event.key === "-") {
      const [begin, end] = [this.steps[0] ?? 0, (this.steps[last] ?? 0) + this.resolution];
      const middle = this.steps[at] ?? 0, half = (end - begin) * (event.key === "+" ? 0.25 : 1);
      this.range = [Math.max(0, middle - half), middle + Math.max(half, 2)];
      this.cursor = null;
      this.reload();
    } else return;
    event.preventDefault();
    this.draw();
  }

  show(steps, curve, resolution) {
    const valid = steps.map((_, i) => i).filter((i) => curve.mean[i] !== null);
    Object.assign(this, { steps: valid.map((i) => steps[i]), resolution });
    for (const name of ["mean", "least", "most"]) this[name] = valid.map((i) => curve[name][i]);
    if (this.cursor !== null) this.cursor = Math.min(this.cursor, this.steps.length - 1);
    this.draw();
  }

  draw() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const pen = resize(this.canvas, width, height), n = this.steps.length;
    if (!n) return this.describe("no data yet");
    const low = Math.min(...this.least), high = Math.max(...this.most), margin = (high - low || Math.abs(high) || 1) * 0.06;
    const [bottom, top] = [low - margin, high + margin], first = this.steps[0], span = this.steps[n - 1] - first || 1;
    const x = (step) => 52 + (width - 60) * (step - first) / span, y = (v) => 8 + (height - 30) * (top - v) / (top - bottom);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("--quiet");
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const value = low + (high - low) * share;
      pen.beginPath(); pen.moveTo(52, y(value)); pen.lineTo(width - 8, y(value)); pen.stroke();
      pen.textAlign = "right"; pen.fillText(digits(value), 47, y(value) + 4);
      if (high === low) break;
    }
    pen.textAlign = "left"; pen.fillText(first.toLocaleString("en"), 52, height - 6);
    pen.textAlign = "right"; pen.fillText(this.steps[n - 1].toLocaleString("en"), width - 8, height - 6);
    pen.fillStyle = colour("--band");
    pen.beginPath();
    this.steps.forEach((step, i) => pen.lineTo(x(step), y(this.most[i])));
    for (let i = n - 1; i >= 0; i--) pen.lineTo(x(this.steps[i]), y(this.least[i]));
    pen.fill();
    pen.strokeStyle = colour("--accent");
    pen.lineWidth = 1.6;
    pen.beginPath();
    this.steps.forEach((step, i) => pen.lineTo(x(step), y(this.mean[i])));
    pen.stroke();
    const at = this.cursor ?? n - 1;
    pen.fillStyle = colour("--accent");
    pen.beginPath(); pen.arc(x(this.steps[at]), y(this.mean[at]), 3.5, 0, 7); pen.fill();
    const text = `${digits(this.mean[at])} at step ${this.steps[at].toLocaleString("en")}`;
    return this.describe(this.least[at] === this.most[at] ? text : `${text} (${digits(this.least[at])} to ${digits(this.most[at])})`);
  }
}

export function heat(canvas, values, min, max, cell) {
  const rows = values.length, columns = values[0].length;
  const size = Math.max(8, Math.min(40, Math.floor((canvas.parentElement.clientWidth - 12) / columns)));
  canvas.style.width = `${size * columns}px`;
  canvas.style.height = `${size * rows}px`;
  const pen = resize(canvas, size * columns, size * rows), span = max - min || 1;
  values.forEach((row, layer) => row.forEach((value, head) => {
    pen.fillStyle = value === null ? colour("--panel") : ramp((value - min) / span);
    pen.fillRect(head * size, layer * size, size - 1, size - 1);
  }));
  const [layer, head] = cell;
  if (layer < rows && head < columns) {
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2.5;
    pen.strokeRect(head * size + 1, layer * size + 1, size - 3, size - 3);
  }
}
