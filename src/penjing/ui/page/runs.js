// The tab of runs: the list at the side, curves of the chosen ones, and what one run left behind. All of it comes from
// the runs' folders, so that a reload, another device and a run started in a terminal show the same.

import { pause } from "./api.js";
import { $, arrange, button, el, fill } from "./dom.js";
import { count, short, t } from "./i18n.js";
import { duration } from "./plan_numbers.js";
import { Plot, told } from "./plot.js";
import { showDetails, showDifferences } from "./run_details.js";
import "./runs_words.js";
import { own } from "./words.js";

const MOST_CHOSEN = 20;
const AGAIN = 2; // seconds until a broken stream is opened again

export async function open(root, context) {
  const { params, signal } = context;
  const now = {
    context, root, rows: [], items: new Map(), plots: new Map(), drawing: false,
    chosen: params.getAll("run"), x: params.get("x") ?? "step", smooth: Number(params.get("smooth")) || 0,
    logX: params.get("logx") === "1", logY: params.get("logy") === "1", small: params.get("small") === "1",
    low: null, high: null,
  };
  addEventListener("theme", () => draw(now), { signal });
  signal.addEventListener("abort", () => now.plots.forEach((plot) => plot.close()));
  build(now);
  await follow(now);
}

function build(now) {
  const select = el("select", { id: "runs-x", "aria-label": t("runsAxis") },
    ["step", "tokens", "time"].map((value) => el("option", { value, text: t(`runsBy_${value}`), selected: now.x === value })));
  select.addEventListener("change", () => change(now, { x: select.value, low: null, high: null }));
  const smooth = el("input", { type: "range", id: "runs-smooth", min: 0, max: 0.99, step: 0.01, value: now.smooth });
  smooth.addEventListener("input", () => change(now, { smooth: Number(smooth.value) }));
  const box = (name, key) => {
    const input = el("input", { type: "checkbox", id: `runs-${key}`, checked: now[key] });
    input.addEventListener("change", () => change(now, { [key]: input.checked }));
    return el("label", { class: "check" }, input, t(name));
  };
  const edge = (key) => el("input", { type: "number", id: `runs-${key}`, class: "edge", "aria-label": t(`runs_${key}`), placeholder: t(`runs_${key}`), min: 0,
    on: { change: (event) => change(now, { [key]: event.target.value === "" ? null : Number(event.target.value) }) } });
  const more = el("details", { class: "more", open: now.small }, el("summary", { text: t("runsMore") }), el("div", { class: "charts", id: "runs-small" }));
  more.addEventListener("toggle", () => change(now, { small: more.open }));
  fill(now.root,
    el("section", { class: "runs-list", "aria-label": t("uiRuns") }, el("p", { class: "hint", id: "runs-folder" }), el("ul", { id: "runs-rows" })),
    el("div", { class: "runs-main" },
      el("div", { class: "row tools" }, select, el("label", { class: "check" }, t("runsSmooth"), smooth), box("runsLogX", "logX"), box("runsLogY", "logY"),
        el("span", { class: "spring" }), el("span", { class: "row" }, edge("low"), edge("high"), button("close", t("runsWhole"), () => change(now, { low: null, high: null })))),
      el("p", { class: "panel-error", id: "runs-gone", role: "alert", hidden: true }),
      first(now),
      el("div", { class: "charts", id: "runs-charts" }),
      more,
      el("div", { id: "runs-details" })));
}

/** What a newcomer does first. */
function first({ context }) {
  const start = context.actButton("primary", t("runsFirstStart"), () => context.api.post("api/quickstart", {}));
  return el("section", { class: "card", id: "runs-first", hidden: true }, el("h2", { text: t("runsFirst") }), el("p", { text: t("runsFirstHint") }),
    el("div", { class: "row" }, start), el("div", { class: "gap" }, context.commandLine("penjing quickstart")));
}

/** Another view of the same runs. */
function change(now, part) {
  Object.assign(now, part);
  for (const key of ["low", "high"]) $(`#runs-${key}`).value = now[key] === null ? "" : Number(now[key].toPrecision(5));
  remember(now);
  draw(now);
}

function remember(now) {
  const view = [["x", now.x], ["smooth", now.smooth], ["logx", Number(now.logX)], ["logy", Number(now.logY)], ["small", Number(now.small)]];
  now.context.keep([...now.chosen.map((run) => ["run", run]), ...view.filter(([, value]) => value !== 0 && value !== "step")]);
}

/** The stream of rows; opened again when it breaks. */
async function follow(now) {
  const { api, signal } = now.context;
  for (;;) {
    try {
      for await (const event of api.events("api/runs/events")) {
        $("#runs-gone").hidden = true;
        update(now, event);
      }
    } catch (error) {
      if (signal.aborted) return;
      $("#runs-gone").hidden = false;
      $("#runs-gone").textContent = now.context.reason(error.status ? error : { status: 0 });
      if (error.status === 401) return;
    }
    await pause(AGAIN, signal);
  }
}

