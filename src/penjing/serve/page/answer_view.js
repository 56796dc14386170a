// One answer on the page: thoughts, words, calls and figures; in words, or looked into token by token.

import { canGoOn } from "./conversation.js";
import { button, el, icon } from "./dom.js";
import { count, current, percent, seconds, t } from "./i18n.js";
import { tokenView } from "./look.js";
import { renderMarkdown } from "./markdown.js";

/**
 * The view of an answer: {node, update}. update shows what has been added since.
 * look: whether tokens are shown; onChoose(stepPlace, tokenPlace, alternative); onGoOn: writes an answer on that was cut
 * off, null where something stands behind it.
 */
export function answerView(answer, { look, onChoose, onGoOn }) {
  const steps = el("div", { class: "steps" });
  const note = el("p", { class: "note", role: "status" });
  const figures = el("div", { class: "figures" });
  const goOn = button("send", t("continueText"), onGoOn, { text: t("continueText"), className: "plain go-on" });
  const node = el("div", { class: "answer" }, steps, note, goOn, figures);
  const views = [];
  const update = () => {
    while (views.length < answer.steps.length) {
      const place = views.length;
      const view = stepView(look, (token, other) => onChoose(place, token, other));
      views.push(view);
      steps.append(view.node);
    }
    answer.steps.forEach((step, place) => views[place].update(step, answer.state === "running" && place === views.length - 1));
    node.classList.toggle("running", answer.state === "running");
    node.setAttribute("aria-busy", String(answer.state === "running"));
    showNote(note, answer);
    goOn.hidden = !onGoOn || !canGoOn(answer);
    showFigures(figures, answer);
  };
  update();
  return { node, update };
}

const LEAST_TIMED = 8; // tokens: the speed of fewer says nothing

function stepView(look, onChoose) {
  const summary = el("span");
  const thought = el("div", { class: "thought-text" });
  const fold = el("details", { class: "thought", hidden: true }, el("summary", {}, icon("chevron"), summary), thought);
  const words = el("div", { class: look ? "words" : "words markdown" });
  const calls = el("div", { class: "calls" });
  const node = el("div", { class: "step" }, fold, words, calls);
  const inThought = look && tokenView(thought, ["reasoning"], onChoose);
  const inWords = look && tokenView(words, ["content", "call", "mark"], onChoose);
  const missing = el("p", { class: "missing", hidden: true, text: look ? t("noTokens") : "" });
  node.append(missing);
  let shown = {};
  return {
    node,
    update(step, running) {
      const tokens = look && step.tokens.length > 0;
      fold.hidden = !step.reasoning && !(tokens && step.tokens.some((token) => token.kind === "reasoning"));
      summary.textContent = thoughtTitle(step, running);
      if (!running && !shown.isOver && isThoughtOnly(step)) fold.open = true; // else the answer looks empty
      if (tokens) {
        inThought.update(step.tokens);
        inWords.update(step.tokens);
      } else {
        if (shown.reasoning !== step.reasoning) thought.textContent = step.reasoning.trim();
        if (shown.content !== step.content) renderMarkdown(words, step.content);
        missing.hidden = !(look && step.content && !running);
      }
      shown = { isOver: !running, reasoning: step.reasoning, content: step.content };
      showCalls(calls, step.calls);
    },
  };
}

function thoughtTitle(step, running) {
  if (running && !step.content) return t("thinking");
  return step.thoughtFor ? t("thoughtFor", { time: seconds(step.thoughtFor) }) : t("thought");
}

function showCalls(container, calls) {
  const key = JSON.stringify(calls);
  if (container.dataset.shown === key) return;
  container.dataset.shown = key;
  container.replaceChildren(...calls.filter(Boolean).map(call));
}

function call({ name, arguments: args, result }) {
  return el(
    "div",
    { class: "call" },
    el("div", { class: "call-head" }, icon("tool"), el("span", { class: "visually-hidden", text: t("calls") }),
      el("strong", { text: name }), el("code", { text: readable(args) })),
    el("div", { class: "call-result" }, el("span", { text: t("result") }),
      result === undefined ? el("em", { text: t("running") }) : el("pre", { tabindex: "0", text: result })),
  );
}

/** Arguments without the JSON around them, where they are simple: expression: 86-74. */
function readable(args) {
  try {
    const entries = Object.entries(JSON.parse(args));
    return entries.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
  } catch {
    return args;
  }
}

const isThoughtOnly = (step) => Boolean(step.reasoning.trim()) && !step.content.trim() && !step.calls.length;
const isEmpty = (answer) => answer.steps.every((step) => !step.content.trim() && !step.calls.length && !step.reasoning.trim());

const REASONS = {
  context_length_exceeded: "tooLong", model_not_found: "noModel", no_chat: "noChat", tool_not_found: "noTool",
  queue_full: "queueFull", timeout: "timedOut", body_too_large: "bodyTooLarge", 401: "wrongKey", 403: "forbidden", 413: "bodyTooLarge",
  429: "queueFull",
};

/** Why there is no answer, in the language of the page. error: {code, param, status}; message: what the server said. */
export function reasonOf({ code, param, status }, message) {
  const key = REASONS[code] ?? REASONS[status];
  if (key) return t(key);
  if (current() === "en") return message;
  if (status >= 500) return t("serverFault");
  return status >= 400 ? t("refused", { param: param || status }) : t("pageFault");
}

function problemOf(answer) {
  if (answer.state === "stopped") return t("stopped");
  if (answer.state === "elsewhere") return t("elsewhere");
  if (answer.state === "failed") return answer.status === 0 ? t("broke") : t("failed", { error: reasonOf(answer, answer.error) });
  if (answer.state === "running") return answer.busy ? t("busy", { wait: Math.ceil(answer.busy) }) : "";
  if (answer.finish === "length") {
    const { used, context } = answer.stats ?? {};
    return used && context && used >= context ? t("contextReached") : t("lengthReached");
  }
  if (isEmpty(answer)) return t("nothing");
  if (answer.steps.length && isThoughtOnly(answer.steps.at(-1))) return t("onlyThoughts");
  return answer.forgotten ? t("forgotten") : "";
}

/** Why the answer ends where it does. */
export function showNote(note, answer) {
  const text = problemOf(answer);
  if (note.textContent !== text) note.textContent = text;
  note.hidden = !text;
  note.classList.toggle("bad", answer.state === "failed");
}

/** Tokens a second, time to the first token, and how full the context is; until the server says so, as measured here. */
export function showFigures(container, answer) {
  const { speed, first, used, context, written } = answer.stats ?? {};
  const parts = [];
  if (speed && written >= LEAST_TIMED) parts.push(el("span", { class: "figure", text: t("speed", { value: count(speed) }) }));
  if (first) parts.push(el("span", { class: "figure", text: t("first", { time: seconds(first) }) }));
  if (written) parts.push(el("span", { class: "figure", text: t("written", { count: count(written) }) }));
  if (used && context) parts.push(contextBar(used, context));
  container.replaceChildren(...parts);
}

function contextBar(used, context) {
  const part = Math.min(used / context, 1);
  const fill = el("span", { class: part > 0.9 ? "fill full" : "fill" });
  fill.style.width = `${part * 100}%`;
  const words = t("contextOf", { used: count(used), context: count(context) });
  return el(
    "span",
    { class: "figure context", title: `${t("context")}: ${words} (${percent(part)})` },
    el("span", { text: t("context") }),
    el("span", { class: "track", "aria-hidden": "true" }, fill),
    el("span", { text: words }),
  );
}
