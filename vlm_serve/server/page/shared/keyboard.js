// Keyboard shortcuts: what they do, and the list of them. None is a letter alone, which a reader
// with speech input would press by chance.

import { dialog } from "./dialogs.js";
import { h, termList } from "./dom.js";

const GROUPS = {
  "On the whole page": [
    ["Ctrl /", "show this list"],
    ["Alt 1, Alt 2, Alt 3", "go to the chat, to what was reused, to the live cache"],
    ["Alt N", "begin a new conversation"],
    ["Ctrl K", "search the conversations"],
    ["Esc", "stop the answer, leave the change of a question, or go to the question box"],
  ],
  "In the question box": [
    ["Enter", "send"],
    ["Shift Enter", "begin a new line"],
    ["↑", "change the last question, if the box is empty"],
  ],
  "In the live cache": [
    ["+, −, 0", "zoom the map in, out, and to all of it"],
    ["↑, ↓, ←, →", "walk through the table, close and open its rows"],
    ["Enter", "choose the row"],
  ],
};

/** Shows the list. */
export async function showShortcuts() {
  if (document.querySelector("dialog[open]")) return;
  await dialog("Keyboard shortcuts", () =>
    Object.entries(GROUPS).map(([title, rows]) => [
      h("h3", title),
      termList(
        "shortcuts",
        rows.map(([keys, text]) => [keyNames(keys), text]),
      ),
    ]),
  );
}

function keyNames(text) {
  return text
    .split(", ")
    .flatMap((one, index) => [
      index ? ", " : null,
      one.split(" ").map((key, place) => [place ? " + " : null, h("kbd", key)]),
    ]);
}

/**
 * Calls actions for keys pressed anywhere, unless a dialog is open.
 * @param {Object<string, () => void>} actions by name: "Ctrl+Slash", "Alt+KeyN", "Escape"
 */
export function onShortcuts(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]"))
      return;
    const control = event.ctrlKey || event.metaKey;
    if (control && event.altKey) return; // AltGr, which types signs
    const held = control ? "Ctrl+" : event.altKey ? "Alt+" : "";
    // Letters and digits go by the key's place, signs by themselves: some need Shift somewhere.
    const act = actions[held + event.key] ?? (event.shiftKey ? null : actions[held + event.code]);
    if (!act) return;
    event.preventDefault();
    act();
  });
}
