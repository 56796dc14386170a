// What the browser keeps: settings, and the conversations. All of it stays in this browser.

import { join, textOfPieces } from "./conversation.js";
import { toast } from "./dom.js";
import { t } from "./i18n.js";
import { change, read, settings } from "./preferences.js";
import { pack, unpack } from "./tokens.js";

export { change, settings };
const PREFIX = "penjing.conversation.";

/** As the server understands them; seed "" draws a new one for every answer. */
export const SAMPLING = { temperature: 0.5, top_p: 0.95, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens: 256, seed: "" };

const DEFAULTS = { ...SAMPLING, system: "", thinking: "auto", toolsOff: [], look: false, model: "", other: "" };
Object.assign(settings, { ...DEFAULTS, ...settings });

// --- conversations ---------------------------------------------------------------------------------------------------

/** All of them, the newest first. */
export let conversations = [];

/** A conversation with other tokens: change(tokens) gives those of a step or a piece. */
function mapTokens(conversation, change) {
  const changed = (one) => ({ ...one, tokens: change(one.tokens) });
  const inAnswer = (answer) => ({ ...answer, steps: answer.steps.map(changed) });
  const inNode = (node) => (node.answers ? { ...node, answers: node.answers.map(inAnswer) } : node);
  return {
    ...conversation,
    pieces: conversation.pieces?.map((piece) => (piece.tokens ? changed(piece) : piece)),
    nodes: Object.fromEntries(Object.entries(conversation.nodes).map(([id, node]) => [id, inNode(node)])),
  };
}

/** Without what can be looked into: a tenth of the size. */
const plain = (conversation) => ({
  ...mapTokens(conversation, () => []),
  pieces: conversation.pieces && [{ text: textOfPieces(conversation.pieces) }],
});

const keyOf = (conversation) => PREFIX + conversation.id;
const storedKeys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

/** A conversation as it was kept; null if it is none. written: what a text says that is being written elsewhere. */
function restored(kept, written) {
  try {
    const conversation = mapTokens(kept, (tokens) => tokens.map(unpack));
    const all = Object.values(conversation.nodes).flatMap((node) => node.answers ?? []);
    for (const one of [...all, conversation.run ?? {}]) if (["running", "elsewhere"].includes(one.state)) one.state = written;
    return Array.isArray(conversation.children) && conversation.id ? conversation : null;
  } catch {
    return null;
  }
}

const sort = () => conversations.sort((one, other) => other.updated - one.updated);

export function loadConversations() {
  let kept = [];
  try {
    kept = storedKeys().map((key) => read(key, null));
  } catch {
    // No storage (a private window).
  }
  conversations = kept.map((one) => restored(one, "stopped")).filter(Boolean);
  sort();
}

/**
 * Another tab wrote or deleted a conversation: take what it has more. open(): the conversation that is open here, and
 * whether it is being written; kept(conversation, isGone) is called afterwards.
 */
export function onOtherTab(open, kept) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const mine = conversations.find((one) => keyOf(one) === key);
    const { conversation, running } = open();
    if (newValue === null) {
      if (!mine || (mine === conversation && running)) return;
      conversations = conversations.filter((one) => one !== mine);
      kept(mine, true);
      return;
    }
    const theirs = restored(JSON.parse(newValue), "elsewhere");
    if (!theirs) return;
    if (!mine) conversations.push(theirs);
    else if (join(mine, theirs)) saveSoon(mine);
    sort();
    kept(mine ?? theirs, false);
  });
}

const changed = new Set(); // ids of what is to be written
const written = new Map(); // id -> what stands in the storage as far as this tab knows
const stripped = new Set(); // ids of those that lost their tokens

/** Write what has changed. Another tab may have written the same conversation: both are kept, as one. */
export function save() {
  clearTimeout(timer);
  timer = 0;
  for (const conversation of conversations.filter(({ id }) => changed.has(id))) {
    const { id } = conversation;
    const there = localStorage.getItem(keyOf(conversation));
    const theirs = there && there !== written.get(id) ? restored(JSON.parse(there), "elsewhere") : null;
    if (theirs) join(conversation, theirs);
    if (!keep(conversation)) toast(t("full")); // there is no room even without tokens
  }
  changed.clear();
}

/** Where the browser has no more room, the oldest conversations lose their tokens, then this one; never their text. */
function keep(conversation) {
  if (put(conversation, conversation)) return true;
  for (const other of [...conversations].reverse()) {
    if (other === conversation || stripped.has(other.id)) continue;
    stripped.add(other.id);
    if (put(other, plain(other)) && put(conversation, conversation)) return true;
  }
  return put(conversation, plain(conversation));
}

function put(conversation, shown) {
  const text = JSON.stringify(mapTokens(shown, (tokens) => tokens.map(pack)));
  try {
    localStorage.setItem(keyOf(conversation), text);
  } catch {
    return false; // full, or no storage at all
  }
  written.set(conversation.id, text);
  return true;
}

let timer = 0;
let due = Infinity;

/** Save soon: once, however often it is asked for, and not later for being asked for again. */
export function saveSoon(conversation, milliseconds = 300) {
  changed.add(conversation.id);
  if (timer && due <= Date.now() + milliseconds) return;
  clearTimeout(timer);
  due = Date.now() + milliseconds;
  timer = setTimeout(save, milliseconds);
}

export function add(conversation) {
  conversations.unshift(conversation);
  saveSoon(conversation);
}

/** The conversation is the newest again. */
export function touch(conversation) {
  conversation.updated = Date.now();
  sort();
  saveSoon(conversation);
}

export function remove(conversation) {
  conversations = conversations.filter((other) => other !== conversation);
  localStorage.removeItem(keyOf(conversation));
}

export function removeAll() {
  conversations = [];
  for (const key of storedKeys()) localStorage.removeItem(key);
}
