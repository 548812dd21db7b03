// Conversations as files: written as JSON with their media, and read again.

import { save } from "../shared/clipboard.js";
import { randomId } from "../shared/ids.js";
import { bytes } from "../shared/words.js";
import { newConversation, newTurn, titleOf } from "./conversation.js";
import { dataUrlOf, mediumOf, taken } from "./library.js";

const DATA_URL = /^data:([\w.+-]+\/[\w.+-]+);base64,/;
const KINDS = ["image", "video", "document", "text"];

/** A file that is no conversation of this page. */
class ExchangeError extends Error {}

/** Saves the conversation as a file, media and versions included. */
export async function saveAsFile(conversation) {
  const { title: _, branches, turns, ...rest } = conversation;
  const versions = {};
  for (const [key, { active, tails }] of Object.entries(branches ?? {}))
    versions[key] = {
      active,
      tails: await Promise.all(tails.map((tail) => tail && written(tail))),
    };
  const title = titleOf(conversation);
  const whole = { title, ...rest, turns: await written(turns), branches: versions };
  save(title, "json", "application/json", JSON.stringify(whole, null, 2));
}

function written(turns) {
  return Promise.all(
    turns.map(async (turn) => {
      const media = turn.media.map(mediumOf).filter(Boolean);
      const records = media.map(async (medium) => ({
        kind: medium.kind,
        name: medium.name,
        size: bytes(medium.blob.size),
        url: await dataUrlOf(medium),
      }));
      return { ...turn, media: await Promise.all(records) };
    }),
  );
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

// What is taken of a file: known fields, and each by a function that makes any value into one of the
// type that the views expect.

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const orNull = (read) => (value) => read(value) || null;
const items = (value) => (Array.isArray(value) ? value : []);
const fields = (readers) => (value) =>
  Object.fromEntries(Object.entries(readers).map(([name, read]) => [name, read(value?.[name])]));
const objects = (readers) => (value) => items(value).filter(isObject).map(fields(readers));
const objectOrNull = (readers) => (value) => (isObject(value) ? fields(readers)(value) : null);

const readReport = objectOrNull({
  prompt_tokens: number,
  boundary: number,
  joined_tokens: number,
  joined_ms: number,
  answer_tokens: number,
  media_decoded: number,
  media_encoded: number,
  media_skipped: number,
  media_cut_short: number,
  kv_boundary: number,
  state_boundary: number,
  reason: text,
  boundary_key: orNull(text),
  segments: objects({ start: number, end: number, source: text }),
  media: objects({ offset: number, length: number, kind: text, hash: text, source: text }),
  snapshots: (value) => items(value).map(number),
});

const readAnswer = fields({
  text,
  reasoning: text,
  calls: objects({ id: (value) => text(value) || randomId(), name: text, arguments: text }),
  finish: (value) => text(value) || "stopped",
  error: orNull(text),
  model: text,
  usage: objectOrNull({ prompt_tokens: number, completion_tokens: number }),
  report: (value) => (number(value?.prompt_tokens) ? readReport(value) : null),
  times: objectOrNull({ first: orNull(number), total: number }),
});

/** A new conversation of what `saveAsFile` has written. @throws {ExchangeError} */
async function imported(json) {
  let file;
  try {
    file = JSON.parse(json);
  } catch {
    throw new ExchangeError("The file is not JSON.");
  }
  if (!isObject(file) || !Array.isArray(file.turns) || !isObject(file.options))
    throw new ExchangeError("The file is no conversation that this page has exported.");
  const conversation = newConversation();
  conversation.title = text(file.title);
  conversation.model = text(file.model);
  if (Number.isFinite(file.created)) conversation.created = file.created;
  for (const name of Object.keys(conversation.options))
    conversation.options[name] = text(file.options[name]);
  const ids = new Map([["start", "start"]]);
  conversation.turns = await readTurns(file.turns, ids);
  const branches = new Map();
  for (const [key, branch] of Object.entries(isObject(file.branches) ? file.branches : {}))
    branches.set(key, await readBranch(branch, ids));
  for (const [key, branch] of branches)
    if (branch && ids.has(key)) conversation.branches[ids.get(key)] = branch;
  return conversation;
}

async function readBranch(value, ids) {
  const { active, tails } = isObject(value) ? value : {};
  if (!Array.isArray(tails) || !Number.isInteger(active) || tails[active] !== null) return null;
  const read = await Promise.all(
    tails.map((tail) => (Array.isArray(tail) ? readTurns(tail, ids) : null)),
  );
  const whole = read.every((tail, index) => (tail === null) === (index === active));
  return whole ? { active, tails: read } : null;
}

async function readTurns(values, ids) {
  const turns = [];
  for (const value of values) {
    if (!isObject(value)) throw new ExchangeError("A turn of the file is no object.");
    const media = [];
    for (const medium of items(value.media)) media.push(await readMedium(medium));
    const results = isObject(value.results) ? Object.entries(value.results) : null;
    const turn = newTurn(
      text(value.text),
      media,
      results && Object.fromEntries(results.map(([id, result]) => [id, text(result)])),
    );
    turn.answer = readAnswer(value.answer);
    ids.set(text(value.id), turn.id);
    turns.push(turn);
  }
  return turns;
}

async function readMedium(value) {
  const url = text(value?.url);
  const [head, type] = DATA_URL.exec(url) ?? [];
  const problem = new ExchangeError("A picture or video of the file cannot be read.");
  if (!head || !KINDS.includes(value.kind)) throw problem;
  let content;
  try {
    content = Uint8Array.from(atob(url.slice(head.length)), (letter) => letter.charCodeAt(0));
  } catch {
    throw problem;
  }
  return (await taken(new File([content], text(value.name), { type }), value.kind)).id;
}

/** Whether the value has fields. */
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
