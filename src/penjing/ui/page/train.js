// The tab train.

import { addWords, t } from "./i18n.js";
import { el } from "./dom.js";
import { words } from "./train_words.js";

addWords(words);

export const tab = {
  open(root, context) {
    root.append(el("p", { class: "hint", text: t("trainSoon") }));
  },
  close() {},
};
