// Questions that come before everything else.

import { button, field, iconButton } from "./controls.js";
import { h } from "./dom.js";
import { storedKey, storeKey } from "./api.js";

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
      h("h2", { id: "dialog-title" }, title),
      iconButton("Close", "close", () => close()),
    );
    const shown = h("dialog", { "aria-labelledby": "dialog-title" }, heading, contents(close));
    shown.addEventListener("close", () => {
      shown.remove();
      resolve(shown.returnValue);
    });
    document.body.append(shown);
    shown.showModal();
    shown.querySelector("input, textarea, select, footer button")?.focus();
  });
}

/** Whether the reader agrees to what cannot be undone. */
export async function confirmed(title, text, action) {
  const answer = await dialog(title, (close) => [
    h("p", text),
    h(
      "footer",
      button("Cancel", null, () => close()),
      button(action, null, () => close("yes"), { class: "danger" }),
    ),
  ]);
  return answer === "yes";
}

/**
 * Asks with a form.
 * @param {string} title
 * @param {string} action the text of the button that sends it
 * @param {(Node|null|false)[]} contents
 * @param {() => boolean} accepts whether what is in it may be sent; else it stays open
 * @returns {Promise<boolean>} false if it was dismissed
 */
export async function askWithForm(title, action, contents, accepts = () => true) {
  const answer = await dialog(title, (close) => {
    const submit = (event) => {
      event.preventDefault();
      if (accepts()) close("yes");
    };
    const send = h("button.primary", { type: "submit" }, action);
    return [h("form", { on: { submit } }, contents, h("footer", send))];
  });
  return answer === "yes";
}

/** Asks for the API key of this tab. Resolves to whether one was given. */
export async function askForKey(wrong) {
  const input = h("input", {
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    value: storedKey(),
  });
  const hint = "It is kept for this tab until the tab is closed, and sent to this server only.";
  const given = await askWithForm("API key", "Use this key", [
    wrong && h("p.problem", { role: "alert" }, "The server does not accept this key."),
    field("Key", input, hint),
  ]);
  if (given) storeKey(input.value.trim());
  return given;
}
