// The page put together: what the buttons and keys do.

import * as api from "./api.js";
import { chat } from "./chat.js";
import { countSoon } from "./counter.js";
import { askKey, askTitle, confirmClear, confirmDelete } from "./dialogs.js";
import { $, el, grow, icon, toast } from "./dom.js";
import { t } from "./i18n.js";
import { closePopover, legend } from "./look.js";
import { showSwitches, wireSwitches } from "./preferences.js";
import { setSettings, showSettings } from "./settings.js";
import { download, setMenu, showConversations } from "./sidebar.js";
import * as store from "./store.js";
import { showBanner, showModels, showWelcome } from "./surroundings.js";
import { fromJsonl, toJsonl } from "./transfer.js";

function label(id, name, text, { shown = true } = {}) {
  const node = $(`#${id}`);
  node.replaceChildren(icon(name), ...(shown ? [el("span", { text })] : []));
  if (!shown) node.setAttribute("aria-label", text);
  node.title = text;
  return node;
}

/** Everything that is written in a language. */
function words() {
  showSwitches();
  $("#legend").replaceChildren(...legend());
}

/** Everything around the conversation, as it is now. */
function refresh() {
  const { conversation, models, running } = chat;
  const document_ = chat.isDocument;
  showConversations(store.conversations, conversation, $("#search").value, { open: (other) => (setMenu(false), chat.open(other)), rename, remove });
  showModels(models, chat.lanes);
  const lookOn = store.settings.look;
  $("#look").setAttribute("aria-checked", String(lookOn));
  $("#legend").hidden = !lookOn;
  $("#compare").setAttribute("aria-pressed", String(chat.lanes.length > 1));
  $("#compare").hidden = models.length < 2 || document_ && conversation.pieces.length > 0;
  showWelcome($("#welcome"), chat, (text) => (document_ ? chat.begin(text) : (chat.send(text), focusText())));
  $("#composer .box").hidden = document_;
  $(".document-row").hidden = !document_;
  $("#hint").textContent = t(document_ ? "hintDocument" : "hint");
  $("#text").placeholder = chat.lanes.length > 1 ? t("writeToTwo") : t("writeTo", { model: chat.lanes[0] ?? "" });
  countSoon(chat);
  $("#to-end").hidden = !chat.view.isAway;
  const sendable = running || $("#text").value.trim() !== "";
  const send = label("send", running ? "stop" : "send", t(running ? "stop" : "send"), { shown: false });
  send.disabled = !sendable || !models.length;
  label("continue", running ? "stop" : "send", t(running ? "stop" : "continueText")).disabled =
    !running && (!models.length || chat.isEmpty);
  $("#undo").hidden = running || !conversation.earlier?.length;
  $("#rewrite").hidden = running || !chat.canRewrite;
  $("#edit-text").hidden = running || !lookOn || !chat.canRewrite;
  $("#system-chip").hidden = !store.settings.system.trim() || document_;
  document.body.classList.toggle("is-document", document_);
  document.title = conversation.title ? `${conversation.title} · penjing` : "penjing 盆景";
}

async function rename(conversation) {
  const title = await askTitle(conversation.title);
  if (title) chat.rename(conversation, title);
}

async function remove(conversation) {
  if (await confirmDelete(conversation.title || t("untitled"))) chat.remove(conversation);
}

/** Take in the conversations of a file; those that are here already are left out. */
async function importFile(input) {
  const [file] = input.files;
  if (!file) return;
  const { conversations, bad } = fromJsonl(await file.text());
  input.value = ""; // so that the same file can be chosen again
  const here = new Set(store.conversations.map((conversation) => toJsonl([conversation], chat.tools)));
  const fresh = conversations.filter((conversation) => !here.has(toJsonl([conversation], chat.tools)));
  chat.add(fresh);
  toast(t("importDone", { count: fresh.length, known: conversations.length - fresh.length, bad }));
}

