// Curves, drawn by uPlot (vendored), which index.html loads.

import { el } from "./dom.js";
import { current, short, t } from "./i18n.js";
import { duration } from "./plan_numbers.js";
import "./plan_words.js"; // those of durations
import { own } from "./words.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const X = { step: (value) => value.toLocaleString("en-US"), tokens: short, time: duration };

export function figure(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${(value * 100).toFixed(1)} %`;
  const size = Math.abs(value);
  if (size >= 1e4) return short(value);
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

/** The name of a chart, or of its figure. */
export const named = ({ title, chinese }) => (current() === "zh" && chinese) || title;

/** A run's figure, as the list has it. */
export const told = (one) => one && `${named(one)} ${figure(one.value, one.percent)}${one.held_out ? ` (${t("runsHeldOut")})` : ""}`;

/** The ends of an axis. Where all is 0 uPlot would end at 100; no fraction is above 1. */
const rangeOf = ({ from_zero, percent }) => (_, low, high) => {
  if (low === null) return [null, null];
  const [least, most] = uPlot.rangeNum(from_zero ? Math.min(0, low) : low, low || high ? high : 1, 0.1, true);
  return [least, percent && high <= 1 ? Math.min(1, most) : most];
};

/** One chart in a card. show(chart, view) draws; view: {x, logX, logY, colours, zoom}. */
export class Plot {
  constructor() {
    this.title = el("h2");
    this.canvas = el("div", { class: "plot", role: "img" });
    this.legend = el("ul", { class: "legend" });
    this.about = el("p", { class: "hint" });
    this.node = el("section", { class: "card chart" }, this.title, this.about, this.canvas, this.legend);
    this.plot = null;
    this.watcher = new ResizeObserver(() => this.plot && this.canvas.clientWidth && this.plot.setSize(this.size()));
    this.watcher.observe(this.canvas);
  }

  size = () => ({ width: Math.max(220, this.canvas.clientWidth), height: 230 });

  show(chart, view) {
    const lines = chart.series.filter((line) => line.x.length);
    const log = chart.log || view.logY;
    const tables = lines.map((line) => [line.x, log ? line.y.map((y) => (y > 0 ? y : null)) : line.y])
      .map(([x, y]) => (view.logX ? [x.filter((one) => one > 0), y.filter((_, at) => x[at] > 0)] : [x, y]));
    const data = tables.length ? uPlot.join(tables) : [[]];
    const name = named(chart);
    this.title.textContent = name;
    this.about.textContent = t(`runsAbout_${chart.metric}`, {}, "");
    this.unit = ` ${own(chart.unit)}`;
    this.title.append(el("span", { class: "unit", text: this.unit }));
    this.canvas.setAttribute("aria-label", t("runsChart", { name, values: lines.map((line) => `${line.run} ${label(line, chart)} ${figure(line.y.at(-1), chart.percent)}`).join("; ") }));
    this.values = lines.map((line) => el("b", { text: figure(line.y.at(-1), chart.percent) }));
    this.legend.replaceChildren(...lines.map((line, at) => el("li", {}, swatch(placeOf(line, view), line.held_out),
      view.alone ? label(line, chart) : `${line.run}${line.held_out ? ` · ${t("runsHeldOut")}` : ""}`, " ", this.values[at])));
    this.legend.classList.toggle("many", lines.length > 8);
    const shape = JSON.stringify([lines.map((line) => [line.run, line.metric]), view.x, view.logX, log, current(), view.theme]);
    if (this.plot && this.shape === shape) {
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(chart, lines, view, log), data, this.canvas);
  }

  options(chart, lines, view, log) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--hair"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
    const logged = (values) => (_, splits) => splits.map((value) => (value === null ? "" : values(value)));
    const series = (line) => ({
      stroke: css(`--c${placeOf(line, view) % 8}`),
      width: 1.6,
      dash: line.held_out || view.colours[line.run] >= 8 ? [5, 4] : undefined,
      points: { show: line.x.length < 25 || line.held_out && line.x.length < 60, size: 4 },
      spanGaps: true,
    });
    return {
      ...this.size(),
      padding: [null, 34, null, null], // right: half of the longest label of the x axis
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "runs" }, points: { size: 6 } },
      scales: { x: { time: false, distr: view.logX ? 3 : 1 }, y: { distr: log ? 3 : 1, range: log ? undefined : rangeOf(chart) } },
      axes: [
        { ...axis, values: logged(X[view.x]), size: 34 },
        { ...axis, values: logged((value) => figure(value, chart.percent)), size: 58 },
      ],
      series: [{}, ...lines.map(series)],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          view.zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(plot) => this.point(plot, lines, chart, view)],
      },
    };
  }

  /** The values under the pointer, in the legend. */
  point(plot, lines, chart, view) {
    const at = plot.cursor.idx;
    lines.forEach((line, place) => {
      let value = line.y.at(-1);
      if (at !== null && at !== undefined) {
        const x = plot.data[0][at];
        const next = line.x.findIndex((one) => one >= x);
        value = line.y[next < 0 ? line.y.length - 1 : next];
      }
      this.values[place].textContent = figure(value, chart.percent);
    });
    this.title.lastChild.textContent = at === null || at === undefined ? this.unit : ` ${t(`runsAt_${view.x}`, { x: X[view.x](plot.data[0][at]) })}`;
  }

  close() {
    this.watcher.disconnect();
    this.plot?.destroy();
  }
}

/** Of a line among the colours: by its run; in a chart of several figures of one run, by the figure. */
const placeOf = (line, view) => (view.colours[line.run] ?? 0) + line.place;

const label = (line, { extras }) => [!line.held_out || extras.length ? own(line.label) : "", line.held_out ? t("runsHeldOut") : ""].filter(Boolean).join(" · ");

const swatch = (place, dashed) => el("i", { class: `swatch c${place % 8}${dashed ? " dashed" : ""}`, "aria-hidden": "true" });
