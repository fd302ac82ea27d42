"use strict";
// Draws any game: a board from cells and palette, or a rendered picture. Knows no game by name.

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

// The size of a canvas in CSS pixels becomes its size in device pixels; returns the context, scaled to CSS pixels.
function prepareCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function roundedCell(context, x, y, size, inset, radius) {
  context.beginPath();
  context.roundRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset, radius);
}

const SIDES = [[1, 0, -1], [2, 1, 0], [4, 0, 1], [8, -1, 0]]; // bit, right, down

function drawLinked(context, x, y, size, colour, links) {
  const [cx, cy] = [x + size / 2, y + size / 2];
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = size * 0.74;
  context.lineCap = "butt";
  for (const [bit, right, down] of SIDES) {
    if (links & bit) {
      context.beginPath();
      context.moveTo(cx, cy);
      context.lineTo(cx + right * (size / 2 + 0.5), cy + down * (size / 2 + 0.5));
      context.stroke();
    }
  }
  const facing = links >> 4;
  context.beginPath();
  context.arc(cx, cy, size * (facing ? 0.44 : 0.37), 0, 2 * Math.PI);
  context.fill();
  const side = SIDES.find(([bit]) => facing & bit);
  if (side) drawEyes(context, cx, cy, size, side[1], side[2]);
}

function drawEyes(context, cx, cy, size, right, down) {
  for (const aside of [-1, 1]) {
    const [x, y] = [cx + size * (0.12 * right - 0.19 * aside * down), cy + size * (0.12 * down + 0.19 * aside * right)];
    for (const [radius, colour, ahead] of [[0.115, "#ffffff", 0], [0.062, "#16181d", 0.045]]) {
      context.fillStyle = colour;
      context.beginPath();
      context.arc(x + size * ahead * right, y + size * ahead * down, size * radius, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

// Draws a board message {rows, columns, cells, links?} with cells of `size` CSS pixels.
// In a game whose cells are numbers (names of the palette), each cell shows its own.
function drawCells(canvas, board, stage, linked, size) {
  const { palette, names } = stage;
  const numbered = names.slice(1).every((name) => /^\d+$/.test(name));
  const { rows, columns } = board;
  const context = prepareCanvas(canvas, columns * size, rows * size);
  const cells = bytesOf(board.cells);
  const links = board.links ? bytesOf(board.links) : null;
  context.fillStyle = palette[0];
  context.fillRect(0, 0, columns * size, rows * size);
  context.fillStyle = "rgba(255, 255, 255, 0.028)";
  for (let i = 0; i < cells.length; i++) {
    const [row, column] = [Math.floor(i / columns), i % columns];
    if ((row + column) % 2) context.fillRect(column * size, row * size, size, size);
  }
  for (let i = 0; i < cells.length; i++) {
    if (!cells[i]) continue;
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    const colour = palette[cells[i]] || "#ff00ff";
    if (linked && links) {
      if (links[i]) {
        drawLinked(context, x, y, size, colour, links[i]);
      } else {
        context.fillStyle = colour;
        context.beginPath();
        context.arc(x + size / 2, y + size / 2, size * 0.34, 0, 2 * Math.PI);
        context.fill();
      }
      continue;
    }
    context.fillStyle = colour;
    roundedCell(context, x, y, size, size * 0.04, size * 0.16);
    context.fill();
    context.fillStyle = "rgba(255, 255, 255, 0.14)";
    context.fillRect(x + size * 0.14, y + size * 0.1, size * 0.72, Math.max(1, size * 0.07));
    if (numbered) drawNumber(context, x, y, size, names[cells[i]]);
  }
}

function drawNumber(context, x, y, size, name) {
  context.fillStyle = "#2b2a28";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `600 ${size * (name.length > 3 ? 0.27 : 0.38)}px system-ui, sans-serif`;
  context.fillText(name, x + size / 2, y + size / 2);
}

// Draws a game of any kind into a canvas, at most `width` by `height` CSS pixels, and sets the canvas's CSS size.
function drawGame(canvas, game, stage, width, height) {
  if (game.picture) {
    const scale = Math.min(width / game.columns, height / game.rows);
    const [w, h] = [Math.round(game.columns * scale), Math.round(game.rows * scale)];
    canvas.style.width = `${w}px`;
    const image = new Image();
    image.onload = () => {
      const context = prepareCanvas(canvas, w, h);
      context.drawImage(image, 0, 0, w, h);
      canvas.dataset.drawn = String(Number(canvas.dataset.drawn || 0) + 1);
    };
    image.src = game.picture;
    return;
  }
  const size = Math.max(2, Math.min(width / game.columns, height / game.rows));
  canvas.style.width = `${size * game.columns}px`;
  drawCells(canvas, game, stage, stage.links, size);
  canvas.dataset.drawn = String(Number(canvas.dataset.drawn || 0) + 1);
}

// Draws the small boards beside a game into a container, a title and a canvas for each.
function drawSideBoards(container, game, stage, size) {
  const boards = game.side || {};
  for (const [title, board] of Object.entries(boards)) {
    let box = container.querySelector(`[data-title="${CSS.escape(title)}"]`);
    if (!box) {
      box = document.createElement("div");
      box.dataset.title = title;
      box.append(title[0].toUpperCase() + title.slice(1), document.createElement("canvas"));
      box.lastChild.setAttribute("role", "img");
      box.lastChild.setAttribute("aria-label", title);
      container.append(box);
    }
    const canvas = box.querySelector("canvas");
    canvas.style.width = `${board.columns * size}px`;
    drawCells(canvas, board, stage, false, size);
  }
}

function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (size >= limit) return trimmed(value / limit) + unit;
  }
  return trimmed(value);
}

function trimmed(value) {
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

// Light or dark: as the system says, until somebody chooses; the choice is remembered.
function setUpTheme(button) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("redline-theme"); } catch { /* storage may be off */ }
  const apply = () => {
    const theme = chosen || (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    if (button) button.textContent = theme === "dark" ? "Light" : "Dark";
    if (button) button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    document.dispatchEvent(new Event("theme"));
  };
  system.addEventListener("change", apply);
  if (button) button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("redline-theme", chosen); } catch { /* storage may be off */ }
    apply();
  });
  apply();
}
