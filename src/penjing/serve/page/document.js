// A model that was only pretrained continues a text: one sheet to write on, and to look into.

import { showFigures, showNote } from "./answer_view.js";
import { textOfPieces } from "./conversation.js";
import { el, grow } from "./dom.js";
import { t } from "./i18n.js";
import { tokenView } from "./look.js";
import { textOf } from "./tokens.js";

/**
 * The pieces of a text after somebody edited it: those at its beginning that still stand there stay as they are, with
 * their tokens; the rest is one piece that was typed.
 */
export function edited(pieces, text) {
  const kept = [];
  let at = 0;
  for (const piece of pieces) {
    if (!piece.tokens || !text.startsWith(piece.text, at)) break;
    kept.push(piece);
    at += piece.text.length;
  }
  if (!kept.length && pieces.length && !pieces[0].tokens && text.startsWith(pieces[0].text)) {
    return [pieces[0], ...edited(pieces.slice(1), text.slice(pieces[0].text.length))].filter((piece) => piece.text);
  }
  const rest = text.slice(at);
  if (kept.length && kept.length < pieces.length && !pieces[kept.length].tokens) {
    return [...kept, ...edited(pieces.slice(kept.length), rest)];
  }
  return rest ? [...kept, { text: rest }] : kept;
}

/** The pieces up to a token, with another token instead of it. */
export function branched(pieces, piecePlace, tokenPlace, other) {
  const piece = pieces[piecePlace];
  const kept = piece.tokens.slice(0, tokenPlace);
  const tokens = [...kept, { ...other, kind: other.bytes === null ? "mark" : "content", top: piece.tokens[tokenPlace].top }];
  return [...pieces.slice(0, piecePlace), { ...piece, text: textOf(tokens, "content"), tokens }];
}

/**
 * Show the sheet. Returns {update}. conversation.pieces: [{text, tokens?}]; conversation.run: how the last
 * continuation went. chat: what is done with the text.
 */
export function showDocument(container, chat, look) {
  const { conversation, running } = chat;
  const figures = el("div", { class: "figures" });
  const note = el("p", { class: "note", role: "status" });
  const sheet = look && conversation.pieces.some((piece) => piece.tokens)
    ? sheetOfTokens(conversation, chat)
    : sheetOfText(conversation, chat);
  container.replaceChildren(el("div", { class: "document" }, sheet.node, note, figures));
  const update = (isRunning) => {
    sheet.update(isRunning);
    if (!conversation.run) return;
    showNote(note, { ...conversation.run, steps: [{ content: "x", reasoning: "", calls: [] }] });
    showFigures(figures, conversation.run);
  };
  update(running);
  return { update };
}

function sheetOfText(conversation, chat) {
  const area = el("textarea", {
    class: "sheet", id: "sheet", "aria-label": t("document"), placeholder: t("documentHint"), spellcheck: "false",
  });
  area.value = textOfPieces(conversation.pieces);
  area.addEventListener("input", () => {
    grow(area);
    chat.changeText(area.value);
  });
  requestAnimationFrame(() => grow(area));
  return {
    node: area,
    update(running) {
      area.readOnly = running;
      const text = textOfPieces(conversation.pieces);
      if (area.value === text) return;
      area.value = text;
      grow(area);
    },
  };
}

function sheetOfTokens(conversation, chat) {
  const node = el("div", { class: "sheet", role: "group", "aria-label": t("document") });
  const views = [];
  return {
    node,
    update() {
      conversation.pieces.forEach((piece, place) => {
        if (!views[place]) {
          const part = el("span", { class: piece.tokens ? "" : "typed" });
          node.append(part);
          views[place] = piece.tokens
            ? tokenView(part, ["content", "mark"], (token, other) => chat.choosePiece(place, token, other))
            : { update: () => {} };
          if (!piece.tokens) part.textContent = piece.text;
        }
        views[place].update(piece.tokens ?? []);
      });
    },
  };
}
