// A prompt as a bar: its parts by where they came from, media above, state snapshots below.

import { h } from "../shared/dom.js";
import { count, counted } from "../shared/words.js";
import { mediumOfHash, urlOf } from "../chat/library.js";
import { segmentsOf, sourceName, spoken, totalsOf } from "./report.js";

/**
 * @param {object} report a cache report
 * @param {{scale?: number, detailed?: boolean}} [how] `scale`: tokens that the full width stands
 *   for; `detailed`: with pictures and the places of snapshots
 */
export function promptBar(report, { scale = report.prompt_tokens, detailed = false } = {}) {
  const share = (tokens) => `${(100 * tokens) / Math.max(1, scale)}%`;
  const place = (start, end) => ({ left: share(start), width: share(end - start) });
  const media = (report.media ?? []).map((span) =>
    mediaMark(span, place(span.offset, span.offset + span.length), detailed),
  );
  const parts = segmentsOf(report).map(({ start, end, source }) => {
    const title = `tokens ${count(start)} to ${count(end)}: ${sourceName(source)}`;
    return h(`span.part.${classOf(source)}`, { style: place(start, end), title });
  });
  const snapshots = (report.snapshots ?? []).map((at) => {
    const title = `recurrent state kept after token ${count(at)}`;
    return h("span.snapshot-mark", { style: { left: share(at) }, title });
  });
  return h(
    detailed ? "div.prompt-bar.detailed" : "div.prompt-bar",
    { role: "img", "aria-label": spoken(report) },
    (media.length > 0 || detailed) && h("div.media-line", media),
    h("div.parts", parts),
    (snapshots.length > 0 || detailed) && h("div.snapshot-line", snapshots),
  );
}

/** The colours of a report's bar with what they mean. */
export function legend(report) {
  const item = (swatch, text) => h("li", h(`span.swatch.${swatch}`), text);
  const has = (encoded) => report.media?.some((span) => (span.source === "encoded") === encoded);
  return h(
    "ul.legend",
    totalsOf(report).map(([source, tokens]) =>
      item(classOf(source), `${sourceName(source)}: ${counted(tokens, "token")}`),
    ),
    has(true) && item("line.encoded", "picture or video, encoded now"),
    has(false) && item("line", "picture or video, encoded before"),
    report.snapshots?.length > 0 && item("snapshot", "recurrent state kept here"),
  );
}

/** The class that colours a source. */
function classOf(source) {
  return ["device", "host", "disk", "computed"].includes(source) ? source : "host";
}

function mediaMark(span, style, detailed) {
  const medium = mediumOfHash(span.hash);
  const encoded = span.source === "encoded";
  const sources = {
    encoded: "went through the vision encoder",
    cached: "encoded before",
    reused: "reused with the prompt",
  };
  const source = sources[span.source] ?? `encoded before, came up from the ${span.source} tier`;
  const title = `${span.kind} of ${counted(span.length, "token")}: ${source}`;
  return h(
    encoded ? "span.medium-mark.encoded" : "span.medium-mark",
    { style, title },
    detailed && medium && picture(medium),
  );
}

function picture(medium) {
  const src = urlOf(medium);
  return medium.kind === "image"
    ? h("img", { src, alt: "" })
    : h("video", { src, preload: "metadata", tabindex: "-1" });
}
