// Charts are drawn from the table beside them: whoever cannot see them reads the same numbers there.
"use strict";
(() => {
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const units = {
    bytes: (value) => {
      if (value === null) return "–";
      let unit = 0;
      while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit += 1; }
      return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
    },
    count: (value) => (value === null ? "–" : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)} k` : value.toLocaleString("en", { maximumFractionDigits: 0 })),
    percent: (value) => (value === null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`),
    ms: (value) => (value === null ? "–" : value < 999.5 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(1)} s`),
  };

  const binary = Array.from({ length: 44 }, (_, power) => 2 ** power);

  // Newest first in the table, oldest first in the chart.
  function read(place) {
    const columns = [0, ...place.dataset.columns.split(",").map(Number)];
    const rows = [...document.querySelectorAll(`#${place.dataset.plot} tbody tr`)].reverse();
    const value = (row, column) => {
      const text = row.cells[column]?.dataset.v;
      return text === undefined || text === "" ? null : Number(text);
    };
    return columns.map((column) => rows.map((row) => value(row, column)));
  }

  // uPlot would show a whole day after a single time.
  const around = (half) => ({ data: [[at, ...more]] }, low, high) => (more.length ? [low, high] : [at - half, at + half]);

  function draw(place) {
    const format = units[place.dataset.unit] ?? String;
    const line = colour("--line");
    const axis = { stroke: colour("--faint"), grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const looks = [{ stroke: colour("--accent"), width: 1.5 }, { stroke: colour("--series-2"), width: 1.5, dash: [5, 4] }];
    const data = read(place);
    const byRound = place.dataset.x === "count";
    const chart = new uPlot({
      width: Math.max(place.clientWidth, 120), height: place.clientHeight || 132, legend: { show: false }, padding: [8, 6, 0, 0],
      cursor: { y: false, points: { size: 5 } },
      scales: { x: { time: !byRound, range: around(byRound ? 0.5 : 30) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, size: 24, grid: { show: false }, space: 70, incrs: byRound ? [1, 2, 5, 10, 20] : undefined, values: byRound ? (_, ticks) => ticks.map(String) : "{HH}:{mm}:{ss}" },
        { ...axis, size: 62, space: 28, incrs: place.dataset.unit === "bytes" ? binary : undefined, values: (_, ticks) => ticks.map(format) },
      ],
      series: [{}, ...data.slice(1).map((_, i) => ({ ...looks[i], points: { show: data[0].length < 40, size: 4 }, spanGaps: true }))],
    }, data, place);
    drawn.set(place, chart);
  }

  function renew() {
    for (const [place, chart] of drawn) {
      if (place.isConnected) continue;
      chart.destroy();
      drawn.delete(place);
    }
    for (const place of document.querySelectorAll("[data-plot]")) {
      const chart = drawn.get(place);
      if (chart) chart.setData(read(place));
      else draw(place);
    }
  }

  function redraw() {
    for (const [place, chart] of drawn) {
      chart.destroy();
      drawn.delete(place);
      place.replaceChildren();
    }
    renew();
  }

  renew();
  document.addEventListener("xmig:renewed", renew);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let later = 0;
  addEventListener("resize", () => { clearTimeout(later); later = setTimeout(redraw, 150); });
})();
