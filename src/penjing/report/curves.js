// The curves of a report. Each `.plot` holds its chart as JSON, and uPlot draws it.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });
const plots = new Map();

function figure(value) {
  if (value === null || value === undefined) return "–";
  const small = value !== 0 && Math.abs(value) < 1e-3;
  return small ? Number(value.toPrecision(3)).toExponential() : compact.format(value).replace("K", "k");
}

function draw(node) {
  const chart = JSON.parse(node.dataset.chart);
  const axis = (label, size) => ({
    label, size, labelSize: 16, labelGap: 2, labelFont: "11.5px system-ui, sans-serif", font: "11.5px system-ui, sans-serif",
    stroke: css("--soft"), grid: { stroke: css("--hair"), width: 1 }, ticks: { show: false },
    values: (_, splits) => splits.map((value) => (value === null ? "" : figure(value))),
  });
  const colour = (one) => css(`--c${one.colour}`);
  const line = (one) => ({
    label: one.name, stroke: colour(one), width: 1.8, dash: one.dashed ? [5, 4] : undefined,
    points: { show: one.dots || one.x.length === 1, size: 5, fill: css("--card") }, value: (_, value) => figure(value),
  });
  const newest = (plot) => plot.cursor.idx ?? plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  // Where all is 0 uPlot would end at 100.
  const range = (_, low, high) => uPlot.rangeNum(chart.from_zero ? Math.min(0, low) : low, low || high ? high : 1, 0.1, true);
  return new uPlot({
    width: node.clientWidth,
    height: chart.height,
    cursor: { sync: { key: chart.x }, points: { size: 6, fill: (_, at) => colour(chart.series[at - 1]) } },
    scales: { x: { time: false, distr: chart.log_x ? 3 : 1 }, y: { distr: chart.log_y ? 3 : 1, range: chart.log_y ? undefined : range } },
    axes: [axis(chart.x, 28), axis(chart.y, 46)],
    hooks: { ready: [newest], setLegend: [newest] }, // the last values where nobody points at others
    series: [{ label: chart.x, value: (_, value) => figure(value) }, ...chart.series.map(line)],
  }, uPlot.join(chart.series.map((one) => [one.x, one.y])), node);
}

// A chart in a closed part of the page has no width until a person opens it.
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (!target.clientWidth) continue;
    const plot = plots.get(target);
    if (plot) plot.setSize({ width: target.clientWidth, height: plot.height });
    else plots.set(target, draw(target));
  }
});
for (const node of document.querySelectorAll(".plot")) watcher.observe(node);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [node, plot] of plots) {
    plot.destroy();
    plots.set(node, draw(node));
  }
});
