// The tab of runs.

import { addWords, t } from "./i18n.js";
import { el } from "./dom.js";
import { words } from "./runs_words.js";

addWords(words);

export const tab = {
  async open(root, context) {
    const { runs, folder } = await context.api.get("api/runs");
    root.append(el("h2", { text: t("runsOf", { folder }) }), el("ul", {}, runs.map((run) => el("li", { text: run.id }))));
  },
  close() {},
};
