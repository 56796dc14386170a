// The tab of chat: starts a chat server for a checkpoint, and opens its page; blind votes between two of them. The
// servers end with this page's server.

import { pause } from "./api.js";
import { blindCard } from "./blind.js";
import "./chat_words.js";
import { el, fill } from "./dom.js";
import { count, t } from "./i18n.js";

const EVERY = 1; // seconds between two looks

export async function open(root, context) {
  const now = { context, list: el("div", { class: "chats" }), blind: blindCard(context), shown: "" };
  const { runs } = await context.api.get("api/runs");
  const rows = runs.filter((row) => row.checkpoints.length);
  root.append(el("p", { class: "hint", text: t(rows.length ? "chatHint" : "chatNone") }), rows.length ? chooser(now, rows) : "", now.list, rows.length ? now.blind.node : "");
  const [run, step] = [context.params.get("run"), Number(context.params.get("step"))];
  if (run) {
    context.keep({}); // a reload starts nothing
    await start(now, run, step);
  }
  for (;;) {
    await ask(now, context.api.get("api/chats"));
    await pause(EVERY, context.signal);
  }
}

function chooser(now, rows) {
  const run = el("select", { "aria-label": t("chatRun") }, rows.map((row) => el("option", { value: row.id, text: row.id })));
  const step = el("select", { "aria-label": t("uiCheckpoint") });
  const steps = () => fill(step, rows[run.selectedIndex].checkpoints.map((value) => el("option", { value, text: t("uiStep", { step: count(value) }) })));
  run.addEventListener("change", steps);
  steps();
  return el("div", { class: "row gap" }, run, step, el("button", { type: "button", class: "primary", text: t("chatStart"), on: { click: () => start(now, run.value, Number(step.value)) } }));
}

/** Show the chats that a request answers, or why it does not. */
async function ask(now, answer) {
  try {
    show(now, await answer);
  } catch (error) {
    now.context.fail(error);
  }
}

const start = (now, run, step) => ask(now, now.context.api.post("api/chats", { run, step }));

function show(now, { chats }) {
  const shown = JSON.stringify(chats);
  if (shown === now.shown) return;
  now.shown = shown;
  now.blind.show(chats.filter((chat) => chat.state === "ready").map((chat) => `${chat.run}@${chat.step}`));
  fill(now.list, chats.map((chat) => el("section", { class: "card gap" },
    el("h2", {}, chat.run, el("span", { class: "unit", text: ` ${t("uiStep", { step: count(chat.step) })}` })),
    el("div", { class: "row" },
      chat.state === "ready" ? el("a", { class: "primary", href: chat.address, target: "_blank", rel: "noopener noreferrer", text: t("chatOpen") }) : el("span", { role: "status", class: chat.state === "ended" ? "bad" : "hint", text: t(`chat_${chat.state}`) }),
      now.context.actButton("plain", t("stop"), async () => show(now, await now.context.api.post("api/chats/stop", { run: chat.run, step: chat.step })))),
    chat.said ? el("pre", { class: "log", tabindex: "0", text: chat.said }) : null)));
}
