// A small Markdown: headings, lists, tables, quotes, code, emphasis, links. It makes nodes from text, and links only
// to http and https: whatever a model writes, nothing runs and nothing is fetched.

import { copyButton, el } from "./dom.js";
import { t } from "./i18n.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/**
 * Show text in a container. Called again with a longer text it touches only the blocks that changed, so that what is
 * already there can be selected, and a long answer stays fast.
 */
export function renderMarkdown(container, text, depth = 0) {
  const sources = blocks(text);
  const shown = container.markdownSources ?? [];
  let same = 0;
  while (same < sources.length && same < shown.length && sources[same] === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const source of sources.slice(same)) container.append(block(source, depth));
  container.markdownSources = sources;
}

/** Cut a text into the sources of its blocks. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    found.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return found;
}

function blockEnd(lines, at) {
  const fence = lines[at].match(FENCE);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  if (isTable(lines, at)) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  const inList = ITEM.test(lines[at]);
  const inQuote = QUOTE.test(lines[at]);
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!(inList && (ITEM.test(next) || /^ {2,}\S/.test(next)))) return end;
    } else if (!inList && (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, end))) return end;
    else if (!inList && (ITEM.test(line) || (!inQuote && QUOTE.test(line)))) return end;
    else if (inList && !/^\s/.test(line) && (FENCE.test(line) || HEADING.test(line) || RULE.test(line))) return end;
    end += 1;
  }
  return end;
}

const closes = (line, mark) => line.trim().length >= mark.length && [...line.trim()].every((letter) => letter === mark[0]);

const isTable = (lines, at) =>
  lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && cells(lines[at]).length === cells(lines[at + 1]).length;

const DEEPEST = 8; // quotes and lists in each other: a model that repeats itself makes thousands

/** One block from its source. */
function block(source, depth) {
  const lines = source.split("\n");
  const fence = lines[0].match(FENCE);
  if (fence) return code(lines, fence);
  const heading = lines[0].match(HEADING);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2])); // the page has h1 and h2
  if (RULE.test(lines[0])) return el("hr");
  if (isTable(lines, 0)) return table(lines);
  const deep = depth >= DEEPEST;
  if (QUOTE.test(lines[0]) && !deep) {
    const quote = el("blockquote");
    renderMarkdown(quote, lines.map((line) => line.match(QUOTE)?.[1] ?? line).join("\n"), depth + 1);
    return quote;
  }
  if (ITEM.test(lines[0]) && !deep) return list(lines, depth);
  return el("p", {}, inline(lines.map((line) => line.trimStart()).join("\n")));
}

function code(lines, [, mark, language]) {
  const closed = lines.length > 1 && closes(lines.at(-1), mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  return el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", { text: language || t("code") }), copyButton(t("copyCode"), t("copied"), () => text)),
    el("pre", { tabindex: "0" }, el("code", { text })),
  );
}

function list(lines, depth) {
  const [, indent, mark] = lines[0].match(ITEM);
  const ordered = /\d/.test(mark);
  const node = el(ordered ? "ol" : "ul", { start: ordered && parseInt(mark, 10) !== 1 ? parseInt(mark, 10) : null });
  let own = [];
  const finish = () => {
    if (!own.length) return;
    const item = el("li", {}, inline(own[0]));
    const below = own.slice(1).join("\n");
    if (below.trim()) {
      const inner = el("div");
      renderMarkdown(inner, below, depth + 1);
      item.append(...inner.childNodes);
    }
    node.append(item);
  };
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length) {
      finish();
      own = [item[3]];
    } else {
      own.push(line.replace(new RegExp(`^ {0,${indent.length + (ordered ? 3 : 2)}}`), ""));
    }
  }
  finish();
  return node;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

function table([head, rule, ...rows]) {
  const sides = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) =>
    el("tr", {}, cells(line).slice(0, sides.length).map((cell, place) => el(tag, { class: `to-${sides[place]}` }, inline(cell))));
  return el(
    "div",
    { class: "table", tabindex: "0" },
    el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, rows.map((line) => row(line, "td")))),
  );
}

// In order of precedence. Emphasis by _ needs a word's edge: snake_case is no emphasis.
const INLINE = [
  [/`+/, (match, rest) => codeSpan(match[0], rest)],
  [/\\([\\`*_{}[\]()#+.!|~>-])/, (match) => [match[1], match[0].length]],
  [/\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, (match) => [el("strong", {}, inline(match[1])), match[0].length]],
  [/\*(?=[^\s*])([^*]*?[^\s*])\*/, (match) => [el("em", {}, inline(match[1])), match[0].length]],
  [/~~(?=\S)([\s\S]*?\S)~~/, (match) => [el("del", {}, inline(match[1])), match[0].length]],
  [/(?<![\p{L}\p{N}_])__(?=\S)([^_]*?\S)__(?![\p{L}\p{N}_])/u, (match) => [el("strong", {}, inline(match[1])), match[0].length]],
  [/(?<![\p{L}\p{N}_])_(?=[^\s_])([^_]*?[^\s_])_(?![\p{L}\p{N}_])/u, (match) => [el("em", {}, inline(match[1])), match[0].length]],
  [/!?\[([^\]\n]*)\]\(\s*(\S+?)(?:\s+"[^"]*")?\s*\)/, (match) => [link(match[2], match[1] || match[2], match[0]), match[0].length]],
  [/https?:\/\/[^\s<>"'）」』，。；]+[^\s<>"'.,;:!?）」』，。；)]/, (match) => [link(match[0], match[0], match[0]), match[0].length]],
  [/\n/, () => [el("br"), 1]],
];

/** The nodes and texts of a line: always the leftmost mark first. */
function inline(text) {
  const found = [];
  let rest = text;
  while (rest) {
    let best = null;
    for (const [pattern, make] of INLINE) {
      const match = rest.match(pattern);
      if (match && (best === null || match.index < best.match.index)) best = { match, make };
    }
    if (best === null) break;
    const { match, make } = best;
    if (match.index) found.push(rest.slice(0, match.index));
    const [node, length] = make(match, rest.slice(match.index));
    found.push(node);
    rest = rest.slice(match.index + length);
  }
  if (rest) found.push(rest);
  return found;
}

function codeSpan(ticks, rest) {
  const end = rest.indexOf(ticks, ticks.length);
  if (end < 0 || rest[end + ticks.length] === "`") return [ticks, ticks.length];
  const text = rest.slice(ticks.length, end).replace(/\n/g, " ");
  return [el("code", { text: text.trim() ? text.replace(/^ (.*) $/, "$1") : text }), end + ticks.length];
}

/** A link to http or https; of any other the text stays as it was written. A picture is not fetched: it is a link. */
function link(address, text, source) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return source;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return source;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, text);
}
