// What an answer took, in numbers and words.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent, rate } from "../shared/words.js";
import { tokenRate } from "../chat/answering.js";
import { headline, mediaSentence, reusedShare, whySentence } from "./report.js";

/** Sentences: how much was reused, what media needed, why not more. */
export function sentences(report) {
  return [headline(report), mediaSentence(report), whySentence(report)]
    .filter(Boolean)
    .map((text) => h("p", null, text));
}

/** Leads to the last node that was reused, or nowhere if there is none. */
export function linkToNode(report) {
  if (!report.boundary_key) return null;
  return h("a", { href: `#live/${report.boundary_key}` }, "Show what was reused in the live cache");
}

/** One line of numbers for below an answer. */
export function numbersLine(answer) {
  const { report, usage, times } = answer;
  const speed = tokenRate(answer);
  return [
    report && `${percent(reusedShare(report))} reused`,
    report && report.media_encoded + report.media_skipped > 0 && encodedWords(report),
    times?.first && `first token ${duration(times.first)}`,
    speed && `${rate(speed)} tokens/s`,
    usage && `${count(usage.prompt_tokens)} → ${count(usage.completion_tokens)} tokens`,
  ].filter(Boolean);
}

/** The same as a list of terms, with the parts of the report that the line leaves out. */
export function numbersList(answer) {
  const { report, usage, times } = answer;
  const speed = tokenRate(answer);
  const rows = [
    ["time to the first token", times?.first ? duration(times.first) : "–"],
    ["tokens a second", speed ? rate(speed) : "–"],
    ["prompt tokens", count(report.prompt_tokens)],
    ["reused", count(report.boundary)],
    ["reused after a wait", `${count(report.joined_tokens)}, ${duration(report.joined_ms)}`],
    ["of these from its own answers", count(report.answer_tokens)],
    ["answer tokens", usage ? count(usage.completion_tokens) : "–"],
    ["pictures and videos decoded", count(report.media_decoded)],
    ["pictures and videos encoded", count(report.media_encoded)],
    ...(report.media_cut_short ? [["videos cut short", count(report.media_cut_short)]] : []),
    ["keys and values known up to", count(report.kv_boundary)],
    ["state known up to", count(report.state_boundary)],
  ];
  return h(
    "dl",
    { class: "numbers" },
    rows.map(([term, value]) => h("div", null, h("dt", null, term), h("dd", null, value))),
  );
}

/** What went through the vision encoder. */
function encodedWords({ media, media_encoded: encoded }) {
  const kinds = new Set((media ?? []).map((span) => span.kind));
  const noun = kinds.size !== 1 ? "picture or video" : kinds.has("video") ? "video" : "picture";
  if (encoded === 0) return `no ${noun} encoded again`;
  return `${counted(encoded, noun, noun === "picture or video" ? "pictures and videos" : undefined)} encoded`;
}
