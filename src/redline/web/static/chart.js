"use strict";
// A small line chart on a canvas: several runs overlaid, the values under the pointer in words.

class Chart {
  constructor(title, unit) {
    this.title = title;
    this.unit = unit;
    this.lines = []; // {name, colour, points: [[x, y], …]}
    this.pointer = null;
    this.box = document.createElement("div");
    this.box.className = "chart";
    this.box.innerHTML = '<div class="title"><h3></h3><div class="now"></div></div><canvas role="img"></canvas>';
    this.box.querySelector("h3").textContent = title;
    this.canvas = this.box.querySelector("canvas");
    this.now = this.box.querySelector(".now");
    this.canvas.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.draw(); });
    this.canvas.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
  }

  format(value) {
    if (value === null || value === undefined) return "–";
    if (this.unit === "share") return `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
    if (this.unit === "percent") return `${value.toFixed(0)} %`;
    if (this.unit === "GB") return `${trimmed(value)} GB`;
    return shortNumber(value);
  }

  show(lines, xName) {
    this.lines = lines;
    this.xName = xName;
    this.now.replaceChildren(...lines.map((line) => {
      const span = document.createElement("span");
      span.style.color = line.colour;
      span.textContent = this.format(line.points.length ? line.points[line.points.length - 1][1] : null);
      return span;
    }));
    const words = lines.filter((line) => line.points.length).map((line) => {
      const values = line.points.map(([, y]) => y);
      return `${line.name}: ${this.format(values[values.length - 1])} now, ${this.format(Math.min(...values))} to ` +
        `${this.format(Math.max(...values))}, ${values.length} points`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}. ${words.join("; ") || "No data yet"}.`);
    this.canvas.dataset.points = String(lines.reduce((sum, line) => sum + line.points.length, 0));
    this.draw();
  }

  draw() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    const context = prepareCanvas(this.canvas, width, height);
    const style = getComputedStyle(document.documentElement);
    const [dim, grid, text] = ["--dim", "--line", "--text"].map((name) => style.getPropertyValue(name));
    context.clearRect(0, 0, width, height);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const all = this.lines.flatMap((line) => line.points);
    if (!all.length) return;
    const range = bounds(all, this.unit);
    const [left, right, top, bottom] = [54, width - 8, 10, height - 24];
    const x = (value) => left + (right - left) * (value - range.x0) / (range.x1 - range.x0 || 1);
    const y = (value) => bottom - (bottom - top) * (value - range.y0) / (range.y1 - range.y0 || 1);
    context.lineWidth = 1;
    context.textBaseline = "middle";
    for (const value of range.ticks) {
      context.strokeStyle = grid;
      context.beginPath();
      context.moveTo(left, Math.round(y(value)) + 0.5);
      context.lineTo(right, Math.round(y(value)) + 0.5);
      context.stroke();
      context.fillStyle = dim;
      context.textAlign = "right";
      context.fillText(this.format(value), left - 8, y(value));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(this.xWords(range.x0), left, height - 6);
    context.textAlign = "right";
    context.fillText(this.xWords(range.x1), right, height - 6);
    for (const line of this.lines) this.drawLine(context, line, x, y);
    if (this.pointer !== null) this.drawPointer(context, x, y, { left, right, top, bottom, text, dim, width });
  }

  drawLine(context, line, x, y) {
    context.strokeStyle = context.fillStyle = line.colour;
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    line.points.forEach(([px, py], i) => (i ? context.lineTo(x(px), y(py)) : context.moveTo(x(px), y(py))));
    context.stroke();
    const last = line.points[line.points.length - 1];
    if (!last) return;
    context.beginPath();
    context.arc(x(last[0]), y(last[1]), 3, 0, 2 * Math.PI);
    context.fill();
  }

  drawPointer(context, x, y, area) {
    const at = Math.min(Math.max(this.pointer, area.left), area.right);
    context.strokeStyle = area.dim;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at + 0.5, area.top);
    context.lineTo(at + 0.5, area.bottom);
    context.stroke();
    let row = 0;
    for (const line of this.lines) {
      const near = line.points.reduce((best, p) => (Math.abs(x(p[0]) - at) < Math.abs(x(best[0]) - at) ? p : best), line.points[0] || null);
      if (!near) continue;
      context.fillStyle = line.colour;
      context.beginPath();
      context.arc(x(near[0]), y(near[1]), 3.5, 0, 2 * Math.PI);
      context.fill();
      const words = `${this.format(near[1])} at ${this.xWords(near[0])}`;
      context.textAlign = at > (area.left + area.right) / 2 ? "right" : "left";
      context.fillText(words, at + (context.textAlign === "right" ? -8 : 8), area.top + 12 + 15 * row++);
    }
  }

  xWords(value) {
    if (this.xName === "steps") return `${shortNumber(value)} steps`;
    const minutes = Math.floor(value / 60);
    return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes}:${String(Math.floor(value % 60)).padStart(2, "0")} min`;
  }
}

function bounds(points, unit) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of points) {
    [x0, x1, y0, y1] = [Math.min(x0, x), Math.max(x1, x), Math.min(y0, y), Math.max(y1, y)];
  }
  if (unit || y0 >= 0) y0 = Math.min(y0, 0);
  if (unit === "share") y1 = Math.max(y1, y1 > 0.5 ? 1 : y1);
  if (unit === "percent" && y1 <= 100) y1 = 100;
  if (y0 === y1) y1 = y0 + 1;
  const raw = (y1 - y0) / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw);
  const ticks = [];
  for (let n = Math.ceil(y0 / step - 1e-9); n * step <= y1 + step * 0.001; n++) ticks.push(Number((n * step).toPrecision(12)));
  return { x0, x1, y0, y1: y1 + (y1 - y0) * 0.04, ticks };
}
