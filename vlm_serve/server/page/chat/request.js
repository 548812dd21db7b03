// From a conversation to a request: as a body and as a curl command. Neither has the key.

import { randomId } from "../shared/ids.js";
import { dataUrlOf, mediumOf } from "./library.js";

/** Options that are numbers, with their names in words. */
export const NUMBERS = {
  temperature: "Temperature",
  top_p: "Top p",
  top_k: "Top k",
  max_tokens: "Longest answer",
  seed: "Seed",
};

const END = "END_OF_REQUEST";

/** What is wrong with the options, as a sentence, or null. */
export function complaintAbout(options) {
  for (const [name, words] of Object.entries(NUMBERS)) {
    if (options[name] !== "" && !Number.isFinite(Number(options[name])))
      return `${words} must be a number.`;
  }
  if (options.tools.trim() === "") return null;
  try {
    return Array.isArray(JSON.parse(options.tools)) ? null : "Tools must be a JSON list.";
  } catch (error) {
    return `Tools must be a JSON list: ${error.message}`;
  }
}

/**
 * The body of the request that asks for the answer to the last turn.
 * @param {object} conversation
 * @param {object[]} turns of the conversation, up to the one to answer
 * @param {(medium: object) => Promise<string>|string} urlFor
 */
export async function requestBody(conversation, turns, urlFor = dataUrlOf) {
  const { options } = conversation;
  const messages = options.system.trim() ? [{ role: "system", content: options.system }] : [];
  for (const turn of turns) {
    messages.push(...(await questionMessages(turn, urlFor)));
    if (turn !== turns.at(-1)) messages.push(...answerMessages(turn.answer));
  }
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    cache_report: true,
  };
  if (conversation.model) body.model = conversation.model;
  for (const name of Object.keys(NUMBERS))
    if (options[name] !== "") body[name] = Number(options[name]);
  if (options.stop.trim()) body.stop = options.stop.split("\n").filter(Boolean);
  if (options.thinking) body.chat_template_kwargs = { enable_thinking: options.thinking === "on" };
  if (options.tools.trim()) body.tools = JSON.parse(options.tools);
  return body;
}

async function questionMessages(turn, urlFor) {
  if (turn.results !== null) {
    return Object.entries(turn.results).map(([id, content]) => ({
      role: "tool",
      tool_call_id: id,
      content,
    }));
  }
  const parts = [];
  for (const id of turn.media) {
    const medium = mediumOf(id);
    if (medium === null)
      throw new Error("A file of this conversation is not in this browser any more.");
    parts.push(await partOf(medium, urlFor));
  }
  if (!parts.length) return [{ role: "user", content: turn.text }];
  if (turn.text) parts.push({ type: "text", text: turn.text });
  return [{ role: "user", content: parts }];
}

async function partOf(medium, urlFor) {
  if (medium.kind === "text") {
    const text = await medium.blob.text();
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return { type: "text", text: `${medium.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n\n` };
  }
  if (medium.kind === "document")
    return { type: "file", file: { filename: medium.name, file_data: await urlFor(medium) } };
  const type = `${medium.kind}_url`;
  return { type, [type]: { url: await urlFor(medium) } };
}

function answerMessages(answer) {
  if (!answer.text && !answer.calls.length) return [];
  const message = { role: "assistant", content: answer.text };
  if (answer.reasoning) message.reasoning = answer.reasoning;
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return [message];
}

/** A shell command that sends the request of the last turn; media are read from files of their name. */
export async function curlCommand(conversation, address, withKey) {
  const files = new Map();
  const body = await requestBody(conversation, conversation.turns, (medium) => {
    const mark = randomId();
    files.set(mark, medium);
    return mark;
  });
  let text = JSON.stringify(body, null, 2).replace(/[\\$`]/g, "\\$&");
  for (const [mark, { blob, name }] of files) {
    const file = name.replace(/[^\w.-]/g, "_").replace(/^-/, "_");
    text = text.replace(mark, () => `data:${blob.type};base64,$(base64 -w0 ${file})`);
  }
  const key = withKey ? ` -H "Authorization: Bearer $VLM_SERVE_KEY"` : "";
  return `curl -N ${address}/v1/chat/completions -H 'Content-Type: application/json'${key} -d @- <<${END}\n${text}\n${END}\n`;
}
