// The tab data: the data files of the folder, a look at one as the trainer sees it, and a dry run of cleaning.

import { $, el, field, fill } from "./dom.js";
import { count, t } from "./i18n.js";
import "./data_words.js";
import { table } from "./table.js";
import { own } from "./words.js";

const MOST_SHOWN = 300; // files of the list

let page = null; // of the opened tab

export async function open(root, context) {
  const found = await context.api.get("/api/data/files");
  page = { context, files: found.files, folder: found.folder, newest: context.newest(), state: Object.fromEntries(context.params) };
  fill(root, build(found));
  list();
  if (page.state.file) await look();
  else if (page.state.cleaned) await openCleaned(page.state.cleaned);
}

const local = (path) => (path.startsWith(`${page.folder}/`) ? path.slice(page.folder.length + 1) : path);
const megabytes = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

function keep(part) {
  Object.assign(page.state, part);
  page.context.keep(Object.fromEntries(Object.entries(page.state).filter(([, value]) => value)));
}

// --- the form --------------------------------------------------------------------------------------------------------

function build(found) {
  const entry = (name) => {
    const input = el("input", { type: "text", class: "plain-input", id: `data-${name}`, autocomplete: "off",
      on: { change: () => keep({ [name]: input.value.trim() }), keydown: (event) => event.key === "Enter" && (keep({ [name]: input.value.trim() }), look()) } });
    input.value = page.state[name] ?? "";
    return field(input, t(`dataField_${name}`), t(`dataHint_${name}`), "data-field");
  };
  const search = el("input", { type: "search", class: "plain-input", "aria-label": t("dataSearch"), placeholder: t("dataSearch"), on: { input: list } });
  const rules = el("select", { id: "data-rules", "aria-label": t("dataRules") },
    ["default", ...found.rules].map((name) => el("option", { value: name, text: name === "default" ? t("dataDefault") : name })));
  const button = (key, className, click, id) => el("button", { type: "button", class: className, text: t(key), id, on: { click } });
  const cleaned = found.cleaned.map((folder) => el("li", {}, el("button", { type: "button", class: "data-file", text: folder, on: { click: () => openCleaned(folder) } })));
  return el("div", { class: "plan-columns" },
    el("section", { class: "card", "aria-label": t("dataFiles") }, el("h2", { text: t("dataFiles") }), search,
      el("ul", { id: "data-files", class: "data-files" }),
      found.is_cut ? el("p", { class: "hint", text: t("dataCut") }) : null,
      cleaned.length ? [el("h3", { text: t("dataCleaned") }), el("ul", { class: "data-files" }, cleaned)] : null),
    el("div", { class: "plan-results" },
      el("section", { class: "card" }, el("h2", { id: "data-title", text: t("dataChoose") }),
        el("div", { class: "data-fields" }, entry("tokenizer"), entry("columns")),
        el("div", { class: "row" }, button("dataLook", "primary", look), rules, button("dataDryRun", "plain", dryRun),
          el("span", { class: "spring" }), button("cancel", "plain unseen", () => (page.newest.cancel(), say(t("dataCancelled"))), "data-cancel")),
        el("p", { id: "data-status", role: "status", class: "hint" })),
      el("div", { id: "data-out", class: "plan-results" })));
}

function list() {
  const wanted = $(".card input[type=search]").value.toLowerCase();
  const files = page.files.filter((file) => file.path.toLowerCase().includes(wanted));
  const item = (file) => el("li", {}, el("button", { type: "button", class: "data-file", "aria-current": file.path === page.state.file ? "true" : null,
    on: { click: () => choose(file.path) } }, el("span", { text: file.path }), el("span", { class: "hint", text: megabytes(file.bytes) })));
  fill($("#data-files"), files.slice(0, MOST_SHOWN).map(item), files.length ? null : el("li", { class: "hint", text: t(page.files.length ? "dataNoneFound" : "dataNone") }));
}

function choose(path) {
  keep({ file: path, cleaned: "" });
  list();
  look();
}

// --- asking ----------------------------------------------------------------------------------------------------------

function say(text, { bad = false, running = false } = {}) {
  $("#data-status").textContent = text;
  $("#data-status").classList.toggle("bad", bad);
  $("#data-cancel").classList.toggle("unseen", !running);
}

/** Show what a request answers; a newer one ends it, and so does the button. */
async function run(message, request, show) {
  say(message, { running: true });
  try {
    const answer = await page.newest.ask(request);
    if (!answer) return;
    say("");
    fill($("#data-out"), show(answer));
  } catch (error) {
    say(page.context.reason(error), { bad: true });
  }
}

function look() {
  const { file, tokenizer, columns } = page.state;
  if (!file) return undefined;
  $("#data-title").textContent = file;
  const asked = Object.fromEntries(Object.entries({ path: file, tokenizer, columns }).filter(([, value]) => value));
  return run(t("dataLooking"), (signal) => page.context.api.post("/api/data/look", asked, signal), (answer) => [
    ...answer.groups.map(group),
    ...answer.not_understood.map((one) => el("p", { class: "panel-error", text: `${local(one.file)}: ${one.reason}` })),
  ]);
}

function dryRun() {
  if (!page.state.file) return undefined;
  const asked = { path: page.state.file, rule: $("#data-rules").value };
  return run(t("dataCleaning"), (signal) => page.context.api.post("/api/data/clean", asked, signal), (answer) => answer.cleaned.map(cleaning));
}

