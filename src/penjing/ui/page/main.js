// The frame: tabs, language, theme. Each tab is a module that exports open(root, context): it fills root, an empty
// element, and may go on until context.signal is aborted, which ends its requests and pauses. It is called again after a
// change of language. The window hears "theme" after a change of it. context: see contextOf. A tab brings its words with
// addWords.

import { events, json, Newest, request, setKey } from "./api.js";
import * as chat from "./chat.js";
import * as data from "./data.js";
import { $, copyButton, el, fill, toast } from "./dom.js";
import { t } from "./i18n.js";
import * as plan from "./plan.js";
import { showSwitches, wireSwitches } from "./preferences.js";
import * as runs from "./runs.js";
import * as train from "./train.js";
import { said } from "./words.js";

// id: [label, module], in the order of the page.
const TABS = { runs: ["uiRuns", runs], plan: ["uiPlan", plan], data: ["uiData", data], train: ["uiTrain", train], chat: ["uiChat", chat] };

/** The tab's id, and what the address says after it: #runs?run=a&run=b */
function place() {
  const [id, query = ""] = location.hash.slice(1).split("?");
  return { id: TABS[id] ? id : "runs", params: new URLSearchParams(query) };
}

/** Requests of a tab, which end with it. */
const apiOf = (ending) => ({
  /** The object at a path; query: an object whose values are texts, numbers or lists of them. */
  get(path, query = {}, signal = ending) {
    const params = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) params.append(name, one);
    return json(`${path}?${params}`, { signal });
  },
  /** The object that a path answers to an object. */
  post: (path, body, signal = ending) => json(path, { body, signal }),
  /** The objects of a stream of server-sent events. */
  async *events(path) {
    yield* events(await request(path, { signal: ending }));
  },
});

/** What an error says to a person. */
function reason(error) {
  if (error.status === 0) return t("uiGone");
  return error.status === 401 ? t("uiNoToken") : said(error.message);
}

const fail = (error) => error.name !== "AbortError" && toast(t("uiFailed", { error: reason(error) }));

/** A button that asks the server for something: off from then on, for what it did shows elsewhere, unless it failed. */
function actButton(className, text, act) {
  const node = el("button", { type: "button", class: className, text, on: { click: () => {
    node.disabled = true;
    act().catch((error) => {
      fail(error);
      node.disabled = false;
    });
  } } });
  return node;
}

/** A command line with a button that copies it. */
function commandLine(text) {
  return el("div", { class: "command" }, el("code", { text }), copyButton(t("uiCopyCommand"), t("copied"), () => text));
}

function contextOf(params, signal) {
  return {
    signal,
    api: apiOf(signal),
    params, // URLSearchParams of this tab
    go: (id, query = {}) => (location.hash = `#${id}?${new URLSearchParams(query)}`), // to another tab
    keep: (query) => history.replaceState(null, "", `#${place().id}?${new URLSearchParams(query)}`), // for a reload
    reason,
    fail,
    actButton,
    commandLine,
    newest: () => new Newest(signal),
  };
}

let opened = new AbortController(); // of the tab that is shown

async function show() {
  const { id, params } = place();
  opened.abort();
  const { signal } = (opened = new AbortController());
  for (const node of document.querySelectorAll(".tab")) {
    const chosen = node.dataset.tab === id;
    node.setAttribute("aria-selected", String(chosen));
    node.tabIndex = chosen ? 0 : -1;
  }
  $("#panel").setAttribute("aria-labelledby", `tab-${id}`);
  const root = el("div", { class: `tab-root ${id}` });
  try {
    fill($("#panel"), root);
    await TABS[id][1].open(root, contextOf(params, signal));
  } catch (error) {
    if (signal.aborted) return;
    console.error(error);
    fill($("#panel"), el("p", { class: "panel-error", role: "alert", text: t("uiFailed", { error: reason(error) }) }));
  }
}

/** Everything of the frame that is written in a language. */
function label() {
  showSwitches();
  fill($("#tabs"), Object.entries(TABS).map(([id, [name]]) =>
    el("button", { type: "button", role: "tab", class: "tab", id: `tab-${id}`, "data-tab": id, "aria-controls": "panel",
      text: t(name), on: { click: () => (location.hash = `#${id}`) } })));
}

/** Arrows, Home and End move between tabs. */
function tabKeys(event) {
  const tabs = [...document.querySelectorAll(".tab")];
  const at = tabs.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  const next = tabs.at(to % tabs.length);
  next.focus();
  next.click();
}

/** The token goes from the address into this browser tab's storage, so that it is not seen or copied on. */
function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  setKey(found[1]);
  history.replaceState(null, "", "#runs");
}

takeToken();
label();
$("#tabs").addEventListener("keydown", tabKeys);
wireSwitches(() => (label(), show()), () => dispatchEvent(new Event("theme")));
addEventListener("hashchange", () => (takeToken(), show()));
addEventListener("pagehide", () => opened.abort());
addEventListener("pageshow", (event) => event.persisted && show()); // back from another page
show();
