"use strict";
// The page of runs. All state comes from the server, over one socket; text from run folders is only ever set as text.

const byId = (id) => document.getElementById(id);
const runs = new Map(); // number -> {info, status, points, stage, games, shown, colour, tiles, wall}
let charts = [];
let playback = { paused: false, speed: 8 };
let socket = null;
let axis = "steps";
let enlarged = null; // {run, game}
let attempts = 0;

const element = makeElement;

function runOf(number) {
  if (!runs.has(number)) {
    runs.set(number, { number, info: { settings: [] }, status: { figures: {} }, points: [], stage: null, games: [], shown: true, tiles: [], problem: "", weights: null });
  }
  return runs.get(number);
}

const colourOf = (run) => getComputedStyle(document.documentElement).getPropertyValue(`--run-${run.number % 6}`).trim();
const shownRuns = () => [...runs.values()].filter((run) => run.shown);

// ---- messages ----

const handlers = {
  hello(message) {
    for (const run of runs.values()) if (run.wall) run.wall.remove();
    runs.clear();
    charts.forEach((entry) => entry.chart.box.remove());
    charts = message.charts.map((entry, place) => ({ ...entry, place: place + 2, chart: null }));
    for (const info of message.runs) Object.assign(runOf(info.run), { info });
    playback = message.playback;
    showChips(); showRuns(); showSettings(); showPlayback();
  },
  run(message) { runOf(message.run).info = message; showChips(); showRuns(); showSettings(); },
  status(message) { runOf(message.run).status = message; showChips(); showRuns(); },
  history(message) { runOf(message.run).points = message.points; showCharts(); },
  points(message) { runOf(message.run).points.push(...message.points); showCharts(); },
  stage(message) { runOf(message.run).stage = message; showCharts(); },
  weights(message) { Object.assign(runOf(message.run), { weights: message.env_steps, problem: "" }); showRuns(); },
  problem(message) { runOf(message.run).problem = message.text; showRuns(); showWaiting(); },
  playback(message) { playback = message; showPlayback(); },
  frame(message) { runOf(message.run).games = message.games; scheduleDraw(); },
};

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.onopen = () => { attempts = 0; byId("connection").hidden = true; };
  socket.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (handlers[message.type]) handlers[message.type](message);
  };
  socket.onclose = (event) => {
    const line = byId("connection");
    line.textContent = event.reason || "The server has ended; this page shows its last state. Start redline watch again to go on.";
    line.hidden = false;
    if (attempts++ < 60) setTimeout(connect, Math.min(500 * attempts, 5000));
  };
}

const command = (name, value) => { if (socket && socket.readyState === 1) socket.send(JSON.stringify({ do: name, value })); };

// ---- drawing games, at most once per screen refresh ----

let drawing = false;
function scheduleDraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; drawWalls(); drawEnlarged(); });
}

function drawWalls() {
  for (const run of runs.values()) {
    if (!run.stage || !run.games.length) continue;
    if (!run.wall) makeWall(run);
    run.wall.hidden = !run.shown;
    if (!run.shown) continue;
    while (run.tiles.length < run.games.length) makeTile(run);
    run.games.forEach((game, number) => drawTile(run, game, number));
  }
  showWaiting();
}

function makeWall(run) {
  run.wall = element("div", undefined, "wall");
  run.wall.style.setProperty("--colour", colourOf(run));
  const game = run.games[0];
  run.wall.style.setProperty("--tile", `${game.rows > 1.5 * game.columns ? 138 : game.picture ? 240 : 184}px`);
  byId("walls").append(run.wall);
}

function makeTile(run) {
  const number = run.tiles.length;
  const tile = element("button", undefined, "tile");
  tile.innerHTML = '<canvas role="presentation"></canvas><div class="caption"><span></span><span class="dim"></span></div>';
  tile.addEventListener("click", () => enlarge(run.number, number));
  run.tiles.push(tile);
  run.wall.append(tile);
}

function scoreWords(run, game) { return `${trimmed(game.score)} ${run.stage.score}`; }

