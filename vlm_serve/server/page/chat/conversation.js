// A conversation: questions with their answers, as plain values that IndexedDB can hold.
//
// turn = {id, text, media: [medium id], results: {call id: text} | null, answer}
//   `results`: instead of a question the turn brings what tools have returned.
// answer = {text, reasoning, calls: [{id, name, arguments}], finish, error, model, usage, report, times}
//   finish: null while it streams, then "stop", "length", "tool_calls", "stopped" (by the reader) or "error"
//   times: milliseconds {first, total} from the sending on
//
// An edited question begins another version of a conversation, and the old one is kept:
// branches = {id of the turn before, or "start": {active, tails: [[turn] or null]}}
//   The turns of the version that is shown stand in conversation.turns; its own place is null.

import { randomId } from "../shared/ids.js";

const TITLE_LENGTH = 48;
const START = "start";

/** The options of a conversation, all empty; what is empty is as in the defaults, see options.js. */
export const NO_OPTIONS = {
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  max_tokens: "",
  seed: "",
  stop: "",
  thinking: "",
  tools: "",
};

export function newConversation() {
  const now = Date.now();
  return {
    id: randomId(),
    created: now,
    updated: now,
    title: "",
    model: "",
    options: { ...NO_OPTIONS },
    turns: [],
    branches: {},
  };
}

export function newTurn(text, media, results = null) {
  return { id: randomId(), text, media, results, answer: newAnswer() };
}

export function newAnswer() {
  return {
    text: "",
    reasoning: "",
    calls: [],
    finish: null,
    error: null,
    model: "",
    usage: null,
    report: null,
    times: null,
  };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const text =
    conversation.turns
      .find((turn) => turn.text)
      ?.text.replaceAll(/\s+/g, " ")
      .trim() ?? "";
  if (!text) return conversation.turns.length ? "A picture" : "New conversation";
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH - 1)}…` : text;
}

/** Ids of the media of all turns, in order. */
export function mediaOf(turns) {
  return turns.flatMap((turn) => turn.media);
}

function keyOf(conversation, index) {
  return conversation.turns[index - 1]?.id ?? START;
}

/** Begins another version at turn `index`; the turns from there on are kept beside it. */
export function branch(conversation, index) {
  conversation.branches ??= {};
  const known = (conversation.branches[keyOf(conversation, index)] ??= {
    active: 0,
    tails: [null],
  });
  known.tails[known.active] = conversation.turns.splice(index);
  known.active = known.tails.push(null) - 1;
}

/** How many versions begin at turn `index`, and which of them is shown: {number, count}, from 1. */
export function versionAt(conversation, index) {
  const known = conversation.branches?.[keyOf(conversation, index)];
  return { number: (known?.active ?? 0) + 1, count: known?.tails.length ?? 1 };
}

/** Shows version `number` of those that begin at turn `index`. */
export function showVersion(conversation, index, number) {
  const known = conversation.branches?.[keyOf(conversation, index)];
  const tail = known?.tails[number - 1];
  if (!tail) return;
  known.tails[known.active] = conversation.turns.splice(index);
  known.tails[number - 1] = null;
  known.active = number - 1;
  conversation.turns.push(...tail);
}

/** The turns of all versions. */
export function everyTurn({ turns, branches }) {
  const others = Object.values(branches ?? {}).flatMap(({ tails }) => tails.filter(Boolean));
  return [...turns, ...others.flat()];
}

/** Whether an answer has ended early and may go on. Half a call of a tool may not. */
export function mayGoOn({ text, reasoning, calls, finish }) {
  const early = ["stopped", "length", "error"].includes(finish);
  return early && !calls.length && Boolean(text || reasoning);
}

/** Opens the last answer again where it has ended; returns whether it may go on. */
export function reopen({ turns }, { answer }) {
  if (answer !== turns.at(-1)?.answer || !mayGoOn(answer)) return false;
  Object.assign(answer, { finish: null, error: null });
  return true;
}

/** The turn that asks again. What came is kept as another version; an error alone is not. */
export function again(conversation, turn) {
  if (turn.answer.error && !mayGoOn(turn.answer) && turn === conversation.turns.at(-1)) {
    conversation.turns.pop();
    turn.answer = newAnswer();
    return turn;
  }
  branch(conversation, conversation.turns.indexOf(turn));
  return newTurn(turn.text, turn.media, turn.results);
}

/** A reload has ended what was still streaming. */
export function endWhatWasRunning(conversation) {
  for (const { answer } of everyTurn(conversation))
    if (answer.finish === null) answer.finish = "stopped";
}

/** Takes one chunk of a streamed chat completion into an answer. Returns whether it brought text. */
export function absorb(answer, chunk) {
  answer.model = chunk.model ?? answer.model;
  answer.usage = chunk.usage ?? answer.usage;
  answer.report = chunk.cache_report ?? answer.report;
  const choice = chunk.choices?.[0];
  if (choice === undefined) return false;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  answer.text += delta.content ?? "";
  answer.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  answer.finish = choice.finish_reason ?? answer.finish;
  return Boolean(delta.content || reasoning || delta.tool_calls?.length);
}
