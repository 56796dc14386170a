// The fields of the tab plan: sliders over lists of round values with a number to type beside them, and choices.

import { el } from "./dom.js";
import { short, t } from "./i18n.js";
import { readNumber } from "./plan_numbers.js";

/** Round values from low to high: steps in each power of ten. */
function rounds(low, high, steps) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const step of steps) if (step * power >= low && step * power <= high) found.push(Number((step * power).toPrecision(2)));
  }
  return found;
}

const FINE = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
const powers = (low, high) => Array.from({ length: high - low + 1 }, (_, at) => 2 ** (low + at));

// values: of the slider. found: the value that the plan has where the field is empty. unit: whether to write 2B or 2000.
const NUMBERS = {
  size: { values: rounds(1e6, 3e9, FINE), found: (plan) => plan.parameters, unit: true },
  tokens: { values: rounds(1e6, 2e12, FINE), found: (plan) => plan.tokens, unit: true },
  unique: { values: rounds(1e6, 2e12, FINE), found: (plan) => plan.unique_tokens || "", unit: true },
  seq_len: { values: powers(6, 15), found: (plan) => plan.seq_len },
  batch: { values: rounds(1, 4096, [1, 1.6, 2, 3.2, 4, 6.4, 8]).concat(powers(7, 12)).filter(Number.isInteger).sort((a, b) => a - b),
    found: (plan) => plan.rows_per_step },
  gpus: { values: [1, 2, 4, 8, 16, 32, 64], found: (plan) => plan.devices },
};

const nearest = (values, wanted) =>
  values.reduce((best, value, at) => (Math.abs(Math.log((value + 1) / (wanted + 1))) < Math.abs(Math.log((values[best] + 1) / (wanted + 1))) ? at : best), 0);

/**
 * A field: {node, show(plan), refuse(message)}; plan: the last good one, or undefined. change(value): called with each
 * value that somebody sets; "" is the plan's own.
 */
export function numberField(name, read, change) {
  const { values, found, unit } = NUMBERS[name];
  const written = (value) => (value === "" ? "" : unit ? short(value) : String(value));
  const exact = (value) => (readNumber(written(value)) === value ? written(value) : String(value)); // as somebody set it
  const slider = el("input", { type: "range", min: 0, max: values.length - 1, step: 1 });
  const text = el("input", { type: "text", class: "plain-input", inputmode: "decimal", "aria-label": t(`planField_${name}`), autocomplete: "off" });
  const clear = el("button", { type: "button", class: "quiet auto", text: t("planAuto"), title: t("planAutoTitle") });
  const { node, refuse } = framed(name, slider, text, clear);
  slider.addEventListener("input", () => {
    text.value = written(values[slider.value]);
    slider.setAttribute("aria-valuetext", text.value);
    change(text.value);
  });
  text.addEventListener("change", () => {
    const value = readNumber(text.value);
    if (text.value.trim() && value === null) return refuse(t("planNotNumber", { text: text.value }));
    return change(value === null ? "" : exact(value));
  });
  text.addEventListener("keydown", (event) => event.key === "Enter" && text.blur());
  clear.addEventListener("click", () => change(""));
  const show = (plan) => {
    const own = read();
    const value = (own ? readNumber(own) : plan && found(plan)) ?? "";
    node.classList.toggle("is-auto", !own);
    clear.classList.toggle("unseen", !own);
    if (document.activeElement !== text) text.value = own ? exact(value) : written(value);
    slider.value = value === "" ? 0 : nearest(values, value);
    slider.setAttribute("aria-valuetext", text.value || t("planUnknown"));
  };
  return { node, show, refuse };
}

/** The same for a list of choices: [value, label]. */
export function choiceField(name, choices, read, change) {
  const select = el("select", { on: { change: () => change(select.value) } },
    choices.map(([value, label]) => el("option", { value, text: label })));
  const { node, refuse } = framed(name, select);
  const show = () => (select.value = choices.some(([value]) => value === read()) ? read() : choices[0][0]);
  return { node, show, refuse };
}

export function textField(name, read, change) {
  const text = el("input", { type: "text", class: "plain-input", autocomplete: "off", on: { change: () => change(text.value.trim()) } });
  const { node, refuse } = framed(name, text);
  const show = () => document.activeElement !== text && (text.value = read());
  return { node, show, refuse };
}

/** A label, controls and a hint, which both belong to the first control; and how to say that its value is refused. */
function framed(name, ...controls) {
  const id = `plan-${name}`;
  const hint = el("p", { class: "hint", id: `${id}-hint`, text: t(`planHint_${name}`) });
  controls[0].id = id;
  controls[0].setAttribute("aria-describedby", hint.id);
  const node = el("div", { class: "plan-field", "data-field": name },
    el("label", { for: id, text: t(`planField_${name}`) }), el("div", { class: "plan-control" }, controls), hint);
  const refuse = (message) => {
    hint.textContent = message || t(`planHint_${name}`);
    hint.classList.toggle("bad", Boolean(message));
    for (const control of controls) if (control.tagName !== "BUTTON") control.setAttribute("aria-invalid", String(Boolean(message)));
  };
  return { node, refuse };
}