function drawTile(run, game, number) {
  const tile = run.tiles[number];
  const [name, note] = tile.querySelectorAll(".caption span");
  name.textContent = scoreWords(run, game);
  note.textContent = game.ended || `${game.length} steps`;
  tile.setAttribute("aria-label", `Game ${number + 1} of ${run.info.name}: ${name.textContent}, ${note.textContent}. Enlarge.`);
  const canvas = tile.querySelector("canvas");
  drawGame(canvas, game, run.stage, tile.clientWidth - 18, 2000);
}

function showWaiting() {
  const waiting = byId("waiting");
  waiting.hidden = [...runs.values()].some((run) => run.wall);
  const problems = [...runs.values()].map((run) => run.problem).filter(Boolean);
  if (problems.length) waiting.textContent = problems[0];
}

// ---- the enlarged game ----

function enlarge(number, game) {
  enlarged = { run: number, game };
  const run = runs.get(number);
  byId("large-title").textContent = `${run.info.name}, game ${game + 1}`;
  byId("dialog").querySelector(".side").replaceChildren();
  byId("dialog").style.setProperty("--colour", colourOf(run));
  if (!byId("dialog").open) byId("dialog").showModal();
  drawEnlarged();
}

function drawEnlarged() {
  const run = enlarged && runs.get(enlarged.run);
  const game = run && run.games[enlarged.game];
  if (!game || !byId("dialog").open) return;
  const side = byId("dialog").querySelector(".side");
  const narrow = window.innerWidth <= 640;
  const room = narrow ? window.innerWidth - 100 : Math.min(window.innerWidth * 0.94, 920) - 400 - (game.side ? 110 : 0);
  const canvas = byId("dialog").querySelector("canvas.main");
  drawGame(canvas, game, run.stage, room, window.innerHeight * (narrow ? 0.48 : 0.74));
  canvas.setAttribute("aria-label", `${scoreWords(run, game)} after ${game.length} steps`);
  drawSideBoards(side, game, run.stage, 18);
  showFigures(byId("dialog").querySelector(".figures"), gameFigures(run.stage, game));
  byId("outputs-title").textContent = game.ended ? `This game has ended: ${game.ended}.` : run.stage.outputs || "";
  showOutputs(byId("outputs"), run.stage, game.outputs || [], game.action);
}

// ---- runs, curves, settings ----

function showChips() {
  const several = runs.size > 1;
  document.body.classList.toggle("several", several);
  byId("hint-runs").hidden = !several;
  byId("chips").replaceChildren(...[...runs.values()].map((run) => {
    const chip = element(several ? "button" : "span", run.info.name, "chip");
    chip.style.setProperty("--colour", colourOf(run));
    chip.append(element("small", run.status.state || ""));
    if (several) {
      chip.setAttribute("aria-pressed", String(run.shown));
      chip.addEventListener("click", () => toggle(run.number));
    }
    return chip;
  }));
  document.title = `${[...runs.values()].map((run) => run.info.name).join(", ")} · Redline`;
}

function toggle(number) {
  const run = runs.get(number);
  if (!run) return;
  run.shown = !run.shown;
  showChips(); showRuns(); showCharts(); showSettings(); drawWalls();
}

function showRuns() {
  byId("runs").replaceChildren(...shownRuns().map((run) => {
    const box = element("article", undefined, "run");
    box.style.setProperty("--colour", colourOf(run));
    const { env, algo, device, name } = run.info;
    box.append(element("h2", name), element("p", [env, algo, device, run.status.state].filter(Boolean).join(" · "), "dim"));
    const list = element("dl");
    const figures = { ...run.status.figures };
    if (run.weights !== null) figures["games played with"] = `${shortNumber(run.weights)} steps`;
    for (const [label, value] of Object.entries(figures)) {
      const pair = element("div");
      pair.append(element("dt", label), element("dd", value));
      list.append(pair);
    }
    const limit = element("p");
    limit.append(element("strong", "Bottleneck. "), run.status.bottleneck || "");
    box.append(list, limit);
    if (run.problem) box.append(element("p", run.problem, "problem"));
    return box;
  }));
}

