// What a conversation's requests say besides the messages, and the dialog for it.

import { requestJson } from "../shared/api.js";
import { field } from "../shared/controls.js";
import { askWithForm } from "../shared/dialogs.js";
import { h } from "../shared/dom.js";

/** Options that are numbers. */
export const NUMBERS = {
  temperature: { label: "Temperature", hint: "0 always picks the most likely token", step: "0.05" },
  top_p: {
    label: "Top p",
    hint: "probability mass of the most likely tokens to sample from",
    step: "0.01",
  },
  top_k: { label: "Top k", hint: "number of the most likely tokens to sample from", step: "1" },
  max_tokens: { label: "Longest answer", hint: "in tokens", step: "1" },
  seed: { label: "Seed", hint: "makes answers repeatable", step: "1" },
};

/**
 * Lets the reader change a conversation's options and model; resolves to the new ones, or to null if
 * nothing was changed.
 * @param {object} conversation see conversation.js; an empty `model` leaves the choice to the server
 * @returns {Promise<{options: object, model: string}|null>}
 */
export async function askForOptions({ options, model }) {
  const models = await servedModels();
  const inputs = {
    system: h("textarea", { rows: 3, value: options.system }),
    stop: h("textarea", { rows: 2, value: options.stop }),
    tools: h("textarea.code", { rows: 4, value: options.tools, spellcheck: "false" }),
    thinking: select(["", "on", "off"], options.thinking, "model's default"),
  };
  for (const [name, { step }] of Object.entries(NUMBERS)) {
    const value = options[name];
    inputs[name] = h("input", { type: "number", step, value, placeholder: "default" });
  }
  const choice = select(models, model || models[0]);
  const problem = h("p.problem", { role: "alert" });
  const read = () =>
    Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  const accepts = () => {
    problem.textContent = complaintAbout(read());
    return problem.textContent === "";
  };
  const contents = [
    models.length > 1 && field("Model", choice),
    field("System prompt", inputs.system),
    h(
      "fieldset",
      h("legend", "Sampling"),
      Object.entries(NUMBERS).map(([name, { label, hint }]) => field(label, inputs[name], hint)),
    ),
    field(
      "Stop texts",
      inputs.stop,
      "one on each line; an answer ends where one of them would begin",
    ),
    field("Thinking", inputs.thinking),
    field("Tools", inputs.tools, "a JSON list of functions, as the API takes it"),
    problem,
  ];
  const title = "Options of this conversation";
  if (!(await askWithForm(title, "Use these options", contents, accepts))) return null;
  return { options: read(), model: models.length > 1 ? choice.value : model };
}

/** The names that the server answers to; none if it does not say, which is shown elsewhere. */
async function servedModels() {
  try {
    return (await requestJson("/v1/models")).data.map(({ id }) => id);
  } catch {
    return [];
  }
}

/** What is wrong with the options, as a sentence, or an empty text. */
function complaintAbout(options) {
  for (const [name, { label }] of Object.entries(NUMBERS)) {
    if (options[name] !== "" && !Number.isFinite(Number(options[name])))
      return `${label} must be a number.`;
  }
  if (options.tools.trim() === "") return "";
  try {
    return Array.isArray(JSON.parse(options.tools)) ? "" : "Tools must be a JSON list.";
  } catch (error) {
    return `Tools must be a JSON list: ${error.message}`;
  }
}

/** A choice of values; `empty`: what to call the empty one. */
function select(values, chosen, empty = "") {
  const choices = values.map((value) =>
    h("option", { value, selected: value === chosen }, value || empty),
  );
  return h("select", { value: chosen }, choices);
}
