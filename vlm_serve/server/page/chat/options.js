// What a conversation's requests say besides the messages, and the dialog for it. What a conversation
// leaves empty is taken from the defaults of all conversations, and what those leave from the server.

import { served } from "../shared/api.js";
import { field, select } from "../shared/controls.js";
import { askWithForm } from "../shared/dialogs.js";
import { h } from "../shared/dom.js";
import { NO_OPTIONS } from "./conversation.js";

const STORED = "vlm-serve-defaults";

/** Options that are numbers. */
export const NUMBERS = {
  temperature: { label: "Temperature", hint: "0 always picks the most likely token", step: "0.05" },
  top_p: {
    label: "Top p",
    hint: "probability mass of the most likely tokens to sample from",
    step: "0.01",
  },
  top_k: { label: "Top k", hint: "number of the most likely tokens to sample from", step: "1" },
  max_tokens: { label: "Longest answer", hint: "in tokens, within the context", step: "1" },
  seed: { label: "Seed", hint: "makes answers repeatable", step: "1" },
};

/** The defaults of all conversations. Whatever else is stored counts as empty. */
export function defaultOptions() {
  let stored = null;
  try {
    stored = JSON.parse(localStorage.getItem(STORED));
  } catch {
    // Another version of this page has written it.
  }
  return filled((name) => (typeof stored?.[name] === "string" ? stored[name] : ""));
}

/** What a conversation's requests go by. */
export function optionsInForce({ options }) {
  const defaults = defaultOptions();
  return filled((name) => options[name] || defaults[name]);
}

function filled(valueOf) {
  return Object.fromEntries(Object.keys(NO_OPTIONS).map((name) => [name, valueOf(name)]));
}

/** What an option is as long as nobody has set it, in a word. */
function placeholderOf(name) {
  const { defaults } = served.get();
  if (name === "seed") return "random";
  if (!(name in NUMBERS)) return "none";
  if (!defaults) return "default";
  return defaults[name] > 0
    ? `${defaults[name]}`
    : ({ max_tokens: "no limit", top_k: "all" }[name] ?? "0");
}

/** Lets the reader change the defaults of all conversations. */
export async function askForDefaults() {
  const options = await ask("Defaults of all conversations", defaultOptions(), NO_OPTIONS);
  if (options !== null) localStorage.setItem(STORED, JSON.stringify(options));
}

/** Lets the reader change a conversation's options; resolves to the new ones, or to null. */
export function askForOptions(options) {
  return ask("Options of this conversation", options, defaultOptions());
}

/** Asks for options; `defaults` hold where they are empty. Null: it was dismissed. */
async function ask(title, options, defaults) {
  const input = (selector, name, facts) => {
    const placeholder = defaults[name] || placeholderOf(name);
    return h(selector, { value: options[name], placeholder, ...facts });
  };
  const inputs = {
    system: input("textarea", "system", { rows: 3 }),
    stop: input("textarea", "stop", { rows: 2 }),
    tools: input("textarea.code", "tools", { rows: 4, spellcheck: "false" }),
    thinking: select(["", "on", "off"], options.thinking, defaults.thinking || "model's default"),
  };
  for (const [name, { step }] of Object.entries(NUMBERS))
    inputs[name] = input("input", name, { type: "number", step });
  const problem = h("p.problem", { role: "alert" });
  const read = () => filled((name) => inputs[name].value);
  const accepts = () => {
    problem.textContent = complaintAbout(read());
    return problem.textContent === "";
  };
  const note =
    "Where nothing stands, the defaults of all conversations hold; a space alone means none.";
  const contents = [
    defaults !== NO_OPTIONS && h("p.note", note),
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
  return (await askWithForm(title, "Use these options", contents, accepts)) ? read() : null;
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
