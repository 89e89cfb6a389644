"use strict";
// Reloads the page of a running run when it has new data, and keeps the reader's position.
(() => {
  const key = "klinic";
  const version = document.documentElement.dataset.version;
  const notice = document.getElementById("live");
  const details = () => [...document.querySelectorAll("details")];
  // the page of a run that has not begun has no charts and no tokens
  const [views, plots] = typeof tokenViews === "undefined" ? [[], []] : [tokenViews, charts];

  const remember = () => {
    const open = Object.fromEntries(details().map((one) => [one.querySelector("summary")?.dataset.name, one.open]));
    const range = plots.find((chart) => chart.range)?.range || null;
    sessionStorage.setItem(key, JSON.stringify({ open, range, views: views.map((view) => view.state()), scroll: scrollY }));
  };

  const restore = () => {
    const before = JSON.parse(sessionStorage.getItem(key) || "null");
    if (!before) return;
    for (const one of details()) one.open = before.open[one.querySelector("summary")?.dataset.name] ?? one.open;
    if (before.range) plots.find((chart) => chart.panel.x === "step")?.zoomAll(before.range.min, before.range.max);
    views.forEach((view, i) => before.views[i] && view.restore(before.views[i]));
    scrollTo(0, before.scroll);
  };

  const poll = async () => {
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
    setTimeout(poll, 2000);
  };

  (typeof pageReady === "undefined" ? Promise.resolve() : pageReady).then(restore);
  setTimeout(poll, 2000);
})();
