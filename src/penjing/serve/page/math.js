// Formulas: the part of TeX that models write, as MathML. What is not known shows as its own name; nothing is executed.

import { made } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST = 4000; // characters
const DEEPEST = 40; // groups in each other
const TOKEN = /\\[A-Za-z]+\*?|\\[\s\S]|\s+|\d+(?:\.\d+)?|[\s\S]/gu;

const list = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));
const LETTERS = list(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
  lambda=λ mu=μ nu=ν xi=ξ omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ
  omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ ell=ℓ
  hbar=ℏ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ imath=ı jmath=ȷ top=⊤ bot=⊥ angle=∠ triangle=△ degree=°`);
const OPERATORS = list(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ odot=⊙ leq=≤ le=≤ geq=≥ ge=≥
  neq=≠ ne=≠ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇
  cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨ neg=¬ lnot=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→ leftarrow=←
  leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ iff=⟺ mapsto=↦ longrightarrow=⟶ uparrow=↑ downarrow=↓
  ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ mid=∣ parallel=∥ perp=⊥ colon=: prime=′ therefore=∴ because=∵ models=⊨ vdash=⊢
  langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| vert=| lVert=‖ rVert=‖ Vert=‖ lbrace={ rbrace=} backslash=\\`);
const LARGE = list("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ int=∫ iint=∬ iiint=∭ oint=∮");
const ACCENTS = list("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ overbrace=⏞");
const UNDER = list("underline=_ underbrace=⏟");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".25em", quad: "1em", qquad: "2em" };
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker gcd deg arg hom Pr
  lim max min sup inf argmax argmin softmax`.split(/\s+/));
const LIMITS = new Set("lim max min sup inf det gcd Pr argmax argmin ∑ ∏ ∐ ⋃ ⋂ ⨁ ⨂".split(" "));
const UPRIGHT = new Set("text textrm textbf textit texttt mathrm mathsf mathtt operatorname mbox".split(" "));
const SILENT = new Set(`displaystyle textstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr middle hline
  nonumber notag mathit cal rm bf`.split(/\s+/));
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{" };

const node = (tag, children = [], props = {}) => made(document.createElementNS(MATHML, tag), props, [children]);

/** A <math> of TeX; null where it is too long. */
export function formula(source, isDisplay) {
  if (source.length > MOST) return null;
  const reader = { tokens: source.match(TOKEN) ?? [], at: 0, depth: 0, isDisplay };
  const found = [];
  while (reader.at < reader.tokens.length) {
    found.push(...rows(reader, []));
    reader.at += 1; // a brace or an \end that closes nothing
  }
  return node("math", found, { display: isDisplay ? "block" : "inline", alttext: source.trim() });
}

const peek = (reader) => reader.tokens[reader.at];
const take = (reader) => reader.tokens[reader.at++];
const skipBlanks = (reader) => {
  while (/^\s/.test(peek(reader) ?? "")) reader.at += 1;
};

/** Everything up to one of the ends, which stays. */
function rows(reader, ends) {
  const found = [];
  for (skipBlanks(reader); reader.at < reader.tokens.length; skipBlanks(reader)) {
    if (ends.includes(peek(reader)) || peek(reader) === "}" || peek(reader) === "\\end") break;
    found.push(withScripts(reader));
  }
  return found;
}

function withScripts(reader) {
  const base = atom(reader);
  const scripts = {};
  for (skipBlanks(reader); /^[_^']$|^\\(?:no)?limits$/.test(peek(reader) ?? ""); skipBlanks(reader)) {
    const mark = take(reader);
    if (mark === "'") scripts["^"] = node("mrow", [...(scripts["^"] ? [scripts["^"]] : []), node("mo", "′")]);
    else if (mark.length === 1) {
      if (scripts[mark]) {
        reader.at -= 1; // a second one is an error of TeX: it shows as it is
        break;
      }
      scripts[mark] = argument(reader);
    }
  }
  return scripted(reader, base, scripts);
}

function scripted(reader, base, { "^": over, _: under }) {
  const limits = reader.isDisplay && LIMITS.has(base.textContent);
  if (over && under) return node(limits ? "munderover" : "msubsup", [base, under, over]);
  if (over) return node(limits ? "mover" : "msup", [base, over]);
  return under ? node(limits ? "munder" : "msub", [base, under]) : base;
}

/** A group, or one atom. */
function argument(reader) {
  skipBlanks(reader);
  if (/^\d\d/.test(peek(reader) ?? "")) reader.tokens.splice(reader.at, 1, peek(reader)[0], peek(reader).slice(1)); // \frac12
  return reader.at < reader.tokens.length && peek(reader) !== "}" ? atom(reader) : node("mrow");
}

function group(reader) {
  reader.depth += 1;
  const found = reader.depth > DEEPEST ? [] : rows(reader, []);
  reader.depth -= 1;
  if (peek(reader) === "}") reader.at += 1;
  return found.length === 1 ? found[0] : node("mrow", found);
}

/** The characters of a group, as they are written. */
function plain(reader) {
  skipBlanks(reader);
  if (peek(reader) !== "{") return take(reader) ?? "";
  const begin = (reader.at += 1);
  for (let open = 1; reader.at < reader.tokens.length; reader.at += 1) {
    open += { "{": 1, "}": -1 }[peek(reader)] ?? 0;
    if (!open) break;
  }
  return reader.tokens.slice(begin, reader.at++).join("");
}

function atom(reader) {
  const token = take(reader);
  if (token === "{") return group(reader);
  if (token[0] === "\\" && token.length > 1) return command(reader, token.slice(1).replace("*", ""));
  if (/^\d/.test(token)) return node("mn", token);
  if (/^\p{L}/u.test(token)) return node("mi", token);
  if (token === "~") return node("mspace", [], { width: ".25em" });
  if (token === "&" || token === "$") return node("mrow");
  return node("mo", token === "-" ? "−" : token, "()[]|".includes(token) ? { stretchy: "false" } : {});
}

function command(reader, name) {
  const has = (table) => Object.hasOwn(table, name);
  if (reader.depth > DEEPEST) return node("mrow");
  reader.depth += 1;
  try {
    if (has(LETTERS)) return node("mi", LETTERS[name]);
    if (has(OPERATORS)) return node("mo", OPERATORS[name]);
    if (has(LARGE)) return node("mo", LARGE[name], { largeop: "true" });
    if (has(SPACES)) return node("mspace", [], { width: SPACES[name] });
    if (FUNCTIONS.has(name)) return node("mi", name);
    if (UPRIGHT.has(name)) return node(name === "text" ? "mtext" : "mi", plain(reader), { mathvariant: "normal" });
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(name)) return node("mfrac", [argument(reader), argument(reader)]);
    if (name === "binom") {
      const pair = node("mfrac", [argument(reader), argument(reader)], { linethickness: "0" });
      return node("mrow", [node("mo", "("), pair, node("mo", ")")]);
    }
    if (name === "sqrt") return root(reader);
    if (has(ACCENTS)) return node("mover", [argument(reader), node("mo", ACCENTS[name])], { accent: "true" });
    if (has(UNDER)) return node("munder", [argument(reader), node("mo", UNDER[name])]);
    if (["mathbb", "mathbf", "mathcal", "bm", "boldsymbol"].includes(name)) return styled(name, plain(reader));
    if (name === "begin") return environment(reader, plain(reader));
    if (name === "left" || name === "right") return delimiter(reader);
    if (SILENT.has(name)) return node("mrow");
    if (/^[{}%$&#_|]$/.test(name)) return node("mo", name === "|" ? "‖" : name);
    return name === "\\" ? node("mspace", [], { linebreak: "newline" }) : node("mtext", `\\${name}`);
  } finally {
    reader.depth -= 1;
  }
}

function delimiter(reader) {
  skipBlanks(reader);
  const token = take(reader) ?? ".";
  if (token === ".") return node("mrow");
  const name = token.slice(1);
  return node("mo", token[0] !== "\\" ? token : name === "|" ? "‖" : OPERATORS[name] ?? name, { stretchy: "true" });
}

function root(reader) {
  if (peek(reader) !== "[") return node("msqrt", argument(reader));
  reader.at += 1;
  const degree = node("mrow", rows(reader, ["]"]));
  if (peek(reader) === "]") reader.at += 1;
  return node("mroot", [argument(reader), degree]);
}

const DOUBLE_STRUCK = list("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ");
const SCRIPT = list("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ");

function styled(name, text) {
  const [first, known] = name === "mathbb" ? [0x1d538, DOUBLE_STRUCK] : name === "mathcal" ? [0x1d49c, SCRIPT] : [0x1d400, {}];
  const one = (letter) => known[letter] ?? String.fromCodePoint(first + letter.charCodeAt(0) - 65 - (letter >= "a" ? 6 : 0));
  return node("mi", text.replace(/[A-Za-z]/g, (letter) => (letter >= "a" && name === "mathcal" ? letter : one(letter))));
}

function environment(reader, name) {
  if (name === "array") plain(reader); // its columns
  const cells = [[[]]];
  for (skipBlanks(reader); reader.at < reader.tokens.length && peek(reader) !== "\\end"; ) {
    cells.at(-1).at(-1).push(...rows(reader, ["&", "\\\\"]));
    const mark = peek(reader);
    if (mark === "&") cells.at(-1).push([]);
    else if (mark === "\\\\") cells.push([[]]);
    else if (mark !== "}") break;
    reader.at += 1;
  }
  if (peek(reader) === "\\end") [reader.at += 1, plain(reader)];
  if (cells.length > 1 && cells.at(-1).flat().length === 0) cells.pop();
  const table = node("mtable", cells.map((row) => node("mtr", row.map((cell) => node("mtd", cell)))),
    { class: /^(?:align|aligned|split|cases|gathered)/.test(name) ? "lined" : "" });
  const [open, close] = FENCES[name.replace("*", "")] ?? "";
  return open ? node("mrow", [node("mo", open), table, ...(close ? [node("mo", close)] : [])]) : table;
}
