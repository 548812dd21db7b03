// Where everything of a tree is drawn. Nodes without branches between them are one run. A run covers
// positions of the prompt from left to right, and from top to bottom a row for each leaf above it.

export const TIERS = ["device", "host", "disk", "leaving"];

/** A run of which nothing is known yet: all its fields. */
const EMPTY_RUN = {
  key: "",
  parent: -1,
  next: 0,
  level: 0,
  start: 0,
  end: 0,
  top: 0,
  bottom: 0,
  tier: 0,
  pins: 0,
  hits: 0,
  nodes: 0,
  bytes: 0,
  snapshots: [],
  media: [],
};

/**
 * Lays a tree out.
 * @param {import("./tree.js").Tree} tree
 * @returns {{layout: object, owner: Map<string, number>}} the run of each node, by key, and arrays with
 *   an entry for each run, parents first and children in order:
 *   `key` of its last node, `parent` (index or -1), `next` (index behind its last descendant),
 *   `level`, `start` and `end` (positions), `top` and `bottom` (rows), `tier` (index into TIERS),
 *   `pins`, `hits`, `nodes`, `bytes`, `snapshots` (positions), `media` ({at, length, kind, hash,
 *   begins}: whether it begins there). Besides: `count` of runs, `rows`, `length` (greatest
 *   position), `numNodes`.
 */
export function layOut(tree) {
  const runs = [];
  const owner = new Map();
  let rows = 0;
  let length = 0;
  // Depth first without recursion: prompts may have thousands of branches below each other.
  const open = [...tree.roots.values()]
    .reverse()
    .flatMap((root) =>
      [...root.children.values()].reverse().map((node) => ({ node, parent: -1, going: [] })),
    );
  while (open.length) {
    const task = open.pop();
    if (task.close !== undefined) {
      const run = runs[task.close];
      run.next = runs.length;
      run.bottom = rows;
      continue;
    }
    const index = runs.length;
    const { run, children } = followed(task.node, task.going, (key) => owner.set(key, index));
    run.parent = task.parent;
    run.level = task.parent < 0 ? 1 : runs[task.parent].level + 1;
    run.top = rows;
    length = Math.max(length, run.end);
    runs.push(run);
    if (!children.length) rows += 1;
    open.push({ close: index });
    const going = run.media
      .filter((span) => span.at + span.length > run.end)
      .map((span) => rest(span, run.end));
    for (const node of children.reverse()) open.push({ node, parent: index, going });
  }
  const layout = { ...columns(runs), count: runs.length, rows, length, numNodes: tree.nodes.size };
  return { layout, owner };
}

/** What of a span lies behind a position. */
function rest(span, position) {
  return { ...span, at: position, length: span.at + span.length - position, begins: false };
}

/** The run that begins with a node, and what comes after it. `going`: media that go on into it;
 * `onNode` is called with its nodes' keys. */
function followed(node, going, onNode) {
  const { start } = node.facts;
  const run = { ...EMPTY_RUN, start, tier: tierOf(node), snapshots: [], media: [...going] };
  for (;;) {
    const { facts, children } = node;
    onNode(facts.key);
    run.key = facts.key;
    run.end = facts.end;
    run.pins = Math.max(run.pins, facts.pins);
    run.hits = Math.max(run.hits, facts.hits);
    run.nodes += 1;
    run.bytes += facts.num_bytes;
    if (facts.snapshot) run.snapshots.push(facts.end);
    for (const { offset, length, kind, hash } of facts.media ?? [])
      run.media.push({ at: facts.start + offset, length, kind, hash, begins: true });
    const only = children.size === 1 ? children.values().next().value : null;
    if (only === null || tierOf(only) !== run.tier)
      return { run, children: [...children.values()] };
    node = only;
  }
}

function tierOf({ facts, leaving }) {
  if (leaving) return TIERS.indexOf("leaving");
  return Math.max(0, TIERS.indexOf(facts.tier));
}

/** An array for each field of the runs; those of numbers are typed, which are fast to pass on. */
function columns(runs) {
  const column = (name) => {
    const values = runs.map((run) => run[name]);
    return typeof EMPTY_RUN[name] === "number" ? Float64Array.from(values) : values;
  };
  return Object.fromEntries(Object.keys(EMPTY_RUN).map((name) => [name, column(name)]));
}

/** The index of the run that holds a position `x` and a row `y`, or -1. */
export function runAt(layout, x, y) {
  let index = 0;
  while (index < layout.count) {
    if (y < layout.top[index]) return -1;
    if (y >= layout.bottom[index]) index = layout.next[index];
    else if (x >= layout.start[index] && x < layout.end[index]) return index;
    else index += 1;
  }
  return -1;
}