function update(now, { folder, runs }) {
  const [before, isFirst] = [versions(now), !now.rows.length];
  now.rows = runs;
  if (!now.chosen.some((id) => runs.some((row) => row.id === id)) && runs.length) now.chosen = [runs[0].id];
  for (const one of [".tools", ".more"]) $(one).hidden = !runs.length;
  $("#runs-first").hidden = Boolean(runs.length);
  $("#runs-folder").textContent = runs.length ? folder : t("runsNone", { folder });
  list(now);
  if (isFirst) $("#runs-rows .chosen")?.scrollIntoView({ block: "nearest" });
  if (versions(now) !== before) draw(now);
}

/** What the chosen runs' files were when they were last read. */
const versions = (now) => now.chosen.map((id) => `${id} ${now.rows.find((row) => row.id === id)?.version}`).join("\n");

function choose(now, id, add) {
  if (!add) now.chosen = [id];
  else if (now.chosen.includes(id)) now.chosen = now.chosen.filter((other) => other !== id || now.chosen.length === 1);
  else if (now.chosen.length < MOST_CHOSEN) now.chosen = [...now.chosen, id];
  list(now);
  change(now, { low: null, high: null });
}

function list(now) {
  arrange($("#runs-rows"), now.rows.map((row) => {
    if (!now.items.has(row.id)) now.items.set(row.id, itemOf(now, row));
    const item = now.items.get(row.id);
    const at = now.chosen.indexOf(row.id);
    const facts = [row.steps ? `${count(row.step)} / ${count(row.steps)}` : row.step ? count(row.step) : "",
      told(row.figure), row.parameters ? short(row.parameters) : "",
      row.state === "running" && row.seconds_left ? t("runsLeft", { time: duration(row.seconds_left) }) : ""];
    item.node.className = at >= 0 ? "chosen" : "";
    item.box.checked = at >= 0;
    item.mark.className = at >= 0 ? `swatch c${at % 8}` : "swatch";
    item.open.setAttribute("aria-pressed", String(at >= 0 && now.chosen.length === 1));
    item.state.className = `state ${row.state.replaceAll(" ", "-")}`;
    item.state.textContent = own(row.state);
    item.facts.textContent = facts.filter(Boolean).join(" · ");
    return item.node;
  }));
}

/** A row of the list. It stays while its run is there, so that no click is lost to an update. */
function itemOf(now, { id, stage }) {
  const [state, facts] = [el("span"), el("span", { class: "run-facts" })];
  const box = el("input", { type: "checkbox", "aria-label": t("runsCompare", { run: id }), on: { change: () => choose(now, id, true) } });
  const mark = el("i", { "aria-hidden": "true" });
  const open = el("button", { type: "button", class: "run", on: { click: () => choose(now, id, false) } },
    el("span", { class: "run-name", text: id === "." ? stage || "." : id }), state, facts);
  return { node: el("li", {}, box, mark, open), box, mark, open, state, facts };
}

/** Ask for the curves and draw them. While one question is open, only the newest of further ones is kept. */
async function draw(now) {
  if (now.drawing) return void (now.again = true);
  now.drawing = true;
  try {
    do {
      now.again = false;
      await drawOnce(now);
    } while (now.again);
  } catch (error) {
    now.context.fail(error);
  } finally {
    now.drawing = false;
  }
}

async function drawOnce(now) {
  const run = now.chosen.filter((id) => now.rows.some((row) => row.id === id));
  if (!run.length) return;
  const query = { run, x: now.x, smooth: now.smooth };
  if (now.low !== null) query.low = now.low;
  if (now.high !== null) query.high = now.high;
  const { api } = now.context;
  const [main, small] = await Promise.all([api.get("api/curves", query), now.small ? api.get("api/curves", { ...query, small: true }) : { charts: [] }]);
  const view = {
    x: now.x, logX: now.logX, logY: now.logY, alone: run.length === 1, theme: document.documentElement.dataset.theme,
    colours: Object.fromEntries(now.chosen.map((id, place) => [id, place])),
    zoom: (low, high) => change(now, { low: Math.max(0, low), high }),
  };
  place(now, $("#runs-charts"), main.charts, view);
  const empty = main.charts.every((chart) => !chart.series.length);
  if (empty && (now.low ?? now.high) !== null) fill($("#runs-charts"), el("p", { class: "hint", text: t("runsNoPoints") }));
  place(now, $("#runs-small"), small.charts, view);
  if (run.length === 1) showDetails($("#runs-details"), await api.get("api/run", { run }), now.context);
  else showDifferences($("#runs-details"), run.map((id) => now.rows.find((row) => row.id === id)), await api.get("api/differences", { run }), now.context);
}

function place(now, container, charts, view) {
  const nodes = charts.filter((chart) => chart.series.length).map((chart) => {
    const key = `${container.id} ${chart.metric}`;
    if (!now.plots.has(key)) now.plots.set(key, new Plot());
    return [now.plots.get(key), chart];
  });
  arrange(container, nodes.map(([plot]) => plot.node));
  for (const [plot, chart] of nodes) plot.show(chart, view);
}
