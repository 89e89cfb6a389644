"use strict";
// Unpacks the data of the page and shows it: curves first, then gaps and tokens.

const tokenViews = [];

// shows what an address such as #A-step-3-completion-5-token-2 names
const showPlace = (hash) => {
  const place = /^#([AB])-step-(\d+)(?:-completion-(\d+)(?:-token-(\d+))?)?$/.exec(hash);
  if (!place) return;
  const [run, step, row, token] = ["AB".indexOf(place[1]), ...place.slice(2).map((part) => (part === undefined ? null : Number(part)))];
  const view = tokenViews[run];
  if (row === null || !view) {
    showStep(step);
  } else {
    view.place.scrollIntoView();
    view.jumpToRow(step, row, token);
  }
};

const pageReady = (async () => {
  const [curves, tokens] = document.getElementById("report-data").textContent.trim().split(" ");
  const data = await unpack(curves);
  showCharts(data);
  showLanes(data);
  const { runs } = await unpack(tokens);
  runs.forEach((run, i) => {
    const place = document.getElementById(`tokens-${i}`);
    if (place && run.rows.length) tokenViews[i] = new TokenView(place, run, data.runs[i].evidence?.lane || "reference");
  });
  const followHash = () => showPlace(location.hash);
  addEventListener("hashchange", followHash);
  // a link that was followed before changes no hash
  document.querySelectorAll("a.place").forEach((link) => link.addEventListener("click", () => link.hash === location.hash && followHash()));
  followHash();
  document.documentElement.dataset.ready = "yes";
})();
pageReady.catch(() => {
  document.getElementById("charts").textContent = "This browser cannot show the curves and tokens: it lacks DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 have it).";
});
