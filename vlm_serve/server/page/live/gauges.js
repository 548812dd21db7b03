// Memory by bucket, and how the last minutes went, from the `status` messages of the event stream:
// totals become rates. Times are milliseconds.

import { h, replace, svg } from "../shared/dom.js";
import { bytes, count, duration, percent, rate } from "../shared/words.js";

const SPAN_MS = 5 * 60_000;
const SHORTEST_MS = 30_000; // that the width of a chart stands for
const WIDTH = 240;
const HEIGHT = 44;

/** Parts of the memory in words. */
const BUCKETS = {
  kv: "keys, values",
  snapshots: "kept states",
  live_states: "live states",
  embeddings: "pictures",
  experts: "experts",
  logprobs: "log-probs",
};

/**
 * The charts. `unit` puts a value into words; `most` is the top of the scale, else the highest value
 * is; `lines` takes a history and returns the points of one or two lines, [time, value or null];
 * `note` says something more of the latest status.
 */
const CHARTS = [
  {
    title: "Hit rate",
    unit: percent,
    most: 1,
    lines: (history) => [shareOf(history, "hit_tokens", "prompt_tokens")],
    note: ({ hit_tokens: hit, prompt_tokens: all }) => all && `${percent(hit / all)} in all`,
  },
  {
    title: "Running, waiting",
    unit: count,
    lines: (history) => ["running", "waiting"].map((name) => valuesOf(history, (it) => it[name])),
    note: ({ waiting, joined }) =>
      `${count(waiting)} waiting, ${count(joined)} of them for a prefix`,
  },
  total("Steps a second", "steps"),
  total("Tokens a second", "generated_tokens"),
  latency("First token", "time_to_first_token_seconds"),
  latency("Between tokens", "inter_token_seconds"),
];

/** How fast a total rises. */
function total(title, name) {
  return { title, unit: rate, lines: (history) => [rateOf(history, name)] };
}

/** The median and the 99th percentile of a latency. */
function latency(title, name) {
  const unit = (seconds) => duration(1000 * seconds);
  return {
    title,
    unit,
    lines: (history) => ["p50", "p99"].map((part) => valuesOf(history, (it) => it[name][part])),
    note: ({ [name]: { p99 } }) => p99 !== null && `p99 ${unit(p99)}`,
  };
}

export class Gauges {
  #history = []; // {status, time}, oldest first
  #charts = CHARTS.map((chart) => new ChartView(chart));

  constructor() {
    this.memory = h("div.memory");
    this.element = h(
      "section.gauges",
      // Until something is told; tenants are told nothing.
      { "aria-label": "The last five minutes", hidden: true },
      this.memory,
      this.#charts.map((chart) => chart.element),
    );
  }

  add(status) {
    this.#put(status, performance.now());
    this.#show();
  }

  /** What was told before this view was opened; `age_seconds` in each. */
  addPast(statuses) {
    if (this.#history.length) return;
    const now = performance.now();
    for (const { age_seconds: age, ...status } of statuses) this.#put(status, now - 1000 * age);
    if (this.#history.length) this.#show();
  }

  /** The history in the form of `addPast`. */
  past() {
    const now = performance.now();
    return this.#history.map(({ status, time }) => ({
      ...status,
      age_seconds: (now - time) / 1000,
    }));
  }

  /** Takes one status; a server that was started anew begins a new history. */
  #put(status, time) {
    const last = this.#history.at(-1)?.status;
    if (last && (status.steps ?? 0) < (last.steps ?? 0)) this.#history = [];
    this.#history.push({ status, time });
    while (this.#history[0].time < time - SPAN_MS) this.#history.shift();
  }

  #show() {
    const now = performance.now();
    const { status } = this.#history.at(-1);
    this.element.hidden = false;
    for (const chart of this.#charts) chart.show(this.#history, now);
    replace(this.memory, h("h3", "Memory"), meters(status.memory, status.memory_limits));
  }
}

/** [time, value] of what each status says; null where it says nothing. */
function valuesOf(history, read) {
  return history.map(({ status, time }) => [time, read(status) ?? null]);
}

/** [time, value a second] of a total. */
function rateOf(history, name) {
  return risesOf(history, (rise, seconds) => rise(name) / seconds);
}

/** [time, share] of how much of one total's rise another one's was; null where nothing rose. */
function shareOf(history, part, whole) {
  return risesOf(history, (rise) => (rise(whole) > 0 ? rise(part) / rise(whole) : null));
}

/** [time, value] between each status and the one before; null where a total is not told. */
function risesOf(history, compute) {
  return history.slice(1).map(({ status, time }, index) => {
    const before = history[index];
    const rise = (name) => (status[name] ?? NaN) - (before.status[name] ?? NaN);
    const value = compute(rise, (time - before.time) / 1000);
    return [time, Number.isNaN(value) ? null : value];
  });
}

/** A meter for each bucket that holds or may hold something. */
function meters(memory, limits) {
  const rows = Object.entries(memory).filter(([name, size]) => size > 0 || limits[name]);
  const items = rows.map(([name, size]) => {
    const limit = limits[name];
    const width = limit ? `${100 * Math.min(1, size / limit)}%` : "0%";
    return h(
      "li",
      h("span", BUCKETS[name] ?? name.replaceAll("_", " ")),
      h("span.meter", { "aria-hidden": "true" }, h("span", { style: { width } })),
      h("span", limit ? `${bytes(size)} of ${bytes(limit)}` : bytes(size)),
    );
  });
  return h("ul.meters", items);
}

/** A small line over the last minutes. */
class ChartView {
  #chart;

  /** @param {object} chart see CHARTS */
  constructor(chart) {
    this.#chart = chart;
    this.value = h("strong", "–");
    this.note = h("small");
    this.plot = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    const heading = h("h3", chart.title);
    this.element = h("div.card", heading, h("p", this.value, " ", this.note), this.plot);
  }

  show(history, now) {
    const { unit, most, note } = this.#chart;
    const lines = this.#chart.lines(history);
    const first = Math.min(now - SHORTEST_MS, ...lines.map((points) => points[0]?.[0] ?? now));
    const values = lines.flat().map(([, value]) => value ?? 0);
    const last = lines[0].findLast(([, value]) => value !== null);
    this.value.textContent = last ? unit(last[1]) : "–";
    this.note.textContent = note?.(history.at(-1).status) || "";
    const top = most ?? Math.max(1e-9, ...values);
    replace(
      this.plot,
      lines.map((points, index) =>
        svg(`path.line-${index}`, { d: pathOf(points, top, first, now) }),
      ),
    );
  }
}

/** A line through the points, with gaps where there is no value. */
function pathOf(points, top, first, now) {
  let drawing = false;
  let path = "";
  for (const [time, value] of points) {
    if (value !== null) {
      const x = (WIDTH * (time - first)) / (now - first);
      const y = HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, value / top);
      const place = `${x.toFixed(1)} ${y.toFixed(1)}`;
      path += drawing ? `L${place}` : `M${place}h0`;
    }
    drawing = value !== null;
  }
  return path;
}
