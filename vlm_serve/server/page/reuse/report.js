// What a cache report says, in numbers and words.

import { h, termList } from "../shared/dom.js";
import { count, counted, duration, listed, percent, rate } from "../shared/words.js";

/** The server's one word on why a request reused no more, as a sentence. */
const SENTENCES = {
  full: "Everything possible was reused: the last token is always computed.",
  unseen: "Everything cached was reused; the rest of the prompt is new.",
  cold: "No earlier prompt begins like this one, so all of it was computed.",
  below_granularity: "The prompt is shorter than the cache's smallest unit.",
  media_changed: "The earlier prompt had another picture or video at this position.",
  media_grown: "The video is longer than before; its cached part was reused.",
  span_clamp: "The cached prefix ends inside a picture or video, which cannot be reused in part.",
  no_snapshot: "Keys and values are cached further, but no recurrent state is.",
  snapshot_evicted: "A later recurrent state was cached, but has been evicted since.",
  kv_evicted: "The next block was cached, but has been evicted since.",
  in_flight: "Another request is computing the next block right now.",
  salt: "It is cached for another tenant only, and tenants share nothing.",
  experts_missing:
    "The routed experts of the next block were not recorded, and the request needs them.",
  prompt_logprobs: "A requested log-probability is not cached beyond this point.",
  tier_error: "A lower tier failed to return its entry.",
  disabled: "The prefix cache is off.",
};

const SOURCES = {
  device: "reused from memory",
  host: "reused from host memory",
  disk: "reused from disk",
  shared: "reused from the shared store",
  computed: "computed",
};
const SHORTEST_MS = 100;

/** Why not more, in words. */
export function sentenceOf(reason) {
  return SENTENCES[reason] ?? `The server gives the reason “${reason}”.`;
}

/** Where a part of the prompt came from, in words. */
export function sourceName(source) {
  return SOURCES[source] ?? `reused from ${source}`;
}

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

/** All of the bar in words, for those who do not see it. */
export function spoken(report) {
  const parts = totalsOf(report).map(
    ([source, tokens]) => `${counted(tokens, "token")} ${sourceName(source)}`,
  );
  return `The prompt of ${counted(report.prompt_tokens, "token")}: ${listed(parts)}.`;
}

/** How much was reused, what media needed, why not more; and a link to the last node reused. */
export function explanation(report) {
  const texts = [headline(report), mediaSentence(report), sentenceOf(report.reason)];
  return h(
    "div.sentences",
    texts.map((text) => text && h("p", text)),
    report.boundary_key &&
      h("a", { href: `#live/${report.boundary_key}` }, "Show what was reused in the live cache"),
  );
}

/** "431 of 460 prompt tokens were reused (94 %)." */
function headline(report) {
  const { boundary, prompt_tokens: length } = report;
  if (boundary === 0) return `All ${counted(length, "prompt token")} were computed.`;
  const computed = counted(length - boundary, "token");
  return `${percent(reusedShare(report))} of the prompt was reused; ${computed} of ${length} had to be computed.`;
}

/** What became of pictures and videos, or null if there are none. */
function mediaSentence(report) {
  const { media_encoded: encoded, media_skipped: skipped } = report;
  const number = encoded + skipped;
  if (number === 0) return null;
  const media = `${counted(number, ...nounsOf(report))} in the prompt:`;
  if (encoded === 0) return `${media} none went through the vision encoder again.`;
  if (skipped === 0)
    return `${media} ${number === 1 ? "it" : "all"} went through the vision encoder.`;
  return `${media} ${encoded} went through the vision encoder, ${skipped} needed no work.`;
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
  return termList("numbers", [
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
  ]);
}

function reusedShare(report) {
  return report.prompt_tokens ? report.boundary / report.prompt_tokens : 0;
}

/** Tokens a second after the first one, or null: of a shorter time the network's buffers tell more. */
function tokenRate({ usage, times }) {
  const numTokens = (usage?.completion_tokens ?? 0) - 1;
  const took = times?.first ? times.total - times.first : 0;
  return numTokens > 0 && took >= SHORTEST_MS ? (1000 * numTokens) / took : null;
}

/** What went through the vision encoder. */
function encodedWords(report) {
  const nouns = nounsOf(report);
  if (report.media_encoded === 0) return `no ${nouns[0]} encoded again`;
  return `${counted(report.media_encoded, ...nouns)} encoded`;
}

/** What to call a report's media: one of them, and several. */
function nounsOf({ media }) {
  const kinds = new Set((media ?? []).map((span) => span.kind));
  if (kinds.size !== 1) return ["picture or video", "pictures and videos"];
  return kinds.has("video") ? ["video"] : ["picture"];
}
