// A conversation is a tree: an edited question and a repeated answer stand beside the first one, and both stay.
//
// A node is a question, {id, parent, text}, or its answers, {id, parent, answers}: one, or two models' side by side.
// An answer is {model, system, seed, steps, state, finish, error, stats}; state: "running", "done", "stopped" or
// "failed". A step is one turn of the model, {reasoning, content, calls, tokens}: after one that calls tools, each call
// {id, name, arguments, result}, the next step follows. A conversation that continues a text has `pieces` instead.

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(2)), (part) => part.toString(36)).join("");
}

export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), nodes: {}, children: [], active: 0 };
}

const holder = (conversation, id) => (id ? conversation.nodes[id] : conversation);

/** Put a node under a parent (null: the beginning), and show it. */
export function addNode(conversation, parent, node) {
  const made = { id: newId(), parent, children: [], active: 0, ...node };
  conversation.nodes[made.id] = made;
  const over = holder(conversation, parent);
  over.children.push(made.id);
  over.active = over.children.length - 1;
  return made;
}

/** The nodes that are shown, from the first. */
export function path(conversation) {
  const shown = [];
  for (let over = conversation; over.children.length; over = shown.at(-1)) {
    shown.push(conversation.nodes[over.children[over.active]]);
  }
  return shown;
}

/** {place, of}: which of its siblings a node is. */
export function siblings(conversation, node) {
  const over = holder(conversation, node.parent);
  return { place: over.children.indexOf(node.id), of: over.children.length };
}

export function showSibling(conversation, node, place) {
  holder(conversation, node.parent).active = place;
}

export function newAnswer(model, settings, steps = []) {
  return { model, system: settings.system, seed: null, steps, state: "running", finish: "", error: "", stats: null };
}

export function newStep() {
  return { reasoning: "", content: "", calls: [], tokens: [] };
}

/** The answer of one lane; where a node has only one, that one. */
export function answerOf(node, lane) {
  return node.answers[lane] ?? node.answers[0];
}

/** What the model said and was told in one answer, as messages of OpenAI's. */
function spoken(steps) {
  return steps.flatMap((step) => {
    const said = { role: "assistant", content: step.content };
    if (step.reasoning) said.reasoning_content = step.reasoning;
    const done = step.calls.filter((call) => call.result !== undefined);
    if (done.length) {
      said.tool_calls = done.map(({ id, name, arguments: args }) => ({
        id, type: "function", function: { name, arguments: args },
      }));
    }
    return [said, ...done.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }))];
  });
}

/** Questions and answers as messages, without questions that were not answered at all. */
function messagesOfNodes(nodes, lane) {
  const silent = (node) => node?.answers && answerOf(node, lane).steps.every((step) => !step.content && !step.calls.length);
  return nodes.flatMap((node, place) => {
    if (silent(node) || silent(nodes[place + 1])) return [];
    return node.answers ? spoken(answerOf(node, lane).steps) : [{ role: "user", content: node.text }];
  });
}

/** The messages that stand before a node, in one lane. */
export function messagesBefore(conversation, node, lane, system) {
  const shown = path(conversation);
  const said = messagesOfNodes(shown.slice(0, shown.indexOf(node)), lane);
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

/** The messages of the last steps of an answer that goes on behind tools. */
export function messagesOf(steps) {
  return spoken(steps);
}

/** One line a conversation, as `penjing train sft` reads them; a text that was continued is {"text": ...}. */
export function toJsonl(conversations, tools) {
  const lines = conversations.map((conversation) => {
    if (conversation.pieces) return { text: conversation.pieces.map((piece) => piece.text).join("") };
    const shown = path(conversation);
    const last = shown.findLast((node) => node.answers);
    if (!last) return null;
    const messages = messagesOfNodes(shown.slice(0, shown.indexOf(last) + 1), 0);
    if (!messages.length) return null;
    const system = answerOf(last, 0).system || "";
    if (system.trim()) messages.unshift({ role: "system", content: system });
    const called = messages.some((message) => message.tool_calls);
    return called && tools.length ? { messages, tools } : { messages };
  });
  return lines.filter(Boolean).map((line) => `${JSON.stringify(line)}\n`).join("");
}
