// What the browser keeps: settings, and the conversations. All of it stays in this browser.

import { pack, unpack } from "./tokens.js";

const SETTINGS = "penjing.settings";
const CONVERSATIONS = "penjing.conversations";

/** As the server understands them; seed "" draws a new one for every answer. */
export const SAMPLING = { temperature: 0.5, top_p: 0.95, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens: 256, seed: "" };

const DEFAULTS = {
  ...SAMPLING, system: "", thinking: "auto", toolsOff: [], look: false, theme: "", language: "", model: "", other: "",
};

export let settings = { ...DEFAULTS };

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or no storage at all
  }
}

export function loadSettings() {
  settings = { ...DEFAULTS, ...read(SETTINGS, {}) };
}

export function change(part) {
  Object.assign(settings, part);
  write(SETTINGS, settings);
}

// --- conversations ---------------------------------------------------------------------------------------------------

/** All of them, the newest first. */
export let conversations = [];

const mapTokens = (conversation, one) => ({
  ...conversation,
  pieces: conversation.pieces?.map((piece) => (piece.tokens ? { ...piece, tokens: piece.tokens.map(one) } : piece)),
  nodes: Object.fromEntries(
    Object.entries(conversation.nodes).map(([id, node]) => [id, node.answers ? withTokens(node, one) : node]),
  ),
});

const withTokens = (node, one) => ({
  ...node,
  answers: node.answers.map((answer) => ({
    ...answer,
    steps: answer.steps.map((step) => ({ ...step, tokens: step.tokens.map(one) })),
  })),
});

/** Without what can be looked into: a tenth of the size. */
const plain = (conversation) => ({
  ...conversation,
  pieces: conversation.pieces && [{ text: conversation.pieces.map((piece) => piece.text).join("") }],
  nodes: Object.fromEntries(
    Object.entries(conversation.nodes).map(([id, node]) => {
      const cut = (answer) => ({ ...answer, steps: answer.steps.map((step) => ({ ...step, tokens: [] })) });
      return [id, node.answers ? { ...node, answers: node.answers.map(cut) } : node];
    }),
  ),
});

export function loadConversations() {
  conversations = read(CONVERSATIONS, []).map((conversation) => mapTokens(conversation, unpack));
  for (const conversation of conversations) {
    for (const node of Object.values(conversation.nodes)) {
      for (const answer of node.answers || []) if (answer.state === "running") answer.state = "stopped";
    }
  }
}

/** Another tab wrote: take what it has, but for the conversation that is open here. kept: called afterwards. */
export function onOtherTab(open, kept) {
  addEventListener("storage", ({ key }) => {
    if (key !== CONVERSATIONS) return;
    const mine = open();
    loadConversations();
    conversations = conversations.map((other) => (other.id === mine.id ? mine : other));
    kept();
  });
}

/** Keep everything; where the browser has no more room, the oldest lose their tokens first, then go. */
export function save() {
  const packed = conversations.map((conversation) => mapTokens(conversation, pack));
  if (write(CONVERSATIONS, packed)) return;
  for (let last = packed.length - 1; last >= 0; last -= 1) {
    packed[last] = plain(packed[last]);
    if (write(CONVERSATIONS, packed)) return;
  }
  while (packed.length > 1) {
    packed.pop();
    if (write(CONVERSATIONS, packed)) return;
  }
}

let timer = 0;

/** Save soon: once, however often it is asked for. */
export function saveSoon() {
  clearTimeout(timer);
  timer = setTimeout(save, 300);
}

export function add(conversation) {
  conversations.unshift(conversation);
  saveSoon();
}

/** The conversation is the newest again. */
export function touch(conversation) {
  conversation.updated = Date.now();
  const place = conversations.indexOf(conversation);
  if (place > 0) conversations.unshift(...conversations.splice(place, 1));
  saveSoon();
}

export function remove(conversation) {
  conversations = conversations.filter((other) => other !== conversation);
  save();
}

export function removeAll() {
  conversations = [];
  clearTimeout(timer);
  localStorage.removeItem(CONVERSATIONS);
}
