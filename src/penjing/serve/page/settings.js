// The settings beside the conversation.

import { $, el, field, fill, grow } from "./dom.js";
import { t } from "./i18n.js";
import { change, SAMPLING, settings } from "./store.js";

// name: [least, most, step, slider]
const FIELDS = {
  temperature: [0, 2, 0.05, true],
  top_p: [0.05, 1, 0.05, true],
  min_p: [0, 0.5, 0.01, true],
  repetition_penalty: [1, 2, 0.05, true],
  top_k: [0, 1000, 1, false],
  max_tokens: [1, 32768, 1, false],
  seed: [0, 2 ** 31 - 1, 1, false],
};

/** tools: as OpenAI writes them. thinking: whether a model that is asked can think. onChange: after every change. */
export function showSettings({ tools, thinking, onChange }) {
  const set = (part) => {
    change(part);
    onChange();
  };
  fill(
    $("#settings-fields"),
    systemField(set),
    thinking ? thinkingField(set) : null,
    tools.length ? toolsField(tools, set) : null,
    el(
      "fieldset",
      {},
      el("legend", { text: t("sampling") }),
      Object.keys(FIELDS).map((name) => numberField(name, set)),
      el("button", { type: "button", class: "plain reset", text: t("reset"), on: { click: () => {
        set({ ...SAMPLING });
        showSettings({ tools, thinking, onChange });
      } } }),
    ),
  );
}

function systemField(set) {
  const area = el("textarea", { id: "system", rows: "2" });
  area.value = settings.system;
  area.addEventListener("input", () => {
    grow(area);
    set({ system: area.value });
  });
  return field(area, t("system"), t("systemHint"));
}

function thinkingField(set) {
  const choices = { auto: "thinkingAuto", on: "thinkingOn", off: "thinkingOff" };
  const select = el("select", { id: "thinking", on: { change: () => set({ thinking: select.value }) } },
    Object.entries(choices).map(([value, key]) => el("option", { value, text: t(key), selected: settings.thinking === value })));
  return field(select, t("thinkingSwitch"));
}

function toolsField(tools, set) {
  const one = ({ function: { name, description } }) => {
    const box = el("input", { type: "checkbox", id: `tool-${name}`, checked: !settings.toolsOff.includes(name) });
    box.addEventListener("change", () => {
      const off = settings.toolsOff.filter((other) => other !== name);
      set({ toolsOff: box.checked ? off : [...off, name] });
    });
    return el("div", { class: "tool" }, box, el("label", { for: `tool-${name}` }, el("strong", { text: name }),
      description ? el("span", { class: "hint", text: description }) : null));
  };
  return el("fieldset", {}, el("legend", { text: t("tools") }), el("p", { class: "hint", text: t("toolsHint") }), tools.map(one));
}

function numberField(name, set) {
  const [min, max, step, slider] = FIELDS[name];
  const id = `set-${name}`;
  const shared = { min, max, "aria-describedby": `${id}-hint` };
  const number = el("input", { type: "number", id, ...shared, step: slider ? "any" : step, value: settings[name], placeholder: name === "seed" ? t("seedEmpty") : null });
  const range = slider ? el("input", { type: "range", ...shared, step, value: settings[name], "aria-label": t(name), tabindex: "-1" }) : null;
  number.addEventListener("input", () => {
    if (number.value === "" && name === "seed") return set({ seed: "" });
    if (number.value === "" || !number.checkValidity()) return undefined;
    if (range) range.value = number.value;
    return set({ [name]: Number(number.value) });
  });
  number.addEventListener("blur", () => {
    if (number.value === "" || !number.checkValidity()) number.value = settings[name];
  });
  range?.addEventListener("input", () => {
    number.value = range.value;
    set({ [name]: Number(range.value) });
  });
  return el(
    "div",
    { class: "field" },
    el("div", { class: "field-head" }, el("label", { for: id, text: t(name) }), number),
    range,
    el("p", { class: "hint", id: `${id}-hint`, text: t(`${name}Hint`) }),
  );
}

/** The tools that are switched on. */
export const toolsOn = (tools) => tools.filter((tool) => !settings.toolsOff.includes(tool.function.name));

export function setSettings(open) {
  document.body.classList.toggle("settings-open", open);
  $("#settings").hidden = !open;
  $("#open-settings").setAttribute("aria-expanded", String(open));
  if (open) $("#close-settings").focus();
}
