// What an answer took, in numbers and words.

import { h } from "../shared/dom.js";
import { count, duration, percent, rate } from "../shared/words.js";
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
    report &&
      report.media_encoded + report.media_skipped > 0 &&
      `media_encoded ${report.media_encoded}`,
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
    ["time to first token", times?.first ? duration(times.first) : "–"],
    ["tokens a second", speed ? rate(speed) : "–"],
    ["prompt tokens", count(report.prompt_tokens)],
    ["reused", count(report.boundary)],
    ["reused after a wait", `${count(report.joined_tokens)}, ${duration(report.joined_ms)}`],
    ["of these from its own answers", count(report.answer_tokens)],
    ["answer tokens", usage ? count(usage.completion_tokens) : "–"],
    ["media_decoded", count(report.media_decoded)],
    ["media_encoded", count(report.media_encoded)],
    ...(report.media_cut_short ? [["videos cut short", count(report.media_cut_short)]] : []),
    ["keys and values known up to", count(report.kv_boundary)],
    ["state known up to", count(report.state_boundary)],
    ["reason", report.reason],
  ];
  return h(
    "dl",
    { class: "numbers" },
    rows.map(([term, value]) => h("div", null, h("dt", null, term), h("dd", null, value))),
  );
}
