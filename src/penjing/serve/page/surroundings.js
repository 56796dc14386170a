// What stands around a conversation: the choice of models, the page before the first word, and bad news.

import { reasonOf } from "./answer_view.js";
import { $, el, fill, icon } from "./dom.js";
import { count, current, short, t } from "./i18n.js";

/** Both choices of models. lanes: the names that are chosen. */
export function showModels(models, lanes) {
  for (const [id, name] of [["model", lanes[0]], ["other", lanes[1]]]) {
    const select = $(`#${id}`);
    const names = models.map((model) => model.id);
    if (select.dataset.names !== names.join("\n")) {
      select.dataset.names = names.join("\n");
      select.replaceChildren(...names.map((value) => el("option", { value, text: value })));
    }
    select.hidden = name === undefined;
    if (name !== undefined) select.value = name;
  }
  $(".versus").hidden = lanes.length < 2;
  document.body.classList.toggle("has-two", lanes.length > 1);
}

/** A model in one line: its size, how long it was trained, how much it reads. */
const factsOf = ({ parameters, step, context }) =>
  t("facts", { parameters: short(parameters), step: count(step), context: count(context) });

/** The page before the first word. send(text): an example was chosen. */
export function showWelcome(container, chat, send) {
  container.hidden = !chat.isEmpty || !chat.models.length;
  if (container.hidden) return container.replaceChildren();
  const model = chat.modelOf(0);
  // Prompts of the model's own data, those in the language of the page first; a model without any shows none.
  const languageOf = (text) => (/\p{Script=Han}/u.test(text) ? "zh" : "en");
  const isOwn = (text) => languageOf(text) === current();
  const offered = [...(model.examples ?? [])].sort((one, other) => isOwn(other) - isOwn(one));
  const cards = offered.map((text) =>
    el("button", { type: "button", class: "example", lang: languageOf(text) === "zh" ? "zh-Hans" : "en",
      on: { click: () => send(text) } }, el("span", { class: "example-text", text })));
  return fill(
    container,
    chat.isDocument ? null : el("img", { src: "tree.svg", alt: "", width: "84", height: "84", class: "tree" }),
    el("h2", { text: chat.isDocument ? model.id : t("emptyTitle") }),
    el("p", { class: "facts" }, chat.lanes.length > 1 ? chat.lanes.join(" ⇄ ") : `${chat.isDocument ? "" : `${model.id} · `}${factsOf(model)}`),
    chat.isDocument ? el("p", { class: "facts", text: t("emptyContinues") }) : null,
    cards.length ? el("div", { class: "example-columns", role: "group", "aria-label": t("examples") }, cards) : null,
  );
}

/** Bad news over the conversation; null takes it away. */
export function showBanner(news) {
  const banner = $("#banner");
  banner.hidden = !news;
  if (!news) return banner.replaceChildren();
  const gone = news.error.status === 0;
  return banner.replaceChildren(
    el("div", {}, el("strong", { text: gone ? t("goneTitle") : t("failed", { error: reasonOf(news.error, news.error.message) }) }),
      gone ? el("p", { text: t("goneText") }) : null),
    el("button", { type: "button", class: "plain", on: { click: news.again } }, icon("retry"), el("span", { text: t("tryAgain") })),
  );
}
