// Tokens with their probabilities: as the server sends them, as they are kept, and as they are shown.

/**
 * A token: {id, text, bytes, logp, kind, top}. bytes: null for a control token (`</think>`), which has no text of its
 * own. kind: "content", "reasoning", "call" or "mark". top: the likeliest tokens of that place, {id, text, bytes, logp}.
 */
export function fromApi(entry, kind) {
  return { ...alternative(entry), kind, top: (entry.top_logprobs || []).map(alternative) };
}

/** A token that adds nothing to the text is a control token too. */
function alternative({ id, token, bytes, logprob }) {
  return { id, text: token || `#${id}`, bytes: bytes?.length ? bytes : null, logp: logprob };
}

const round = (value) => Math.round(Math.max(value, -99) * 1000) / 1000;
const utf8 = new TextEncoder();

/** A token as a short list, for the browser's small storage: bytes only where the text does not give them. */
export function pack(token) {
  const one = ({ id, text, bytes, logp }) => {
    if (bytes === null) return [id, round(logp), text, 0];
    return text.includes("\ufffd") ? [id, round(logp), text, bytes] : [id, round(logp), text];
  };
  return [...one(token).concat(Array(3)).slice(0, 4), token.kind, token.top.map(one)];
}

export function unpack([id, logp, text, bytes, kind, top]) {
  const one = ([otherId, otherLogp, otherText, raw]) => {
    const known = raw === 0 ? null : raw || [...utf8.encode(otherText)];
    return { id: otherId, logp: otherLogp, text: otherText, bytes: known };
  };
  return { ...one([id, logp, text, bytes]), kind, top: top.map(one) };
}

/** How many bytes at the end begin a character that they do not finish. */
function unfinished(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
    const byte = bytes[bytes.length - back];
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) ? back : 0;
    if (byte < 0x80) return 0;
  }
  return 0;
}

const MOST_JOINED = 6; // tokens: bytes that never make a character are shown as they are

/**
 * Tokens joined where a character is spread over several: [{tokens, text, logp, first}], first being the place of the
 * first of them; logp is that of all together. Only the last group can still be unfinished.
 */
export function groups(tokens, from) {
  const found = [];
  let open = null;
  for (let place = from; place < tokens.length; place += 1) {
    const token = tokens[place];
    if (token.bytes === null || (open && open.tokens.length >= MOST_JOINED)) open = null;
    if (open === null) {
      open = { tokens: [], bytes: [], first: place };
      found.push(open);
    }
    open.tokens.push(token);
    open.bytes.push(...(token.bytes ?? []));
    open.text = token.bytes === null ? token.text : decode(open.bytes);
    open.logp = open.tokens.reduce((sum, part) => sum + part.logp, 0);
    if (token.bytes === null || unfinished(open.bytes) === 0) open = null;
  }
  return found;
}

function decode(bytes) {
  return new TextDecoder().decode(new Uint8Array(bytes));
}

/** The text of tokens of one kind, without a character at its end that is not finished yet. */
export function textOf(tokens, kind) {
  const bytes = tokens.filter((token) => token.kind === kind && token.bytes).flatMap((token) => token.bytes);
  return decode(bytes.slice(0, bytes.length - unfinished(bytes)));
}

/** What an alternative would read as, behind the bytes of the same character that stand before it. */
export function reading(token, before) {
  if (token.bytes === null) return token.text;
  const bytes = [...before, ...token.bytes];
  const rest = unfinished(bytes);
  const text = decode(rest ? bytes.slice(0, -rest) : bytes);
  if (rest === 0 && !text.includes("\ufffd")) return text;
  const part = token.bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
  return text && !text.includes("\ufffd") ? `${text}+${part}` : part;
}

/** Text with its blanks made visible, for a place where a single token is named. */
export function visible(text) {
  return text.replace(/ /g, "␣").replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

/** The steps of the colour scale: a token is of the first step whose probability it reaches. */
export const STEPS = [0.9, 0.6, 0.3, 0.1, 0.03, 0];

export function step(logp) {
  const probability = Math.exp(logp);
  return STEPS.findIndex((least) => probability >= least);
}

/** 1 for the likeliest of its place; 0 if it is none of those that are known. */
export function rank(token) {
  return token.top.findIndex((other) => other.id === token.id) + 1;
}
