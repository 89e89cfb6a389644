"use strict";
// Log-prob gaps by step and by position in the completion, as an image.

// cividis: perceptually uniform, also for colour-blind readers
const STOPS = [[0, 32, 77], [55, 70, 109], [108, 110, 114], [166, 156, 117], [255, 234, 70]];
const laneColour = (fraction) => {
  const at = Math.max(0, Math.min(1, fraction)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  return STOPS[low].map((part, i) => Math.round(part + (at - low) * (STOPS[low + 1][i] - part)));
};
const DECADE = 100; // levels of a decade
const LANE_FLOOR = 1e-7; // nats at level 0
const toNats = (level) => LANE_FLOOR * 10 ** (level / DECADE);

const meanLevel = (levels) => {
  const known = levels.flat().filter((level) => level >= 0).map(toNats);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

const laneFigure = (lane, largest) => {
  const figure = element("figure", "lane");
  const canvas = element("canvas");
  const [columns, rows] = [lane.steps.length, lane.levels[0]?.length || 0];
  Object.assign(canvas, { width: Math.max(1, columns), height: Math.max(1, rows), tabIndex: 0 });
  const image = canvas.getContext("2d").createImageData(canvas.width, canvas.height);
  lane.levels.forEach((column, x) => column.forEach((level, y) => {
    const colour = level < 0 ? [128, 128, 128, 40] : [...laneColour(level / largest), 255];
    image.data.set(colour, 4 * ((rows - 1 - y) * columns + x));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${lane.title}: mean gap ${short(meanLevel(lane.levels))} nats, in step ${lane.steps[0]} ${short(meanLevel([lane.levels[0]]))}, in step ${lane.steps.at(-1)} ${short(meanLevel([lane.levels.at(-1)]))}`);
  const reading = element("div", "values", "");
  canvas.addEventListener("mousemove", (event) => {
    const x = Math.min(columns - 1, Math.floor((event.offsetX / canvas.clientWidth) * columns));
    const y = Math.min(rows - 1, rows - 1 - Math.floor((event.offsetY / canvas.clientHeight) * rows));
    const level = lane.levels[x]?.[y];
    reading.textContent = `step ${lane.steps[x]}, token ${y * lane.width}${lane.width > 1 ? ` to ${(y + 1) * lane.width - 1}` : ""}: ${level >= 0 ? `${short(toNats(level))} nats` : "no token"}`;
  });
  const axis = element("div", "axis");
  axis.append(element("span", "", `step ${lane.steps[0]}`), element("span", "", `step ${lane.steps.at(-1)}`));
  figure.append(element("figcaption", "", lane.title), canvas, axis, reading);
  return figure;
};

const showLanes = (data) => {
  const levels = data.runs.flatMap((run) => run.lanes.flatMap((lane) => lane.levels.flat()));
  const largest = levels.reduce((a, b) => Math.max(a, b), 7 * DECADE); // one scale for both runs
  data.runs.forEach((run, i) => {
    const place = document.getElementById(`lanes-${i}`);
    if (place) place.append(...run.lanes.map((lane) => laneFigure(lane, largest)));
  });
  const scale = document.getElementById("lane-scale");
  if (!scale) return;
  const canvas = element("canvas");
  Object.assign(canvas, { width: 64, height: 1 });
  for (let x = 0; x < 64; x++) {
    canvas.getContext("2d").fillStyle = `rgb(${laneColour(x / 63).join(" ")})`;
    canvas.getContext("2d").fillRect(x, 0, 1, 1);
  }
  scale.append(`${short(LANE_FLOOR)} `, canvas, ` ${short(toNats(largest))} nats`);
};
