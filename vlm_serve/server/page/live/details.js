// One node: what it holds, and what can be done with it.

import { request, requestJson } from "../shared/api.js";
import { button } from "../shared/controls.js";
import { h, replace } from "../shared/dom.js";
import { bytes, count, counted } from "../shared/words.js";
import { mediumOfHash } from "../chat/library.js";
import { mediumFigure } from "../chat/library.js";
import { TIERS } from "./layout.js";

const PIN_SECONDS = 600;
const PLACES = {
  device: "in memory",
  host: "in host memory",
  disk: "on disk",
  leaving: "just evicted",
};

export class Details {
  #key = null;

  constructor() {
    this.body = h("div");
    this.said = h("p.note", { role: "status" });
    this.element = h(
      "section.details",
      { "aria-label": "The selected part of the cache" },
      this.body,
      this.said,
    );
    replace(this.body, h("p.note", "Choose a bar or a row to see its contents."));
  }

  /** Shows run `run` of a layout; asks the server about its last node if it is another one. */
  show(layout, run) {
    const key = layout.key[run];
    replace(
      this.body,
      this.#facts(layout, run),
      this.#media(layout, run),
      this.#actions(key),
      (this.tokens ??= h("div")),
    );
    if (key === this.#key) return;
    this.#key = key;
    this.said.textContent = "";
    replace(this.tokens);
    this.#askTokens(key);
  }

  /** The run is not there any more. */
  gone() {
    this.#key = null;
    replace(this.body, h("p.note", "The selected part is no longer in the cache."));
  }

  #facts(l, run) {
    const snapshots = [...l.marks.subarray(l.firstMark[run], l.firstMark[run + 1])];
    const rows = [
      ["tokens", `${count(l.start[run])} to ${count(l.end[run])}`],
      ["blocks", count(l.nodes[run])],
      ["place", PLACES[TIERS[l.tier[run]]]],
      ["size", bytes(l.bytes[run])],
      ["hits", count(l.hits[run])],
      ["users now", count(l.pins[run])],
      ["state kept after", snapshots.map((at) => `token ${count(at)}`).join(", ") || "none"],
      ["key", h("code", l.key[run].slice(0, 16))],
    ];
    return h(
      "dl.numbers",
      rows.map(([term, value]) => h("div", h("dt", term), h("dd", value))),
    );
  }

  #media(l, run) {
    const spans = l.media.slice(l.firstMedium[run], l.firstMedium[run + 1]);
    const mine = [...new Set(spans.map(({ hash }) => hash && mediumOfHash(hash)).filter(Boolean))];
    if (!spans.length) return null;
    const pictures = spans.filter(({ kind }) => kind === "image").length;
    const parts = [
      pictures && counted(pictures, "picture"),
      spans.length > pictures &&
        counted(spans.length - pictures, "part of a video", "parts of videos"),
    ];
    return h(
      "div.figures",
      h("p", `${parts.filter(Boolean).join(", ")}${mine.length ? "" : ", not from this browser"}`),
      mine.map(mediumFigure),
    );
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
      this.said.textContent = await action();
    } catch (error) {
      this.said.textContent = error.message;
    }
  }

  async #askTokens(key) {
    let told;
    try {
      told = await requestJson(`/v1/cache/nodes/${key}`);
    } catch {
      return; // evicted meanwhile, or not for this key to see
    }
    if (key !== this.#key || !told.token_ids) return;
    const ids = h("pre", { tabindex: "0" }, told.token_ids.join(" "));
    const read = () =>
      this.#act(async () => {
        const { prompt } = await requestJson("/detokenize", { body: { tokens: told.token_ids } });
        ids.textContent = prompt;
        return "";
      });
    replace(this.tokens, h("h3", `Tokens of its last block`), ids, button("As text", null, read));
  }
}

/** Forgets all that nobody holds. */
export async function flush() {
  await request("/v1/cache/flush", { body: {} });
}
