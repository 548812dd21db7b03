// What the reader may do with a conversation as a whole: each asks what has to be asked, and does it.

import { here, requestJson, server } from "../shared/api.js";
import { copy, save } from "../shared/clipboard.js";
import { askForText, confirmed } from "../shared/dialogs.js";
import { storedKey } from "../shared/key.js";
import { titleOf } from "./conversation.js";
import { ExchangeError, exported, imported } from "./exchange.js";
import { askForOptions } from "./options.js";
import { curlCommand } from "./request.js";

/** Whether the conversation is to be deleted. */
export function mayRemove(conversation) {
  return confirmed(
    "Delete this conversation?",
    `“${titleOf(conversation)}” and its pictures are removed from this browser.`,
    "Delete",
  );
}

/** Another title for the conversation, or null. */
export function otherTitle(conversation) {
  return askForText("Rename the conversation", "Name", titleOf(conversation), "Rename");
}

/** Other options for the conversation, with a model, or null. */
export async function otherOptions({ options, model }) {
  let models = [];
  try {
    models = (await requestJson("/v1/models")).data.map((each) => each.id);
  } catch {
    // The dialog goes without the choice of a model; the state of the server is shown elsewhere.
  }
  return askForOptions(options, models, model);
}

/** Copies the request of the last question. Returns a sentence that says so. */
export async function copyAsCurl(conversation) {
  const withKey = server.get() === "key" || storedKey() !== "";
  await copy(await curlCommand(conversation, here("/").slice(0, -1), withKey));
  return "The command is on the clipboard. Pictures are read from files of their names.";
}

/** Saves the conversation as a file. */
export async function saveAsFile(conversation) {
  const name = titleOf(conversation).replace(/[^\w-]+/g, "-");
  save(`${name}.json`, "application/json", await exported(conversation));
}

/** The conversation of a file, or a sentence why there is none: {conversation, problem}. */
export async function readFile(file) {
  try {
    return { conversation: await imported(await file.text()), problem: null };
  } catch (error) {
    if (!(error instanceof ExchangeError)) throw error;
    return { conversation: null, problem: `${file.name}: ${error.message}` };
  }
}
