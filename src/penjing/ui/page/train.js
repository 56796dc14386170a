// The tab of training: a form of the settings as the code declares them. Only what was changed is sent; the server says
// of each change what the command line would.

import { pause } from "./api.js";
import { button, el, fill } from "./dom.js";
import { current, t } from "./i18n.js";
import { read, write } from "./preferences.js";
import "./train_words.js";
import { said } from "./words.js";

const KEPT = "penjing.train"; // in this browser tab: the recipe and what was changed
const PAUSE = 0.25; // seconds after a key, until the server is asked
// What most people set, shown first.
const OFTEN = ["data.train", "model.preset", "init_from", "out", "max_steps", "epochs", "batch.size", "data.seq_len", "optimizer.learning_rate", "seed"];

export async function open(root, context) {
  const now = { context, root, changed: {}, values: {}, recipe: "pretrain", newest: context.newest() };
  root.append(el("p", { class: "hint", role: "status", text: t("trainLoading") }));
  const [form, { runs }, { files }] = await Promise.all(["settings", "runs", "data/files"].map((path) => context.api.get(`api/${path}`)));
  const [recipe, changed] = [context.params.get("recipe"), context.params.get("settings")]; // from another tab
  const begun = recipe ? { recipe, changed: JSON.parse(changed || "{}") } : read(KEPT, {}, "sessionStorage");
  Object.assign(now, { form, runs: runs.map((row) => row.id), files: files.map((file) => file.path) }, begun);
  context.keep({}); // a reload keeps what was changed since
  build(now);
  await check(now, 0);
}

function build(now) {
  const { form, runs } = now;
  const recipe = el("select", { id: "train-recipe", "aria-describedby": "train-about" },
    el("optgroup", { label: t("trainRecipes") }, form.recipes.map(({ name }) => el("option", { value: name, text: name }))),
    runs.length ? el("optgroup", { label: t("trainAsRun") }, runs.map((run) => el("option", { value: `${run}/run.toml`, text: run }))) : null);
  recipe.value = now.recipe;
  if (recipe.selectedIndex < 0) recipe.value = now.recipe = form.recipes[0].name;
  const about = el("p", { class: "hint", id: "train-about" });
  const explain = () => (about.textContent = help(form.recipes.find(({ name }) => name === now.recipe)));
  explain();
  recipe.addEventListener("change", () => {
    now.recipe = recipe.value;
    explain();
    check(now, 0);
  });
  const search = el("input", { type: "search", class: "plain-input", id: "train-search", placeholder: t("trainSearch"), "aria-label": t("trainSearch"), autocomplete: "off" });
  search.addEventListener("input", () => filter(now, search.value));
  now.fields = new Map();
  const all = form.groups.flatMap((group) => group.fields);
  const often = { name: t("trainOften"), help: "", fields: OFTEN.flatMap((path) => all.filter((field) => field.path === path)) };
  const groups = [often, ...form.groups.map((group) => ({ ...group, fields: group.fields.filter((field) => !OFTEN.includes(field.path)) }))];
  now.groups = groups.filter((group) => group.fields.length).map((group, place) => groupOf(now, group, place === 0));
  now.result = el("div", { class: "train-result" });
  fill(now.root,
    el("datalist", { id: "train-presets" }, form.presets.map((value) => el("option", { value }))),
    el("datalist", { id: "train-files" }, now.files.map((value) => el("option", { value }))),
    el("datalist", { id: "train-runs" }, runs.map((value) => el("option", { value }))),
    el("div", { class: "train-head" }, el("div", { class: "field" }, el("label", { for: "train-recipe", text: t("trainRecipe") }), recipe, about), search),
    el("div", { class: "train-columns" }, el("form", { class: "train-form", on: { submit: (event) => event.preventDefault() } }, now.groups.map(({ node }) => node)), now.result));
}

/** What the code says of a setting, a group or a recipe; in Chinese, what the table of the server says. */
const help = (about) => (current() === "zh" && about?.zh) || about?.help || "";

function groupOf(now, group, open) {
  const fields = group.fields.map((field) => fieldOf(now, field));
  const node = el("details", { class: "card", open }, el("summary", {}, group.name || t("trainRun"), el("span", { class: "unit", text: ` ${help(group)}` })), fields.map((field) => field.node));
  return { node, fields, open };
}

