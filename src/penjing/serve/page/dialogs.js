// Questions that need an answer before anything else.

import { $, el, field } from "./dom.js";
import { t } from "./i18n.js";

/** Show a dialog; resolves to the text in `input`, or true without one, when its first button is used, else to null. */
function ask({ title, text = [], yes, danger = false, input = null, label = "" }) {
  const dialog = $("#dialog");
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", { id: "dialog-title", text: title }),
    text.map((line) => el("p", { text: line })),
    input && field(input, label),
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
  (input ?? $("button[value=yes]", form)).focus();
  // The first button of a form is the one that Enter presses; here that is the second.
  input?.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    $("button[value=yes]", form).click();
  });
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? input?.value ?? true : null), { once: true });
  });
}

export const confirmClear = () => ask({ title: t("clearAll"), text: [t("clearSure")], yes: t("delete"), danger: true });

export const confirmDelete = (title) => ask({ title: t("deleteChat", { title }), text: [t("deleteSure")], yes: t("delete"), danger: true });

/** Another title, or null. */
export async function askTitle(title) {
  const input = el("input", { type: "text", id: "new-title", maxlength: "120", autocomplete: "off", value: title });
  return (await ask({ title: t("rename"), yes: t("save"), input, label: t("titleLabel") }))?.trim();
}

/** The key of the server, or null. again: the one before was refused. */
export function askKey(again) {
  const input = el("input", { type: "password", id: "key", required: true, autocomplete: "off" });
  const text = again ? [t("keyWrong"), t("keyText")] : [t("keyText")];
  return ask({ title: t("keyTitle"), text, yes: t("useKey"), input, label: t("key") });
}
