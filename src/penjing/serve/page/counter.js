// Counts, before it is sent, how many tokens a question would be with everything that stands before it.

import { countTokens, Newest, pause } from "./api.js";
import { messagesOfNodes, path, textOfPieces } from "./conversation.js";
import { $ } from "./dom.js";
import { count, t } from "./i18n.js";
import { chatOptions } from "./answer.js";
import { toolsOn } from "./settings.js";
import { settings } from "./store.js";

const PAUSE = 0.35; // seconds after the last key

const newest = new Newest();
let counted = ""; // the request that the shown figure is of

/** What is counted now; null where nothing is written. */
function bodyOf(chat) {
  const model = chat.modelOf(0);
  if (chat.isDocument) {
    const prompt = textOfPieces(chat.conversation.pieces);
    return prompt ? { model: model.id, prompt } : null;
  }
  const text = $("#text").value;
  if (!text.trim()) return null;
  if (model.answers === false) return { model: model.id, prompt: text };
  const messages = [...messagesOfNodes(path(chat.conversation), 0, settings.system), { role: "user", content: text }];
  return { model: model.id, messages, ...chatOptions(model, toolsOn(chat.tools), settings) };
}

/** Count soon; called whenever anything has changed. A figure that is no longer true is not shown. */
export function countSoon(chat) {
  if (chat.running) return;
  const body = chat.models.length ? bodyOf(chat) : null;
  const key = JSON.stringify([body, document.documentElement.lang]);
  if (key === counted) return;
  counted = key;
  newest.cancel();
  if (body === null) $("#count").replaceChildren();
  else show(body);
}

async function show(body) {
  try {
    const answer = await newest.ask(async (signal) => {
      await pause(PAUSE, signal);
      return countTokens(body, signal);
    });
    if (!answer) return;
    const { count: tokens, max_model_len: context } = answer;
    $("#count").textContent = t("counted", { count: count(tokens), context: count(context) });
    $("#count").classList.toggle("bad", tokens >= context);
  } catch (error) {
    $("#count").textContent = error.code === "context_length_exceeded" ? t("tooLong") : "";
    $("#count").classList.add("bad");
  }
}
