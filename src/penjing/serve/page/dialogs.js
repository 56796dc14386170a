// Questions that need an answer before anything else.

import { $, el } from "./dom.js";
import { t } from "./i18n.js";

/** Show a dialog; resolves to what `fields` gives when its first button is used, else to null. */
function ask({ title, text, yes, danger = false, fields = [], value = () => true }) {
  const dialog = $("#dialog");
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", { id: "dialog-title", text: title }),
    text.map((line) => el("p", { text: line })),
    fields,
    el(
      "div",
      { class: "dialog-row" },
      el("button", { type: "submit", value: "", class: "plain", formnovalidate: true, text: t("cancel") }),
      el("button", { type: "submit", value: "yes", class: danger ? "primary danger" : "primary", text: yes }),
    ),
  );
  dialog.replaceChildren(form);
  dialog.returnValue = "";
  dialog.showModal();
  const first = fields.length ? $("input", form) : $("button[value=yes]", form);
  first.focus();
  // The first button of a form is the one that Enter presses; here that is the second.
  if (fields.length) first.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    $("button[value=yes]", form).click();
  });
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? value() : null), { once: true });
  });
}

export const confirmClear = () => ask({ title: t("clearAll"), text: [t("clearSure")], yes: t("delete"), danger: true });

export const confirmDelete = (title) => ask({ title: t("deleteChat", { title }), text: [t("deleteSure")], yes: t("delete"), danger: true });

/** Another title, or null. */
export function askTitle(title) {
  const input = el("input", { type: "text", id: "new-title", maxlength: "120", autocomplete: "off" });
  input.value = title;
  const field = el("div", { class: "field" }, el("label", { for: "new-title", text: t("titleLabel") }), input);
  return ask({ title: t("rename"), text: [], yes: t("save"), fields: [field], value: () => input.value.trim() });
}

/** The key of the server, or null. again: the one before was refused. */
export function askKey(again) {
  const input = el("input", { type: "password", id: "key", required: true, autocomplete: "off" });
  const field = el("div", { class: "field" }, el("label", { for: "key", text: t("key") }), input);
  return ask({
    title: t("keyTitle"),
    text: again ? [t("keyWrong"), t("keyText")] : [t("keyText")],
    yes: t("useKey"),
    fields: [field],
    value: () => input.value,
  });
}
