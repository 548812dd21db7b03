// A prompt as a bar: its parts by where they came from, media above, state snapshots below.

import { h } from "../shared/dom.js";
import { count, counted } from "../shared/words.js";
import { mediumOfHash, urlOf } from "../chat/library.js";
import { sourceName } from "./reasons.js";
import { segmentsOf, spoken, totalsOf } from "./report.js";

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
  const parts = segmentsOf(report).map(({ start, end, source }) =>
    h("span", {
      class: `part ${classOf(source)}`,
      style: place(start, end),
      title: `tokens ${count(start)} to ${count(end)}: ${sourceName(source)}`,
    }),
  );
  const snapshots = (report.snapshots ?? []).map((at) =>
    h("span", {
      class: "snapshot-mark",
      style: { left: share(at) },
      title: `recurrent state kept after token ${count(at)}`,
    }),
  );
  return h(
    "div",
    {
      class: detailed ? "prompt-bar detailed" : "prompt-bar",
      role: "img",
      "aria-label": spoken(report),
    },
    media.length || detailed ? h("div", { class: "media-line" }, media) : null,
    h("div", { class: "parts" }, parts),
    snapshots.length || detailed ? h("div", { class: "snapshot-line" }, snapshots) : null,
  );
}

/**
 * The colours of a report's bar with what they mean.
 * @param {"ul"|"span"} tag "span" where a list may not stand
 */
export function legend(report, tag = "ul") {
  const item = tag === "ul" ? "li" : "span";
  const entries = totalsOf(report).map(([source, tokens]) =>
    h(
      item,
      null,
      h("span", { class: `swatch ${classOf(source)}` }),
      `${sourceName(source)}: ${counted(tokens, "token")}`,
    ),
  );
  for (const [encoded, told] of [
    [true, "picture or video, encoded now"],
    [false, "picture or video, encoded before"],
  ]) {
    const mark = encoded ? "swatch line encoded" : "swatch line";
    if (report.media?.some((span) => (span.source === "encoded") === encoded))
      entries.push(h(item, null, h("span", { class: mark }), told));
  }
  if (report.snapshots?.length)
    entries.push(
      h(item, null, h("span", { class: "swatch snapshot" }), "recurrent state kept here"),
    );
  return h(tag, { class: "legend" }, entries);
}

/** The class that colours a source. */
export function classOf(source) {
  return ["device", "host", "disk", "computed"].includes(source) ? source : "host";
}

function mediaMark(span, style, detailed) {
  const medium = mediumOfHash(span.hash);
  const told = {
    encoded: "went through the vision encoder",
    cached: "encoded before",
    reused: "reused with the prompt",
  };
  const source = told[span.source] ?? `encoded before, came up from the ${span.source} tier`;
  const title = `${span.kind} of ${counted(span.length, "token")}: ${source}`;
  const shown = detailed && medium !== null ? picture(medium) : null;
  return h(
    "span",
    { class: `medium-mark ${span.source === "encoded" ? "encoded" : ""}`, style, title },
    shown,
  );
}

function picture(medium) {
  const src = urlOf(medium);
  return medium.kind === "image"
    ? h("img", { src, alt: "" })
    : h("video", { src, preload: "metadata", tabindex: "-1" });
}
