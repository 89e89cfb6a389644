"use strict";
// Unpacks the data of the page and shows it: curves first, then gaps and tokens.

const tokenViews = [];
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
  document.querySelectorAll(".to-worst").forEach((node) => {
    node.addEventListener("click", () => {
      const view = tokenViews[Number(node.dataset.run)];
      if (!view) return;
      view.place.scrollIntoView();
      view.jumpToRow(Number(node.dataset.step), Number(node.dataset.row));
    });
  });
  document.documentElement.dataset.ready = "yes";
})();
pageReady.catch(() => {
  document.getElementById("charts").textContent = "This browser cannot show the curves and tokens: it lacks DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 have it).";
});
