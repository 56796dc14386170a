// The tab plan: what a training costs, while one drags. The newest request counts; older ones are ended.

import { pause } from "./api.js";
import { $, el, fill } from "./dom.js";
import { count, short, t } from "./i18n.js";
import "./plan_words.js";
import { choiceField, numberField, textField } from "./plan_fields.js";
import { duration, gibibytes, readNumber } from "./plan_numbers.js";
import { drawWaterfall, waterfall } from "./waterfall.js";
import { said } from "./words.js";

const DEFAULTS = { recipe: "pretrain", model: "26m", gpu: "RTX 3090" };
const NAMES = ["recipe", "model", "tokens", "unique", "seq_len", "batch", "gpu", "gpus", "strategy", "optimizer", "checkpointing", "price"];
const HERE = "here"; // in the place of a card: this machine
const PAUSE = 0.25; // seconds of rest, before the tables are asked for
// The field that an error is about, by what the error names.
const FIELD_OF = { "model.preset": "model", "data.seq_len": "seq_len", "batch.size": "batch", "parallel.strategy": "strategy",
  "optimizer.name": "optimizer", "compute.activation_checkpointing": "checkpointing" };
const FIGURES = ["time", "cost", "memory", "energy", "speed", "tokens", "epochs", "flops", "loss", "parameters"];

let page = null; // of the opened tab

export async function open(root, context) {
  const state = { ...DEFAULTS };
  for (const name of NAMES) if (context.params.has(name)) state[name] = context.params.get(name);
  page = { context, state, estimate: context.newest(), refine: context.newest(), answer: null };
  const choices = await context.api.get("/api/plan/choices");
  fill(root, build(choices));
  $("#plan-status").textContent = t("uiLoading");
  await ask();
}

// --- the form --------------------------------------------------------------------------------------------------------

function build(choices) {
  const { state } = page;
  const read = (name) => () => state[name] || "";
  const number = (name) => numberField(name, read(name), (value) => set({ [name]: value }));
  const choice = (name, options) => choiceField(name, options, read(name), (value) => set({ [name]: value }));
  const own = (names) => names.map((name) => [name, t(`planChoice_${name}`)]);
  const models = [["", t("planBySize")], ...choices.models.map((name) => [name, name])];
  const cards = choices.cards.map((card) => [card.name, `${card.name} · ${Math.round(card.memory_gib)} GB`]);
  const fields = {
    recipe: choice("recipe", own(choices.recipes)),
    model: choiceField("model", models, read("model"), (value) => set({ model: value || ladder(page.answer?.plan.parameters ?? 26e6) })),
    size: numberField("size", () => (state.model.startsWith("ladder-") ? state.model.slice(7) : ""),
      (value) => set({ model: value ? ladder(readNumber(value)) : DEFAULTS.model })),
    ...Object.fromEntries(["tokens", "unique", "seq_len", "batch", "gpus"].map((name) => [name, number(name)])),
    gpu: choice("gpu", [...cards, [HERE, t("planThisMachine")]]),
    strategy: choice("strategy", choices.strategies.map((name) => [name, name])),
    optimizer: choice("optimizer", [["", t("planRecipes")], ["muon", "Muon"], ["adamw", "AdamW"]]),
    checkpointing: choice("checkpointing", [["", t("planRecipes")], ...own(["none", "mlp", "block"])]),
    price: textField("price", read("price"), (value) => set({ price: value })),
  };
  page.fields = fields;
  const group = (title, ...names) => el("fieldset", { class: "card" }, el("legend", { text: t(title) }), names.map((name) => fields[name].node));
  const form = el("form", { class: "plan-form", "aria-label": t("planForm"), on: { submit: (event) => event.preventDefault() } },
    group("model", "recipe", "model", "size"), group("planData", "tokens", "unique", "seq_len", "batch"),
    group("planCards", "gpu", "gpus", "strategy", "price"), group("planMemory", "optimizer", "checkpointing"));
  return el("div", { class: "plan-columns" }, form, results());
}

const ladder = (size) => `ladder-${short(Math.min(Math.max(size, 5e5), 3e9)).toLowerCase()}`;

const sentence = (name) => t(`planNote_${name}`, {}, ""); // some have one of their own

