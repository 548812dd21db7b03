// What happens in the cache, newest first, in words.

import { h } from "../shared/dom.js";
import { count, counted } from "../shared/words.js";
import { sentenceOf } from "../reuse/report.js";

const MOST = 60;

/** Each kind of event in words, in the order in which the events of one step are told. */
const WORDS = {
  hit: ({ prompt_tokens: all, cached_tokens: cached, reason, joined_tokens: joined }) => {
    const waited = joined ? `, ${count(joined)} of them after a wait for another request` : "";
    return `${count(cached)} of ${counted(all, "prompt token")} reused${waited}. ${sentenceOf(reason)}`;
  },
  node_added: ({ tokens, nodes }) =>
    `cached ${counted(tokens, "token")} in ${counted(nodes, "block")}`,
  node_evicted: ({ tokens, nodes }) =>
    `evicted ${counted(tokens, "token")} in ${counted(nodes, "block")}`,
  snapshot_ready: ({ nodes, ends }) =>
    ends
      ? `state kept after ${ends.map((end) => `token ${count(end)}`).join(", ")}`
      : `kept ${counted(nodes, "state snapshot")}`,
  snapshot_evicted: ({ nodes }) => `evicted ${counted(nodes, "state snapshot")}`,
};

export class Feed {
  #events = []; // {time, type, ...}, oldest first; `time` in milliseconds since 1970

  constructor() {
    this.list = h("ol", { tabindex: "0", "aria-label": "Events of the cache, newest first" });
    this.element = h("section.feed", h("h2", "Events"), this.list);
  }

  /** @param {object[]} changes of one step, as the worker tells them */
  add(changes) {
    for (const type of Object.keys(WORDS)) {
      const events = changes.filter((change) => change.type === type);
      const told = type === "hit" || !events.length ? events : [summary(type, events)];
      for (const event of told) this.#put({ ...event, time: Date.now() });
    }
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

  #put(event) {
    this.#events.push(event);
    const time = new Date(event.time).toLocaleTimeString("en-GB");
    this.list.prepend(h(`li.${event.type}`, h("time", time), " ", WORDS[event.type](event)));
    while (this.list.childElementCount > MOST) {
      this.list.lastChild.remove();
      this.#events.shift();
    }
  }
}

/** Changes of one kind as one event. */
function summary(type, changes) {
  const tokens = changes.reduce((sum, { start, end }) => sum + end - start, 0);
  return { type, nodes: changes.length, tokens, ends: changes.map(({ end }) => end) };
}
