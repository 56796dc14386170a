// Requests to the server this page came from. The key, where the server wants one, lives as long as the tab.

const KEY = "penjing.key";
const MOST_TRIES = 6; // of a request that the server is too busy for

/** What the server said. status 0: it did not answer. */
class ApiError extends Error {
  constructor(status, message, { retryAfter = 0, code = "", param = "" } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter, code, param });
  }
}

let askForKey = async () => false;

/** ask: called when the server refuses the key; says whether the person gave another one. */
export function onUnauthorised(ask) {
  askForKey = ask;
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key.trim());
}

/** Some seconds; the signal ends them with its AbortError. */
export function pause(secondsLong, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(resolve, secondsLong * 1000);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

async function once(path, { body, signal, key }) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, error.message);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const message = said.error?.message || response.statusText || String(response.status);
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  throw new ApiError(response.status, message, { retryAfter, code: said.error?.code, param: said.error?.param });
}

/**
 * A response that is good. A refused key is asked for again; a busy server (429, 503) is asked again after the time it
 * names, and onBusy(seconds) is told each time. Throws ApiError, or the signal's AbortError.
 */
export async function request(path, { body, signal, onBusy, mostTries = MOST_TRIES } = {}) {
  for (let tries = 1; ; ) {
    const key = sessionStorage.getItem(KEY);
    try {
      return await once(path, { body, signal, key });
    } catch (error) {
      // Somebody may have given another key since this was sent.
      if (error.status === 401 && (key !== sessionStorage.getItem(KEY) || (await askForKey()))) continue;
      const busy = error.status === 429 || error.status === 503;
      if (!busy || tries >= mostTries) throw error;
      const wait = Math.min(error.retryAfter || 2 ** (tries - 1), 30);
      onBusy?.(wait);
      await pause(wait, signal);
      tries += 1;
    }
  }
}

/** The object that a path answers. Options and errors are those of request. */
export const json = async (path, options) => (await request(path, options)).json();

/** One request at a time: each ends the one before it; `ending` ends them all. */
export class Newest {
  constructor(ending) {
    ending?.addEventListener("abort", () => this.cancel());
  }

  /** What request(signal) answers; undefined if it was ended. */
  async ask(request) {
    this.cancel();
    const mine = (this.running = new AbortController());
    try {
      return await request(mine.signal);
    } catch (error) {
      if (!mine.signal.aborted) throw error;
      return undefined;
    } finally {
      if (this.running === mine) this.running = null;
    }
  }

  /** End what runs; whether anything did. */
  cancel() {
    const { running } = this;
    running?.abort();
    this.running = null;
    return Boolean(running);
  }
}

/** The models, each {id, answers, thinking, context, step, parameters}; an adapter is one more, named MODEL:ADAPTER. */
export async function models() {
  const { data } = await json("v1/models");
  return data.map(({ id, penjing }) => ({ id, ...penjing }));
}

/** The tools that the server was started with, as OpenAI writes them. */
export const tools = async () => (await json("api/tools")).tools;

/** What a tool answered: {text, is_answer}; is_answer: nothing is to be said after it. */
export const callTool = (name, args, signal) => json("api/tools/call", { body: { name, arguments: args }, signal });

/** How many tokens a request reads: {count, max_model_len}. */
export const countTokens = (body, signal) => json("tokenize", { body, signal, mostTries: 1 });

/** The objects of a stream, until [DONE]. Throws a TypeError where the connection breaks before it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new TypeError("the stream ended early");
      rest += value;
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of an answer. path: v1/chat/completions or v1/completions. A broken stream is an ApiError of status 0. */
export async function* stream(path, body, { signal, onBusy } = {}) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, { body: asked, signal, onBusy });
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(500, chunk.error.message, { code: chunk.error.code });
      yield chunk;
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(0, error.message) : error;
  }
}
