"use strict";
// The outputs of a network beside a game: a bar for each action, the chosen one marked.

const MOST_OUTPUTS = 12; // of a game with more actions, the best ones are shown

function makeElement(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function showOutputs(list, stage, outputs, chosen) {
  const known = outputs.filter((value) => value !== null);
  const share = stage.outputs === "Action probabilities";
  const [low, high] = share ? [0, 1] : [Math.min(...known), Math.max(...known)];
  let actions = outputs.map((_, action) => action);
  if (outputs.length > MOST_OUTPUTS) {
    actions.sort((a, b) => (outputs[b] ?? -Infinity) - (outputs[a] ?? -Infinity));
    actions = actions.slice(0, MOST_OUTPUTS);
  }
  while (list.children.length > actions.length) list.lastChild.remove();
  while (list.children.length < actions.length) {
    const row = makeElement("div");
    row.append(makeElement("span"), makeElement("span", undefined, "track"), makeElement("span"));
    row.children[1].append(makeElement("i"));
    list.append(row);
  }
  actions.forEach((action, place) => {
    const [row, value] = [list.children[place], outputs[action]];
    row.className = action === chosen ? "chosen" : value === null ? "illegal" : "";
    row.children[0].textContent = stage.actions[action] || `action ${action}`;
    row.children[1].firstChild.style.width = `${value === null ? 0 : 100 * (high > low ? 0.04 + 0.96 * (value - low) / (high - low) : 1)}%`;
    row.children[2].textContent = value === null ? "illegal" : share ? `${(100 * value).toFixed(1)} %` : value.toFixed(3);
  });
}

function showFigures(list, figures) {
  list.replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const box = makeElement("div");
    box.append(makeElement("dt", name), makeElement("dd", String(value ?? "–")));
    return box;
  }));
}

function gameFigures(stage, game) {
  const value = game.value === undefined ? "–" : shortNumber(game.value);
  return { [stage.score]: trimmed(game.score), steps: game.length, return: trimmed(game.reward), value };
}
