// Memory by bucket, and how the last minutes went.

import { h, replace } from "../shared/dom.js";
import { bytes, count, duration, percent, rate } from "../shared/words.js";
import { Chart } from "./chart.js";
import { History } from "./history.js";

const BUCKETS = 6; // colours that there are

export class Gauges {
  #history = new History();
  #charts = {
    hits: new Chart("Hit rate", { unit: percent, most: 1 }),
    queue: new Chart("Running, waiting", { unit: count }),
    steps: new Chart("Steps a second", { unit: rate }),
    tokens: new Chart("Tokens a second", { unit: rate }),
    first: new Chart("First token, median", { unit: (seconds) => duration(1000 * seconds) }),
  };

  constructor() {
    this.memory = h("div", { class: "memory" });
    this.element = h("section", { class: "gauges", "aria-label": "The last five minutes" }, this.memory, Object.values(this.#charts).map((chart) => chart.element));
    this.element.hidden = true; // until something is told; tenants are told nothing
  }

  add(status) {
    const now = performance.now();
    const history = this.#history;
    history.add(status, now);
    this.element.hidden = false;
    const { hits, queue, steps, tokens, first } = this.#charts;
    const times = status.time_to_first_token_seconds ?? {};
    hits.show([history.shareOf((each) => each.hit_tokens, (each) => each.prompt_tokens)], now, overall(status));
    queue.show([history.of((each) => each.running), history.of((each) => each.waiting)], now, `${count(status.waiting)} waiting`);
    steps.show([history.rateOf((each) => each.steps)], now);
    tokens.show([history.rateOf((each) => each.generated_tokens)], now);
    first.show(
      [history.of((each) => each.time_to_first_token_seconds?.p50), history.of((each) => each.time_to_first_token_seconds?.p99)],
      now,
      Number.isFinite(times.p99) ? `p99 ${duration(1000 * times.p99)}` : "",
    );
    if (status.memory) replace(this.memory, memoryBar(status.memory));
  }
}

function overall({ hit_tokens: hit, prompt_tokens: all }) {
  return all ? `${percent(hit / all)} since the start` : "";
}

function memoryBar(memory) {
  const buckets = Object.entries(memory).filter(([, size]) => size > 0);
  const whole = buckets.reduce((sum, [, size]) => sum + size, 0);
  const parts = buckets.map(([, size], index) =>
    h("span", { class: `bucket-${index % BUCKETS}`, style: { "flex-grow": String(size) } }),
  );
  const names = buckets.map(([name, size], index) =>
    h("li", null, h("span", { class: `swatch bucket-${index % BUCKETS}` }), `${name.replaceAll("_", " ")} ${bytes(size)}`),
  );
  return [h("h3", null, `Memory: ${bytes(whole)}`), h("div", { class: "stack" }, parts), h("ul", { class: "legend" }, names)];
}
