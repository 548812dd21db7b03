// The list of conversations: searched, renamed, deleted, and read from files.

import { button, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { everyTurn } from "./branches.js";
import { titleOf } from "./conversation.js";

export class Sidebar {
  #actions;
  #conversations = [];
  #current = null;

  /** @param {{open: Function, add: Function, remove: Function, rename: Function, read: Function}} actions */
  constructor(actions) {
    this.#actions = actions;
    this.list = h("ul");
    this.note = h("p", { class: "note" });
    this.search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the conversations",
      on: { input: () => this.#show() },
    });
    this.file = h("input", {
      type: "file",
      class: "unseen",
      accept: ".json,application/json",
      tabindex: "-1",
      "aria-label": "Exported conversation",
      on: { change: () => this.#read() },
    });
    this.found = h("p", { class: "note", role: "status" });
    this.element = h(
      "nav",
      { class: "sidebar", "aria-label": "Conversations" },
      button("New conversation", icon("plus"), () => actions.add(), { class: "wide-button" }),
      this.search,
      this.found,
      this.list,
      button("Import", icon("import"), () => this.file.click(), { class: "wide-button" }),
      this.file,
      this.note,
    );
  }

  show(conversations, current) {
    this.#conversations = conversations;
    this.#current = current.id;
    this.#show();
  }

  #show() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#conversations.filter((each) => has(each, words));
    replace(
      this.list,
      found.map((each) => this.#entry(each, each.id === this.#current)),
    );
    this.found.textContent = words.length && !found.length ? "No conversation has these words." : "";
  }

  #read() {
    const [file] = this.file.files;
    if (file) this.#actions.read(file);
    this.file.value = "";
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
          title,
          "aria-current": isCurrent ? "true" : null,
          on: { click: () => this.#actions.open(conversation) },
        },
        title,
      ),
      button(`Rename ${title}`, icon("edit"), () => this.#actions.rename(conversation), {
        bare: true,
      }),
      button(`Delete ${title}`, icon("trash"), () => this.#actions.remove(conversation), {
        bare: true,
      }),
    );
  }
}

/** Whether all words are somewhere in a conversation's title, questions and answers. */
function has(conversation, words) {
  if (!words.length) return true;
  const said = everyTurn(conversation).map(({ text, answer }) => `${text}\n${answer.text}`);
  const all = [titleOf(conversation), ...said].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}
