// What stands above a conversation: its title, and what may be done with it as a whole.

import { button, iconButton } from "../shared/controls.js";
import { h } from "../shared/dom.js";

/**
 * @param {Element} title
 * @param {{list: Function, setOptions: Function, copy: Function, save: Function}} actions
 */
export function conversationBar(title, { list, setOptions, copy, save }) {
  const curl = "Copy as a curl command";
  return h(
    "header.conversation-bar",
    iconButton("Conversations", "menu", list, { class: "bare menu" }),
    title,
    iconButton("Options", "options", setOptions),
    button("curl", "terminal", copy, { class: "bare", "aria-label": curl, title: curl }),
    iconButton("Export as JSON", "save", save),
  );
}
