// The memory of a step as a waterfall: each part begins where the one before it ends, against the memory of the card.

import { el, fill } from "./dom.js";
import { t } from "./i18n.js";
import { gibibytes } from "./plan_numbers.js";

// Rows, and which components of the plan each adds up. A component that is not named here is "other".
const ROWS = {
  weights: ["weights", "master weights"],
  gradients: ["gradients"],
  optimizer: ["optimizer state"],
  activations: ["activations"],
  logits: ["logits and loss"],
  communication: ["communication"],
  other: [],
  fragmentation: ["fragmentation", "heap"],
  context: ["context"],
};

export const waterfall = () => el("table", { class: "waterfall" });

/** Fills the table, always with as many rows. parts: bytes by component. limit: bytes of the card; 0 = unknown. */
export function drawWaterfall(node, parts, limit) {
  const sum = (names) => names.reduce((bytes, name) => bytes + (parts[name] ?? 0), 0);
  const named = Object.values(ROWS).flat();
  const unnamed = Object.keys(parts).filter((name) => !named.includes(name));
  const total = sum(Object.keys(parts));
  const share = (bytes) => `${(100 * bytes) / Math.max(total, limit, 1)}%`;
  const row = (name, start, bytes) => {
    const bar = bytes ? el("div", { class: `part ${name}${limit && start + bytes > limit ? " over" : ""}` }) : null;
    if (bar) Object.assign(bar.style, { marginLeft: share(start), width: share(bytes) });
    return el("tr", {}, el("th", { scope: "row", text: t(`planPart_${name}`) }), el("td", {}, bar), el("td", { text: bytes ? gibibytes(bytes) : "–" }));
  };
  let end = 0;
  const rows = Object.entries(ROWS).map(([name, of]) => {
    const bytes = sum(name === "other" ? unnamed : of);
    return row(name, (end += bytes) - bytes, bytes);
  });
  node.classList.toggle("limited", limit > 0);
  node.style.setProperty("--limit", share(limit));
  fill(node, el("caption", { text: limit ? t("planCardHas", { memory: gibibytes(limit) }) : "" }), el("tbody", {}, rows, row("total", 0, total)));
}
