// One answer: asks the server, takes its chunks apart, runs the tools it calls, and asks again.

import * as api from "./api.js";
import { answerOf, messagesOf, messagesOfNodes, newStep, pathBefore } from "./conversation.js";
import { fromApi, textOf } from "./tokens.js";

const MOST_STEPS = 8; // turns of the model in one answer, as `penjing chat` has it
const ALTERNATIVES = 10; // asked for of each token: five are shown, the others give its rank

/** The sampling settings as the server takes them. seed: what this answer is drawn with. */
export function sampling(settings, seed) {
  const { temperature, top_p, top_k, min_p, repetition_penalty, max_tokens } = settings;
  return { temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, seed };
}

/** The seed of the settings, or a new one. */
export function drawSeed(settings) {
  return settings.seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : Number(settings.seed);
}

/** Whether the model must think, must not, or decides (undefined). */
const thinkingOf = (model, settings) => (model.thinking ? { on: true, off: false }[settings.thinking] : undefined);

/** What a request for an answer says besides its messages and the sampling. */
export const chatOptions = (model, tools, settings) => ({
  tools: tools.length ? tools : undefined, enable_thinking: thinkingOf(model, settings),
});

/**
 * Write an answer until it ends. context: {conversation, node, lane, settings, tools}; hooks: {signal, onUpdate(tokens),
 * onBusy(seconds)}.
 * answer.steps may begin with finished steps; a last step with tokens is one to go on from. Never throws: what went
 * wrong is in answer.state and answer.error, and the text so far stays.
 */
export async function writeAnswer(answer, context, hooks) {
  try {
    for (;;) {
      const last = answer.steps.at(-1);
      const goOn = last && !last.finished ? last.tokens.map((token) => token.id) : [];
      if (!goOn.length) answer.steps.push(newStep());
      answer.finish = "";
      await writeStep(answer, goOn, context, hooks);
      const step = answer.steps.at(-1);
      step.finished = true;
      if (!step.calls.length || answer.steps.length >= MOST_STEPS) break;
      let isAnswered = true;
      for (const call of step.calls) {
        const { text, is_answer } = await api.callTool(call.name, parsed(call.arguments), hooks.signal);
        call.result = text;
        isAnswered &&= Boolean(is_answer);
        hooks.onUpdate();
      }
      if (isAnswered) break;
    }
    answer.state = "done";
  } catch (error) {
    endWith(answer, error);
  }
  hooks.onUpdate();
}

/** Stopped, or failed and why; what was written stays. */
function endWith(answer, error) {
  answer.state = error.name === "AbortError" ? "stopped" : "failed";
  answer.error = error.message || String(error);
  Object.assign(answer, { status: error.status ?? -1, code: error.code ?? "", param: error.param ?? "" });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}

async function writeStep(answer, goOn, { conversation, node, lane, settings, tools, model }, hooks) {
  const step = answer.steps.at(-1);
  const before = pathBefore(conversation, node);
  const request = {
    model: answer.model,
    ...sampling(settings, answer.seed),
    ...chatOptions(model, tools, settings),
    logprobs: true,
    top_logprobs: ALTERNATIVES,
    messages: [...messagesOfNodes(before, lane, answer.system), ...messagesOf(answer.steps.slice(0, -1))],
  };
  if (goOn.length) request.continue_ids = goOn;
  step.began = performance.now();
  let kind = lastKind(step.tokens, request.enable_thinking);
  fit(request, answer, perCharacterOf(before, lane), model.context);
  for await (const chunk of fittingStream(request, answer, hooks)) {
    takeUsage(answer, chunk);
    const choice = chunk.choices?.[0];
    const count = step.tokens.length;
    if (choice) kind = takeChoice(answer, step, choice, kind);
    hooks.onUpdate(step.tokens.length - count);
  }
  const { stats } = answer;
  if (stats?.used) stats.perCharacter = stats.used / characters([...request.messages, ...messagesOf([step])]);
}

const ROOM = 64; // tokens that an answer should find

const characters = (messages) => messages.reduce((sum, message) => sum + JSON.stringify(message).length, 0);

/** Tokens a character of what was read and written for the last answer of a lane; 0 before the first. */
function perCharacterOf(nodes, lane) {
  const last = nodes.findLast((node) => node.answers);
  return (last && answerOf(last, lane).stats?.perCharacter) || 0;
}

/** Leave out the oldest exchanges where they would leave too little of the context, as `penjing chat` does. */
function fit(request, answer, perCharacter, context) {
  const room = Math.min(ROOM, request.max_tokens, context / 4);
  while (context && characters(request.messages) * perCharacter > context - room && forget(request, answer));
}

