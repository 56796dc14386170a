// Tables of figures.

import { el } from "./dom.js";

/** heads: texts, or none. rows: of texts; the first names the row. It scrolls sideways where it is too wide. */
export function table(heads, rows, label = heads[0]) {
  return el("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": label }, el("table", { class: "figures" },
    heads.length ? el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col", text })))) : null,
    el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row", text: name }), cells.map((text) => el("td", { text })))))));
}
