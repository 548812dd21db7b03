// What a cache report says, ready to be shown.

import { counted, listed, percent } from "../shared/words.js";
import { sentenceOf, sourceName } from "./reasons.js";

/** Parts of the prompt by where they came from: [{start, end, source}], without gaps. */
export function segmentsOf(report) {
  const { segments, boundary, prompt_tokens: length } = report;
  if (segments?.length) return segments;
  return [
    { start: 0, end: boundary, source: "device" },
    { start: boundary, end: length, source: "computed" },
  ].filter(({ start, end }) => end > start);
}

/** Tokens by source, most important first: [[source, tokens]]. */
export function totalsOf(report) {
  const totals = new Map();
  for (const { start, end, source } of segmentsOf(report))
    totals.set(source, (totals.get(source) ?? 0) + end - start);
  return [...totals];
}

export function reusedShare(report) {
  return report.prompt_tokens ? report.boundary / report.prompt_tokens : 0;
}

/** "431 of 460 prompt tokens were reused (94 %)." */
export function headline(report) {
  const { boundary, prompt_tokens: length } = report;
  if (boundary === 0) return `All ${counted(length, "prompt token")} were computed.`;
  const left = length - boundary;
  return `${percent(reusedShare(report))} of the prompt was reused; ${counted(left, "token")} of ${length} had to be computed.`;
}

/** What became of pictures and videos, or null if there are none. */
export function mediaSentence(report) {
  const { media_encoded: encoded, media_skipped: skipped } = report;
  const number = encoded + skipped;
  if (number === 0) return null;
  const kinds = new Set((report.media ?? []).map((span) => span.kind));
  const noun =
    kinds.has("video") === kinds.has("image")
      ? counted(number, "picture or video", "pictures and videos")
      : counted(number, kinds.has("video") ? "video" : "picture");
  if (encoded === 0) return `${noun} in the prompt: none went through the vision encoder again.`;
  if (skipped === 0)
    return `${noun} in the prompt: ${number === 1 ? "it" : "all"} went through the vision encoder.`;
  return `${noun} in the prompt: ${encoded} went through the vision encoder, ${skipped} needed no work.`;
}

export function whySentence(report) {
  return sentenceOf(report.reason);
}

/** All of the bar in words, for those who do not see it. */
export function spoken(report) {
  const parts = totalsOf(report).map(
    ([source, tokens]) => `${counted(tokens, "token")} ${sourceName(source)}`,
  );
  return `The prompt of ${counted(report.prompt_tokens, "token")}: ${listed(parts)}.`;
}
