// The look inside: tokens coloured by their probability, and what else each might have been.

import { $, el, icon } from "./dom.js";
import { percent, t } from "./i18n.js";
import { groups, rank, reading, step, STEPS, visible } from "./tokens.js";

const SHOWN = 5; // alternatives in the window

/**
 * Tokens of some kinds in a container. onChoose(place, alternative): an alternative of tokens[place] was clicked.
 * update(tokens) adds those that are new.
 */
export function tokenView(container, kinds, onChoose) {
  const state = { shown: [], count: 0 };
  container.classList.add("tokens");
  const at = (node) => state.shown.find((group) => group.node === node);
  const over = (event) => at(event.target.closest(".token"));
  container.addEventListener("pointerover", (event) => {
    const group = event.pointerType === "mouse" && over(event);
    if (group) popover.soon(group, onChoose);
  });
  container.addEventListener("pointerout", () => popover.leave());
  container.addEventListener("click", (event) => {
    const group = over(event);
    if (!group) return;
    group.node.focus({ preventScroll: true });
    popover.open(group, onChoose);
  });
  container.addEventListener("focusin", (event) => {
    const group = over(event);
    if (!group || !group.node.matches(":focus-visible")) return;
    rove(state.shown, group);
    popover.open(group, onChoose);
  });
  container.addEventListener("keydown", (event) => move(event, state.shown, over(event), onChoose));
  return {
    update(tokens) {
      if (tokens.length === state.count) return;
      state.count = tokens.length;
      const last = state.shown.at(-1);
      const from = last ? last.first : 0; // a character may have been finished
      if (last) state.shown.pop();
      const found = groups(tokens, from).filter((group) => kinds.includes(group.tokens[0].kind));
      const fresh = found.map((group) => (last && group.first === last.first && same(group, last) ? last : drawn(group)));
      if (last && !fresh.includes(last)) last.node.remove();
      for (const group of fresh) if (group !== last) container.append(group.node);
      state.shown.push(...fresh);
      if (state.shown.length) (state.shown.find((group) => group.node.tabIndex === 0) ?? state.shown[0]).node.tabIndex = 0;
    },
  };
}

const same = (group, other) => group.tokens.length === other.tokens.length;

/** The text of a control token, in words where it has a meaning that people know. */
function named(text) {
  return /im_end|endoftext|eot|<\/s>|end_of/.test(text) ? t("endToken") : text;
}

function drawn(group) {
  const mark = group.tokens[0].bytes === null;
  const text = mark ? named(group.text) : group.text;
  group.node = el("span", {
    class: `token s${step(group.logp)}${mark ? " mark" : ""}`,
    tabindex: "-1",
    role: "button",
    "aria-haspopup": "dialog",
    "aria-label": t("tokenLabel", { text: visible(text), chance: percent(Math.exp(group.logp)) }),
  });
  // A blank before a word is not coloured, so that words stand apart; one that is all of a token is.
  const blank = mark || !text.trim() ? "" : text.match(/^ */)[0];
  const paint = el("span", { class: "paint" });
  // A line break shows, and breaks the line.
  text.slice(blank.length).split(/(\n)/).forEach((part) => {
    if (part === "\n") paint.append(el("i", { "aria-hidden": "true", text: "↵" }));
    if (part) paint.append(part);
  });
  group.node.append(blank, paint);
  return group;
}

function rove(shown, group) {
  for (const other of shown) other.node.tabIndex = other === group ? 0 : -1;
}

/** Arrow keys go from token to token, and down into the window. */
function move(event, shown, group, onChoose) {
  const place = shown.indexOf(group);
  const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (next !== undefined && shown[next]) {
    rove(shown, shown[next]);
    shown[next].node.focus();
  } else if (["ArrowDown", "Enter", " "].includes(event.key) && group) {
    if (popover.group !== group) popover.open(group, onChoose);
    popover.enter();
  } else return;
  event.preventDefault();
}

// --- the window ------------------------------------------------------------------------------------------------------

