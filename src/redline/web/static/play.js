"use strict";
// A match: keys go to the server, boards come back. The names of keys and actions come from the game.

const byId = (id) => document.getElementById(id);
const stages = {};
const games = {};
let state = { phase: "loading", keys: {} };
let socket = null;
let attempts = 0;
const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "Space" };
const keyName = (key) => NAMES[key] || key.toUpperCase();

const element = makeElement;
const command = (name, value) => { if (socket && socket.readyState === 1) socket.send(JSON.stringify({ do: name, value })); };

const handlers = {
  hello(message) { byId("game").textContent = message.title; document.title = `${message.title} · Redline`; },
  stage(message) { stages[message.run] = message; },
  state(message) { const before = state.phase; state = message; showState(before); },
  frame(message) { games[message.run] = message.games[0]; schedule(); },
  problem(message) { byId("problem").textContent = message.text; byId("problem").hidden = false; },
};

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.onopen = () => { attempts = 0; byId("problem").hidden = true; };
  socket.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (handlers[message.type]) handlers[message.type](message);
  };
  socket.onclose = (event) => {
    handlers.problem({ text: event.reason || "The server has ended. Start redline play again to go on." });
    if (attempts++ < 60) setTimeout(connect, Math.min(500 * attempts, 5000));
  };
}

let drawing = false;
function schedule() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; draw(); });
}

function draw() {
  const two = Boolean(games[1] && stages[1]);
  const narrow = window.innerWidth <= 640;
  for (const number of [0, 1]) {
    const [box, game, stage] = [byId(`player-${number}`), games[number], stages[number]];
    box.hidden = !game || !stage;
    if (box.hidden) continue;
    const side = game.side ? 110 : 0;
    const room = narrow ? (window.innerWidth - 56 - (two ? 30 : 0)) / (two ? 2 : 1) - (two ? 0 : side) : Math.min(560, (Math.min(window.innerWidth, 1360) - (two ? 484 : 400)) / (two ? 2 : 1) - side);
    box.querySelector(".side").hidden = narrow && two;
    drawGame(box.querySelector("canvas.main"), game, stage, room, window.innerHeight * (narrow ? 0.5 : 0.74));
    drawSideBoards(box.querySelector(".side"), game, stage, narrow ? 14 : 22);
    box.querySelector(".figure").textContent = `${trimmed(game.score)} ${stage.score}`;
    box.querySelector("canvas.main").setAttribute("aria-label", `${number ? "The agent's" : "Your"} game: ${trimmed(game.score)} ${stage.score}, ${game.length} steps`);
  }
  if (games[0]) byId("score").textContent = trimmed(games[0].score);
  if (stages[0]) byId("score-name").textContent = stages[0].score;
}

function showState(before) {
  byId("level").textContent = state.level;
  byId("level-box").hidden = !state.levels;
  byId("pause").disabled = !["playing", "paused"].includes(state.phase);
  byId("pause").textContent = state.phase === "paused" ? "Go on" : "Pause";
  if (state.opponent) byId("opponent").textContent = state.opponent.name;
  byId("player-1").querySelector(".cover").hidden = !(state.opponent && state.opponent.over);
  showCover();
  if (before !== state.phase) byId("spoken").textContent = { ready: "Ready.", playing: "Playing.", paused: "Paused.", over: `Game over with ${games[0] ? games[0].score : 0}.` }[state.phase] || "";
  const list = state.scores || [];
  byId("no-scores").hidden = list.length > 0;
  byId("scores").replaceChildren(...list.map((entry, place) => {
    const item = element("li", `${trimmed(entry.score)} `, place + 1 === state.rank && state.phase === "over" ? "new" : "");
    item.append(element("span", entry.date || "", "dim"));
    return item;
  }));
  if (before === "loading" || !byId("keys").children.length) showKeys();
  schedule();
}

function showCover() {
  const cover = byId("player-0").querySelector(".cover");
  cover.hidden = state.phase === "playing";
  const words = {
    ready: ["Ready", "Press one of the keys to start."],
    paused: ["Paused", "Press P to go on."],
    over: ["Game over", state.rank ? `Number ${state.rank} of the high scores. Enter plays again.` : "Enter plays again."],
  }[state.phase];
  if (words) cover.replaceChildren(element("strong", words[0]), element("span", words[1]));
}

function showKeys() {
  const rows = [];
  const touch = [];
  for (const [action, keys] of Object.entries(state.keys)) {
    const cell = element("span");
    keys.forEach((key) => cell.append(element("kbd", keyName(key)), " "));
    rows.push(cell, element("span", action));
    const button = element("button", NAMES[keys[0]] && keys[0] !== " " ? keyName(keys[0]) : action);
    button.setAttribute("aria-label", action);
    button.addEventListener("pointerdown", (event) => { event.preventDefault(); command("key", keys[0]); });
    touch.push(button);
  }
  const pause = element("span");
  pause.append(element("kbd", "P"));
  rows.push(pause, element("span", "pause"));
  byId("keys").replaceChildren(...rows);
  byId("touch").replaceChildren(...touch);
}

const togglePause = () => command("pause", state.phase !== "paused");
byId("new").addEventListener("click", (event) => { command("new"); event.target.blur(); });
byId("pause").addEventListener("click", (event) => { togglePause(); event.target.blur(); });
window.addEventListener("blur", () => { if (state.phase === "playing") command("pause", true); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const known = Object.values(state.keys).some((keys) => keys.includes(key));
  const onButton = event.target.tagName === "BUTTON";
  if (onButton && (key === " " || key === "Enter")) return;
  if (key === "p" && !known) togglePause();
  else if (known || (key === "Enter" && state.phase === "over")) command("key", key);
  else return;
  event.preventDefault();
});
new ResizeObserver(schedule).observe(document.body);
setUpTheme(byId("theme"));
connect();
