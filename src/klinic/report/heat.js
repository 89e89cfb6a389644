"use strict";
// Everything that is quoted is put into the page as text, never as markup.
const runs = JSON.parse(document.getElementById("heat-data").textContent);

const element = (name, className, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

// escapes control and invisible characters; runs of combining marks are counted
const code = (c) => {
  const point = c.codePointAt(0);
  const [sign, width] = point < 0x100 ? ["x", 2] : point < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${sign}${point.toString(16).padStart(width, "0")}`;
};
const visible = (text) => text
  .replace(/(\p{M}{4})(\p{M}+)/gu, (_, first, rest) => `${first}\u2026${[...rest].length} marks`)
  .replace(/\n/g, "\u21b5\n")
  .replace(/(?!\n)[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu, code);

const number = (value) => (value === null || value === undefined ? "not recorded" : value.toFixed(3));

const colour = (kl, largest) => {
  if (kl === null) return "transparent";
  const strength = Math.min(1, Math.abs(kl) / largest);
  return kl > 0 ? `rgb(213 94 0 / ${strength * 0.75})` : `rgb(0 114 178 / ${strength * 0.75})`;
};

const tokenOf = (completion, i, largest, tell) => {
  const classes = ["token"];
  const apart = completion.sampler[i];
  if (apart !== null && Math.abs(apart) > 0.1) classes.push("apart");
  if (!completion.trained[i]) classes.push("foreign");
  const made = element("span", classes.join(" "), visible(completion.text[i]));
  made.style.backgroundColor = colour(completion.kl[i], largest);
  made.tabIndex = -1;
  const said = `token ${i}: policy ${number(completion.logp[i])}, sampler ${number(completion.logpSampler[i])}, `
    + `reference ${number(completion.logpRef[i])}; policy - reference ${number(completion.kl[i])}, `
    + `policy - sampler ${number(apart)} nats${completion.trained[i] ? "" : "; not trained on"}`;
  made.title = said;
  for (const event of ["mouseenter", "focus"]) made.addEventListener(event, () => tell(said));
  return made;
};

const showStep = (place, run, index, tell) => {
  const step = run.steps[index];
  place.replaceChildren();
  if (step.owners.length) {
    place.append(element("p", "", `Half of the KL of step ${step.step} is owned by ${step.numOwners} of ${step.numTokens} tokens:`));
    const list = element("p", "quiet");
    for (const owner of step.owners) {
      list.append(element("code", "", visible(owner.text)), ` ${(100 * owner.share).toFixed(1)}% (completion ${owner.row}, token ${owner.position})  `);
    }
    place.append(list);
  }
  for (const completion of step.completions) {
    const box = element("div", "completion");
    box.append(element("div", "quiet", `completion ${completion.row}, reward ${number(completion.reward)}`));
    if (completion.prompt) box.append(element("div", "prompt", visible(completion.prompt)));
    const tokens = element("div", "tokens");
    tokens.tabIndex = 0;
    completion.text.forEach((_, i) => tokens.append(tokenOf(completion, i, run.largest, tell)));
    tokens.addEventListener("keydown", (event) => {
      const all = [...tokens.children];
      const at = all.indexOf(document.activeElement);
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      all[Math.max(0, Math.min(all.length - 1, at + move))]?.focus();
    });
    if (completion.hidden) tokens.append(element("span", "quiet", ` ... ${completion.hidden} more`));
    box.append(tokens);
    place.append(box);
  }
};

for (const mark of document.querySelectorAll(".mark")) {
  const said = mark.getAttribute("aria-label");
  for (const event of ["mouseenter", "focus"]) {
    mark.addEventListener(event, () => { document.getElementById("reading-marks").textContent = said; });
  }
}

runs.forEach((run, number_) => {
  const slider = document.getElementById(`slider-${number_}`);
  if (!slider) return;
  const label = document.getElementById(`step-${number_}`);
  const place = document.getElementById(`heat-${number_}`);
  const reading = document.getElementById(`reading-${number_}`);
  const tell = (said) => { reading.textContent = said; };
  const move = () => {
    slider.dataset.step = run.steps[slider.value].step;
    label.textContent = `step ${slider.dataset.step}`;
    showStep(place, run, slider.value, tell);
  };
  slider.max = run.steps.length - 1;
  slider.value = slider.max;
  slider.dataset.steps = run.steps.map((one) => one.step).join();
  slider.addEventListener("input", move);
  move();
});
