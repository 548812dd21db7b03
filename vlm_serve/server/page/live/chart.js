// A small line over the last minutes.

import { h, replace, svg } from "../shared/dom.js";

const WIDTH = 240;
const HEIGHT = 44;
const SHORTEST_MS = 30_000; // that the width stands for

export class Chart {
  #unit;
  #most;

  /**
   * @param {string} title
   * @param {{unit: (value: number) => string, most?: number}} how `most`: top of the scale; else it
   *   is as high as the highest value
   */
  constructor(title, { unit, most }) {
    this.#unit = unit;
    this.#most = most;
    this.value = h("strong", "–");
    this.second = h("small");
    this.plot = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    this.element = h("div.card", h("h3", title), h("p", this.value, " ", this.second), this.plot);
  }

  /** @param {[number, number|null][][]} lines points of one or two lines, on one scale */
  show(lines, now, second = "") {
    const first = Math.min(now - SHORTEST_MS, ...lines.map((points) => points[0]?.[0] ?? now));
    const values = lines
      .flat()
      .map(([, value]) => value)
      .filter((value) => value !== null);
    const last = lines[0].findLast(([, value]) => value !== null);
    this.value.textContent = last ? this.#unit(last[1]) : "–";
    this.second.textContent = second;
    const top = this.#most ?? Math.max(1e-9, ...values);
    replace(
      this.plot,
      lines.map((points, index) =>
        svg("path", { class: `line-${index}`, d: pathOf(points, top, first, now) }),
      ),
    );
  }
}

/** A line through the points, with gaps where there is no value. */
function pathOf(points, top, first, now) {
  let pen = "M";
  let path = "";
  for (const [time, value] of points) {
    if (value === null) {
      pen = "M";
      continue;
    }
    const x = (WIDTH * (time - first)) / (now - first);
    const y = HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, value / top);
    path += pen === "M" ? `M${x.toFixed(1)} ${y.toFixed(1)}h0` : `L${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return path;
}
