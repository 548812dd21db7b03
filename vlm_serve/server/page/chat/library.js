// The media that this browser has uploaded: their bytes, and pictures of them for the views.

import { icon } from "../shared/controls.js";
import { dialog } from "../shared/dialogs.js";
import { h } from "../shared/dom.js";
import { randomId } from "../shared/ids.js";
import { Value } from "../shared/value.js";
import { bytes } from "../shared/words.js";
import { media as stored } from "./store.js";

const KINDS = /^(image|video)\//;
const TEXT_TYPE = "text/plain";
const PDF_TYPE = "application/pdf";
const PDF_NAME = /\.pdf$/i;

const byId = new Map();
const byHash = new Map();
const urls = new Map();

/** Counts changes of what `mediumOfHash` knows. */
export const known = new Value(0);

/** Reads what earlier visits have left. */
export async function loadLibrary() {
  for (const medium of await stored.all()) remember(medium);
  known.set(known.get() + 1);
}

function remember(medium) {
  byId.set(medium.id, medium);
  for (const hash of medium.hashes) byHash.set(hash, medium);
}

/**
 * "image", "video", "document" (PDF), "text", or "empty" if there is nothing in it; null for others.
 * Vector graphics are text.
 */
export async function kindOf(file) {
  if (file.size === 0) return "empty";
  if (file.type !== "image/svg+xml" && KINDS.test(file.type)) return KINDS.exec(file.type)[1];
  if (file.type === PDF_TYPE || PDF_NAME.test(file.name)) return "document";
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.trim()) return "empty";
    return text.includes("\0") ? null : "text";
  } catch {
    return null;
  }
}

/**
 * Takes a copy of a file in, for the file may be gone when it is needed. It is kept when the
 * conversation that it is part of is.
 */
export async function taken(file, kind) {
  const type = { text: TEXT_TYPE, document: PDF_TYPE }[kind] ?? file.type;
  const blob = new Blob([await file.arrayBuffer()], { type });
  const medium = {
    id: randomId(),
    conversation: null,
    kind,
    name: file.name || "pasted",
    blob,
    hashes: [],
  };
  remember(medium);
  return medium;
}

export async function keepFor(conversation, mediumIds) {
  for (const id of mediumIds) {
    const medium = byId.get(id);
    if (medium === undefined || medium.conversation !== null) continue;
    medium.conversation = conversation;
    await stored.put(medium);
  }
}

export function mediumOf(id) {
  return byId.get(id) ?? null;
}

/** What this browser has uploaded under a hash of a report or of the tree, or null. */
export function mediumOfHash(hash) {
  return byHash.get(hash) ?? null;
}

/** An address of the medium's bytes that this page may show. */
export function urlOf(medium) {
  if (!urls.has(medium.id)) urls.set(medium.id, URL.createObjectURL(medium.blob));
  return urls.get(medium.id);
}

/** A medium in its place in a conversation; null: it is not in this browser any more. */
export function mediumFigure(medium) {
  if (medium === null) return h("span.gone", "no longer in this browser");
  if (medium.kind === "text" || medium.kind === "document") {
    const size = h("small", bytes(medium.blob.size));
    return h("span.file", icon("file"), h("span", medium.name), size);
  }
  const src = urlOf(medium);
  if (medium.kind === "image") {
    const name = `Enlarge ${medium.name}`;
    const facts = { type: "button", "aria-label": name, title: name };
    const picture = h("img", { src, alt: medium.name });
    return h("button.picture", { ...facts, on: { click: () => enlarge(medium) } }, picture);
  }
  return h("video", {
    src,
    controls: true,
    muted: true,
    preload: "metadata",
    "aria-label": medium.name,
  });
}

/** Shows a picture as large as the window lets it be; a click on it closes it too. */
function enlarge(medium) {
  return dialog(medium.name, (close) => [
    h("img", { src: urlOf(medium), alt: medium.name, on: { click: () => close() } }),
  ]);
}

/** The medium as a `data:` URL. */
export function dataUrlOf(medium) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(medium.blob);
  });
}

/** Forgets what a conversation has brought. */
export async function forget(conversation) {
  for (const medium of await stored.all())
    if (medium.conversation === conversation) await stored.remove(medium.id);
  for (const medium of [...byId.values()]) {
    if (medium.conversation !== conversation) continue;
    byId.delete(medium.id);
    for (const hash of medium.hashes) byHash.delete(hash);
    if (urls.has(medium.id)) URL.revokeObjectURL(urls.get(medium.id));
    urls.delete(medium.id);
  }
  known.set(known.get() + 1);
}

/**
 * Learns under which hashes the server knows the media of a request, from its report.
 * Pictures have one span each, in the order in which they were sent; a video has one for each pair
 * of frames, so spans of videos have an owner only where one video was sent.
 * @param {string[]} mediumIds of the whole conversation, in order
 * @param {{kind: string, hash: string}[]} spans
 */
export async function learnHashes(mediumIds, spans) {
  const sent = mediumIds.map((id) => byId.get(id));
  if (sent.includes(undefined)) return;
  for (const kind of ["image", "video"]) {
    const owners = sent.filter((medium) => medium.kind === kind);
    // Pages of documents are spans of pictures too.
    if (kind === "image" && sent.some((medium) => medium.kind === "document")) continue;
    const hashes = spans.filter((span) => span.kind === kind).map((span) => span.hash);
    if (owners.length === 1) await learn(owners[0], hashes);
    else if (owners.length === hashes.length)
      for (const [index, owner] of owners.entries()) await learn(owner, [hashes[index]]);
  }
  known.set(known.get() + 1);
}

async function learn(medium, hashes) {
  const fresh = hashes.filter((hash) => hash && !medium.hashes.includes(hash));
  if (!fresh.length) return;
  medium.hashes.push(...fresh);
  for (const hash of fresh) byHash.set(hash, medium);
  if (medium.conversation !== null) await stored.put(medium);
}
