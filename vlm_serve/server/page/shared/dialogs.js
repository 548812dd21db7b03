// Questions that come before everything else.

import { button, field, h } from "./dom.js";
import { icon } from "./icons.js";
import { storeKey, storedKey } from "./key.js";

/**
 * A modal dialog that is gone when it is closed.
 * @param {string} title
 * @param {(close: (value?: string) => void) => Node[]} contents
 * @returns {Promise<string>} what it was closed with; empty if it was dismissed
 */
export function dialog(title, contents) {
  return new Promise((resolve) => {
    const close = (value = "") => shown.close(value);
    const heading = h(
      "header",
      null,
      h("h2", { id: "dialog-title" }, title),
      button("Close", icon("close"), () => close(), { bare: true }),
    );
    const shown = h("dialog", { "aria-labelledby": "dialog-title" }, heading, contents(close));
    shown.addEventListener("close", () => {
      shown.remove();
      resolve(shown.returnValue);
    });
    document.body.append(shown);
    shown.showModal();
  });
}

/** Whether the reader agrees to what cannot be undone. */
export async function confirmed(title, text, action) {
  const answer = await dialog(title, (close) => [
    h("p", null, text),
    h(
      "footer",
      null,
      button("Cancel", null, () => close()),
      button(action, null, () => close("yes"), { class: "danger" }),
    ),
  ]);
  return answer === "yes";
}

/** Asks for one line of text. Resolves to it, or to null if the dialog was dismissed. */
export async function askForText(title, label, value, action) {
  const input = h("input", { type: "text", value, maxlength: "200", autocomplete: "off" });
  const give = (close) => (event) => {
    event.preventDefault();
    close("yes");
  };
  const answer = await dialog(title, (close) => [
    h(
      "form",
      { on: { submit: give(close) } },
      field(label, input),
      h("footer", null, h("button", { type: "submit", class: "primary" }, action)),
    ),
  ]);
  return answer === "yes" ? input.value.trim() : null;
}

/** Asks for the API key of this tab. Resolves to whether one was given. */
export async function askForKey(wrong) {
  const input = h("input", {
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    value: storedKey(),
  });
  const answer = await dialog("API key", (close) => [
    h(
      "form",
      {
        on: {
          submit: (event) => {
            event.preventDefault();
            storeKey(input.value.trim());
            close("yes");
          },
        },
      },
      wrong
        ? h("p", { class: "problem", role: "alert" }, "The server does not accept this key.")
        : null,
      field(
        "Key",
        input,
        "It is kept for this tab until the tab is closed, and sent to this server only.",
      ),
      h("footer", null, h("button", { type: "submit", class: "primary" }, "Use this key")),
    ),
  ]);
  return answer === "yes";
}
