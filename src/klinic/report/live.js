"use strict";
// Reloads the page of a running run when it has new data, and keeps the reader's position.
const seen = "klinic";
const version = document.documentElement.dataset.version;
const notice = document.getElementById("live");
const sliders = [...document.querySelectorAll("input[type=range]")];
const openOnes = () => [...document.querySelectorAll("details")];

const remember = () => {
  const focus = document.activeElement;
  const tokens = focus?.classList.contains("token") ? [...document.querySelectorAll(".token")] : [];
  sessionStorage.setItem(seen, JSON.stringify({
    // a reader of the newest step stays on the newest
    steps: sliders.map((s) => (s.value === s.max ? null : Number(s.dataset.step))),
    open: openOnes().map((d) => d.open),
    scroll: scrollY,
    focus: focus?.id || "",
    token: tokens.indexOf(focus),
  }));
};

const restore = () => {
  const before = JSON.parse(sessionStorage.getItem(seen) || "null");
  if (!before) return;
  sliders.forEach((slider, i) => {
    const step = before.steps[i];
    if (step === null || step === undefined) return;
    const all = slider.dataset.steps.split(",").map(Number);
    const near = all.reduce((best, s, at) => (Math.abs(s - step) < Math.abs(all[best] - step) ? at : best), 0);
    slider.value = near;
    slider.dispatchEvent(new Event("input"));
  });
  openOnes().forEach((d, i) => { if (before.open[i] !== undefined) d.open = before.open[i]; });
  const focus = before.token >= 0 ? document.querySelectorAll(".token")[before.token] : before.focus && document.getElementById(before.focus);
  if (focus) focus.focus({ preventScroll: true });
  scrollTo(0, before.scroll);
};

const look = async () => {
  try {
    const answer = await fetch("version", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    notice.textContent = "";
    if (await answer.text() !== version) {
      remember();
      location.reload();
      return;
    }
  } catch {
    notice.textContent = "klinic watch no longer responds: this is the last page it served.";
  }
  setTimeout(look, 2000);
};

restore();
setTimeout(look, 2000);
