// The conversation that is open: what is asked, answered, stopped, repeated and branched.

import { branch, continueText, drawSeed, isEnd, writeAnswer } from "./answer.js";
import { addNode, newAnswer, newConversation, newStep, path, showSibling } from "./conversation.js";
import { toolsOn } from "./settings.js";
import { titleOf } from "./sidebar.js";
import * as store from "./store.js";
import { TextChat } from "./text_chat.js";
import { View } from "./view.js";

class Chat extends TextChat {
  models = [];
  tools = [];
  lanes = []; // the names of the one or two models that are asked
  conversation = newConversation();
  controller = null; // of what is being written
  onChange = () => {};
  view = new View(this);

  get running() {
    return this.controller !== null;
  }

  get isDocument() {
    return this.conversation.pieces !== undefined;
  }

  get isEmpty() {
    return !this.conversation.children.length && !(this.conversation.pieces?.length > 0);
  }

  modelOf(lane) {
    return this.models.find((model) => model.id === this.lanes[lane]) ?? { id: this.lanes[lane] ?? "", answers: true };
  }

  /** Which models there are, and what they may call. */
  connected(models, tools) {
    this.models = models;
    this.tools = tools;
    const known = (name) => models.some((model) => model.id === name);
    const first = known(store.settings.model) ? store.settings.model : (models.find((model) => model.answers) ?? models[0])?.id;
    this.lanes = [first, store.settings.other].filter((name) => name && known(name));
    this.fitKind();
    this.draw();
  }

  /** An empty conversation is of the kind that its model can: one that only continues gets a sheet. */
  fitKind() {
    if (!this.isEmpty) return;
    const continues = this.lanes.length === 1 && !this.modelOf(0).answers;
    if (continues) this.conversation.pieces ??= [];
    else delete this.conversation.pieces;
  }

  choose(lane, name) {
    this.lanes[lane] = name;
    this.keepLanes();
  }

  compare(on) {
    const other = this.models.find((model) => model.id !== this.lanes[0]);
    this.lanes = on && other ? [this.lanes[0], other.id] : [this.lanes[0]];
    this.keepLanes();
  }

  keepLanes() {
    store.change({ model: this.lanes[0], other: this.lanes[1] ?? "" });
    this.fitKind();
    this.draw();
  }

  // --- which conversation --------------------------------------------------------------------------------------------

  startNew() {
    this.open(newConversation());
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.fitKind();
    this.draw();
    this.view.toEnd();
  }

  remove(conversation) {
    store.remove(conversation);
    if (conversation === this.conversation) this.startNew();
    else this.onChange();
  }

  removeAll() {
    store.removeAll();
    this.startNew();
  }

  /** Show another version of a question or an answer. */
  show(node, place) {
    showSibling(this.conversation, node, place);
    store.saveSoon(this.conversation);
    this.draw();
  }

  rename(conversation, title) {
    Object.assign(conversation, { title, renamed: Date.now() });
    store.saveSoon(conversation);
    this.onChange();
  }

  /** Put conversations of a file beside those that are there. */
  add(conversations) {
    conversations.forEach((conversation) => store.add(conversation));
    this.onChange();
  }

  /** Draw the conversation anew, and what stands around it. */
  draw() {
    this.view.draw();
    this.onChange();
  }

