// What is done with a text that a model continues. The other half of the open conversation: see chat.js.

import { continueText, drawSeed, isEnd } from "./answer.js";
import { textOfPieces } from "./conversation.js";
import { branched, edited } from "./document.js";
import { titleOf } from "./sidebar.js";
import * as store from "./store.js";

export class TextChat {
  get canRewrite() {
    return Boolean(this.conversation.pieces?.at(-1)?.tokens);
  }

  begin(text) {
    this.conversation.pieces = [{ text }];
    return this.goOn();
  }

  changeText(text) {
    this.conversation.pieces = edited(this.conversation.pieces, text);
    if (!this.conversation.renamed) this.conversation.title = titleOf(text.slice(0, 200));
    if (text) this.keep();
    this.onChange();
  }

  goOn() {
    return this.continueFrom([...this.conversation.pieces, { text: "", tokens: [] }]);
  }

  rewrite() {
    return this.continueFrom([...this.conversation.pieces.slice(0, -1), { text: "", tokens: [] }]);
  }

  /** Keep the text before, where others take its place. */
  remember(pieces) {
    const [before, after] = [this.conversation.pieces, pieces].map(textOfPieces);
    if (!after.startsWith(before)) this.conversation.earlier = [...(this.conversation.earlier ?? []), before].slice(-20);
  }

  /** The text before the last one that took its place. */
  undo() {
    this.stop();
    const text = this.conversation.earlier.pop();
    Object.assign(this.conversation, { pieces: [{ text }], run: undefined });
    this.keep();
    this.draw();
  }

  choosePiece(place, token, other) {
    const pieces = branched(this.conversation.pieces, place, token, other);
    if (!isEnd(other)) return this.continueFrom(pieces);
    this.stop();
    this.remember(pieces);
    Object.assign(this.conversation, { pieces, run: undefined });
    return this.draw();
  }

  /** Write on behind the last piece, whose tokens are what it goes on from. */
  async continueFrom(pieces) {
    this.stop();
    this.remember(pieces);
    const { conversation } = this;
    const prompt = textOfPieces(pieces.slice(0, -1));
    conversation.pieces = pieces;
    conversation.title ||= titleOf(textOfPieces(pieces).slice(0, 200));
    const run = { model: this.lanes[0], state: "running", seed: drawSeed(store.settings), finish: "", error: "", stats: null };
    conversation.run = run;
    const write = (signal) => continueText(run, prompt, pieces.at(-1), "text", store.settings, this.hooks(run, signal));
    await this.whileRunning(write);
    if (this.conversation === conversation) this.draw();
  }
}
