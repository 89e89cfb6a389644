"use strict";
// The token view: completions with every log-prob, searched, filtered, sorted, and drawn as one scrolls.

const BLOCK = 128; // tokens that are drawn together
const OVERSCAN = 200; // pixels drawn above and below what is seen
const HEADER_HEIGHT = 58; // estimates until an item was measured
const LINE_HEIGHT = 27;
const NUM_WORST = 12;
const GAP_LIMIT = 100; // thousandths of a nat between policy and sampler from which a token is underlined
const MILLI = 1000;

const difference = (row, a, b, i) => {
  const [first, second] = [row[a]?.[i], row[b]?.[i]];
  return isFiniteNumber(first) && isFiniteNumber(second) ? first - second : null;
};
const k3 = (gap) => Math.expm1(-gap / MILLI) + gap / MILLI;
const isMasked = (row, i) => row.maskedSet.has(i);

// signed gaps in thousandths of a nat, by the name of the choice
const GAPS = {
  reference: { label: "KL: policy - reference", of: (row, i) => difference(row, "old", "ref", i) },
  sampler: { label: "policy - sampler", of: (row, i) => difference(row, "old", "sampler", i) },
  update: { label: "after - before the update", of: (row, i) => difference(row, "logp", "old", i) },
};
const SORTS = {
  gap: { label: "largest gap first", key: (row) => -row.gap },
  low: { label: "lowest reward first", key: (row) => row.reward ?? Infinity },
  high: { label: "highest reward first", key: (row) => -(row.reward ?? -Infinity) },
  long: { label: "longest first", key: (row) => -row.length },
  step: { label: "by step", key: (row) => row.step },
};

const colourOf = (gap, scale) => {
  if (gap === null) return "";
  const strength = Math.min(1, Math.abs(gap) / scale) * 0.75;
  return gap > 0 ? `rgb(213 94 0 / ${strength})` : `rgb(0 114 178 / ${strength})`;
};

// the gap at which colours saturate: the 99th percentile
const colourScale = (rows, gap) => {
  const stride = Math.max(1, Math.floor(rows.reduce((n, row) => n + row.text.length, 0) / 20000));
  const sizes = [];
  let at = 0;
  for (const row of rows) {
    for (; at < row.text.length; at += stride) {
      const size = gap.of(row, at);
      if (size !== null && !isMasked(row, at)) sizes.push(Math.abs(size));
    }
    at -= row.text.length;
  }
  return Math.max(100, sizes.sort((a, b) => a - b)[Math.floor(sizes.length * 0.99)] || 0);
};

class TokenView {
  constructor(place, data, lane) {
    this.place = place;
    this.texts = data.texts.map(visible);
    this.prompts = data.prompts.map(visible);
    this.steps = data.steps;
    this.rows = data.rows.map((row) => ({ ...row, maskedSet: new Set(row.masked) }));
    this.lanes = Object.keys(GAPS).filter((name) => this.rows.some((row) => row.text.some((_, i) => GAPS[name].of(row, i) !== null)));
    this.lane = this.lanes.includes(lane) ? lane : this.lanes[0] || "reference";
    this.sort = "gap";
    this.measured = new Map();
    this.nodes = new Map();
    this.place.append(this.controls(), this.count = element("p", "quiet"), this.worst = element("p", "worst"), this.scroller(), this.detail());
    this.useLane(this.lane);
    this.width = this.list.clientWidth;
    new ResizeObserver(() => {
      if (this.list.clientWidth === this.width) return;
      this.width = this.list.clientWidth;
      this.measured.clear();
      this.layOut();
    }).observe(this.list);
  }

  controls() {
    const form = element("form", "filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    const field = (label, node) => {
      const wrapper = element("label", "", `${label} `);
      wrapper.append(node);
      form.append(wrapper);
      node.addEventListener("input", () => this.apply());
      return node;
    };
    const choice = (label, options) => {
      const select = field(label, element("select"));
      for (const [value, text] of options) select.append(Object.assign(element("option", "", text), { value }));
      return select;
    };
    const numberField = (label) => field(label, Object.assign(element("input"), { type: "number", step: "any" }));
    this.inputs = {
      search: field("Search", Object.assign(element("input"), { type: "search", placeholder: "text of a prompt or completion" })),
      step: choice("Step", [["", "all"], ...this.steps.map(([step]) => [step, step])]),
      gap: choice("Colour and worst by", this.lanes.map((name) => [name, GAPS[name].label])),
      sort: choice("Order", Object.entries(SORTS).map(([name, sort]) => [name, sort.label])),
      lowReward: numberField("Reward from"),
      highReward: numberField("to"),
      shortest: numberField("Tokens from"),
      longest: numberField("to"),
    };
    const processes = [...new Set(this.rows.map((row) => row.process))].filter(isFiniteNumber);
    if (processes.length > 1) this.inputs.process = choice("Process", [["", "all"], ...processes.map((one) => [one, one])]);
    this.inputs.gap.value = this.lane;
    this.inputs.gap.addEventListener("input", () => this.useLane(this.inputs.gap.value));
    form.append(button("quiet-button", "show all", () => { form.reset(); this.inputs.gap.value = this.lane; this.apply(); }));
    return form;
  }

