// A conversation is a tree: an edited question and a repeated answer stand beside the first one, and both stay.
//
// A node is a question, {id, parent, text}, or its answers, {id, parent, answers}: one, or two models' side by side.
// An answer is {model, system, seed, steps, state, finish, error, stats}; state: "running", "done", "stopped" or
// "failed". A step is one turn of the model, {reasoning, content, calls, tokens}: after one that calls tools, each call
// {id, name, arguments, result}, the next step follows. A conversation that continues a text has `pieces` instead.

function newId() {
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

/** The nodes that are shown before one. */
export function pathBefore(conversation, node) {
  const shown = path(conversation);
  return shown.slice(0, shown.indexOf(node));
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

/** The text of a conversation that continues one. */
export const textOfPieces = (pieces) => pieces.map((piece) => piece.text).join("");

/** What the model said and was told in steps of one answer, as messages of OpenAI's. */
export function messagesOf(steps) {
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

/** Questions and answers as messages, without questions that were not answered at all; the system prompt before them. */
export function messagesOfNodes(nodes, lane, system) {
  const silent = (node) => node?.answers && answerOf(node, lane).steps.every((step) => !step.content && !step.calls.length);
  const said = nodes.flatMap((node, place) => {
    if (silent(node) || silent(nodes[place + 1])) return [];
    return node.answers ? messagesOf(answerOf(node, lane).steps) : [{ role: "user", content: node.text }];
  });
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

const sizeOf = (answer) => JSON.stringify(answer.steps.map(({ tokens, ...said }) => said)).length;
const further = (one, other) => sizeOf(one) - sizeOf(other) || (one.state === "done") - (other.state === "done");

/** Take into `mine` what another tab's version has more. Returns whether `mine` has anything that it lacks. */
export function join(mine, theirs) {
  let hasMore = false;
  const pairs = [[mine, theirs]];
  for (const [id, node] of Object.entries(theirs.nodes)) {
    const own = mine.nodes[id];
    if (own === undefined) mine.nodes[id] = node;
    else pairs.push([own, node]);
    own?.answers?.forEach((answer, lane) => {
      const ahead = answer.state === "running" ? 1 : further(answer, node.answers[lane]);
      if (ahead < 0) Object.assign(answer, node.answers[lane]);
      hasMore ||= ahead > 0;
    });
  }
  for (const [own, other] of pairs) {
    hasMore ||= own.children.some((id) => !other.children.includes(id));
    own.children = [...new Set([...own.children, ...other.children])];
  }
  if ((theirs.renamed ?? 0) > (mine.renamed ?? 0)) Object.assign(mine, { title: theirs.title, renamed: theirs.renamed });
  if (mine.pieces && theirs.updated > mine.updated && mine.run?.state !== "running") {
    Object.assign(mine, { pieces: theirs.pieces, run: theirs.run, earlier: theirs.earlier });
  }
  mine.updated = Math.max(mine.updated, theirs.updated);
  return hasMore;
}

/** How many nodes stand one under the other from this one on. */
function depth(conversation, node) {
  let most = 0;
  for (const open = [[node, 1]]; open.length; ) {
    const [one, place] = open.pop();
    most = Math.max(most, place);
    for (const id of one.children) open.push([conversation.nodes[id], place + 1]);
  }
  return most;
}

/** The place of a version beside this node under which the conversation went on further; -1 if there is none. */
export function longerVersion(conversation, node) {
  const all = holder(conversation, node.parent).children;
  if (all.length < 2) return -1;
  const depths = all.map((id) => depth(conversation, conversation.nodes[id]));
  const most = Math.max(...depths);
  return most > depths[all.indexOf(node.id)] ? depths.indexOf(most) : -1;
}

/** Whether an answer that was cut off can be written on. */
export function canGoOn(answer) {
  const isCut = ["stopped", "failed"].includes(answer.state) || (answer.state === "done" && answer.finish === "length");
  const last = answer.steps.at(-1);
  return isCut && Boolean(last) && !last.calls.length && (last.tokens.length > 0 || answer.steps.length > 1);
}