function settingsPanel() {
  showSettings({ tools: chat.tools, thinking: chat.models.some((model) => model.thinking), onChange: refresh });
}

function wire() {
  const on = (id, event, listener) => $(`#${id}`).addEventListener(event, listener);
  on("new-chat", "click", () => (setMenu(false), chat.startNew(), focusText()));
  on("export", "click", () => download("penjing-chats.jsonl", toJsonl(store.conversations, chat.tools)));
  on("import", "click", () => $("#import-file").click());
  on("import-file", "change", (event) => importFile(event.target));
  on("search", "input", refresh);
  on("to-end", "click", () => chat.view.toEnd());
  on("scroll", "scroll", () => ($("#to-end").hidden = !chat.view.isAway));
  on("undo", "click", () => chat.undo());
  on("clear", "click", async () => (await confirmClear()) && chat.removeAll());
  wireSwitches(() => (words(), settingsPanel(), chat.draw()));
  on("menu", "click", () => setMenu(!document.body.classList.contains("menu-open")));
  on("close-menu", "click", () => setMenu(false));
  on("shade", "click", () => (setMenu(false), setSettings(false)));
  on("look", "click", () => {
    store.change({ look: !store.settings.look });
    closePopover();
    chat.draw();
  });
  on("open-settings", "click", () => setSettings($("#settings").hidden));
  on("close-settings", "click", () => (setSettings(false), $("#open-settings").focus()));
  on("system-chip", "click", () => (setSettings(true), $("#system").focus()));
  on("compare", "click", () => chat.compare(chat.lanes.length < 2));
  on("model", "change", (event) => chat.choose(0, event.target.value));
  on("other", "change", (event) => chat.choose(1, event.target.value));
  on("continue", "click", () => (chat.running ? chat.stop() : chat.goOn()));
  on("rewrite", "click", () => chat.rewrite());
  on("edit-text", "click", () => (store.change({ look: false }), chat.draw(), $("#sheet").focus()));
  on("composer", "submit", (event) => {
    event.preventDefault();
    submit();
  });
  on("text", "input", (event) => (grow(event.target), refresh()));
  on("text", "keydown", (event) => {
    // While an input method composes (Chinese), Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    if (!chat.running) submit();
  });
  document.addEventListener("keydown", keys);
  addEventListener("pagehide", store.save);
}

function submit() {
  if (chat.running) return chat.stop();
  const area = $("#text");
  const text = area.value;
  if (!text.trim() || !chat.models.length) return undefined;
  area.value = "";
  grow(area);
  return chat.send(text);
}

function keys(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && chat.isDocument && !chat.running) {
    event.preventDefault();
    chat.goOn();
  }
  if (event.key !== "Escape" || $("#dialog").open || closePopover()) return;
  if (chat.running) chat.stop();
  else if (document.body.classList.contains("menu-open")) setMenu(false);
  else if (!$("#settings").hidden) (setSettings(false), $("#open-settings").focus());
}

const focusText = () => matchMedia("(hover: hover)").matches && ($("#sheet") ?? $("#text")).focus();

/** Ask for the models until the server gives them. */
async function connect() {
  showBanner(null);
  try {
    const [models, tools] = await Promise.all([api.models(), api.tools()]);
    chat.connected(models, tools);
    settingsPanel();
    focusText();
  } catch (error) {
    showBanner({ error, again: connect });
    refresh();
  }
}

let refused = false;
let asking = null;
api.onUnauthorised(() => {
  asking ??= askKey(refused).then((key) => {
    asking = null;
    refused = true;
    if (key) api.setKey(key);
    return Boolean(key);
  });
  return asking;
});

store.loadConversations();
for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
words();
wire();
chat.onChange = refresh;
store.onOtherTab(
  () => chat,
  (conversation, isGone) => {
    if (conversation !== chat.conversation || chat.running) refresh();
    else if (isGone) chat.startNew();
    else chat.draw();
  },
);
chat.draw();
connect();