  scroller() {
    this.list = element("div", "tokens");
    this.list.tabIndex = 0;
    this.list.setAttribute("role", "region");
    this.list.setAttribute("aria-label", "Completions, token by token. Left and right arrow keys move through the tokens.");
    this.space = element("div", "space");
    this.list.append(this.space);
    this.list.addEventListener("scroll", () => {
      this.pending ||= requestAnimationFrame(() => { this.pending = 0; this.draw(); });
    }, { passive: true });
    for (const event of ["mouseover", "click"]) {
      this.list.addEventListener(event, ({ target }) => {
        const block = target.classList.contains("token") && target.parentElement;
        if (block) this.show(block.row, block.start + [...block.children].indexOf(target), event === "click");
      });
    }
    this.list.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      this.move(move);
    });
    return this.list;
  }

  detail() {
    this.reading = element("div", "reading", "Point at a token, or use the arrow keys, to read its log-probs.");
    this.reading.setAttribute("aria-live", "polite");
    return this.reading;
  }

  useLane(lane) {
    this.lane = lane;
    const { of } = GAPS[lane];
    for (const row of this.rows) {
      let [sum, num] = [0, 0];
      row.text.forEach((_, i) => {
        const gap = isMasked(row, i) ? null : of(row, i);
        if (gap !== null) { sum += Math.abs(gap); num += 1; }
      });
      row.gap = num ? sum / num / MILLI : -1;
    }
    this.scale = colourScale(this.rows, GAPS[lane]);
    this.nodes.clear();
    this.apply();
  }

  // the completions that pass the filters, in order, cut into items of the list
  apply() {
    const { search, step, sort, lowReward, highReward, shortest, longest, process } = this.inputs;
    const words = search.value.toLowerCase();
    const inside = (value, low, high) => (low.value === "" || value >= Number(low.value)) && (high.value === "" || value <= Number(high.value));
    this.found = this.rows.filter((row) => (step.value === "" || row.step === Number(step.value))
      && (!process?.value || row.process === Number(process.value))
      && ((lowReward.value === "" && highReward.value === "") || (row.reward !== null && inside(row.reward, lowReward, highReward)))
      && inside(row.length, shortest, longest)
      && (words === "" || this.textOf(row).includes(words)));
    const { key } = SORTS[sort.value];
    this.found.sort((a, b) => key(a) - key(b) || a.step - b.step || a.row - b.row);
    this.items = this.found.flatMap((row) => [
      { row, start: -1, key: `${row.step}/${row.row}` },
      ...Array.from({ length: Math.ceil(row.text.length / BLOCK) }, (_, i) => ({ row, start: i * BLOCK, key: `${row.step}/${row.row}/${i}` })),
    ]);
    const total = this.steps.filter(([one]) => step.value === "" || one === Number(step.value));
    const tokens = this.found.reduce((n, row) => n + row.text.length, 0);
    this.count.textContent = `${this.found.length} of ${total.reduce((n, [, , all]) => n + all, 0)} completions of ${total.length} recorded steps, ${tokens.toLocaleString("en")} tokens.`;
    this.listWorst();
    this.list.scrollTop = 0;
    this.layOut();
  }

  textOf(row) {
    row.haystack ??= `${this.prompts[row.prompt]}${row.text.map((i) => this.texts[i]).join("")}`.toLowerCase();
    return row.haystack;
  }

  // buttons for the tokens with the largest gap
  listWorst() {
    const { of } = GAPS[this.lane];
    const measure = this.lane === "reference" ? k3 : (gap) => Math.abs(gap) / MILLI;
    const top = [];
    for (const row of this.found) {
      for (let i = 0; i < row.text.length; i++) {
        const gap = isMasked(row, i) ? null : of(row, i);
        const size = gap === null ? 0 : measure(gap);
        if (size <= 0 || (top.length === NUM_WORST && size <= top.at(-1).size)) continue;
        top.push({ row, i, size });
        top.sort((a, b) => b.size - a.size);
        top.length = Math.min(top.length, NUM_WORST);
      }
    }
    this.worst.replaceChildren();
    if (!top.length) return;
    this.worst.append(element("span", "quiet", `Largest ${this.lane === "reference" ? "KL (k3)" : "gap"}, nats: `));
    for (const { row, i, size } of top) {
      const entry = button("worst-token", "", () => this.jump(row, i));
      entry.append(element("code", "", this.texts[row.text[i]]), ` ${short(size)}`);
      entry.title = `step ${row.step}, completion ${row.row}, token ${i}`;
      this.worst.append(entry);
    }
  }

  heightOf(item) {
    const known = this.measured.get(item.key);
    if (known !== undefined) return known;
    if (item.start < 0) return HEADER_HEIGHT;
    const num = Math.min(BLOCK, item.row.text.length - item.start);
    return LINE_HEIGHT * Math.max(1, Math.ceil((num * 32) / (this.width || 600)));
  }

  layOut() {
    this.tops = new Float64Array(this.items.length + 1);
    this.items.forEach((item, i) => { this.tops[i + 1] = this.tops[i] + this.heightOf(item); });
    this.space.style.height = `${this.tops[this.items.length]}px`;
    this.draw();
  }

  indexAt(top) {
    let [low, high] = [0, this.items.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tops[middle + 1] <= top) low = middle + 1; else high = middle;
    }
    return low;
  }

  // draws what is seen; heights that were estimated wrongly are mended without moving the text
  draw() {
    const { scrollTop, clientHeight } = this.list;
    const first = this.indexAt(scrollTop - OVERSCAN);
    const last = Math.min(this.items.length, this.indexAt(scrollTop + clientHeight + OVERSCAN) + 1);
    const nodes = new Map();
    for (let i = first; i < last; i++) {
      const item = this.items[i];
      nodes.set(item.key, this.nodes.get(item.key) || this.makeNode(item));
    }
    this.nodes = nodes;
    this.space.replaceChildren(...nodes.values());
    const anchor = this.indexAt(scrollTop);
    let [moved, changed] = [0, false];
    for (let i = first; i < last; i++) {
      const height = nodes.get(this.items[i].key).offsetHeight;
      const before = this.tops[i + 1] - this.tops[i];
      if (height && Math.abs(height - before) > 0.5) {
        this.measured.set(this.items[i].key, height);
        changed = true;
        if (i < anchor) moved += height - before;
      }
    }
    if (changed) {
      this.items.forEach((item, i) => { this.tops[i + 1] = this.tops[i] + this.heightOf(item); });
      this.space.style.height = `${this.tops[this.items.length]}px`;
      if (moved) this.list.scrollTop = scrollTop + moved;
    }
    for (let i = first; i < last; i++) nodes.get(this.items[i].key).style.top = `${this.tops[i]}px`;
    this.markCurrent();
  }

  makeNode({ row, start }) {
    if (start < 0) return this.makeHeader(row);
    const block = element("div", "block item");
    [block.row, block.start] = [row, start];
    const end = Math.min(row.text.length, start + BLOCK);
    for (let i = start; i < end; i++) {
      const token = element("span", "token", this.texts[row.text[i]]);
      const apart = difference(row, "old", "sampler", i);
      if (apart !== null && Math.abs(apart) > GAP_LIMIT) token.classList.add("apart");
      if (isMasked(row, i)) token.classList.add("masked");
      token.style.backgroundColor = colourOf(GAPS[this.lane].of(row, i), this.scale);
      block.append(token);
    }
    if (end === row.text.length && row.length > end) block.append(element("i", "quiet", ` ... ${row.length - end} more tokens are not in this file`));
    return block;
  }

  makeHeader(row) {
    const node = element("div", "header item");
    const facts = [`step ${row.step}`, `completion ${row.row}`, `reward ${short(row.reward)}`, `advantage ${short(row.advantage)}`, `${row.length} tokens`];
    if (row.finish) facts.push(`finish ${visible(row.finish)}`);
    if (isFiniteNumber(row.process)) facts.push(`process ${row.process}`);
    if (row.gap >= 0) facts.push(`mean |${GAPS[this.lane].label.replace("KL: ", "")}| ${short(row.gap)}`);
    node.append(element("div", "facts", facts.join(" \u00b7 ")));
    const prompt = this.prompts[row.prompt];
    if (prompt) node.append(element("div", "prompt", prompt));
    return node;
  }

  show(row, i, focus) {
    const nats = (value) => (isFiniteNumber(value) ? short(value / MILLI) : null);
    const kl = GAPS.reference.of(row, i);
    const apart = GAPS.sampler.of(row, i);
    const of = (name) => (row[name] === null ? "not recorded" : nats(row[name][i]) ?? "none");
    const advantage = row.tokenAdvantage ? of("tokenAdvantage") : row.advantage === null ? "not recorded" : short(row.advantage);
    const facts = [
      ["policy", of("old")],
      ...(row.logp ? [["policy after", of("logp")]] : []),
      ["sampler", of("sampler")],
      ["reference", of("ref")],
      ["policy - sampler", nats(apart)],
      ["ratio", apart === null ? null : short(Math.exp(apart / MILLI))],
      ["policy - reference", nats(kl)],
      ["KL (k3)", kl === null ? null : short(k3(kl))],
      ["advantage", advantage],
      ...(row.entropy ? [["entropy", of("entropy")]] : []),
      ["trained on", isMasked(row, i) ? "no" : "yes"],
    ];
    this.reading.replaceChildren(element("strong", "", `${i}: `), element("code", "", this.texts[row.text[i]]));
    for (const [label, value] of facts) {
      if (value === null) continue;
      const fact = element("span", "fact", `${label} `);
      fact.append(element("b", "", value));
      this.reading.append(" ", fact);
    }
    if (focus) this.current = { row, i };
    this.markCurrent();
  }

  markCurrent() {
    this.list.querySelector(".current")?.classList.remove("current");
    if (!this.current) return;
    const { row, i } = this.current;
    const block = this.nodes.get(`${row.step}/${row.row}/${Math.floor(i / BLOCK)}`);
    block?.children[i % BLOCK]?.classList.add("current");
  }

  // to the next or previous token, also over the end of a completion
  move(by) {
    const start = this.current || { row: this.found[0], i: -1 };
    if (!start.row) return;
    let at = this.found.indexOf(start.row);
    if (at < 0) [at, start.i] = [0, -1];
    let i = start.i + by;
    if (i < 0 && at > 0) i = this.found[--at].text.length - 1;
    if (i >= this.found[at].text.length && at < this.found.length - 1) [at, i] = [at + 1, 0];
    this.reveal(this.found[at], Math.max(0, Math.min(this.found[at].text.length - 1, i)));
  }

  reveal(row, i) {
    const key = `${row.step}/${row.row}/${Math.floor(i / BLOCK)}`;
    const index = this.items.findIndex((item) => item.key === key);
    if (index < 0) return;
    if (!this.nodes.has(key)) {
      this.list.scrollTop = Math.max(0, this.tops[index] - 60);
      this.draw();
    }
    this.show(row, i, true);
    const token = this.nodes.get(key)?.children[i % BLOCK];
    if (!token) return;
    const [box, frame] = [token.getBoundingClientRect(), this.list.getBoundingClientRect()];
    if (box.top < frame.top || box.bottom > frame.bottom) this.list.scrollTop += box.top - frame.top - frame.height / 3;
  }

  jump(row, i) {
    if (!this.found.includes(row)) {
      this.place.querySelector("form").reset();
      this.inputs.gap.value = this.lane;
      this.apply();
    }
    this.reveal(row, i);
    this.list.focus({ preventScroll: true });
  }

  // to a token of a completion; without one, to that with the largest gap
  jumpToRow(step, number, token) {
    const row = this.rows.find((one) => one.step === step && one.row === number);
    if (!row) {
      this.reading.textContent = `Completion ${number} of step ${step} is not in this file.`;
      return;
    }
    const { of } = GAPS[this.lane];
    const sizes = row.text.map((_, i) => (isMasked(row, i) ? 0 : Math.abs(of(row, i) ?? 0)));
    const largest = sizes.indexOf(sizes.reduce((a, b) => Math.max(a, b), 0));
    this.jump(row, Math.max(0, Math.min(token ?? largest, row.text.length - 1)));
  }

  state() {
    return { filters: Object.fromEntries(Object.entries(this.inputs).map(([name, node]) => [name, node.value])), scroll: this.list.scrollTop };
  }

  restore({ filters, scroll }) {
    for (const [name, value] of Object.entries(filters)) if (this.inputs[name]) this.inputs[name].value = value;
    if (this.lanes.includes(filters.gap)) this.useLane(filters.gap);
    this.list.scrollTop = scroll;
    this.draw();
  }
}
