// Conversations as lines of JSON, out and in: what `penjing train sft` reads.

import { addNode, answerOf, messagesOfNodes, newAnswer, newConversation, newStep, path, textOfPieces } from "./conversation.js";
import { t } from "./i18n.js";
import { titleOf } from "./sidebar.js";

/** One line a conversation, as `penjing train sft` reads them; a text that was continued is {"text": ...}. */
export function toJsonl(conversations, tools) {
  const lines = conversations.map((conversation) => {
    if (conversation.pieces) return { text: textOfPieces(conversation.pieces) };
    const shown = path(conversation);
    const last = shown.findLast((node) => node.answers);
    if (!last) return null;
    const messages = messagesOfNodes(shown.slice(0, shown.indexOf(last) + 1), 0, answerOf(last, 0).system || "");
    if (messages.every((message) => message.role === "system")) return null;
    const called = messages.some((message) => message.tool_calls);
    return called && tools.length ? { messages, tools } : { messages };
  });
  return lines.filter(Boolean).map((line) => `${JSON.stringify(line)}\n`).join("");
}

/** The conversations of a file of such lines (or of one array), and how many lines are none: {conversations, bad}. */
export function fromJsonl(text) {
  const found = { conversations: [], bad: 0 };
  for (const line of linesOf(text)) {
    try {
      found.conversations.push(conversationOf(typeof line === "string" ? JSON.parse(line) : line));
    } catch {
      found.bad += 1;
    }
  }
  return found;
}

function linesOf(text) {
  const whole = text.replace(/^\ufeff/, "").trim();
  if (whole.startsWith("[")) {
    try {
      return JSON.parse(whole);
    } catch {
      // Then each line for itself.
    }
  }
  return whole.split("\n").filter((line) => line.trim());
}

/** Throws where a line is no conversation. */
function conversationOf(line) {
  const made = newConversation();
  if (typeof line.text === "string") return Object.assign(made, { title: titleOf(line.text.slice(0, 200)), pieces: [{ text: line.text }] });
  let [system, parent, answer] = ["", null, null];
  for (const message of line.messages ?? line.conversations) {
    const content = textOf(message.content);
    if (message.role === "system") system = content;
    else if (message.role === "user") {
      made.title ||= titleOf(content);
      [parent, answer] = [addNode(made, parent, { text: content }).id, null];
    } else if (message.role === "assistant" && parent) {
      if (!answer) {
        answer = { ...newAnswer(t("imported"), { system }), state: "done" };
        parent = addNode(made, parent, { answers: [answer] }).id;
      }
      const calls = (message.tool_calls ?? []).map(callOf);
      answer.steps.push({ ...newStep(), content, reasoning: textOf(message.reasoning_content), calls, finished: true });
    } else if (message.role === "tool" && answer) {
      const open = answer.steps.at(-1).calls.filter((call) => call.result === undefined);
      (open.find((call) => call.id === message.tool_call_id) ?? open[0]).result = content;
    } else throw new TypeError("not a conversation");
  }
  if (!made.children.length) throw new TypeError("nothing is said");
  return made;
}

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content !== "string") throw new TypeError("not a text");
  return content;
}

function callOf({ id, function: called, ...own }, place) {
  const { name, arguments: args } = called ?? own;
  return { id: String(id ?? `call_${place}`), name: String(name), arguments: typeof args === "string" ? args : JSON.stringify(args ?? {}) };
}
