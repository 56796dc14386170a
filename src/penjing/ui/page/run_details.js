// What one run left behind: buttons, plan and outcome, samples, incidents, checkpoints, settings.

import { arrange, el } from "./dom.js";
import { count, short, t } from "./i18n.js";
import { figure, named, told } from "./plot.js";
import { duration, gibibytes } from "./plan_numbers.js";
import { table } from "./table.js";
import { own, said } from "./words.js";

const opened = new Set(); // sections that a person has opened or closed
const made = new WeakMap(); // by container: the parts that are shown, and of what they were made

/** run: as the server describes it. Only parts that have changed are made anew: a person may be reading. */
export function showDetails(container, run, context) {
  const parts = {
    actions: [[run.state, run.checkpoints, run.command, run.delivered, run.settings], () => actions(run, context)],
    why: [[run.why, run.state], () => run.why && el("p", { class: run.state === "stopped" ? "hint" : "panel-error", text: said(run.why) })],
    samples: [run.samples, () => section("samples", t("runsSamples"), samples(run), true)],
    plan: [[run.terms, run.warnings], () => section("plan", t("runsPlan"), terms(run), true)],
    incidents: [run.incidents, () => section("incidents", t("runsIncidents", { count: run.incidents.length }), incidents(run), run.incidents.length > 0)],
    log: [[run.log, run.state], () => section("log", t("runsLog"), run.log ? el("pre", { class: "log", tabindex: "0", text: run.log }) : null, ["failed", "starting"].includes(run.state))],
    settings: [run.settings, () => section("settings", t("settings"), Object.keys(run.settings).length ? table([], Object.entries(run.settings), t("settings")) : null, false)],
  };
  showParts(container, run.id, parts);
}

/** rows: of several runs, in the list. differences: by setting, its value in each. */
export function showDifferences(container, rows, differences, context) {
  const names = Object.keys(differences);
  const lines = rows.map(({ id, figure: one }, at) => [id, told(one), ...names.map((name) => differences[name][at])]);
  showParts(container, "", {
    differences: [[lines, names], () => section("differences", t("runsDifferences"), el("div", { class: "differences" }, table([t("uiRuns"), t("runsFigure"), ...names], lines, t("runsDifferences"))), true)],
    report: [rows.map(({ id }) => id), () => context.commandLine(`penjing report ${rows.map(({ id }) => `'${id.replaceAll("'", "'\\''")}'`).join(" ")}`)],
  });
}

function showParts(container, of, parts) {
  const before = made.get(container) ?? {};
  const now = Object.fromEntries(Object.entries(parts).map(([id, [data, make]]) => {
    const key = JSON.stringify([of, data]);
    return [id, before[id]?.key === key ? before[id] : { key, node: make() }];
  }));
  made.set(container, now);
  arrange(container, Object.values(now).map(({ node }) => node).filter(Boolean));
}

function section(id, title, content, open) {
  if (!content) return null;
  const node = el("details", { class: "card", open: open !== opened.has(id) }, el("summary", { text: title }), content);
  node.addEventListener("toggle", () => (node.open === open ? opened.delete(id) : opened.add(id)));
  return node;
}

function actions(run, context) {
  const act = (name, path, className) => context.actButton(className, t(name), () => context.api.post(path, { run: run.id }));
  const active = ["running", "starting"].includes(run.state);
  const begun = Object.keys(run.settings).length > 0; // else it failed before it wrote its settings
  const canContinue = begun && !active && run.state !== "finished";
  const used = run.delivered, losses = used && { name: named(used), step: count(used.step), newest: count(used.newest), loss: figure(used.loss), last: figure(used.newest_loss) };
  const step = el("select", { "aria-label": t("uiCheckpoint") }, run.checkpoints.map((value) => el("option", { value, selected: value === used?.step, text: t("uiStep", { step: count(value) }) })));
  const chat = el("button", { type: "button", class: "plain", text: t("runsChat"), on: { click: () => context.go("chat", { run: run.id, step: step.value }) } });
  return el("div", { class: "card" }, el("h2", { text: run.id }),
    el("div", { class: "row" },
      active ? act("runsStop", "api/stop", "plain") : null,
      canContinue ? act("runsContinue", "api/resume", "primary") : null,
      run.checkpoints.length ? [step, chat] : el("span", { class: "hint", text: t("runsNoCheckpoint") }),
      begun ? el("button", { type: "button", class: "plain", text: t("runsAgain"), on: { click: () => context.go("train", { recipe: `${run.id}/run.toml` }) } }) : null),
    typeof used?.loss === "number" ? el("p", { class: "hint", text: t(used.step === used.newest ? "runsUsedNewest" : "runsUsedBest", losses) }) : null,
    begun && !active ? el("div", { class: "gap" }, context.commandLine(run.command)) : null);
}

const UNITS = { seconds: duration, bytes: gibibytes, "tokens per second": (value) => t("planPerSecond", { tokens: short(value) }) };

function terms(run) {
  if (!run.terms.length) return null;
  const show = (value, unit) => (UNITS[unit] ?? ((one) => (one >= 1e4 ? short(one) : figure(one))))(value);
  const percent = (error) => (error === null ? "–" : `${["−", "", "+"][Math.sign(Math.round(error * 100)) + 1]}${Math.abs(error * 100).toFixed(0)}\u00a0%`);
  return el("div", {}, table(["runsTerm", "runsPredicted", "runsActual", "runsError"].map((key) => t(key)),
    run.terms.map(([name, unit, predicted, actual, error]) => [own(name), show(predicted, unit), show(actual, unit), percent(error)]), t("runsPlan")),
  run.warnings.map((text) => el("p", { class: "hint", text })));
}

/** The texts of each prompt, the newest first, so that one reads down how they improved. */
function samples(run) {
  if (!run.samples.length) return null;
  return el("div", { class: "samples" }, run.samples.map(({ prompt, language, texts }) => el("div", { lang: language === "zh" ? "zh-Hans" : language || null },
    el("h3", { text: prompt }),
    el("ol", { tabindex: "0" }, [...texts].reverse().map(([step, text]) => el("li", {}, el("span", { class: "hint", text: t("uiStep", { step: count(step) }) }), el("p", { text })))))));
}

function incidents(run) {
  if (!run.incidents.length) return null;
  const rest = ({ step, kind, ...more }) => Object.entries(more).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : said(String(value))}`).join(", ");
  return el("ul", { class: "incidents" }, [...run.incidents].reverse().map((incident) => el("li", {},
    el("strong", { text: `${t("uiStep", { step: count(incident.step) })}: ${own(String(incident.kind ?? ""))}` }), el("span", { class: "hint", text: ` ${rest(incident).slice(0, 300)}` }))));
}