function openCleaned(folder) {
  keep({ cleaned: folder, file: "" });
  list();
  $("#data-title").textContent = folder;
  return run(t("uiLoading"), (signal) => page.context.api.get("/api/data/cleaning", { folder }, signal), (answer) => [
    ...answer.cleaned.map(cleaning),
    el("p", {}, el("button", { type: "button", class: "plain", text: t("dataReport"), title: answer.report, on: { click: () => openReport(answer.report) } })),
  ]);
}

/** In a window of its own, whose address is good for once. */
async function openReport(path) {
  const { fail, api } = page.context;
  try {
    open((await api.post("/api/data/report", { path })).address, "_blank", "noopener");
  } catch (error) {
    fail(error);
  }
}

// --- showing ---------------------------------------------------------------------------------------------------------

const facts = (pairs) => el("dl", { class: "data-facts" }, pairs.filter(([, value]) => value !== "").map(([key, value]) =>
  el("div", {}, el("dt", { text: t(key) }), el("dd", { text: String(value) }))));

function group(found) {
  const { records } = found;
  const scripts = Object.entries(found.scripts).filter(([, share]) => share >= 0.005).map(([name, share]) => `${own(name)} ${Math.round(share * 100)} %`).join(", ");
  const lengths = Object.entries(found.lengths).filter(([, values]) => Object.values(values).some(Boolean));
  const quantiles = Object.keys(lengths[0]?.[1] ?? {});
  return el("section", { class: "card data-group" }, el("h2", { text: t("dataKind", { kind: own(found.kind) }) }),
    facts([["dataRecords", count(records.good)], ["dataBad", records.bad ? count(records.bad) : ""], ["dataLeftOut", records.left_out ? count(records.left_out) : ""],
      ["dataTokens", count(found.tokens_estimate)], ["dataBytes", megabytes(found.bytes)], ["dataScripts", scripts],
      ["dataDuplicates", found.exact_duplicates ? count(found.exact_duplicates) : ""],
      ["dataRead", found.fields.map((field) => `${field.field} → ${field.read_as}`).join(", ")], ["dataEnd", found.read_to_the_end ? "" : t("dataNotToEnd")]]),
    lengths.length ? table([t("dataLength"), ...quantiles.map((name) => own(name))], lengths.map(([name, values]) => [own(name), ...quantiles.map((each) => count(values[each]))])) : null,
    el("ul", { class: "data-problems" },
      found.problems.map((one) => el("li", { class: "bad", text: `${one.kind} (${count(one.records)}): ${local(one.file)}:${one.line}: ${one.reason}` })),
      found.not_learned.map((one) => el("li", { text: t("dataNotLearned", { what: one.what, count: count(one.records) }) })),
      found.warnings.map((text) => el("li", { text }))),
    found.examples.length ? el("p", { class: "data-legend" }, el("span", { text: t("dataAsTrainer") }), " ", el("span", { class: "learned", text: t("dataLearned") }), " ",
      el("span", { class: "masked", text: t("dataMasked") }), " ", el("span", { class: "special", text: t("dataSpecial") })) : null,
    found.examples.map(example));
}

function example(found) {
  const rows = found.rows.flatMap((row) => [found.rows.length > 1 ? el("h4", { text: row.name }) : null,
    el("pre", { class: "data-row", tabindex: 0, role: "group", "aria-label": row.name }, row.spans.map((span) =>
      el("span", { class: `${span.learned ? "learned" : "masked"}${span.special ? " special" : ""}`, text: span.text })))]);
  return el("div", { class: "data-example" }, el("h3", { text: t(found.cut ? "dataPlaceCut" : "dataPlace", { file: local(found.file), line: found.line }) }),
    found.problem ? el("p", { class: "bad", text: found.problem }) : null, rows);
}

function cleaning(counts) {
  const total = Math.max(1, counts.records);
  const share = (number) => `${count(number)} (${((100 * number) / total).toFixed(1)} %)`;
  const samples = new Map();
  for (const one of counts.examples ?? []) {
    const title = [one.action, one.rule, one.reason].filter(Boolean).join(" · ");
    samples.set(title, [...(samples.get(title) ?? []), one]);
  }
  return el("section", { class: "card data-clean" }, el("h2", { text: t("dataCleanResult") }),
    facts([["dataRecords", count(counts.records)], ["dataKept", share(counts.kept)], ["dataDropped", share(counts.dropped)], ["dataChanged", share(counts.changed)], ["dataBad", share(counts.broken)]]),
    counts.rules?.length ? table([t("dataRule"), t("dataAction"), t("dataWhy"), t("dataRecords")], counts.rules.map(([action, rule, why, number]) => [rule, action, why, share(number)])) : null,
    [...samples].map(([title, ones]) => el("details", {}, el("summary", { text: `${title} (${ones.length})` }), ones.map(sample))));
}

function sample(one) {
  const text = (name) => one[name] ? el("pre", { class: `data-row ${name}` }, el("span", { class: "visually-hidden", text: `${t(`dataSample_${name}`)}: ` }), String(one[name])) : null;
  return el("div", { class: "data-example" }, el("p", { class: "hint", text: `${local(one.file)}:${one.line} ${one.detail ?? ""}` }), ["sample", "before", "after"].map(text));
}
