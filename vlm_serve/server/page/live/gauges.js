// Memory by bucket, and how the last minutes went.

import { h, replace } from "../shared/dom.js";
import { bytes, count, duration, percent, rate } from "../shared/words.js";
import { Chart } from "./chart.js";
import { History } from "./history.js";

/** Parts of the memory in words. */
const BUCKETS = {
  kv: "keys, values",
  snapshots: "kept states",
  live_states: "live states",
  embeddings: "pictures",
  experts: "experts",
  logprobs: "log-probs",
};

export class Gauges {
  #history = new History();
  #charts = {
    hits: new Chart("Hit rate", { unit: percent, most: 1 }),
    queue: new Chart("Running, waiting", { unit: count }),
    steps: new Chart("Steps a second", { unit: rate }),
    tokens: new Chart("Tokens a second", { unit: rate }),
    first: new Chart("First token", { unit: (seconds) => duration(1000 * seconds) }),
    between: new Chart("Between tokens", { unit: (seconds) => duration(1000 * seconds) }),
  };

  constructor() {
    this.memory = h("div.memory");
    this.element = h(
      "section.gauges",
      { "aria-label": "The last five minutes" },
      this.memory,
      Object.values(this.#charts).map((chart) => chart.element),
    );
    this.element.hidden = true; // until something is told; tenants are told nothing
  }

  add(status) {
    this.#history.add(status, performance.now());
    this.#show(status);
  }

  /** What was told before this view was opened; `age_seconds` in each. */
  addPast(statuses) {
    if (this.#history.latest() !== null) return;
    const now = performance.now();
    for (const { age_seconds: age, ...status } of statuses)
      this.#history.add(status, now - 1000 * age);
    const latest = this.#history.latest();
    if (latest !== null) this.#show(latest);
  }

  /** The history in the form of `addPast`. */
  past() {
    const now = performance.now();
    return this.#history
      .of((status) => status)
      .map(([time, status]) => ({ ...status, age_seconds: (now - time) / 1000 }));
  }

  #show(status) {
    const now = performance.now();
    const history = this.#history;
    this.element.hidden = false;
    const { hits, queue, steps, tokens, first, between } = this.#charts;
    hits.show(
      [
        history.shareOf(
          (each) => each.hit_tokens,
          (each) => each.prompt_tokens,
        ),
      ],
      now,
      overall(status),
    );
    queue.show(
      [history.of((each) => each.running), history.of((each) => each.waiting)],
      now,
      `${count(status.waiting)} waiting, ${count(status.joined)} of them for a prefix`,
    );
    steps.show([history.rateOf((each) => each.steps)], now);
    tokens.show([history.rateOf((each) => each.generated_tokens)], now);
    this.#showTimes(first, "time_to_first_token_seconds", now);
    this.#showTimes(between, "inter_token_seconds", now);
    replace(this.memory, meters(status.memory, status.memory_limits));
  }

  /** The median and the 99th percentile of a latency. */
  #showTimes(chart, name, now) {
    const { p99 } = this.#history.latest()[name];
    const lines = ["p50", "p99"].map((part) => this.#history.of((status) => status[name][part]));
    chart.show(lines, now, p99 === null ? "" : `p99 ${duration(1000 * p99)}`);
  }
}

function overall({ hit_tokens: hit, prompt_tokens: all }) {
  return all ? `${percent(hit / all)} in all` : "";
}

/** A meter for each bucket that holds or may hold something. */
function meters(memory, limits) {
  const rows = Object.entries(memory).filter(([name, size]) => size > 0 || limits[name]);
  return [
    h("h3", "Memory"),
    h(
      "ul.meters",
      rows.map(([name, size]) =>
        meter(BUCKETS[name] ?? name.replaceAll("_", " "), size, limits[name] ?? null),
      ),
    ),
  ];
}

function meter(name, size, limit) {
  const share = limit ? Math.min(1, size / limit) : 0;
  return h(
    "li",
    h("span", name),
    h("span.meter", { "aria-hidden": "true" }, h("span", { style: { width: `${100 * share}%` } })),
    h("span", limit ? `${bytes(size)} of ${bytes(limit)}` : bytes(size)),
  );
}
