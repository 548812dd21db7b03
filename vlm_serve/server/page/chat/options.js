// The dialog for what a conversation's requests say besides the messages.

import { dialog } from "../shared/dialogs.js";
import { field, h } from "../shared/dom.js";
import { complaintAbout, NUMBERS } from "./request.js";

const SAMPLING = [
  ["temperature", "0 always picks the most likely token", "0.05"],
  ["top_p", "probability mass of the most likely tokens to sample from", "0.01"],
  ["top_k", "number of the most likely tokens to sample from", "1"],
  ["max_tokens", "in tokens", "1"],
  ["seed", "makes answers repeatable", "1"],
];

/**
 * Lets the reader change options; resolves to the new ones, or to null if nothing was changed.
 * @param {object} options see conversation.js
 * @param {string[]} models names that the server answers to
 * @param {string} model the one in use; empty: the server's choice
 */
export async function askForOptions(options, models, model) {
  const inputs = {
    system: h("textarea", { rows: 3, value: options.system }),
    stop: h("textarea", { rows: 2, value: options.stop }),
    tools: h("textarea", { rows: 4, value: options.tools, spellcheck: "false", class: "code" }),
    thinking: select(
      [
        ["", "model's default"],
        ["on", "on"],
        ["off", "off"],
      ],
      options.thinking,
    ),
  };
  for (const [name, , step] of SAMPLING)
    inputs[name] = h("input", {
      type: "number",
      step,
      value: options[name],
      placeholder: "default",
    });
  const chosen = select(
    models.map((name) => [name, name]),
    model || models[0],
  );
  const problem = h("p", { class: "problem", role: "alert" });
  const read = () =>
    Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  const answer = await dialog("Options of this conversation", (close) => [
    h(
      "form",
      {
        class: "options",
        on: {
          submit: (event) => {
            event.preventDefault();
            const complaint = complaintAbout(read());
            problem.textContent = complaint ?? "";
            if (complaint === null) close("yes");
          },
        },
      },
      models.length > 1 ? field("Model", chosen) : null,
      field("System prompt", inputs.system),
      h(
        "fieldset",
        null,
        h("legend", null, "Sampling"),
        SAMPLING.map(([name, hint]) => field(NUMBERS[name], inputs[name], hint)),
      ),
      field(
        "Stop texts",
        inputs.stop,
        "one on each line; an answer ends where one of them would begin",
      ),
      field("Thinking", inputs.thinking),
      field(
        "Tools",
        inputs.tools,
        "a JSON list of functions, as the API takes it",
      ),
      problem,
      h("footer", null, h("button", { type: "submit", class: "primary" }, "Use these options")),
    ),
  ]);
  return answer === "yes"
    ? { options: read(), model: models.length > 1 ? chosen.value : model }
    : null;
}

function select(choices, value) {
  return h(
    "select",
    { value },
    choices.map(([name, text]) => h("option", { value: name, selected: name === value }, text)),
  );
}
