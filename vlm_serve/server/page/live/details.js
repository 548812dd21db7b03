// One node: what it holds, and what can be done with it.

import { requestJson } from "../shared/api.js";
import { button } from "../shared/controls.js";
import { h, replace, termList } from "../shared/dom.js";
import { bytes, count, counted } from "../shared/words.js";
import { mediumFigure, mediumOfHash } from "../chat/library.js";
import { TIERS } from "./layout.js";

const PIN_SECONDS = 600;

/** Tiers in words. */
export const PLACES = {
  device: "in memory",
  host: "in host memory",
  disk: "on disk",
  leaving: "just evicted",
};

export class Details {
  #key = null;

  constructor() {
    this.body = h("div", h("p.note", "Choose a bar or a row to see its contents."));
    this.tokens = h("div");
    this.outcome = h("p.note", { role: "status" });
    this.element = h(
      "section.details",
      { "aria-label": "The selected part of the cache" },
      this.body,
      this.outcome,
    );
  }

  /** Shows run `run` of a layout; asks the server about its last node if it is another one. */
  show(layout, run) {
    const key = layout.key[run];
    replace(this.body, facts(layout, run), media(layout, run), this.#actions(key), this.tokens);
    if (key === this.#key) return;
    this.#key = key;
    this.outcome.textContent = "";
    replace(this.tokens);
    this.#askTokens(key);
  }

  /** The run is not there any more. */
  gone() {
    this.#key = null;
    replace(this.body, h("p.note", "The selected part is no longer in the cache."));
  }

  #actions(key) {
    const pin = () =>
      this.#act(async () => {
        const { pinned_tokens: number } = await requestJson("/v1/cache/pin", {
          body: { key, ttl_seconds: PIN_SECONDS },
        });
        return number
          ? `${counted(number, "token")} are pinned for ${PIN_SECONDS / 60} minutes.`
          : "Nothing was pinned: the limit of pinned memory is reached.";
      });
    return h("div.actions", button(`Pin for ${PIN_SECONDS / 60} minutes`, "pin", pin));
  }

  async #act(action) {
    try {
      this.outcome.textContent = await action();
    } catch (error) {
      this.outcome.textContent = error.message;
    }
  }

  async #askTokens(key) {
    let tokens;
    try {
      tokens = (await requestJson(`/v1/cache/nodes/${key}`)).token_ids;
    } catch {
      return; // evicted meanwhile, or not for this key to see
    }
    if (key !== this.#key || !tokens) return;
    const ids = h("pre", { tabindex: "0" }, tokens.join(" "));
    const read = () =>
      this.#act(async () => {
        ids.textContent = (await requestJson("/detokenize", { body: { tokens } })).prompt;
        return "";
      });
    replace(this.tokens, h("h3", "Tokens of its last block"), ids, button("As text", null, read));
  }
}

function facts(layout, run) {
  const states = layout.snapshots[run].map((at) => `token ${count(at)}`);
  return termList("numbers", [
    ["tokens", `${count(layout.start[run])} to ${count(layout.end[run])}`],
    ["blocks", count(layout.nodes[run])],
    ["place", PLACES[TIERS[layout.tier[run]]]],
    ["size", bytes(layout.bytes[run])],
    ["hits", count(layout.hits[run])],
    ["users now", count(layout.pins[run])],
    ["state kept after", states.join(", ") || "none"],
    ["key", h("code", layout.key[run].slice(0, 16))],
  ]);
}

function media(layout, run) {
  const spans = layout.media[run];
  if (!spans.length) return null;
  const known = spans.map(({ hash }) => hash && mediumOfHash(hash)).filter(Boolean);
  const origin = known.length ? "" : ", not from this browser";
  return h(
    "div.figures",
    h("p", `${mediaWords(spans, "part of a video", "parts of videos")}${origin}`),
    [...new Set(known)].map(mediumFigure),
  );
}

/** "2 pictures, 1 video part", with what to call one span of a video and several; empty if none. */
export function mediaWords(spans, ...videoPart) {
  const pictures = spans.filter(({ kind }) => kind === "image").length;
  const parts = spans.length - pictures;
  return [pictures && counted(pictures, "picture"), parts && counted(parts, ...videoPart)]
    .filter(Boolean)
    .join(", ");
}
