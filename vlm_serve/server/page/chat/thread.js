// The turns of a conversation. Keeps the end of what grows in sight, unless the reader has scrolled
// up or does something there.

import { h, replace } from "../shared/dom.js";
import { versionAt } from "./conversation.js";
import { arrived } from "./loading.js";
import { TurnView } from "./turn.js";

const NEAR_END = 80;

export class Thread {
  #actions;
  #welcome;
  #turnViews = new Map();
  #follows = true;
  #lastTop = 0;

  /**
   * @param {object} actions as a TurnView takes them
   * @param {Element} welcome what stands in place of turns where there are none
   */
  constructor(actions, welcome) {
    this.#actions = actions;
    this.#welcome = welcome;
    this.turns = h("ol.turns", { "aria-label": "Conversation" });
    // What is opened, selected or copied stays where it is.
    const stop = () => this.stop();
    const on = { scroll: () => this.#scrolled(), pointerdown: stop, keydown: stop };
    const attributes = { tabindex: "0", role: "region", "aria-label": "Messages", on };
    this.element = h("div.thread", attributes, this.turns);
    const observer = new ResizeObserver(() => this.#follows && this.#toEnd());
    observer.observe(this.turns);
    observer.observe(this.element);
    arrived.subscribe(() => this.#turnViews.forEach((turnView) => turnView.renew()));
  }

  /** Shows the turns of a conversation. */
  show(conversation) {
    const turnViews = conversation.turns.map((turn, index) => [
      turn.id,
      new TurnView(turn, this.#actions, versionAt(conversation, index)),
    ]);
    this.#turnViews = new Map(turnViews);
    const elements = turnViews.map(([, { element }]) => element);
    replace(this.turns, elements.length ? elements : this.#welcome);
  }

  /** Shows how far the answer of a turn is, if the turn is shown. */
  update(turn) {
    this.#turnViews.get(turn.id)?.update();
  }

  /** Leads to a turn that has several versions. */
  reveal(turn) {
    this.stop();
    const { element } = this.#turnViews.get(turn.id);
    element.scrollIntoView({ block: "nearest" });
    element.querySelector(".versions button:enabled")?.focus();
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#follows = true;
    this.#toEnd();
  }

  /** Stays where it is. */
  stop() {
    this.#follows = false;
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    // Content that grows leaves the end without a scroll; only a reader goes up.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false;
    this.#lastTop = scrollTop;
  }

  #toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }
}
