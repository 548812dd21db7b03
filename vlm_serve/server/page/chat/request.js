// From a conversation to a request: as a body, as a curl command, and as a file to keep. None of
// them has the key.

import { randomId } from "../shared/ids.js";
import { bytes } from "../shared/words.js";
import { titleOf } from "./conversation.js";
import { dataUrlOf, mediumOf } from "./library.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const END = "END_OF_REQUEST";

/** What is wrong with the options, as a sentence, or null. */
export function complaintAbout(options) {
  for (const name of NUMBERS) {
    if (options[name] !== "" && !Number.isFinite(Number(options[name])))
      return `${name} must be a number.`;
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
  for (const name of NUMBERS) if (options[name] !== "") body[name] = Number(options[name]);
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
      throw new Error("A picture or video of this conversation is not in this browser any more.");
    const type = `${medium.kind}_url`;
    parts.push({ type, [type]: { url: await urlFor(medium) } });
  }
  if (!parts.length) return [{ role: "user", content: turn.text }];
  if (turn.text) parts.push({ type: "text", text: turn.text });
  return [{ role: "user", content: parts }];
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

/** The conversation as JSON text, media included. */
export async function exported(conversation) {
  const { title: _, ...rest } = conversation;
  const turns = [];
  for (const turn of conversation.turns) {
    const media = turn.media.map(mediumOf).filter(Boolean);
    const told = media.map(async (medium) => ({
      kind: medium.kind,
      name: medium.name,
      size: bytes(medium.blob.size),
      url: await dataUrlOf(medium),
    }));
    turns.push({ ...turn, media: await Promise.all(told) });
  }
  return JSON.stringify({ title: titleOf(conversation), ...rest, turns }, null, 2);
}
