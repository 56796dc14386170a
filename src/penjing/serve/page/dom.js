// Elements are built here, from text: nothing a model or a person writes is ever parsed as HTML.

import { t } from "./i18n.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. props: attributes; `class`, `text` (its text), `on` ({event: listener}); false, null and undefined are
 * left out, true is an empty attribute. children: nodes or strings; null is skipped.
 */
export const el = (tag, props = {}, ...children) => made(document.createElement(tag), props, children);

/** The same of a drawing. */
export const shape = (tag, props = {}, ...children) => made(document.createElementNS(SVG, tag), props, children);

/** A new node with what el describes. */
export function made(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** Put children in the place of those that are there; null is skipped. The focus goes to a control of the same name. */
export function fill(node, ...children) {
  const focused = document.activeElement;
  const nameOf = (one) => `${one.ariaLabel} ${one.textContent}`;
  const same = () => [...node.querySelectorAll(focused.tagName)].filter((one) => nameOf(one) === nameOf(focused));
  const place = node.contains(focused) ? same().indexOf(focused) : -1;
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  if (place >= 0) same()[place]?.focus({ preventScroll: true });
}

/** The same, but children that are there stay where they are, with their focus and their scroll position. */
export function arrange(node, children) {
  for (const child of [...node.children]) if (!children.includes(child)) child.remove();
  children.forEach((child, at) => child === node.children[at] || node.insertBefore(child, node.children[at] ?? null));
}

export const $ = (selector, within = document) => within.querySelector(selector);

// Strokes on a grid of 24 by 24.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  edit: "M5 19h3.5L19 8.5 15.5 5 5 15.5zM13.5 7l3.5 3.5",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  eye: "M2.5 12S6 5.5 12 5.5 21.5 12 21.5 12 18 18.5 12 18.5 2.5 12 2.5 12zM12 9.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6z",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  sliders: "M4 8h8.5M17.5 8H20M4 16h2.5M11.5 16H20M15 5.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM9 13.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
  down: "M12 5v14M6 13l6 6 6-6",
  upload: "M12 15V4M7.5 8l4.5-4.5L16.5 8M5 20h14",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 12.5h8L17 7M10.5 10.5v5.5M13.5 10.5v5.5",
  download: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 20h14",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2.5M12 19v2.5M2.5 12H5M19 12h2.5M5.3 5.3L7 7M17 17l1.7 1.7M5.3 18.700L7 17M17 7l1.7-1.7",
  tool: "M14.5 6.5a4 4 0 0 1 5-1.5l-2.7 2.7.5 2 2 .5L22 7.5a4 4 0 0 1-5.5 5L8 21l-3-3 8.5-8.5a4 4 0 0 1 1-3z",
  chevron: "M9.5 6l6 6-6 6",
};

/** A drawing beside a label; what cannot be seen is told by the label. */
export const icon = (name) =>
  shape("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" }, shape("path", { d: ICONS[name] }));

/** A button with a drawing. label: what a screen reader says, and the tooltip; text: shown beside the drawing. */
export function button(name, label, onClick, { text = "", className = "quiet" } = {}) {
  const node = el("button", { type: "button", class: className, title: label, on: { click: onClick } }, icon(name));
  if (text) node.append(el("span", { text }));
  else node.setAttribute("aria-label", label);
  return node;
}

/** A control with an id under its label, and perhaps over a hint that describes it. */
export function field(control, label, hint = "", className = "field") {
  const about = hint && el("p", { class: "hint", id: `${control.id}-hint`, text: hint });
  if (about) control.setAttribute("aria-describedby", about.id);
  return el("div", { class: className }, el("label", { for: control.id, text: label }), control, about || null);
}

/** The text on the clipboard; true if that worked. A page that is not on localhost or https has only the old way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "visually-hidden", readonly: true, "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  let done = false;
  try {
    done = document.execCommand("copy");
  } catch {
    // There is no other way.
  }
  area.remove();
  focused?.focus({ preventScroll: true });
  return done;
}

/** A button that copies, and shows a tick for a moment; where copying is not allowed it says so. */
export function copyButton(label, done, text) {
  const node = button("copy", label, async () => {
    if (!(await copy(text()))) return toast(t("copyFailed"));
    node.replaceChildren(icon("check"));
    node.setAttribute("aria-label", done);
    return setTimeout(() => {
      node.replaceChildren(icon("copy"));
      node.setAttribute("aria-label", label);
    }, 1500);
  });
  return node;
}

let toastTimer = 0;

/** Say something for a few seconds. */
export function toast(text) {
  clearTimeout(toastTimer);
  if ($("#toast").textContent !== text) $("#toast").textContent = text; // else a screen reader would say it again
  toastTimer = setTimeout(() => $("#toast").replaceChildren(), 7000);
}

/** A text area as high as what stands in it. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
