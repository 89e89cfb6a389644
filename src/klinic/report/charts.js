"use strict";
// Charts of curves over steps with uPlot: hover, zoom, toggle, linked cursors, events, two runs.

const COLOURS = ["--first", "--second", "--third"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const SMOOTH_FROM = 60; // points from which a moving average is drawn over the raw values
const LOG_RATIO = 100; // ratio of the largest to the smallest value from which the scale is logarithmic
const charts = [];

const isFiniteNumber = (value) => value !== null && value !== undefined && Number.isFinite(value);

// a window that is not complete has no average: the line ends before the edge
const movingAverage = (values) => {
  const half = Math.max(2, Math.floor(values.length / 40));
  return values.map((_, i) => {
    if (i < half || i + half >= values.length) return null;
    const window = values.slice(i - half, i + half + 1).filter(isFiniteNumber);
    return window.length ? window.reduce((a, b) => a + b, 0) / window.length : null;
  });
};

// a curve is told by its colour and its dashes; with two runs the colour is that of the run
const styleOf = (line, numRuns) => {
  const key = numRuns > 1 ? line.run : line.index;
  return { colour: COLOURS[key % COLOURS.length], dash: DASHES[line.index % DASHES.length] };
};

const summaryOf = (panel) => panel.lines.filter((line) => line.y.some(isFiniteNumber)).map((line) => {
  const finite = line.y.filter(isFiniteNumber);
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  return `${line.label}: from ${short(finite[0])} to ${short(finite.at(-1))}, between ${short(low)} and ${short(high)}`;
}).join("; ");

const wantsLog = (lines) => {
  const values = lines.flatMap((line) => line.y.filter(isFiniteNumber));
  const positive = values.filter((value) => value > 0);
  if (positive.length < values.length * 0.5 || values.some((value) => value < 0)) return false;
  return positive.reduce((a, b) => Math.max(a, b), 0) / positive.reduce((a, b) => Math.min(a, b), Infinity) > LOG_RATIO;
};

const PARTING = "A \u2260 B"; // marks the first step in which two runs differ

// events, the steps since the cause was first seen and the step at which two runs part, behind the curves
const drawMarks = (u, marks, firstStep, parting) => {
  const { ctx } = u;
  const { left, top, width, height } = u.bbox;
  const at = (step) => u.valToPos(step, "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  if (isFiniteNumber(firstStep)) {
    ctx.fillStyle = cssColour("--since");
    ctx.fillRect(at(firstStep), top, left + width - at(firstStep), height);
    ctx.fillStyle = cssColour("--bad");
    ctx.fillRect(at(firstStep) - devicePixelRatio / 2, top, devicePixelRatio, height);
  }
  const seen = new Map();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  if (isFiniteNumber(parting)) {
    ctx.fillStyle = ctx.strokeStyle = cssColour("--bad");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(at(parting), top);
    ctx.lineTo(at(parting), top + height);
    ctx.stroke();
    ctx.textAlign = at(parting) > left + width / 2 ? "right" : "left";
    ctx.fillText(` ${PARTING} `, at(parting), top + height - 4 * devicePixelRatio);
    ctx.textAlign = "center";
  }
  for (const mark of marks) {
    ctx.fillStyle = cssColour("--event");
    if (mark.last !== null) {
      ctx.globalAlpha = 0.18;
      ctx.fillRect(at(mark.step - 0.5), top, Math.max(2, at(mark.last + 0.5) - at(mark.step - 0.5)), height);
      ctx.globalAlpha = 1;
    } else {
      ctx.fillRect(at(mark.step) - devicePixelRatio / 2, top, devicePixelRatio, height);
    }
    const stacked = seen.get(mark.step) || 0;
    seen.set(mark.step, stacked + 1);
    const y = (mark.run ? top + height - 4 * devicePixelRatio - stacked * 12 * devicePixelRatio : top + (12 + stacked * 12) * devicePixelRatio);
    ctx.fillText(mark.sign, at(mark.step), y);
  }
  ctx.restore();
};

class Chart {
  constructor(panel, context) {
    this.panel = panel;
    this.context = context;
    this.lines = panel.lines.filter((line) => line.x.length);
    this.hidden = new Set();
    this.isLog = wantsLog(this.lines);
    this.figure = element("figure", "chart");
    this.plot = element("div", "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${panel.title}. ${summaryOf(panel)}. Arrow keys move the cursor, + and - zoom, Escape shows all.`);
    this.values = element("div", "values");
    this.figure.append(this.heading(), this.plot, this.legend(), this.values);
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    charts.push(this);
    redraws.push(() => this.draw());
  }

  heading() {
    const head = element("figcaption");
    head.append(element("span", "", visible(this.panel.title)));
    this.scaleButton = button("quiet-button", "", () => { this.isLog = !this.isLog; this.draw(); });
    head.append(this.scaleButton);
    return head;
  }

  legend() {
    const list = element("div", "legend");
    this.readings = this.lines.map((line, i) => {
      const { colour, dash } = styleOf(line, this.context.numRuns);
      const entry = button(`entry ${colour.slice(2)} dash-${DASHES.indexOf(dash)}`, "", () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        entry.setAttribute("aria-pressed", String(!this.hidden.has(i)));
        this.draw();
      });
      entry.setAttribute("aria-pressed", "true");
      entry.append(element("span", "swatch"), `${visible(line.label)}${this.context.numRuns > 1 ? ` (${"AB"[line.run]})` : ""} `);
      const reading = element("b");
      entry.append(reading);
      list.append(entry);
      return reading;
    });
    return list;
  }

  options(smooth) {
    const ink = cssColour("--quiet");
    const grid = { stroke: cssColour("--line"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: ink, grid, ticks: grid, font };
    const format = (_, splits) => splits.map((v) => (v === null ? "" : fourDigits(v)));
    const powers = (_, __, low, high) => {
      const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
      const stride = Math.max(1, Math.round((last - first) / 5));
      const every = Array.from({ length: Math.floor((last - first) / stride) + 1 }, (___, i) => 10 ** (first + i * stride));
      const inside = every.filter((power) => power >= low * 0.999 && power <= high * 1.001); // others lie over the steps
      return inside.length > 1 ? inside : [low, high];
    };
    const vertical = { ...axis, size: 54, values: format, ...(this.isLog ? { splits: powers } : {}) };
    const sync = this.panel.x === "step" ? { sync: { key: "steps", setSeries: false } } : {};
    const series = this.lines.map((line, i) => {
      const { colour, dash } = styleOf(line, this.context.numRuns);
      const own = { stroke: cssColour(colour), dash, width: 1.5, show: !this.hidden.has(i), spanGaps: true, points: { show: line.x.length === 1 } };
      return smooth[i] ? [{ ...own, alpha: 0.35, width: 1, dash: [] }, own] : [own];
    }).flat();
    return {
      width: this.plot.clientWidth || 320,
      height: this.context.height,
      legend: { show: false },
      cursor: { ...sync, drag: { x: true, y: false, setScale: true }, y: false, points: { show: false } },
      scales: { x: { time: false, range: (_, low, high) => this.xRange(low, high) }, y: this.yScale() },
      axes: [{ ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6, 1e7] }, vertical],
      series: [{}, ...series],
      hooks: {
        drawClear: [(u) => this.panel.x === "step" && drawMarks(u, this.context.marks, this.panel.firstStep ?? this.context.firstStep, this.context.parting)],
        setCursor: [(u) => this.read(u.cursor.idx)],
        setSelect: [(u) => u.select.width > 0 && this.zoomAll(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"))],
      },
    };
  }

  // room at both ends, so that events at the edge are seen whole
  xRange(low, high) {
    const room = Math.max(0.5, (high - low) * 0.02);
    return this.range ? [low, high] : [low - room, high + room];
  }

  yScale() {
    if (this.isLog) return { distr: 3 };
    const isFraction = this.panel.unit === "fraction";
    const range = (_, low, high) => {
      if (isFraction && low >= 0 && high <= 1) return [-0.03, 1.03];
      // rounding of an average is no movement
      const isFlat = high - low <= 1e-9 * Math.abs(high);
      const room = isFlat ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.08;
      return [low - room, high + room];
    };
    return { range };
  }

  // all curves over the union of their steps; zeros lie on the floor of a logarithmic scale
  table() {
    this.steps = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const at = new Map(this.steps.map((step, i) => [step, i]));
    this.columns = this.lines.map((line) => {
      const column = new Array(this.steps.length).fill(null);
      line.x.forEach((step, i) => { column[at.get(step)] = line.y[i]; });
      return column;
    });
    const smooth = this.lines.map((line) => line.y.length >= SMOOTH_FROM && this.panel.x === "step");
    const floor = this.columns.flat().filter((v) => v > 0).reduce((a, b) => Math.min(a, b), Infinity);
    const plotted = (values) => (this.isLog ? values.map((v) => (v === null ? null : Math.max(v, floor))) : values);
    const columns = this.lines.map((line, i) => {
      if (!smooth[i]) return [plotted(this.columns[i])];
      const average = new Array(this.steps.length).fill(null);
      movingAverage(line.y).forEach((v, k) => { average[at.get(line.x[k])] = v; });
      return [plotted(this.columns[i]), plotted(average)];
    }).flat();
    return { data: [this.steps, ...columns], smooth };
  }

  draw() {
    const range = this.range;
    if (this.chart) this.chart.destroy();
    this.scaleButton.textContent = this.isLog ? "log scale" : "linear scale";
    this.scaleButton.setAttribute("aria-label", `${this.panel.title}: ${this.isLog ? "logarithmic" : "linear"} scale, switch`);
    const { data, smooth } = this.table();
    this.chart = new uPlot(this.options(smooth), data, this.plot);
    this.chart.over.addEventListener("dblclick", () => this.zoomAll(null, null));
    if (range) this.chart.setScale("x", range);
    this.read(null);
  }

  resize() {
    if (this.chart && this.plot.clientWidth && this.plot.clientWidth !== this.chart.width) {
      this.chart.setSize({ width: this.plot.clientWidth, height: this.context.height });
    }
  }

  // the last values, or those under the cursor with the events near it
  read(index) {
    this.index = index;
    this.readings.forEach((reading, i) => {
      const column = this.columns[i];
      reading.textContent = short(isFiniteNumber(index) ? column[index] : column.findLast(isFiniteNumber));
    });
    if (!isFiniteNumber(index)) {
      this.values.textContent = "";
      return;
    }
    const step = this.steps[index];
    const near = this.panel.x !== "step" ? [] : this.context.marks.filter((mark) => mark.last === null
      ? Math.abs(mark.step - step) <= Math.max(0.5, (this.steps.at(-1) - this.steps[0]) / 150)
      : mark.step <= step && step <= mark.last);
    const events = near.map((mark) => ` \u00b7 ${mark.sign} ${visible(mark.text)}`).join("");
    const parts = this.panel.x === "step" && step === this.context.parting ? ` \u00b7 ${PARTING}: the runs part` : "";
    this.values.textContent = `${this.panel.x} ${step}${parts}${events}`;
  }

  pointAt(step) {
    this.values.setAttribute("aria-live", "polite");
    this.chart.setCursor({ left: this.chart.valToPos(step, "x"), top: 10 });
  }

  zoomAll(low, high) {
    const some = this.panel.x === "step" ? charts.filter((one) => one.panel.x === "step") : [this];
    for (const one of some) one.zoom(low, high);
  }

  zoom(low, high) {
    this.range = low === null ? null : { min: low, max: high };
    const all = { min: this.steps[0], max: this.steps.at(-1) };
    if (this.chart) this.chart.setScale("x", this.range || all);
  }

  onKey(event) {
    const last = this.steps.length - 1;
    const index = this.index ?? last;
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last };
    if (event.key in moves) {
      const next = Math.max(0, Math.min(last, moves[event.key]));
      this.pointAt(this.steps[next]);
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = this.chart.scales.x;
      const centre = this.steps[index];
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      this.zoomAll(Math.max(this.steps[0], centre - half), Math.min(this.steps.at(-1), centre + half));
    } else if (event.key === "Escape") {
      this.zoomAll(null, null);
    } else {
      return;
    }
    event.preventDefault();
  }
}

const showCharts = (data) => {
  const marks = data.runs.flatMap((run, i) => run.marks.map((mark) => ({ ...mark, run: i })));
  const firstStep = data.runs.length === 1 ? data.runs[0].firstStep : null;
  const context = { numRuns: data.runs.length, marks, firstStep, parting: data.parting, height: 190 };
  const place = document.getElementById("charts");
  const shown = data.panels.map((panel) => new Chart(panel, context));
  place.append(...shown.map((chart) => chart.figure));
  data.runs.forEach((run, i) => {
    const holder = document.getElementById(`evidence-${i}`);
    if (!holder || !run.evidence) return;
    const own = { numRuns: 1, marks: [], firstStep: run.evidence.firstStep, height: 170 };
    const chart = new Chart(run.evidence, own);
    holder.prepend(chart.figure);
    shown.push(chart);
  });
  for (const chart of shown) chart.draw();
  new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(document.body);
};

// puts the cursor of all charts on a step
const showStep = (step) => {
  document.getElementById("charts").scrollIntoView();
  for (const chart of charts.filter((one) => one.panel.x === "step")) chart.pointAt(step);
};
