// The conversation on the page: questions, and under each its answers, one or two side by side.

import { answerView } from "./answer_view.js";
import { answerOf, longerVersion, path, siblings } from "./conversation.js";
import { button, copyButton, el, grow } from "./dom.js";
import { t } from "./i18n.js";

/**
 * Show a conversation in a container. actions: {edit(node, text), retry(node, lane), choose(node, lane, step, token,
 * other), show(node, place), goOn(node, lane)}. Returns the views of its answers: Map(answer -> {update}).
 */
export function showThread(container, conversation, { look, actions }) {
  const views = new Map();
  const items = path(conversation).map((node) =>
    node.answers ? answers(conversation, node, look, actions, views) : question(conversation, node, actions),
  );
  container.replaceChildren(...items);
  return views;
}

function versions(conversation, node, show) {
  const { place, of } = siblings(conversation, node);
  if (of < 2) return null;
  const back = button("left", t("before"), () => show(node, place - 1));
  const on = button("right", t("after"), () => show(node, place + 1));
  back.disabled = place === 0;
  on.disabled = place === of - 1;
  return el("span", { class: "versions" }, back, el("span", { text: `${place + 1} / ${of}` }), on);
}

/** Says that the conversation goes on under another version of this node, and leads there. */
function later(conversation, node, show) {
  const place = longerVersion(conversation, node);
  if (place < 0) return null;
  return el("p", { class: "later", role: "status" }, el("span", { text: t("laterTurns", { place: place + 1 }) }),
    el("button", { type: "button", class: "plain", text: t("showLater"), on: { click: () => show(node, place) } }));
}

function question(conversation, node, actions) {
  const bubble = el("div", { class: "bubble", text: node.text });
  const edit = button("edit", t("edit"), () => item.replaceChildren(editor(node, actions, () => item.replaceChildren(...usual))));
  const tools = el(
    "div",
    { class: "actions" },
    versions(conversation, node, actions.show),
    edit,
    copyButton(t("copy"), t("copied"), () => node.text),
  );
  const usual = [el("h2", { class: "visually-hidden", text: t("you") }), bubble, tools, later(conversation, node, actions.show)].filter(Boolean);
  const item = el("article", { class: "question" }, usual);
  return item;
}

function editor(node, actions, cancel) {
  const area = el("textarea", { class: "edit", "aria-label": t("editLabel"), rows: "1" });
  area.value = node.text;
  const done = () => area.value.trim() && actions.edit(node, area.value);
  area.addEventListener("input", () => grow(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  queueMicrotask(() => {
    grow(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  const row = el(
    "div",
    { class: "edit-row" },
    el("button", { type: "button", class: "plain", text: t("cancel"), on: { click: cancel } }),
    el("button", { type: "button", class: "primary", text: t("sendEdited"), on: { click: done } }),
  );
  return el("div", { class: "editor" }, area, row);
}

function answers(conversation, node, look, actions, views) {
  const lanes = node.answers.map((answer, lane) => {
    const onChoose = (step, token, other) => actions.choose(node, lane, step, token, other);
    const onGoOn = node.children.length ? null : () => actions.goOn(node, lane);
    const view = answerView(answer, { look, onChoose, onGoOn });
    views.set(answer, view);
    return el(
      "section",
      { class: "lane", "aria-label": answer.model },
      el("header", { class: "lane-head" }, el("span", { class: "leaf", "aria-hidden": "true" }), el("h2", { text: answer.model }), remark(answer)),
      view.node,
      el(
        "div",
        { class: "actions" },
        lane === 0 ? versions(conversation, node, actions.show) : null,
        copyButton(t("copy"), t("copied"), () => said(answerOf(node, lane))),
        button("retry", t("retry"), () => actions.retry(node, lane)),
      ),
    );
  });
  return el("article", { class: `answers lanes-${lanes.length}`, tabindex: "-1" }, lanes, later(conversation, node, actions.show));
}

const said = ({ steps }) => steps.map((step) => step.content).join("\n\n").trim() || steps.map((step) => step.reasoning).join("\n\n");

const remark = (answer) => (answer.continued ? el("span", { class: "remark", text: t("continues") }) : null);

/** Says finished sentences, and not every token, to a screen reader. */
export function announcer(region) {
  let said = 0;
  let about = null;
  return (answer, text, finished) => {
    if (about !== answer) [about, said] = [answer, 0];
    const rest = text.slice(said);
    const end = finished ? rest.length : Math.max(...[...rest.matchAll(/[.!?。！？\n]/g)].map((match) => match.index + 1), 0);
    if (end < 1) return;
    said += end;
    region.append(el("p", { text: rest.slice(0, end) }));
    while (region.childNodes.length > 6) region.firstChild.remove();
  };
}
