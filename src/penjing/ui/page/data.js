// The tab data.

import { addWords, t } from "./i18n.js";
import { el } from "./dom.js";
import { words } from "./data_words.js";

addWords(words);

export const tab = {
  open(root, context) {
    root.append(el("p", { class: "hint", text: t("dataSoon") }));
  },
  close() {},
};
