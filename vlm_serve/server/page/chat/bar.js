// What stands above a conversation: its title, and what may be done with it as a whole.

import { button, h } from "../shared/dom.js";
import { icon } from "../shared/icons.js";

/**
 * @param {Element} title
 * @param {{list: Function, options: Function, copy: Function, save: Function}} actions
 */
export function conversationBar(title, actions) {
  const bare = { bare: true };
  return h(
    "header",
    { class: "conversation-bar" },
    button("Conversations", icon("menu"), actions.list, { bare: true, class: "bare menu" }),
    title,
    button("Options", icon("options"), actions.options, bare),
    button("Copy as a curl command", icon("copy"), actions.copy, bare),
    button("Export as JSON", icon("save"), actions.save, bare),
  );
}