function results() {
  const figure = (name) => el("div", { class: `figure ${name}` }, el("dt", { text: t(`planFigure_${name}`) }),
    el("dd", { id: `plan-out-${name}`, text: "–" }), el("dd", { class: "hint", id: `plan-note-${name}`, text: sentence(name) }));
  const refine = el("button", { type: "button", class: "primary", id: "plan-refine", text: t("planRefine"), on: { click: toggleRefine } });
  return el("div", { class: "plan-results is-stale" },
    el("p", { id: "plan-status", role: "status", class: "hint" }),
    el("dl", { class: "plan-figures card" }, FIGURES.map(figure)),
    el("section", { class: "card" }, el("h2", { text: t("planWaterfall") }),
      waterfall(),
      el("div", { class: "row" }, refine, el("p", { class: "hint", id: "plan-source" }))),
    el("section", { class: "card", id: "plan-commands" }, el("h2", { text: t("uiCommand") }), el("div", { id: "plan-lines" }),
      el("p", { class: "hint", text: t("planCommandHint") }),
      el("button", { type: "button", class: "plain gap", text: t("planTrain"), on: { click: train } })),
    el("section", { class: "card" }, el("h2", { text: t("planWhichCards") }), el("div", { class: "scroll-y", id: "plan-cards", tabindex: 0, role: "region", "aria-label": t("planWhichCards") })),
    el("section", { class: "card" }, el("h2", { text: t("planWhichSizes") }), el("div", { class: "scroll-y", id: "plan-sizes", tabindex: 0, role: "region", "aria-label": t("planWhichSizes") })),
    el("details", { class: "card" }, el("summary", { text: t("planAdvice") }), el("ul", { id: "plan-advice" })));
}

// --- asking ----------------------------------------------------------------------------------------------------------

function set(part) {
  Object.assign(page.state, part);
  ask();
}

const given = () => Object.fromEntries(NAMES.filter((name) => page.state[name]).map((name) => [name, page.state[name]]));

/** What the server is asked: the machine that it runs on has no name. */
const body = () => Object.fromEntries(Object.entries(given()).filter(([, value]) => value !== HERE));

/** The plan, and after a rest the tables. */
function ask() {
  const asked = body();
  const { context, estimate, refine } = page;
  const post = (kind, signal) => context.api.post(`/api/plan/${kind}`, asked, signal);
  context.keep(given());
  if (refine.cancel()) refining(false);
  return estimate.ask(async (signal) => {
    const answer = await post("estimate", signal);
    show(answer);
    if (answer.refused) return;
    await pause(PAUSE, signal);
    table($("#plan-cards"), "planField_gpu", (await post("cards", signal)).rows, asked.gpu, (name) => set({ gpu: name }));
    table($("#plan-sizes"), "planField_model", (await post("sizes", signal)).rows, asked.model, (name) => set({ model: name }));
  }).catch(context.fail);
}

async function toggleRefine() {
  const { context, refine } = page;
  if (refine.cancel()) return refining(false);
  refining(true);
  try {
    const answer = await refine.ask((signal) => context.api.post("/api/plan/refine", body(), signal));
    if (answer) show({ ...page.answer, ...answer });
  } catch (error) {
    context.fail(error);
    refining(false);
  }
  return undefined;
}

function train() {
  const { answer, context, state } = page;
  if (answer) context.go("train", { recipe: state.recipe, settings: JSON.stringify(answer.settings) });
}

function refining(on) {
  $("#plan-refine").textContent = t(on ? "cancel" : "planRefine");
  if (on) $("#plan-source").textContent = t("planTracing");
  else if (page.answer) $("#plan-source").textContent = source(page.answer.plan);
}

// --- showing ---------------------------------------------------------------------------------------------------------

const source = (plan) => t(plan.traced ? "planTraced" : "planByFormula", { rows: plan.micro_size, passes: plan.passes });

