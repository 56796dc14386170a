// The list of conversations.

import { $, button, el } from "./dom.js";
import { t } from "./i18n.js";

/** actions: {open(conversation), remove(conversation)}. */
export function showConversations(conversations, current, actions) {
  const list = $("#conversations");
  if (!conversations.length) {
    list.replaceChildren(el("li", { class: "empty", text: t("noHistory") }));
    return;
  }
  list.replaceChildren(...conversations.map((conversation) => {
    const title = conversation.title || t("untitled");
    const open = el("button", {
      type: "button",
      class: "conversation",
      "aria-current": conversation === current ? "page" : null,
      text: title,
      title,
      on: { click: () => actions.open(conversation) },
    });
    return el("li", {}, open, button("trash", t("deleteChat", { title }), () => actions.remove(conversation)));
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
