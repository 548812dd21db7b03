// The cache's tree as the server tells it: nodes by key, children in the order of their coming.
// What is evicted stays for a moment, marked, so that it can be seen to go.

const LEAVING_MS = 1200;

export class Tree {
  /** Nodes and roots by key: {facts, children: Map, leaving: when it goes, or 0}. */
  nodes = new Map();
  roots = new Map();

  /** Takes the whole. */
  reset({ roots, nodes }) {
    this.nodes.clear();
    this.roots.clear();
    for (const { key } of roots) this.#root(key);
    for (const facts of nodes) this.#add(facts);
  }

  /** Takes one batch of changes; `now` in milliseconds. */
  apply({ changes }, now) {
    for (const change of changes) this.#change(change, now);
  }

  /** Lets go what has been leaving for long enough; returns when the next one is due, or null. */
  sweep(now) {
    let next = null;
    // Children have come after their parents, and go before them.
    for (const node of [...this.nodes.values()].reverse()) {
      if (!node.leaving) continue;
      if (node.leaving <= now) this.#remove(node);
      else next = Math.min(next ?? Infinity, node.leaving);
    }
    return next;
  }

  /** The whole, as `reset` takes it. */
  whole() {
    const staying = [...this.nodes.values()].filter((node) => !node.leaving);
    return {
      roots: [...this.roots.keys()].map((key) => ({ key })),
      nodes: staying.map((node) => node.facts),
    };
  }

  #change({ type, node, key, ...facts }, now) {
    if (type === "node_added") {
      this.#add(node);
      return;
    }
    const known = this.nodes.get(key);
    if (known === undefined) return;
    if (type === "node_evicted") known.leaving = now + LEAVING_MS;
    else if (type === "snapshot_ready") known.facts.snapshot = facts.snapshot;
    else if (type === "snapshot_evicted") known.facts.snapshot = null;
    else if (type === "pinned") Object.assign(known.facts, facts);
  }

  #root(key) {
    if (!this.roots.has(key)) this.roots.set(key, { children: new Map() });
    return this.roots.get(key);
  }

  #add(facts) {
    const known = this.nodes.get(facts.key);
    const node = { facts, children: known?.children ?? new Map(), leaving: 0 };
    this.nodes.set(facts.key, node);
    const parent = this.nodes.get(facts.parent) ?? this.#root(facts.parent);
    parent.children.set(facts.key, node);
  }

  #remove({ facts, children }) {
    if (children.size) return;
    this.nodes.delete(facts.key);
    (this.nodes.get(facts.parent) ?? this.roots.get(facts.parent))?.children.delete(facts.key);
    if (this.roots.get(facts.parent)?.children.size === 0) this.roots.delete(facts.parent);
  }
}