  keep() {
    if (!store.conversations.includes(this.conversation)) store.add(this.conversation);
    else store.touch(this.conversation);
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  send(text) {
    const last = path(this.conversation).at(-1);
    return this.ask(last?.id ?? null, text);
  }

  edit(node, text) {
    return this.ask(node.parent, text);
  }

  ask(parent, text) {
    this.stop();
    this.conversation.title ||= titleOf(text);
    const question = addNode(this.conversation, parent, { text });
    return this.answer(question.id, this.lanes.map((name) => this.blank(name)));
  }

  blank(name, steps = []) {
    const answer = newAnswer(name, store.settings, steps);
    answer.continued = this.models.find((model) => model.id === name)?.answers === false;
    return answer;
  }

  /** Answer again, beside what was answered before; of two answers the other one stays. */
  retry(node, lane) {
    const again = this.blank(this.lanes.length === node.answers.length ? this.lanes[lane] : node.answers[lane].model);
    return this.instead(node, lane, again);
  }

  /** Go on from another token than the one that was drawn. */
  chooseToken(node, lane, step, token, other) {
    const old = node.answers[lane];
    const again = this.blank(old.model, branch(old, step, token, other));
    again.system = old.system;
    if (isEnd(other)) Object.assign(again, { state: "done", finish: "stop" });
    return this.instead(node, lane, again);
  }

  instead(node, lane, answer) {
    this.stop();
    return this.answer(node.parent, node.answers.map((other, place) => (place === lane ? answer : other)));
  }

  /** Put answers under a question, and write those that are not written yet. */
  answer(question, answers) {
    return this.writeAll(addNode(this.conversation, question, { answers }), answers);
  }

  /** Write an answer on that was cut off. */
  writeOn(node, lane) {
    this.stop();
    const answer = node.answers[lane];
    if (answer.steps.at(-1).tokens.length) answer.steps.at(-1).finished = false;
    else answer.steps.pop();
    answer.state = "running";
    return this.writeAll(node, node.answers);
  }

  writeAll(node, answers) {
    const waiting = answers.filter((answer) => answer.state === "running");
    const write = (signal) => Promise.all(waiting.map((answer) => this.write(answer, node, answers.indexOf(answer), signal)));
    return this.whileRunning(write);
  }

  /** Everything around write(signal), which ends when it is stopped: kept, drawn, and kept again. */
  async whileRunning(write) {
    const { conversation } = this;
    this.keep();
    const controller = new AbortController();
    this.controller = controller;
    this.draw();
    this.view.toEnd();
    await write(controller.signal);
    if (this.controller === controller) this.controller = null;
    store.saveSoon(conversation);
    this.onChange();
  }

  write(answer, node, lane, signal) {
    const { conversation, models, tools } = this;
    const settings = { ...store.settings };
    answer.seed = drawSeed(settings);
    const hooks = this.hooks(answer, signal);
    if (answer.continued) {
      if (!answer.steps.length) answer.steps.push(newStep());
      return continueText(answer, conversation.nodes[node.parent].text, answer.steps[0], "content", settings, hooks);
    }
    const model = models.find((one) => one.id === answer.model) ?? {};
    return writeAnswer(answer, { conversation, node, lane, settings, model, tools: toolsOn(tools) }, hooks);
  }

  /** clock: when what is written began. It is not kept. */
  hooks(answer, signal) {
    const clock = { begun: performance.now(), first: 0, tokens: 0 };
    const { conversation } = this;
    Object.defineProperty(answer, "clock", { value: clock, configurable: true });
    const busy = (wait) => {
      answer.busy = wait;
      this.view.soon();
    };
    return {
      signal,
      onBusy: busy,
      onUpdate: (tokens = 0) => {
        delete answer.busy;
        if (tokens) measure(answer, clock, tokens);
        store.saveSoon(conversation, 1000); // a reload keeps what is there
        this.view.soon();
      },
    };
  }

  stop() {
    this.controller?.abort(new DOMException("stopped", "AbortError"));
    this.controller = null;
  }
}

/** The figures as they are measured here, until the server gives its own. */
function measure(answer, clock, tokens) {
  clock.first ||= performance.now();
  clock.tokens += tokens;
  const passed = (performance.now() - clock.first) / 1000;
  const speed = passed > 0.2 ? clock.tokens / passed : null;
  answer.stats = { first: (clock.first - clock.begun) / 1000, speed, written: clock.tokens, used: null, context: null };
}

export const chat = new Chat();
