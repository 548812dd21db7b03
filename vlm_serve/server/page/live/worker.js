// Keeps the tree and lays it out, away from the thread that draws.
//
// Takes {event: "tree" | "changes", data} as the server sends them, and {ask: "tree"},
// and {choose: key of a node}.
// Gives {layout, choice: the last key, chosen: its node's run or -1}, {choice, chosen} once a choice
// has arrived and is there, {happened: changes with where they are}, and {tree} when asked.

import { layOut } from "./layout.js";
import { Tree } from "./tree.js";

const PAUSE_MS = 100;

const tree = new Tree();
let due = null;
let latest = null;
let choice = null;

self.onmessage = ({ data: { event, data, ask, choose } }) => {
  if (choose !== undefined) {
    choice = choose;
    if (latest && chosen() >= 0) self.postMessage({ choice, chosen: chosen() });
  } else if (ask === "tree") {
    self.postMessage({ tree: tree.whole() });
  } else if (event === "tree") {
    tree.reset(data);
    give();
  } else {
    self.postMessage({ happened: data.changes.map(located) });
    tree.apply(data, Date.now());
    due ??= setTimeout(give, PAUSE_MS);
  }
};

function give() {
  clearTimeout(due);
  const now = Date.now();
  const next = tree.sweep(now);
  due = next === null ? null : setTimeout(give, next - now + PAUSE_MS);
  latest = layOut(tree);
  self.postMessage({ layout: latest.layout, choice, chosen: chosen() });
}

function chosen() {
  return latest.owner.get(choice) ?? -1;
}

function located(change) {
  const facts = change.node ?? tree.nodes.get(change.key)?.facts;
  const run = latest?.layout.key[latest.owner.get(change.key)] ?? null;
  return { ...change, node: undefined, run, start: facts?.start ?? 0, end: facts?.end ?? 0 };
}
