// The open conversation on the screen: drawn anew where its shape changes, added to once a frame where it is written.

import { showDocument } from "./document.js";
import { $ } from "./dom.js";
import { settings } from "./store.js";
import { announcer, showThread } from "./thread.js";

const NEAR = 60; // pixels from the end: whoever reads there follows what is written

export class View {
  constructor(chat) {
    this.chat = chat;
    this.views = new Map(); // what is written -> {update}
    this.waiting = false;
    this.announce = announcer($("#announcer"));
  }

  draw() {
    const { chat } = this;
    const { look } = settings;
    const thread = $("#thread");
    const hadFocus = thread.contains(document.activeElement);
    if (chat.isDocument) {
      const sheet = showDocument(thread, chat, look);
      this.views = new Map([[chat.conversation.run, { update: () => sheet.update(chat.running) }]]);
      if (hadFocus) $("#sheet, .token", thread)?.focus({ preventScroll: true });
      return;
    }
    this.views = showThread(thread, chat, look);
    // What had the focus is gone: whoever uses the keyboard goes on at the newest answer.
    if (hadFocus) [...thread.querySelectorAll("article")].at(-1)?.focus({ preventScroll: true });
  }

  /** Show what came, once a frame. */
  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const atEnd = !this.isAway;
      for (const [answer, view] of this.views) {
        view.update();
        if (answer?.clock) this.say(answer);
      }
      if (atEnd) this.toEnd();
      $("#to-end").hidden = !this.isAway;
    });
  }

  say(answer) {
    const text = answer.steps?.map((step) => step.content).join("\n") ?? this.chat.conversation.pieces?.at(-1)?.text;
    this.announce(answer, text ?? "", answer.state !== "running");
  }

  /** Whether the end is out of sight. */
  get isAway() {
    const scroll = $("#scroll");
    return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight >= NEAR;
  }

  /** Scroll to the end; of two answers side by side, no further than their question stays in sight. */
  toEnd() {
    const scroll = $("#scroll");
    const question = this.chat.lanes.length > 1 && [...scroll.querySelectorAll(".question")].at(-1);
    scroll.scrollTop = Math.min(scroll.scrollHeight, question ? question.offsetTop - scroll.offsetTop - 12 : Infinity);
  }
}