let chartsDue = false;
function showCharts() {
  if (chartsDue) return;
  chartsDue = true;
  requestAnimationFrame(() => { chartsDue = false; drawCharts(); });
}

function drawCharts() {
  const names = new Set([...runs.values()].map((run) => run.stage && run.stage.score).filter(Boolean));
  for (const entry of charts) {
    const lines = shownRuns().map((run) => ({
      name: run.info.name,
      colour: colourOf(run),
      points: run.points.filter((point) => point[entry.place] !== null).map((point) => [point[axis === "steps" ? 0 : 1], point[entry.place]]),
    }));
    const used = [...runs.values()].some((run) => run.points.some((point) => point[entry.place] !== null));
    if (!entry.chart && used) {
      entry.chart = new Chart(entry.title, entry.unit);
      entry.chart.box.dataset.series = entry.series;
      const next = charts.slice(charts.indexOf(entry) + 1).find((other) => other.chart);
      byId("charts").insertBefore(entry.chart.box, next ? next.chart.box : null);
    }
    if (!entry.chart) continue;
    if (entry.series === "score" && names.size === 1) entry.chart.box.querySelector("h3").textContent = `Score: ${[...names][0]} per game`;
    entry.chart.show(lines.filter((line) => line.points.length), axis);
  }
}

function showSettings() {
  const open = new Set([...byId("settings").querySelectorAll("details[open]")].map((box) => box.dataset.run));
  byId("settings").replaceChildren(...shownRuns().map((run) => {
    const box = element("details");
    box.dataset.run = run.number;
    box.open = open.has(String(run.number));
    box.append(element("summary", `${run.info.name}: ${run.info.settings.length} settings`));
    const table = element("table");
    const head = table.createTHead().insertRow();
    for (const title of ["setting", "value", "source", "reason"]) head.append(Object.assign(element("th", title), { scope: "col" }));
    const body = table.createTBody();
    for (const row of run.info.settings) {
      const line = body.insertRow();
      for (const key of ["name", "value", "source", "reason"]) line.insertCell().textContent = row[key];
    }
    const wrap = element("div", undefined, "table");
    wrap.append(table);
    box.append(wrap);
    return box;
  }));
}

function showPlayback() {
  byId("pause").textContent = playback.paused ? "Play" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(playback.paused));
  byId("speed").value = String(playback.speed);
}

// ---- input ----

function changeSpeed(by) {
  const options = [...byId("speed").options].map((option) => Number(option.value));
  const place = options.findIndex((value) => value >= playback.speed);
  command("speed", options[Math.min(Math.max(place + by, 0), options.length - 1)]);
}

byId("pause").addEventListener("click", () => command("pause", !playback.paused));
byId("step").addEventListener("click", () => command("step"));
byId("speed").addEventListener("change", (event) => command("speed", Number(event.target.value)));
byId("close").addEventListener("click", () => byId("dialog").close());
byId("dialog").addEventListener("click", (event) => { if (event.target === byId("dialog")) byId("dialog").close(); });
byId("dialog").addEventListener("close", () => { enlarged = null; });
for (const name of ["steps", "time"]) {
  byId(`by-${name}`).addEventListener("click", () => {
    axis = name;
    for (const other of ["steps", "time"]) byId(`by-${other}`).setAttribute("aria-pressed", String(other === name));
    showCharts();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|SUMMARY)$/.test(event.target.tagName)) return;
  const onButton = event.target.tagName === "BUTTON";
  if (event.key === " " && !onButton) command("pause", !playback.paused);
  else if (event.key === ".") command("step");
  else if (event.key === "+" || event.key === "=") changeSpeed(1);
  else if (event.key === "-") changeSpeed(-1);
  else if (/^[1-9]$/.test(event.key) && runs.size > 1) toggle(Number(event.key) - 1);
  else return;
  event.preventDefault();
});
new ResizeObserver(() => { scheduleDraw(); showCharts(); }).observe(document.body);
document.addEventListener("theme", () => {
  for (const run of runs.values()) if (run.wall) run.wall.style.setProperty("--colour", colourOf(run));
  showChips(); showRuns(); showCharts();
});
setUpTheme(byId("theme"));
connect();
