// Which of the server's models and adapters answers a conversation.

import { served } from "../shared/api.js";
import { select } from "../shared/controls.js";
import { h, replace } from "../shared/dom.js";

/** The model that a conversation asks; empty: the server's first. One that is gone counts as none. */
export function modelOf({ model }) {
  const { names } = served.get();
  return !names.length || names.includes(model) ? model : "";
}

/**
 * The name of what answers, or a choice where the server has several.
 * @param {import("../shared/value.js").Value} current the conversation that is open
 * @param {(model: string) => void} onChoose
 */
export function modelChoice(current, onChoose) {
  const element = h("div.model");
  const show = () => {
    const { names } = served.get();
    const on = { change: ({ target }) => onChoose(target.value) };
    const chosen = modelOf(current.get()) || names[0];
    const facts = { "aria-label": "Model", on };
    replace(element, names.length > 1 ? select(names, chosen, "", facts) : names);
  };
  current.subscribe(show);
  served.subscribe(show);
  return element;
}
