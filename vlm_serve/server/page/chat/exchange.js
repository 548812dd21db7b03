// Conversations as files: written as JSON with their media, and read again.

import { randomId } from "../shared/ids.js";
import { bytes } from "../shared/words.js";
import { isObject, readReport, readTimes, readUsage, text as textOf } from "../reuse/reading.js";
import { newAnswer, newConversation, newTurn, titleOf } from "./conversation.js";
import { dataUrlOf, mediumOf, taken } from "./library.js";

const DATA_URL = /^data:([\w.+-]+\/[\w.+-]+);base64,/;
const KINDS = ["image", "video", "document", "text"];

/** A file that is no conversation of this page. */
export class ExchangeError extends Error {}

/** The conversation as JSON text, media and versions included. */
export async function exported(conversation) {
  const { title: _, branches, turns, ...rest } = conversation;
  const versions = {};
  for (const [key, { active, tails }] of Object.entries(branches ?? {}))
    versions[key] = { active, tails: await Promise.all(tails.map((tail) => tail && written(tail))) };
  const whole = { title: titleOf(conversation), ...rest, turns: await written(turns) };
  return JSON.stringify({ ...whole, branches: versions }, null, 2);
}

function written(turns) {
  return Promise.all(
    turns.map(async (turn) => {
      const media = turn.media.map(mediumOf).filter(Boolean);
      const told = media.map(async (medium) => ({
        kind: medium.kind,
        name: medium.name,
        size: bytes(medium.blob.size),
        url: await dataUrlOf(medium),
      }));
      return { ...turn, media: await Promise.all(told) };
    }),
  );
}

/**
 * A new conversation of what `exported` has written. Only known fields of the right type are taken.
 * @throws {ExchangeError}
 */
export async function imported(text) {
  let told;
  try {
    told = JSON.parse(text);
  } catch {
    throw new ExchangeError("The file is not JSON.");
  }
  if (!isObject(told) || !Array.isArray(told.turns) || !isObject(told.options))
    throw new ExchangeError("The file is no conversation that this page has exported.");
  const made = newConversation();
  made.title = textOf(told.title);
  made.model = textOf(told.model);
  if (Number.isFinite(told.created)) made.created = told.created;
  for (const name of Object.keys(made.options)) made.options[name] = textOf(told.options[name]);
  const ids = new Map([["start", "start"]]);
  made.turns = await readTurns(told.turns, ids);
  const branches = Object.entries(isObject(told.branches) ? told.branches : {});
  const tails = [];
  for (const [key, each] of branches) tails.push([key, await readTails(each, ids)]);
  for (const [key, each] of tails) if (each && ids.has(key)) made.branches[ids.get(key)] = each;
  return made;
}

async function readTails(told, ids) {
  const { active, tails } = isObject(told) ? told : {};
  if (!Array.isArray(tails) || !Number.isInteger(active) || tails[active] !== null) return null;
  const read = await Promise.all(tails.map((tail) => (Array.isArray(tail) ? readTurns(tail, ids) : null)));
  return read.every((tail, index) => (tail === null) === (index === active)) ? { active, tails: read } : null;
}

async function readTurns(told, ids) {
  const turns = [];
  for (const each of told) {
    if (!isObject(each)) throw new ExchangeError("A turn of the file is no object.");
    const media = [];
    for (const medium of Array.isArray(each.media) ? each.media : []) media.push(await readMedium(medium));
    const turn = newTurn(textOf(each.text), media, readResults(each.results));
    turn.answer = readAnswer(isObject(each.answer) ? each.answer : {});
    ids.set(textOf(each.id), turn.id);
    turns.push(turn);
  }
  return turns;
}

async function readMedium(told) {
  const url = textOf(told?.url);
  const [head, type] = DATA_URL.exec(url) ?? [];
  if (!head || !KINDS.includes(told.kind)) throw new ExchangeError("A picture or video of the file cannot be read.");
  let content;
  try {
    content = Uint8Array.from(atob(url.slice(head.length)), (letter) => letter.charCodeAt(0));
  } catch {
    throw new ExchangeError("A picture or video of the file cannot be read.");
  }
  const medium = await taken(new File([content], textOf(told.name), { type }), told.kind);
  return medium.id;
}

function readResults(told) {
  if (!isObject(told)) return null;
  return Object.fromEntries(Object.entries(told).map(([id, text]) => [id, textOf(text)]));
}

function readAnswer(told) {
  const calls = (Array.isArray(told.calls) ? told.calls : []).filter(isObject);
  return {
    ...newAnswer(),
    text: textOf(told.text),
    reasoning: textOf(told.reasoning),
    calls: calls.map((call) => ({
      id: textOf(call.id) || randomId(),
      name: textOf(call.name),
      arguments: textOf(call.arguments),
    })),
    finish: textOf(told.finish) || "stopped",
    error: textOf(told.error) || null,
    model: textOf(told.model),
    usage: readUsage(told.usage),
    report: readReport(told.report),
    times: readTimes(told.times),
  };
}