const popover = {
  node: null,
  group: null,
  timer: 0,

  /** Open it if the pointer stays for a moment. */
  soon(group, onChoose) {
    clearTimeout(this.timer);
    if (group !== this.group) this.timer = setTimeout(() => this.open(group, onChoose), this.group ? 60 : 120);
  },

  leave() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (!this.node?.matches(":hover, :focus-within") && document.activeElement !== this.group?.node) this.close();
    }, 250);
  },

  open(group, onChoose, part = 0) {
    clearTimeout(this.timer);
    this.close();
    this.group = group;
    group.node.classList.add("open");
    this.node = el(
      "div",
      { class: "popover", role: "dialog", "aria-label": t("alternatives"), on: {
        pointerleave: () => this.leave(),
        keydown: (event) => this.key(event),
      } },
      parts(group, part, (chosen) => this.open(group, onChoose, chosen)),
      details(group, part),
      rows(group, part, (alternative) => {
        group.node.focus({ preventScroll: true });
        this.close();
        onChoose(group.first + part, alternative);
      }),
      el("p", { class: "popover-hint", text: t("chooseHint") }),
    );
    document.body.append(this.node);
    this.place();
  },

  /** Below the token, or above it, where there is more room; no higher than that room, so that the token stays seen. */
  place() {
    const lines = $(".paint", this.group.node).getClientRects();
    if (!lines.length) return;
    this.node.style.maxHeight = "none";
    const own = this.node.getBoundingClientRect();
    const [over, under] = [lines[0].top - 14, window.innerHeight - lines[lines.length - 1].bottom - 14];
    const below = own.height <= under || under >= over;
    const height = Math.max(Math.min(own.height, below ? under : over), 60);
    const left = Math.min(Math.max(8, lines[0].left - 12), window.innerWidth - own.width - 8);
    this.node.style.maxHeight = `${height}px`;
    this.node.style.left = `${left}px`;
    this.node.style.top = `${below ? lines[lines.length - 1].bottom + 6 : Math.max(8, lines[0].top - height - 6)}px`;
  },

  key(event) {
    const buttons = [...this.node.querySelectorAll("button:not(:disabled)")];
    const place = buttons.indexOf(document.activeElement);
    if (event.key === "ArrowDown") buttons[Math.min(place + 1, buttons.length - 1)]?.focus();
    else if (event.key === "ArrowUp") (place > 0 ? buttons[place - 1] : this.group.node).focus();
    else return;
    event.preventDefault();
  },

  enter() {
    $(".alternatives button:not(:disabled)", this.node ?? document)?.focus();
  },

  close() {
    clearTimeout(this.timer);
    this.node?.remove();
    this.group?.node.classList.remove("open");
    this.node = this.group = null;
  },
};

/** Close the window; true if it was open. focus goes back to its token. */
export function closePopover() {
  const { group, node } = popover;
  if (!group) return false;
  if (node.contains(document.activeElement)) group.node.focus({ preventScroll: true });
  popover.close();
  return true;
}

document.addEventListener("pointerdown", (event) => {
  if (popover.node && !popover.node.contains(event.target) && !event.target.closest(".token")) popover.close();
});
document.addEventListener("scroll", () => popover.node && popover.place(), { capture: true, passive: true });

/** A character of several tokens: which of them the window is about. */
function parts(group, chosen, show) {
  if (group.tokens.length === 1) return null;
  const label = t("partsOf", { text: visible(group.text), count: group.tokens.length });
  const pick = (_, place) =>
    el("button", { type: "button", "aria-pressed": String(place === chosen), text: String(place + 1), on: { click: () => show(place) } });
  return el("div", { class: "parts", role: "group", "aria-label": label }, el("span", { text: label }), group.tokens.map(pick));
}

const before = (group, part) => group.tokens.slice(0, part).flatMap((token) => token.bytes ?? []);

function details(group, part) {
  const token = group.tokens[part];
  const text = token.bytes === null ? named(token.text) : visible(reading(token, before(group, part)));
  const place = rank(token);
  const known = place ? t("rank", { place }) : t("rankBeyond", { count: token.top.length });
  return el(
    "div",
    { class: "popover-head" },
    el("strong", { class: "piece", text }),
    el("span", { class: "chance", text: percent(Math.exp(token.logp)) }),
    el("span", { class: "rank", text: `${known} · ${t("tokenId", { id: token.id })}` }),
  );
}

function rows(group, part, choose) {
  const token = group.tokens[part];
  const best = token.top.slice(0, SHOWN);
  const shown = best.some((other) => other.id === token.id) ? best : [...best, token];
  return el("ul", { class: "alternatives" }, shown.map((other) => row(other, token, before(group, part), choose)));
}

function row(other, token, prefix, choose) {
  const chance = Math.exp(other.logp);
  const own = other.id === token.id;
  const text = other.bytes === null ? named(other.text) : visible(reading(other, prefix));
  const fill = el("span", { class: "fill" });
  fill.style.width = `${Math.max(chance * 100, 0.5)}%`;
  const label = t(own ? "ownLabel" : "alternativeLabel", { text, chance: percent(chance) });
  return el(
    "li",
    {},
    el(
      "button",
      { type: "button", class: own ? "own" : "", disabled: own, "aria-label": label, on: { click: () => choose(other) } },
      el("span", { class: `piece${other.bytes === null ? " mark" : ""}`, text }),
      el("span", { class: "track" }, fill),
      el("span", { class: "chance", text: percent(chance) }),
      own ? icon("check") : icon("right"),
    ),
  );
}

/** The colour scale, in words too. */
export function legend() {
  const swatch = (least, place) =>
    el("li", {}, el("span", { class: `swatch s${place}` }), el("span", {
      text: least === 0 ? `< ${STEPS[place - 1] * 100} %` : `≥ ${least * 100} %`,
    }));
  return [
    el("span", { class: "legend-title", text: t("legend") }),
    el("ol", { class: "scale", "aria-label": t("legend") }, STEPS.map(swatch)),
    el("span", { class: "legend-hint", text: t("legendHint") }),
  ];
}
