// From a conversation to a request, as a body and as a curl command (neither has the key), and to
// the answer that the server gives.

import { failure, here, request, server, storedKey } from "../shared/api.js";
import { copy } from "../shared/clipboard.js";
import { randomId } from "../shared/ids.js";
import { serverSentEvents } from "../shared/sse.js";
import { absorb, mediaOf } from "./conversation.js";
import { dataUrlOf, learnHashes, mediumOf } from "./library.js";
import { modelOf } from "./model.js";
import { NUMBERS, optionsInForce } from "./options.js";

const END = "END_OF_REQUEST";

/**
 * The body of the request that asks for the answer to the last turn.
 * @param {object} conversation
 * @param {object[]} turns of the conversation, up to the one to answer
 * @param {(medium: object) => Promise<string>|string} urlFor
 * @param {boolean} goesOn whether what the last turn has of an answer is continued
 */
async function requestBody(conversation, turns, urlFor, goesOn) {
  const options = optionsInForce(conversation);
  const messages = options.system.trim() ? [{ role: "system", content: options.system }] : [];
  for (const turn of turns) {
    messages.push(...(await questionMessages(turn, urlFor)));
    const last = turn === turns.at(-1);
    if (goesOn || !last) messages.push(...answerMessages(turn.answer, last));
  }
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    cache_report: true,
  };
  if (goesOn) body.continue_final_message = true;
  if (modelOf(conversation)) body.model = modelOf(conversation);
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

/** An answer as the history says it; `open`: it is to be continued, maybe in its thought. */
function answerMessages(answer, open) {
  if (!open && !answer.text && !answer.calls.length) return [];
  const message = { role: "assistant", content: open ? answer.text || null : answer.text };
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

/**
 * Copies a shell command that sends the request of the last turn; media are read from files of their
 * names. Returns a sentence that says so.
 */
export async function copyAsCurl(conversation) {
  const files = new Map();
  const marked = (medium) => {
    const mark = randomId();
    files.set(mark, medium);
    return mark;
  };
  const body = await requestBody(conversation, conversation.turns, marked, false);
  let text = JSON.stringify(body, null, 2).replace(/[\\$`]/g, "\\$&");
  for (const [mark, { blob, name }] of files) {
    const file = name.replace(/[^\w.-]/g, "_").replace(/^-/, "_");
    text = text.replace(mark, () => `data:${blob.type};base64,$(base64 -w0 ${file})`);
  }
  const withKey = server.get() === "key" || storedKey() !== "";
  const key = withKey ? ` -H "Authorization: Bearer $VLM_SERVE_KEY"` : "";
  const address = here("/v1/chat/completions");
  await copy(
    `curl -N ${address} -H 'Content-Type: application/json'${key} -d @- <<${END}\n${text}\n${END}\n`,
  );
  return "The command is on the clipboard. Pictures are read from files of their names.";
}

/**
 * Streams into the last turn's answer, behind what it has already. Never raises: what goes wrong is the answer's `error`.
 * @param {object} conversation
 * @param {AbortSignal} signal ends the answer, which keeps what has come
 * @param {() => void} onChange called after every chunk
 */
export async function ask(conversation, signal, onChange) {
  const turns = conversation.turns;
  const { answer } = turns.at(-1);
  const begin = performance.now();
  const times = { first: null, total: null };
  answer.times = times;
  try {
    const goesOn = Boolean(answer.text || answer.reasoning);
    const body = await requestBody(conversation, turns, dataUrlOf, goesOn);
    const response = await request("/v1/chat/completions", { body, signal });
    for await (const { data } of serverSentEvents(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (absorb(answer, chunk)) times.first ??= performance.now() - begin;
      onChange();
    }
    if (answer.finish === null) throw new Error("The answer ended early.");
  } catch (error) {
    const meant = signal.aborted ? null : failure(error);
    answer.finish = meant === null ? "stopped" : "error";
    answer.error = meant?.message ?? null;
  }
  times.total = performance.now() - begin;
  if (answer.report?.media) await learnHashes(mediaOf(turns), answer.report.media);
  onChange();
}
