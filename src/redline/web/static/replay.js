"use strict";
// Replays recorded games: everything is in this file.

const byId = (id) => document.getElementById(id);
const record = JSON.parse(byId("data").textContent);
let [game, place, playing, due] = [0, 0, true, 0];
const frames = () => record.games[game];

function show() {
  const [frame, narrow] = [frames()[place], window.innerWidth <= 640];
  const room = narrow ? window.innerWidth - 56 - (frame.side ? 84 : 0) : Math.min(640, window.innerWidth - 400);
  const canvas = document.querySelector("canvas.main");
  drawGame(canvas, frame, record.stage, room, window.innerHeight * (narrow ? 0.5 : 0.7));
  canvas.setAttribute("aria-label", `${trimmed(frame.score)} ${record.stage.score} after ${frame.length} steps`);
  drawSideBoards(document.querySelector(".side"), frame, record.stage, narrow ? 14 : 20);
  byId("time").value = String(place);
  byId("place").textContent = `${place} of ${frames().length - 1}${frame.ended ? ` · ${frame.ended}` : ""}`;
  byId("play").textContent = playing ? "Pause" : place === frames().length - 1 ? "Again" : "Play";
  showFigures(byId("figures"), gameFigures(record.stage, frame));
  byId("outputs-title").textContent = frame.outputs ? record.stage.outputs : "";
  showOutputs(byId("outputs"), record.stage, frame.outputs || [], frame.action);
}

function go(to) {
  place = Math.min(Math.max(to, 0), frames().length - 1);
  if (place === frames().length - 1) playing = false;
  show();
}

function choose(number) {
  [game, place, playing] = [number, 0, true];
  byId("time").max = String(frames().length - 1);
  document.querySelector(".side").replaceChildren();
  show();
}

function toggle() {
  if (!playing && place === frames().length - 1) place = 0;
  playing = !playing;
  show();
}

function tick(now) {
  if (playing && now >= due) {
    due = Math.max(due + 1000 / (record.fps * Number(byId("speed").value)), now);
    go(place + 1);
  }
  requestAnimationFrame(tick);
}

byId("about").textContent = `${record.name}: ${record.env}, ${record.algo}, trained for ${shortNumber(record.env_steps)} steps`;
record.games.forEach((steps, number) => {
  const last = steps[steps.length - 1];
  const option = document.createElement("option");
  option.value = String(number);
  option.textContent = `${number + 1}: ${trimmed(last.score)} ${record.stage.score}`;
  byId("game").append(option);
});
byId("game").addEventListener("change", (event) => choose(Number(event.target.value)));
byId("play").addEventListener("click", toggle);
byId("back").addEventListener("click", () => { playing = false; go(place - 1); });
byId("step").addEventListener("click", () => { playing = false; go(place + 1); });
byId("time").addEventListener("input", (event) => { playing = false; go(Number(event.target.value)); });
document.addEventListener("keydown", (event) => {
  if (/^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  if (event.key === " " && event.target.tagName !== "BUTTON") toggle();
  else if (event.key === "ArrowLeft") { playing = false; go(place - 1); }
  else if (event.key === "ArrowRight") { playing = false; go(place + 1); }
  else return;
  event.preventDefault();
});
new ResizeObserver(show).observe(document.body);
setUpTheme(byId("theme"));
choose(0);
requestAnimationFrame(tick);
