// Blind comparison: one question, two answers without names in a random order, a vote; then the names, and the standing.

import { el, fill } from "./dom.js";
import { t } from "./i18n.js";
import { table } from "./table.js";

const VOTES = ["a", "b", "tie", "bad"]; // by the keys 1 to 4
// Outlives the tab and a change of language. open: the answers that wait for a vote, or had it; then names: of a and b.
const kept = { question: "", open: null, names: {} };

/** A card: {node, show(names of the loaded checkpoints)}. */
export function blindCard({ api, fail }) {
  const select = (label) => el("select", { "aria-label": t(label) });
  const [first, second] = [select("chatFirst"), select("chatSecond")];
  const text = el("textarea", { class: "plain-input", rows: "2", "aria-label": t("chatQuestion"), placeholder: t("chatQuestion"), on: { input: () => (kept.question = text.value) } });
  const ask = el("button", { type: "submit", class: "primary", text: t("chatAsk") });
  const form = el("form", { class: "blind-form", on: { submit: question } }, el("div", { class: "row" }, first, "⇄", second), text, ask);
  const needs = el("p", { class: "hint", text: t("chatBlindNeeds") });
  const answers = el("div", { class: "samples", role: "status" });
  const buttons = VOTES.map((choice, at) => el("button", { type: "button", class: "plain", text: t(`chatVote_${choice}`), "aria-keyshortcuts": at + 1, on: { click: () => vote(choice) } }));
  const votes = el("div", { class: "row gap", hidden: true }, buttons, el("span", { class: "hint", text: t("chatKeys") }));
  const strengths = el("div", { class: "gap" });
  const node = el("section", { class: "card gap", on: { keydown: keys } }, el("h2", { text: t("chatBlind") }), el("p", { class: "hint", text: t("chatBlindHint") }), needs, form, answers, votes, strengths);

  function drawn(part) {
    const { open, names } = Object.assign(kept, part);
    votes.hidden = !open || Boolean(names.a);
    fill(answers, open && ["a", "b"].map((side) => el("div", {},
      el("h3", { text: names[side] ? t("chatWas", { side: side.toUpperCase(), name: names[side] }) : side.toUpperCase() }), el("p", { text: open[side] }))));
  }

  async function question(event) {
    event.preventDefault();
    if (ask.disabled || !text.value.trim()) return;
    ask.disabled = votes.hidden = true;
    fill(answers, el("p", { class: "hint", text: t("chatAnswering") }));
    try {
      drawn({ open: await api.post("api/blind/ask", { first: first.value, second: second.value, question: text.value }), names: {} });
      buttons[0].focus();
    } catch (error) {
      drawn({ open: null });
      fail(error);
    }
    ask.disabled = false;
  }

  async function vote(choice) {
    if (votes.hidden) return;
    votes.hidden = true;
    try {
      const said = await api.post("api/blind/vote", { id: kept.open.id, vote: choice });
      drawn({ names: said });
      standing(said);
      text.focus();
      text.select();
    } catch (error) {
      votes.hidden = false;
      fail(error);
    }
  }

  function keys(event) {
    const choice = VOTES[Number(event.key) - 1];
    if (choice && event.target !== text && !event.ctrlKey && !event.altKey && !event.metaKey) vote(choice);
    if (event.key === "Enter" && event.target === text && !event.shiftKey && !event.isComposing) question(event);
  }

  function standing({ groups }) {
    const heads = ["uiCheckpoint", "chatStrength", "chatInterval", "chatWon", "chatTied", "chatLost"].map((key) => t(key));
    const row = ({ model, strength, low, high, won, tied, lost }) => [model, strength.toFixed(2), `${low.toFixed(2)} … ${high.toFixed(2)}`, won, tied, lost];
    fill(strengths, groups.length ? [el("h3", { text: t("chatStanding") }), el("p", { class: "hint", text: t("chatStandingHint") })] : null,
      groups.map((group) => table(heads, group.map(row))));
  }

  function show(names) {
    for (const [at, one] of [first, second].entries()) {
      const kept = one.value;
      fill(one, names.map((name) => el("option", { value: name, text: name })));
      one.value = names.includes(kept) ? kept : names[at] ?? "";
    }
    form.hidden = names.length < 2;
    needs.hidden = !form.hidden;
  }

  api.get("api/blind").then(standing, fail);
  text.value = kept.question;
  drawn();
  show([]);
  return { node, show };
}
