// The list of conversations.

import { button, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { titleOf } from "./conversation.js";

export class Sidebar {
  #actions;

  /** @param {{open: Function, add: Function, remove: Function}} actions */
  constructor(actions) {
    this.#actions = actions;
    this.list = h("ul");
    this.note = h("p", { class: "note" });
    this.element = h(
      "nav",
      { class: "sidebar", "aria-label": "Conversations" },
      button("New conversation", icon("plus"), () => actions.add(), { class: "wide-button" }),
      this.list,
      this.note,
    );
  }

  show(conversations, current) {
    replace(
      this.list,
      conversations.map((each) => this.#entry(each, each.id === current.id)),
    );
  }

  #entry(conversation, isCurrent) {
    const title = titleOf(conversation);
    return h(
      "li",
      null,
      h(
        "button",
        {
          type: "button",
          class: "open",
          "aria-current": isCurrent ? "true" : null,
          on: { click: () => this.#actions.open(conversation) },
        },
        title,
      ),
      button(`Delete ${title}`, icon("trash"), () => this.#actions.remove(conversation), {
        bare: true,
      }),
    );
  }
}
