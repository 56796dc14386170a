// The list of conversations.

import { $, button, el } from "./dom.js";
import { t } from "./i18n.js";

/** Everything that is said in a conversation, to be searched. */
function wordsOf({ title, pieces, nodes }) {
  const answered = (node) => node.answers.flatMap((answer) => answer.steps.flatMap((step) => [step.content, step.reasoning]));
  const said = Object.values(nodes).flatMap((node) => (node.answers ? answered(node) : [node.text]));
  return [title, ...(pieces ?? []).map((piece) => piece.text), ...said].join("\n").toLowerCase();
}

/** query: words that a conversation must hold. actions: {open, rename, remove}, each of a conversation. */
export function showConversations(conversations, current, query, actions) {
  const list = $("#conversations");
  const wanted = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = wanted.length ? conversations.filter((one) => wanted.every((word) => wordsOf(one).includes(word))) : conversations;
  $("#search").hidden = !conversations.length;
  if (!found.length) {
    list.replaceChildren(el("li", { class: "empty", text: conversations.length ? t("noneFound") : t("noHistory") }));
    return;
  }
  list.replaceChildren(...found.map((conversation) => {
    const title = conversation.title || t("untitled");
    const open = el("button", {
      type: "button",
      class: "conversation",
      "aria-current": conversation === current ? "page" : null,
      text: title,
      title,
      on: { click: () => actions.open(conversation) },
    });
    return el("li", {}, open, el("span", { class: "edits" },
      button("edit", t("renameChat", { title }), () => actions.rename(conversation)),
      button("trash", t("deleteChat", { title }), () => actions.remove(conversation))));
  }));
}

/** The first words of a conversation, as its name. */
export function titleOf(text) {
  const line = text.trim().split("\n").at(-1);
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}

/** A small screen shows the list over the page. */
export function setMenu(open) {
  document.body.classList.toggle("menu-open", open);
  $("#menu").setAttribute("aria-expanded", String(open));
  if (open) $("#new-chat").focus();
}

/** Give the browser a file. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/x-ndjson" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