function show(answer) {
  const { refused } = answer;
  const at = refused && fieldOf(refused.where);
  for (const [name, field] of Object.entries(page.fields)) field.refuse(name === at ? said(refused.message) : "");
  $(".plan-results").classList.toggle("is-stale", Boolean(refused));
  $("#plan-status").classList.toggle("bad", Boolean(refused));
  if (!refused) page.answer = answer;
  for (const field of Object.values(page.fields)) field.show(page.answer?.plan);
  if (refused) {
    $("#plan-status").textContent = said(refused.message);
    return;
  }
  refining(false);
  const { plan } = answer;
  const shown = figures(plan);
  $("#plan-status").textContent = t("planFor", { model: shown.parameters[0], devices: plan.devices, card: plan.device, time: shown.time[0],
    cost: plan.cost && ` · ${plan.cost}`, memory: shown.memory[0], fits: fitting(plan) });
  for (const [name, [value, note]] of Object.entries(shown)) {
    $(`#plan-out-${name}`).textContent = value;
    $(`#plan-note-${name}`).textContent = note ?? sentence(name);
  }
  $(".figure.memory").dataset.fits = verdictOf(plan);
  drawWaterfall($(".waterfall"), plan.waterfall, plan.memory_bytes);
  fill($("#plan-lines"), Object.values(answer.commands).map((line) => page.context.commandLine(line)));
  fill($("#plan-advice"), [...plan.warnings, ...plan.alternatives, ...plan.advice].map((line) => el("li", { text: line })));
}

function fieldOf(where) {
  const name = Object.keys(FIELD_OF).find((key) => where.endsWith(key));
  return name ? FIELD_OF[name] : NAMES.find((field) => where === `--${field}` || where === field);
}

const verdictOf = (plan) => (plan.fits === false ? "no" : plan.tight ? "tight" : plan.fits ? "yes" : "unknown");
const fitting = (plan) => t(`planMark_${verdictOf(plan)}`);

function figures(plan) {
  const [low, high] = [plan.predicted_seconds_low, plan.predicted_seconds_high].map(duration);
  return {
    time: [duration(plan.predicted_seconds), t("planBetween", { low, high, level: t(`planLevel_${plan.level}`, {}, plan.level) })],
    cost: plan.cost ? [plan.cost, t("planPerHour", { price: plan.price.split(" an hour")[0] })] : ["–"],
    memory: [gibibytes(plan.peak_memory_bytes), `${fitting(plan)} · ${t("planCardHas", { memory: plan.memory_bytes ? gibibytes(plan.memory_bytes) : "?" })}`],
    energy: [`${Number(plan.kilowatt_hours.toPrecision(2))} kWh`],
    speed: [t("planPerSecond", { tokens: short(plan.tokens_per_second) }),
      plan.mfu_causal ? t("planMfu", { mfu: Math.round(plan.mfu_causal * 100), bottleneck: t(`planPart_${plan.bottleneck}`) }) : null],
    tokens: [short(plan.tokens), t("planSteps", { steps: count(plan.steps), each: count(plan.tokens_per_step), ratio: Number((plan.tokens / plan.parameters).toPrecision(2)) })],
    epochs: plan.unique_tokens ? [Number(plan.epochs.toPrecision(3)), t("planOfUnique", { tokens: short(plan.unique_tokens) })] : ["–"],
    flops: [(plan.flops_per_token * plan.tokens).toExponential(2).replace("+", "")],
    loss: plan.expected_loss ? [plan.expected_loss.toFixed(2)] : ["–"],
    parameters: [short(plan.parameters), plan.active_parameters === plan.parameters ? null : t("planActive", { count: short(plan.active_parameters) })],
  };
}

function table(place, named, rows, chosen, choose) {
  const row = (one) => {
    const name = el("button", { type: "button", class: "link", text: one.name, on: { click: () => choose(one.name) } });
    if (one.refused) return el("tr", { class: "refused" }, el("td", {}, name), el("td", { colspan: 4, class: "hint", text: said(one.refused.message) }));
    return el("tr", { "data-fits": verdictOf(one), "aria-current": one.name === chosen ? "true" : null }, el("td", {}, name),
      el("td", { class: "verdict", text: fitting(one) }), el("td", { text: gibibytes(one.peak_memory_bytes) }),
      el("td", { text: duration(one.predicted_seconds) }), el("td", { text: one.cost || "–" }));
  };
  const heads = [named, "planHeadFits", "planFigure_memory", "planFigure_time", "planFigure_cost"].map((key) => el("th", { scope: "col", text: t(key) }));
  const top = place.scrollTop;
  fill(place, el("table", { class: "figures" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows.map(row))));
  place.scrollTop = top;
}
