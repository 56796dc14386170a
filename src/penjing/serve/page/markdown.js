// A small Markdown: headings, lists, tables, quotes, code, emphasis, links, formulas. It makes nodes from text, and links only
// to http and https: whatever a model writes, nothing runs and nothing is fetched.

import { copyButton, el } from "./dom.js";
import { highlighted } from "./highlight.js";
import { t } from "./i18n.js";
import { formula } from "./math.js";

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
  const afterMath = mathEnd(lines, at);
  if (afterMath) return afterMath;
  const item = lines[at].match(ITEM);
  const inList = item !== null;
  const inQuote = QUOTE.test(lines[at]);
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!(inList && (ITEM.test(next) || /^ {2,}\S/.test(next)))) return end;
    } else if (!inList && (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, end) || mathEnd(lines, end))) return end;
    else if (inList && isOtherList(item, line.match(ITEM))) return end;
    else if (!inList && (ITEM.test(line) || (!inQuote && QUOTE.test(line)))) return end;
    else if (inList && !/^\s/.test(line) && (FENCE.test(line) || HEADING.test(line) || RULE.test(line))) return end;
    end += 1;
  }
  return end;
}

const closes = (line, mark) => line.trim().length >= mark.length && [...line.trim()].every((letter) => letter === mark[0]);

/** Whether an item begins another list: with another mark, and no deeper. */
const isOtherList = (item, other) => other !== null && other[1].length <= item[1].length && other[2].at(-1) !== item[2].at(-1);

const LONGEST_FORMULA = 60; // lines

/** The line behind a formula that begins here on a line of its own; 0 if none does, or it does not end. */
function mathEnd(lines, at) {
  const open = lines[at].match(/^\s*(\$\$|\\\[)/)?.[1];
  if (!open) return 0;
  const close = open === "$$" ? "$$" : "\\]";
  for (let end = at; end < Math.min(lines.length, at + LONGEST_FORMULA); end += 1) {
    if (lines[end].includes(close, end === at ? lines[at].indexOf(open) + 2 : 0)) return end + 1;
  }
  return 0;
}

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
    el("pre", { tabindex: "0" }, el("code", {}, highlighted(text, language))),
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

/** The cells of a row; a | in code or behind a backslash parts none. */
function cells(line) {
  const found = [""];
  for (const part of line.trim().replace(/^\||(?<!\\)\|$/g, "").match(/(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)|\\\||[\s\S]/g) ?? []) {
    if (part === "|") found.push("");
    else found.push(found.pop() + part.replaceAll("\\|", "|"));
  }
  return found.map((cell) => cell.trim());
}

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

// In order of precedence. Emphasis by _ needs a word's edge: snake_case is no emphasis. A $ is a formula's only where no
// blank follows it, none is before its end, and no digit follows that: $5 and $6 is money.
const INLINE = [
  [/`+/g, (match, text) => codeSpan(match[0], text, match.index)],
  [/\\\(([\s\S]{1,2000}?)\\\)/g, (match) => [math(match, false), match[0].length]],
  [/\\\[([\s\S]{1,4000}?)\\\]|\$\$([\s\S]{1,4000}?)\$\$/g, (match) => [math(match, true), match[0].length]],
  [/(?<![\\$\p{L}\p{N}])\$(?![\s$])((?:[^$\n\\]|\\.){1,500}?)(?<!\s)\$(?![\d$])/gu, (match) => [math(match, false), match[0].length]],
  [/\\([\\`*_{}[\]()#+.!|~>$-])/g, (match) => [match[1], match[0].length]],
  [/\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/g, (match) => [el("strong", {}, inline(match[1])), match[0].length]],
  [/\*(?=[^\s*])([^*]*?[^\s*])\*/g, (match) => [el("em", {}, inline(match[1])), match[0].length]],
  [/~~(?=\S)([\s\S]*?\S)~~/g, (match) => [el("del", {}, inline(match[1])), match[0].length]],
  [/(?<![\p{L}\p{N}_])__(?=\S)([^_]*?\S)__(?![\p{L}\p{N}_])/gu, (match) => [el("strong", {}, inline(match[1])), match[0].length]],
  [/(?<![\p{L}\p{N}_])_(?=[^\s_])([^_]*?[^\s_])_(?![\p{L}\p{N}_])/gu, (match) => [el("em", {}, inline(match[1])), match[0].length]],
  [/!?\[([^\]\n]*)\]\(\s*(?:<([^<>\n]*)>|((?:[^\s()]|\((?:[^\s()]|\([^\s()]*\))*\))+))(?:\s+"[^"]*")?\s*\)/g,
    (match) => [link(match[2] ?? match[3], match[1] || (match[2] ?? match[3]), match[0]), match[0].length]],
  [/<(https?:\/\/[^\s<>]+)>/g, (match) => [link(match[1], match[1], match[0]), match[0].length]],
  [/https?:\/\/[^\s<>"'）」』，。；]+/g, (match) => bareLink(match[0])],
  [/\n/g, () => [el("br"), 1]],
];

/** The nodes and texts of a line: always the leftmost mark first. Each pattern is searched once for each of its marks. */
function inline(text) {
  const found = [];
  const next = INLINE.map(() => ({ index: -1 }));
  let at = 0;
  for (;;) {
    let best = null;
    INLINE.forEach(([pattern, make], which) => {
      if (next[which] && next[which].index < at) {
        pattern.lastIndex = at;
        next[which] = pattern.exec(text);
      }
      const match = next[which];
      if (match && (best === null || match.index < best.match.index)) best = { match, make };
    });
    if (best === null) break;
    const { match, make } = best;
    if (match.index > at) found.push(text.slice(at, match.index));
    const [node, length] = make(match, text);
    found.push(node);
    at = match.index + length;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

function codeSpan(ticks, text, at) {
  const begin = at + ticks.length;
  const end = text.indexOf(ticks, begin);
  if (end < 0 || text[end + ticks.length] === "`") return [ticks, ticks.length];
  const code = text.slice(begin, end).replace(/\n/g, " ");
  return [el("code", { text: code.trim() ? code.replace(/^ (.*) $/, "$1") : code }), end + ticks.length - at];
}

function math(match, isDisplay) {
  const made = formula(match[1] ?? match[2], isDisplay);
  if (made === null) return match[0];
  return isDisplay ? el("span", { class: "formula", tabindex: "0" }, made) : made;
}

/** An address in a text, without the sentence's signs behind it; a ) is its own where it closes one of its own. */
function bareLink(written) {
  let end = written.length;
  for (let own = written.split("(").length - written.split(")").length; end > 0; end -= 1) {
    if (written[end - 1] === ")" && own < 0) own += 1;
    else if (!".,;:!?*_~`|".includes(written[end - 1])) break;
  }
  const address = written.slice(0, end);
  return [link(address, address, address), address.length];
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
