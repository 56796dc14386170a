// Colours for code: comments, strings, numbers, keywords, names that are called. One pattern a language finds all of
// them; what it does not find stays plain text. Each pattern reads a text once, however it is written.

import { el } from "./dom.js";

const MOST = 60_000; // characters: longer code stays plain

const END = "(?![\\s\\S])";
const DOUBLE = '"(?:[^"\\\\\\n]|\\\\[\\s\\S])*"?';
const SINGLE = "'(?:[^'\\\\\\n]|\\\\[\\s\\S])*'?";
const BLOCK = `\\/\\*[\\s\\S]*?(?:\\*\\/|${END})`;
const HASH = "#.*";
const NUMBER = "(?<![\\w.])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.[\\d_]*)?(?:[eE][+-]?\\d+)?)[\\w%]*";
const WORD = "[\\p{L}_$][\\p{L}\\p{N}_$]*";

/** parts: {comment, string, number, key, word} as sources of patterns, in order of precedence; keywords: a list. */
function language(parts, keywords = "", flags = "") {
  const source = Object.entries(parts).map(([name, part]) => `(?<${name}>${part})`).join("|");
  return { pattern: new RegExp(source, `gu${flags}`), keywords: new Set(keywords.split(" ")) };
}

const C_WORDS =
  "auto bool break case catch char class const constexpr continue default delete do double else enum extern false final " +
  "finally float fn for func go goto if impl implements import in inline int interface let long loop match mod mut namespace " +
  "new nil null nullptr operator override package private protected pub public return self short signed sizeof static struct " +
  "super switch template this throw trait true try type typedef typename union unsafe unsigned use using var virtual void " +
  "volatile where while";
const JS_WORDS =
  "abstract any as async await boolean break case catch class const constructor continue declare default delete do else enum " +
  "export extends false finally for from function get if implements import in instanceof interface let new null number of " +
  "private protected public readonly return set static string super switch this throw true try type typeof undefined var " +
  "void while yield";
const PYTHON_WORDS =
  "False None True and as assert async await break case class continue def del elif else except finally for from global if " +
  "import in is lambda match nonlocal not or pass raise return self try while with yield";
const SHELL_WORDS =
  "alias break case cd continue do done echo elif else esac eval exec exit export fi for function if in local read return " +
  "set shift source sudo then trap unset until while";
const SQL_WORDS =
  "all alter and as asc between by case create cross delete desc distinct drop else end exists from full group having in index " +
  "inner insert into is join key left like limit not null offset on or order outer primary right select set table then " +
  "union unique update values view when where with";

const c = language({ comment: `\\/\\/.*|${BLOCK}`, string: `${DOUBLE}|'(?:\\\\[^\\n][^'\\n]{0,8}|[^\\\\'\\n])'`,
  key: "(?<=^[ \\t]{0,40})#\\w+", number: NUMBER, word: WORD }, C_WORDS, "m");
const js = language({ comment: `\\/\\/.*|${BLOCK}`, string: `${DOUBLE}|${SINGLE}|\`(?:[^\`\\\\]|\\\\[\\s\\S])*\`?`, number: NUMBER, word: WORD }, JS_WORDS);
const python = language({ comment: HASH,
  string: `[rbfuRBFU]{0,2}(?:"""[\\s\\S]*?(?:"""|${END})|'''[\\s\\S]*?(?:'''|${END})|${DOUBLE}|${SINGLE})`,
  key: "@[\\w.]+", number: NUMBER, word: WORD }, PYTHON_WORDS);
const shell = language({ comment: "(?<!\\S)#.*", string: `"(?:[^"\\\\]|\\\\[\\s\\S])*"?|'[^']*'?`,
  key: "\\$(?:\\w+|\\{[^}\\n]*\\}?|[@#?*!$-])|(?<!\\S)--?[\\w-]+", number: NUMBER, word: WORD }, SHELL_WORDS);
const json = language({ comment: `\\/\\/.*|${BLOCK}`, key: '"(?:[^"\\\\\\n]|\\\\.)*"(?=\\s*:)', string: DOUBLE, number: `-?${NUMBER}`, word: WORD }, "true false null");
const tag = language({ string: `"[^"]*"?|'[^']*'?`, word: "<[\\/!?]?[\\w:-]*|\\/?>", key: "[\\w:@.-]+" });
const html = language({ comment: `<!--[\\s\\S]*?(?:-->|${END})`, tag: `<[\\/!?]?[A-Za-z](?:"[^"<>]*"?|'[^'<>]*'?|[^<>"'])*>?`, key: "&#?\\w+;" });
const css = language({ comment: BLOCK, string: `${DOUBLE}|${SINGLE}`, key: "(?<![\\w-])[\\w-]+(?=\\s?:\\s)|@[\\w-]+",
  number: "#[\\da-fA-F]{3,8}\\b|(?<![\\w-])-?\\d*\\.?\\d+[\\w%]*" });
const sql = language({ comment: `--.*|${BLOCK}`, string: `'[^']*'?|${DOUBLE}`, number: NUMBER, word: WORD }, SQL_WORDS);
const config = language({ comment: "(?<!\\S)[#;].*", key: "(?<![\\w.-])[\\w.-]+(?=[ \\t]{0,40}=|:\\s)|^\\[.*\\]", string: `${DOUBLE}|${SINGLE}`,
  number: NUMBER, word: WORD }, "true false null yes no on off", "m");

const LANGUAGES = {
  c, h: c, cpp: c, "c++": c, cc: c, java: c, cs: c, csharp: c, rust: c, rs: c, go: c, kotlin: c, swift: c, php: c, cuda: c,
  js, javascript: js, jsx: js, mjs: js, ts: js, tsx: js, typescript: js,
  py: python, python, python3: python, sh: shell, bash: shell, shell, zsh: shell, console: shell,
  json, jsonc: json, jsonl: json, html, xml: html, svg: html, vue: html, css, scss: css, sql,
  toml: config, yaml: config, yml: config, ini: config,
};

const CLASSES = { comment: "hl-comment", string: "hl-string", number: "hl-number", key: "hl-key" };

/** Code as texts and coloured spans; text as it is where the language is not known. */
export function highlighted(text, name) {
  const known = Object.hasOwn(LANGUAGES, name.toLowerCase()) && LANGUAGES[name.toLowerCase()];
  return known && text.length <= MOST ? painted(text, known) : [text];
}

function painted(text, known) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(known.pattern)) {
    const [kind, part] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    const end = match.index + part.length;
    const shown = kind === "tag" ? painted(part, tag) : [spanOf(kind, part, known, text, end)];
    if (match.index > at) found.push(text.slice(at, match.index));
    found.push(...shown);
    at = end;
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

function spanOf(kind, part, known, text, end) {
  const isWord = kind === "word";
  const isKeyword = isWord && (known === tag || known.keywords.has(known === sql ? part.toLowerCase() : part));
  const name = isKeyword ? "hl-keyword" : isWord && text[end] === "(" ? "hl-call" : CLASSES[kind];
  return name ? el("span", { class: name, text: part }) : part;
}