function fieldOf(now, field) {
  const id = `set-${field.path}-${field.needs}`.replace(/[^\w-]/g, "_");
  const about = { id, "aria-describedby": `${id}-help ${id}-error`, autocomplete: "off", spellcheck: "false" };
  const options = field.kind === "yes" ? ["true", "false"] : field.options;
  const lists = { "data.train": "train-files", "model.preset": "train-presets", init_from: "train-runs", "objective.teacher": "train-runs" };
  const input = ["choice", "yes"].includes(field.kind)
    ? el("select", about, el("option", { value: "" }), options.map((value) => el("option", { value, text: value })))
    : el("input", { type: "text", ...about, class: "plain-input", list: lists[field.path], inputmode: { whole: "numeric", number: "decimal" }[field.kind] });
  const error = el("p", { class: "bad", hidden: true, id: `${id}-error` });
  const set = (value) => {
    if (value === "") delete now.changed[field.path];
    else now.changed[field.path] = value;
    check(now);
  };
  input.addEventListener("input", () => set(input.value));
  const undo = button("close", t("trainUndo", { name: field.path }), () => {
    input.value = "";
    set("");
    input.focus();
  });
  const leaf = field.path.split(".").at(-1);
  const node = el("div", { class: "setting" }, el("label", { for: id, text: OFTEN.includes(field.path) ? field.path : leaf }), el("div", { class: "setting-input" }, input, undo),
    el("p", { class: "hint", id: `${id}-help`, text: [help(field), field.range.join(", ")].filter(Boolean).join(" · ") }), error);
  const entry = { field, node, input, undo, error };
  now.fields.set(`${field.path} ${field.needs}`, entry);
  return entry;
}

/** Ask the server soon what these settings would do, and show it. */
async function check(now, seconds = PAUSE) {
  const settings = { ...now.changed };
  write(KEPT, { recipe: now.recipe, changed: settings }, "sessionStorage");
  try {
    const answer = await now.newest.ask(async (signal) => {
      await pause(seconds, signal);
      show(now, settings);
      return now.context.api.post("api/check", { recipe: now.recipe, settings }, signal);
    });
    if (!answer) return;
    now.values = answer.values;
    show(now, settings);
    result(now, answer, settings);
  } catch (error) {
    result(now, { error: { where: error.param ?? "", message: now.context.reason(error) }, command: "", decisions: [] }, settings);
  }
}

/** Which settings exist under the present choices, their values, and which were changed. */
function show(now, changed) {
  for (const { field, node, input, undo } of now.fields.values()) {
    const [choice, wanted] = field.needs.split("=");
    node.dataset.absent = String(Boolean(choice) && (changed[choice] ?? now.values[choice]) !== wanted);
    const value = changed[field.path] ?? "";
    if (input.value !== value && document.activeElement !== input) input.value = value;
    const own = now.values[field.path] ?? "";
    if (input.tagName === "SELECT") input.options[0].textContent = value === "" ? own : "";
    else input.placeholder = own;
    node.classList.toggle("changed", value !== "");
    undo.hidden = value === "";
  }
}

function result(now, { error, command, decisions, out }, settings) {
  const names = ({ path }) => [path, path.replace(/\.(name|preset)$/, "")];
  const wrong = error && [...now.fields.values()].find(({ field, node }) => node.dataset.absent === "false" && names(field).includes(error.where));
  for (const entry of now.fields.values()) {
    entry.error.hidden = entry !== wrong;
    entry.error.textContent = entry === wrong ? said(error.message) : "";
    entry.input.setAttribute("aria-invalid", String(entry === wrong));
  }
  const start = now.context.actButton("primary", t("trainStart"), async () => {
    const { run } = await now.context.api.post("api/start", { recipe: now.recipe, settings });
    now.context.go("runs", { run });
  });
  Object.assign(start, { id: "train-start", disabled: Boolean(error) });
  fill(now.result,
    error ? el("p", { class: "panel-error", role: "alert", text: said(error.message) }) : el("p", { class: "hint", role: "status", text: t("trainInto", { out }) }),
    command ? now.context.commandLine(command) : null,
    el("div", { class: "row gap" }, start, Object.keys(settings).length ? el("button", { type: "button", class: "plain", text: t("trainReset"), on: { click: () => {
      now.changed = {};
      document.activeElement?.blur();
      check(now, 0);
    } } }) : null),
    decisions.length ? el("ul", { class: "decisions" }, decisions.map(([name, was, is, why]) => el("li", {}, el("strong", { text: `${name}: ${was} → ${is}` }), ` ${why}`))) : null);
}

/** Only the settings that hold all of these words, in their name or help. */
function filter(now, text) {
  const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of now.groups) {
    let found = 0;
    for (const { field, node } of group.fields) {
      const all = `${field.path} ${field.help} ${field.zh}`.toLowerCase();
      node.hidden = !wanted.every((word) => all.includes(word));
      if (!node.hidden && node.dataset.absent === "false") found += 1;
    }
    group.node.hidden = wanted.length > 0 && !found;
    group.node.open = wanted.length ? found > 0 : group.open;
  }
}
