// What happens in the cache, newest first, in words.

import { h, replace } from "../shared/dom.js";
import { count, counted } from "../shared/words.js";
import { sentenceOf } from "../reuse/report.js";

const MOST = 60;
const KINDS = ["node_added", "node_evicted", "snapshot_ready", "snapshot_evicted"];

export class Feed {
  #events = []; // {time, type, ...}, oldest first; `time` in milliseconds since 1970

  constructor() {
    this.list = h("ol", { tabindex: "0", "aria-label": "Events of the cache, newest first" });
    this.element = h("section.feed", h("h2", "Events"), this.list);
  }

  /** @param {object[]} changes of one step, as the worker tells them */
  add(changes) {
    const hits = changes.filter((change) => change.type === "hit");
    for (const event of [...hits, ...KINDS.map((type) => summary(type, changes)).filter(Boolean)])
      this.#put({ ...event, time: Date.now() });
  }

  /** What happened before this view was opened; `age_seconds` in each. */
  addPast(events) {
    if (this.#events.length) return;
    for (const { age_seconds: age, ...event } of events)
      this.#put({ ...event, time: Date.now() - 1000 * age });
  }

  /** The events in the form of `addPast`. */
  past() {
    return this.#events.map(({ time, ...event }) => ({
      ...event,
      age_seconds: (Date.now() - time) / 1000,
    }));
  }

  /** Forgets everything: another server, or another key. */
  clear() {
    this.#events = [];
    replace(this.list);
  }

  #put(event) {
    this.#events.push(event);
    const time = new Date(event.time).toLocaleTimeString("en-GB");
    this.list.prepend(h("li", { class: event.type }, h("time", time), " ", wordsOf(event)));
    while (this.list.childElementCount > MOST) {
      this.list.lastChild.remove();
      this.#events.shift();
    }
  }
}

/** All changes of one kind as one event, or null if there are none. */
function summary(type, changes) {
  const some = changes.filter((change) => change.type === type);
  const tokens = some.reduce((sum, { start, end }) => sum + end - start, 0);
  return some.length
    ? { type, nodes: some.length, tokens, ends: some.map(({ end }) => end) }
    : null;
}

function wordsOf({ type, nodes, tokens, ends, ...hit }) {
  switch (type) {
    case "node_added":
      return `cached ${counted(tokens, "token")} in ${counted(nodes, "block")}`;
    case "node_evicted":
      return `evicted ${counted(tokens, "token")} in ${counted(nodes, "block")}`;
    case "snapshot_ready":
      return ends
        ? `state kept after ${ends.map((end) => `token ${count(end)}`).join(", ")}`
        : `kept ${counted(nodes, "state snapshot")}`;
    case "snapshot_evicted":
      return `evicted ${counted(nodes, "state snapshot")}`;
    default:
      return hitWords(hit);
  }
}

function hitWords({ prompt_tokens: all, cached_tokens: cached, reason, joined_tokens: joined }) {
  const waited = joined ? `, ${count(joined)} of them after a wait for another request` : "";
  return `${count(cached)} of ${counted(all, "prompt token")} reused${waited}. ${sentenceOf(reason)}`;
}
