// What becomes of a file that is dropped, pasted or chosen: a medium, or a sentence why not.

import { served } from "../shared/served.js";
import { bytes } from "../shared/words.js";
import { mediaOf } from "./conversation.js";
import { kindOf, mediumOf, taken } from "./library.js";

/** Bytes that a file takes in a request: media travel as base64. */
export function bytesInRequest(size) {
  return 4 * Math.ceil(size / 3);
}

/** The largest request that the server takes, and what of it the files of a conversation need. */
export function roomOf({ turns }) {
  const media = mediaOf(turns).map(mediumOf).filter(Boolean);
  const used = media.reduce((sum, { blob }) => sum + bytesInRequest(blob.size), 0);
  return { limit: served.get().limit, used };
}

/**
 * Takes files in. No file is read before its size is known to fit.
 * @param {File[]} files
 * @param {{limit: number, used: number}} room `limit`: bytes of the largest request that the server
 *   takes; `used`: bytes that the request has without these files
 * @returns {Promise<{media: object[], refusals: string[]}>}
 */
export async function attach(files, { limit, used }) {
  const media = [];
  const refusals = [];
  for (const file of files) {
    const refusal = refusalOf(file, limit, used);
    const kind = refusal ? null : await kindOf(file);
    if (kind === null) {
      refusals.push(refusal ?? `${file.name} is neither a picture, a video, a PDF document nor a text.`);
    } else {
      used += bytesInRequest(file.size);
      media.push(await taken(file, kind));
    }
  }
  return { media, refusals };
}

function refusalOf(file, limit, used) {
  const needed = bytesInRequest(file.size);
  if (needed > limit)
    return `${file.name} has ${bytes(file.size)}, and ${bytes(needed)} as it is sent. This server takes requests of up to ${bytes(limit)}.`;
  if (needed + used > limit)
    return `${file.name} does not fit beside the other files of this conversation: this server takes requests of up to ${bytes(limit)}.`;
  return null;
}