/** Leave out the oldest exchange; false if only the last question is left. */
function forget(request, answer) {
  const asked = request.messages.flatMap((message, place) => (message.role === "user" ? [place] : []));
  if (asked.length < 2) return false;
  request.messages.splice(asked[0], asked[1] - asked[0]);
  answer.forgotten = true;
  return true;
}

/** A stream of an answer; where the server says that the conversation is too long, its oldest exchange is left out. */
async function* fittingStream(request, answer, hooks) {
  for (;;) {
    try {
      yield* api.stream("v1/chat/completions", request, hooks);
      return;
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !forget(request, answer)) throw error;
    }
  }
}

/** What the next token is a part of, from the marks before it. */
function lastKind(tokens, inThought) {
  return tokens.reduce((kind, token) => afterMark(token, kind), inThought ? "reasoning" : "content");
}

const THINK = ["<think>", "</think>"];
const MARKS = { "<think>": "reasoning", "</think>": "content", "<tool_call>": "call", "</tool_call>": "content" };

const afterMark = (token, kind) => (token.bytes === null ? (MARKS[token.text] ?? kind) : token.kind);

/** Take one chunk in; returns what a following token without text of its own is a part of. */
function takeChoice(answer, step, { delta = {}, logprobs, finish_reason: finish }, kind) {
  // A vocabulary without control tokens has no marks: there the delta says what its tokens are a part of.
  if (kind !== "call") kind = delta.reasoning_content ? "reasoning" : delta.content ? "content" : kind;
  for (const entry of entriesOf(logprobs)) {
    const token = fromApi(entry, kind);
    if (token.bytes === null) token.kind = THINK.includes(token.text) ? "reasoning" : "mark";
    step.tokens.push(token);
    kind = afterMark(token, kind);
  }
  if (delta.reasoning_content) {
    step.reasoning += delta.reasoning_content;
    step.thoughtFor = (performance.now() - step.began) / 1000;
  }
  if (delta.content) step.content += delta.content;
  for (const part of delta.tool_calls ?? []) takeCall(step, part);
  if (finish) answer.finish = finish;
  return kind;
}

/** The tokens of a chunk; `end` is the one that ended the answer. */
function entriesOf(logprobs) {
  return [...(logprobs?.content ?? []), ...(logprobs?.end ? [logprobs.end] : [])];
}

/** A call arrives whole or in pieces. */
function takeCall(step, { index = 0, id, function: called = {} }) {
  step.calls[index] ??= { id: id || `call_${index}`, name: "", arguments: "" };
  step.calls[index].name += called.name ?? "";
  step.calls[index].arguments += called.arguments ?? "";
}

/** The figures of the last chunk. */
function takeUsage(answer, { usage, penjing }) {
  if (!penjing) return;
  const { tokens_per_second: speed, time_to_first_token_s: first, context_used: used, context } = penjing;
  answer.stats = { speed, first, used, context, written: usage.completion_tokens };
}

/** Whether a token ends the answer: a control token that opens or closes no part of it. */
export function isEnd(token) {
  return token.bytes === null && !(token.text in MARKS);
}

/** The steps of a new answer: as this one up to a token of a step, then another token instead of it. */
export function branch(answer, stepPlace, tokenPlace, chosen) {
  const steps = structuredClone(answer.steps.slice(0, stepPlace));
  const old = answer.steps[stepPlace];
  const kept = structuredClone(old.tokens.slice(0, tokenPlace));
  const instead = old.tokens[tokenPlace];
  const kind = chosen.bytes === null ? "mark" : instead.bytes === null ? lastKind(kept, false) : instead.kind;
  const tokens = [...kept, { ...chosen, kind, top: instead.top }];
  const step = { ...newStep(), tokens, reasoning: textOf(tokens, "reasoning"), content: textOf(tokens, "content") };
  return [...steps, step];
}

/**
 * A model that was only pretrained goes on behind a prompt. part: {tokens}, with those that are there already, and its
 * text as part[name]; what is written is added to both. Never throws, like writeAnswer.
 */
export async function continueText(answer, prompt, part, name, settings, hooks) {
  const request = { model: answer.model, prompt, ...sampling(settings, answer.seed), logprobs: ALTERNATIVES };
  if (part.tokens.length) request.continue_ids = part.tokens.map((token) => token.id);
  try {
    for await (const chunk of api.stream("v1/completions", request, hooks)) {
      takeUsage(answer, chunk);
      const choice = chunk.choices?.[0];
      const tokens = entriesOf(choice?.logprobs).map((entry) => fromApi(entry, entry.bytes ? "content" : "mark"));
      part.tokens.push(...tokens);
      part[name] += choice?.text ?? "";
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      hooks.onUpdate(tokens.length);
    }
    answer.state = "done";
  } catch (error) {
    endWith(answer, error);
  }
  hooks.onUpdate();
}
