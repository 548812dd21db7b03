// The list of conversations: searched, renamed, deleted, and read from files.

import { button, field, fileInput, iconButton } from "../shared/controls.js";
import { askWithForm, confirmed } from "../shared/dialogs.js";
import { h, replace } from "../shared/dom.js";
import { everyTurn, titleOf } from "./conversation.js";

export class Sidebar {
  #actions;
  #conversations = [];
  #current = null;

  /** @param {{open: Function, add: Function, remove: Function, rename: Function, read: Function,
   *   setDefaults: Function}} actions */
  constructor(actions) {
    this.#actions = actions;
    this.list = h("ul");
    this.note = h("p.note");
    this.search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the conversations",
      on: { input: () => this.#show() },
    });
    const accept = ".json,application/json";
    const read = ([file]) => file && actions.read(file);
    const file = fileInput("Exported conversation", read, { accept });
    this.outcome = h("p.note", { role: "status" });
    this.element = h(
      "nav.sidebar",
      { "aria-label": "Conversations" },
      button("New conversation", "plus", () => actions.add(), { class: "wide-button" }),
      this.search,
      this.outcome,
      this.list,
      h(
        "div.pair",
        button("Import", "import", () => file.click()),
        button("Defaults", "options", () => actions.setDefaults()),
      ),
      file,
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
    const matches = this.#conversations.filter((conversation) => has(conversation, words));
    replace(
      this.list,
      matches.map((conversation) => this.#entry(conversation)),
    );
    this.outcome.textContent =
      words.length && !matches.length ? "No conversation has these words." : "";
  }

  #entry(conversation) {
    const title = titleOf(conversation);
    const attributes = {
      type: "button",
      title,
      "aria-current": conversation.id === this.#current ? "true" : null,
      on: { click: () => this.#actions.open(conversation) },
    };
    return h(
      "li",
      h("button.open", attributes, title),
      iconButton(`Rename ${title}`, "edit", () => this.#rename(conversation)),
      iconButton(`Delete ${title}`, "trash", () => this.#remove(conversation)),
    );
  }

  async #rename(conversation) {
    const value = titleOf(conversation);
    const input = h("input", { type: "text", value, maxlength: "200", autocomplete: "off" });
    if (await askWithForm("Rename the conversation", "Rename", [field("Name", input)]))
      this.#actions.rename(conversation, input.value.trim());
  }

  async #remove(conversation) {
    const text = `“${titleOf(conversation)}” and its pictures are removed from this browser.`;
    if (await confirmed("Delete this conversation?", text, "Delete"))
      this.#actions.remove(conversation);
  }
}

/** Whether all words are somewhere in a conversation's title, questions and answers. */
function has(conversation, words) {
  if (!words.length) return true;
  const said = everyTurn(conversation).map(({ text, answer }) => `${text}\n${answer.text}`);
  const all = [titleOf(conversation), ...said].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}
