// The conversation on the page: questions, and under each its answers, one or two side by side.

import { answerView } from "./answer_view.js";
import { answerOf, longerVersion, path, siblings } from "./conversation.js";
import { button, copyButton, el, grow } from "./dom.js";
import { t } from "./i18n.js";

/** Show the open conversation in a container. Returns the views of its answers: Map(answer -> {update}). */
export function showThread(container, chat, look) {
  const views = new Map();
  const items = path(chat.conversation).map((node) => (node.answers ? answers(chat, node, look, views) : question(chat, node)));
  container.replaceChildren(...items);
  return views;
}

function versions(chat, node) {
  const { place, of } = siblings(chat.conversation, node);
  if (of < 2) return null;
  const back = button("left", t("before"), () => chat.show(node, place - 1));
  const on = button("right", t("after"), () => chat.show(node, place + 1));
  back.disabled = place === 0;
  on.disabled = place === of - 1;
  return el("span", { class: "versions" }, back, el("span", { text: `${place + 1} / ${of}` }), on);
}

/** Says that the conversation goes on under another version of this node, and leads there. */
function later(chat, node) {
  const place = longerVersion(chat.conversation, node);
  if (place < 0) return null;
  return el("p", { class: "later", role: "status" }, el("span", { text: t("laterTurns", { place: place + 1 }) }),
    el("button", { type: "button", class: "plain", text: t("showLater"), on: { click: () => chat.show(node, place) } }));
}

function question(chat, node) {
  const bubble = el("div", { class: "bubble", text: node.text });
  const edit = button("edit", t("edit"), () => item.replaceChildren(editor(node, chat, () => item.replaceChildren(...usual))));
  const tools = el(
    "div",
    { class: "actions" },
    versions(chat, node),
    edit,
    copyButton(t("copy"), t("copied"), () => node.text),
  );
  const usual = [el("h2", { class: "visually-hidden", text: t("you") }), bubble, tools, later(chat, node)].filter(Boolean);
  const item = el("article", { class: "question" }, usual);
  return item;
}

function editor(node, chat, cancel) {
  const area = el("textarea", { class: "edit", "aria-label": t("editLabel"), rows: "1" });
  area.value = node.text;
  const done = () => area.value.trim() && chat.edit(node, area.value);
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
    el("button", { type: "button", class: "primary", text: t("send"), on: { click: done } }),
  );
  return el("div", { class: "editor" }, area, row);
}

function answers(chat, node, look, views) {
  const lanes = node.answers.map((answer, lane) => {
    const onChoose = (step, token, other) => chat.chooseToken(node, lane, step, token, other);
    const onGoOn = node.children.length ? null : () => chat.writeOn(node, lane);
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
        lane === 0 ? versions(chat, node) : null,
        copyButton(t("copy"), t("copied"), () => said(answerOf(node, lane))),
        button("retry", t("retry"), () => chat.retry(node, lane)),
      ),
    );
  });
  return el("article", { class: `answers lanes-${lanes.length}`, tabindex: "-1" }, lanes, later(chat, node));
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
