// What happens in the cache, newest first, in words.

import { h } from "../shared/dom.js";
import { count, counted } from "../shared/words.js";
import { sentenceOf } from "../reuse/reasons.js";

const MOST = 60;

export class Feed {
  constructor() {
    this.list = h("ol", { tabindex: "0", "aria-label": "Events of the cache, newest first" });
    this.element = h("section", { class: "feed" }, h("h2", null, "Events"), this.list);
  }

  /** @param {object[]} changes of one step, as the worker tells them */
  add(changes) {
    const lines = changes.filter((change) => change.type === "hit").map(hitLine);
    for (const [type, words] of [
      ["node_added", "cached"],
      ["node_evicted", "evicted"],
    ]) {
      const some = changes.filter((change) => change.type === type);
      const tokens = some.reduce((sum, { start, end }) => sum + end - start, 0);
      if (some.length)
        lines.push([
          type,
          `${words} ${counted(tokens, "token")} in ${counted(some.length, "block")}`,
        ]);
    }
    const snapshots = changes.filter((change) => change.type === "snapshot_ready");
    if (snapshots.length)
      lines.push([
        "snapshot_ready",
        `state kept after ${snapshots.map(({ end }) => `token ${count(end)}`).join(", ")}`,
      ]);
    const gone = changes.filter((change) => change.type === "snapshot_evicted").length;
    if (gone) lines.push(["snapshot_evicted", `evicted ${counted(gone, "state snapshot")}`]);
    for (const [type, text] of lines) {
      this.list.prepend(
        h(
          "li",
          { class: type },
          h("time", null, new Date().toLocaleTimeString("en-GB")),
          " ",
          text,
        ),
      );
    }
    while (this.list.childElementCount > MOST) this.list.lastChild.remove();
  }
}

function hitLine({ prompt_tokens: all, cached_tokens: cached, reason, joined_tokens: joined }) {
  const waited = joined ? `, ${count(joined)} of them after a wait for another request` : "";
  return [
    "hit",
    `${count(cached)} of ${counted(all, "prompt token")} reused${waited}. ${sentenceOf(reason)}`,
  ];
}
