// Asks the server for the answer to a conversation's last turn, and keeps the time.

import { failure, request } from "../shared/api.js";
import { serverSentEvents } from "../shared/sse.js";
import { absorb, mediaOf } from "./conversation.js";
import { learnHashes } from "./library.js";
import { requestBody } from "./request.js";

/**
 * Streams into the last turn's answer. Never raises: what goes wrong is the answer's `error`.
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
    const body = await requestBody(conversation, turns);
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

const SHORTEST_MS = 100;

/** Tokens a second after the first one, or null: of a shorter time the network's buffers tell more. */
export function tokenRate({ usage, times }) {
  const numTokens = (usage?.completion_tokens ?? 0) - 1;
  const took = times?.first ? times.total - times.first : 0;
  return numTokens > 0 && took >= SHORTEST_MS ? (1000 * numTokens) / took : null;
}
