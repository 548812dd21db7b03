// Memory by bucket, and how the last minutes went, from the `status` messages of the event stream:
// totals become rates. Times are milliseconds.

import { h, replace, svg } from "../shared/dom.js";
import { bytes, count, duration, percent, rate } from "../shared/words.js";

const SPAN_MS = 5 * 60_000;
const SHORTEST_MS = 30_000; // that the width of a chart stands for
const WIDTH = 240;
const HEIGHT = 44;
/** A longer time between two statuses was not watched, unless the server did nothing in it. */
const UNWATCHED_MS = 15_000;

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
 * is; `lines` takes a history and returns the spans of one or two lines, [from, to, value or null];
 * `note` says something more of the latest status.
 */
const CHARTS = [
  {
    title: "Hit rate",
    unit: percent,
    most: 1,
    lines: (history) => [shareOf(history)],
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

/** What each status says, which holds until the next one; null where it says nothing. */
function valuesOf(history, read) {
  const { status, time } = history.at(-1);
  return [...spansOf(history, read), [time, time, read(status) ?? null]];
}

/** A total's rise a second, by the server's clock: messages may come late, and at once. */
function rateOf(history, name) {
  return spansOf(history, (before, after) => {
    const rise = after[name] - before[name];
    return rise === 0 ? 0 : rise / (after.time - before.time);
  });
}

/** How much of the prompts' tokens were hits; null where there was no prompt. */
function shareOf(history) {
  return spansOf(history, (before, after) => {
    const all = after.prompt_tokens - before.prompt_tokens;
    return all > 0 ? (after.hit_tokens - before.hit_tokens) / all : null;
  });
}

/** [from, to, value] of the time between each status and the next; null where nothing is known. */
function spansOf(history, compute) {
  return history.slice(1).map(({ status, time }, index) => {
    const { status: before, time: from } = history[index];
    const unwatched = time - from > UNWATCHED_MS && status.steps !== before.steps;
    const value = unwatched ? null : compute(before, status);
    return [from, time, Number.isFinite(value) ? value : null];
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
    });
    this.top = h("span");
    const scale = h("div.plot", { "aria-hidden": "true" }, this.plot, this.top, h("span", "0"));
    const heading = h("h3", chart.title);
    this.element = h("div.card", heading, h("p", this.value, " ", this.note), scale);
  }

  show(history, now) {
    const { unit, most, note } = this.#chart;
    const lines = this.#chart.lines(history);
    const first = Math.min(now - SHORTEST_MS, history[0].time);
    const highest = Math.max(0, ...lines.flat().map(([, , value]) => value ?? 0));
    const last = lines[0].findLast(([, , value]) => value !== null);
    this.value.textContent = last ? unit(last[2]) : "–";
    this.note.textContent = note?.(history.at(-1).status) || "";
    const top = most ?? highest;
    this.top.textContent = top ? unit(top) : "";
    replace(
      this.plot,
      lines.map((spans, index) =>
        svg(`path.line-${index}`, { d: pathOf(spans, top || 1, first, now) }),
      ),
    );
  }
}

/** A level line for each span, joined where one follows another; no slope says what nobody knows. */
function pathOf(spans, top, first, now) {
  const across = (time) => ((WIDTH * (time - first)) / (now - first)).toFixed(1);
  let path = "";
  let end = null;
  for (const [from, to, value] of spans) {
    if (value === null) continue;
    const y = (HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, value / top)).toFixed(1);
    path += `${end === from ? `V${y}` : `M${across(from)} ${y}`}H${across(to)}`;
    end = to;
  }
  return path;
}
