// The memory of a step as a waterfall: each part begins where the one before it ends, against the memory of the card.

import { shape } from "./dom.js";
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
const [ROW, LEFT, RIGHT] = [26, 150, 86];

export const waterfall = () => shape("svg", { class: "waterfall" });

/** The rows of a plan: [name, bytes]. */
function rowsOf(parts) {
  const known = Object.values(ROWS).flat();
  const sum = (names) => names.reduce((total, name) => total + (parts[name] || 0), 0);
  const other = sum(Object.keys(parts).filter((name) => !known.includes(name)));
  return Object.entries(ROWS).map(([name, of]) => [name, name === "other" ? other : sum(of)]);
}

/** Draws into an svg element, always in the same place and height. limit: bytes of the card; 0 = unknown. */
export function drawWaterfall(svg, parts, limit) {
  const rows = rowsOf(parts);
  const total = rows.reduce((sum, [, bytes]) => sum + bytes, 0);
  const WIDTH = matchMedia("(max-width: 52rem)").matches ? 400 : 620; // as the style sheet's ratio
  const scale = (WIDTH - LEFT - RIGHT) / Math.max(total, limit, 1);
  const height = (rows.length + 1) * ROW + 24;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", [...rows.filter(([, bytes]) => bytes), ["total", total]]
    .map(([name, bytes]) => `${t(`planPart_${name}`)} ${gibibytes(bytes)}`).join(", "));
  const nodes = [];
  let start = 0;
  for (const [at, [name, bytes]] of [...rows, ["total", total]].entries()) {
    const [x, y] = [LEFT + (name === "total" ? 0 : start) * scale, at * ROW + 4];
    nodes.push(shape("text", { x: LEFT - 10, y: y + 14, "text-anchor": "end", class: name === "total" ? "strong" : "" }, t(`planPart_${name}`)));
    const over = limit && (name === "total" ? total : start + bytes) > limit;
    nodes.push(shape("rect", { x, y, width: Math.max(bytes * scale, bytes ? 1 : 0), height: ROW - 8, rx: 3, class: `part ${name}${over ? " over" : ""}` }));
    nodes.push(shape("text", { x: WIDTH - 4, y: y + 14, "text-anchor": "end", class: name === "total" ? "strong" : "soft" }, bytes ? gibibytes(bytes) : "–"));
    start += bytes;
  }
  if (limit) {
    const x = LEFT + limit * scale;
    nodes.push(shape("line", { x1: x, x2: x, y1: 0, y2: height - 20, class: "limit" }));
    const anchor = x > WIDTH * 0.6 ? "end" : "start";
    nodes.push(shape("text", { x: x + (anchor === "end" ? 4 : -4), y: height - 5, "text-anchor": anchor, class: "soft" }, t("planCardHas", { memory: gibibytes(limit) })));
  }
  svg.replaceChildren(...nodes);
}
