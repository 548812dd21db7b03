// The tree as a table for keyboards and screen readers: a row for each run, of which only those in
// sight exist. Follows the treegrid pattern of the ARIA practices, with aria-activedescendant.

import { h, onceAFrame, replace } from "../shared/dom.js";
import { bytes, count } from "../shared/words.js";
import { mediaWords } from "./details.js";
import { TIERS } from "./layout.js";

const ROW = 30;
const SPARE = 6;
const HEADINGS = ["Tokens", "Blocks", "Media", "State", "Where", "Hits", "Users", "Size"];
const PLACES = { device: "memory", host: "host", disk: "disk", leaving: "evicted" };

export class TreeGrid {
  #layout = null;
  #rows = new Int32Array(0);
  #closed = new Set();
  #active = 0;
  #selected = -1;
  #onSelect;
  #draw = onceAFrame(() => this.#drawNow());

  /** @param {(run: number) => void} onSelect */
  constructor(onSelect) {
    this.#onSelect = onSelect;
    const heading = h(
      "div.heading",
      { role: "row", "aria-rowindex": "1" },
      HEADINGS.map((text) => h("span", { role: "columnheader" }, text)),
    );
    this.body = h("div.rows", { role: "rowgroup" });
    this.element = h(
      "div.treegrid",
      {
        role: "treegrid",
        tabindex: "0",
        "aria-label": "Nodes of the cache",
        "aria-colcount": HEADINGS.length,
        on: {
          scroll: () => this.#draw(),
          keydown: (event) => this.#onKey(event),
          click: (event) => this.#onClick(event),
        },
      },
      h("div.headings", { role: "rowgroup" }, heading),
      this.body,
    );
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  show(layout) {
    const key = this.#layout?.key[this.#rows[this.#active]];
    this.#layout = layout;
    this.#count();
    const again = key === undefined ? -1 : this.#rows.findIndex((run) => layout.key[run] === key);
    this.#active = Math.max(0, again);
    this.#draw();
  }

  select(run) {
    this.#selected = run;
    const row = this.#rows.indexOf(run);
    if (row >= 0) this.#active = row;
    this.#draw();
  }

  reveal(run) {
    const row = this.#rows.indexOf(run);
    if (row >= 0) this.#scrollTo(row);
  }

  /** The runs that have no closed one above them. */
  #count() {
    const { count: number, key, next } = this.#layout;
    const rows = [];
    for (let run = 0; run < number; run = this.#closed.has(key[run]) ? next[run] : run + 1)
      rows.push(run);
    this.#rows = Int32Array.from(rows);
    this.element.setAttribute("aria-rowcount", String(rows.length + 1));
    this.body.style.height = `${rows.length * ROW}px`;
  }

  #drawNow() {
    if (!this.#layout) return;
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const last = Math.min(this.#rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    const places = Array.from({ length: Math.max(0, last - first) }, (_, index) => first + index);
    if (this.#rows.length && !places.includes(this.#active)) places.push(this.#active);
    replace(
      this.body,
      places.map((place) => this.#row(place)),
    );
    if (this.#rows.length)
      this.element.setAttribute("aria-activedescendant", `node-${this.#active}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #row(place) {
    const run = this.#rows[place];
    const layout = this.#layout;
    const tier = TIERS[layout.tier[run]];
    const begun = layout.media[run].filter((span) => span.begins);
    const contents = [
      [this.#twisty(run), `${count(layout.start[run])}–${count(layout.end[run])}`],
      count(layout.nodes[run]),
      mediaWords(begun, "video part") || "–",
      layout.snapshots[run].length || "–",
      [h(`span.swatch.${tier}`), PLACES[tier]],
      count(layout.hits[run]),
      count(layout.pins[run]),
      bytes(layout.bytes[run]),
    ];
    const cells = contents.map((content) => h("span", { role: "gridcell" }, content));
    cells[0].style.setProperty("padding-left", `${Math.min(12, layout.level[run]) * 12 - 4}px`);
    return h(
      place === this.#active ? "div.active" : "div",
      {
        id: `node-${place}`,
        role: "row",
        "aria-level": layout.level[run],
        "aria-rowindex": place + 2,
        "aria-selected": String(run === this.#selected),
        "aria-expanded": this.#hasBelow(run) && String(!this.#isClosed(run)),
        style: { transform: `translateY(${place * ROW}px)` },
      },
      cells,
    );
  }

  #twisty(run) {
    const sign = this.#isClosed(run) ? "▸" : "▾";
    return h("span.twisty", { "aria-hidden": "true" }, this.#hasBelow(run) ? sign : "·");
  }

  /** Whether runs branch off from a run. */
  #hasBelow(run) {
    return this.#layout.next[run] > run + 1;
  }

  #isClosed(run) {
    return this.#closed.has(this.#layout.key[run]);
  }

  #setClosed(run, closed) {
    if (closed) this.#closed.add(this.#layout.key[run]);
    else this.#closed.delete(this.#layout.key[run]);
    this.#count();
    this.#active = this.#rows.indexOf(run);
    this.#draw();
  }

  #onClick(event) {
    const row = event.target.closest("[role=row][id]");
    if (!row) return;
    const run = this.#rows[Number(row.id.slice("node-".length))];
    if (event.target.classList.contains("twisty") && this.#hasBelow(run))
      this.#setClosed(run, !this.#isClosed(run));
    else this.#onSelect(run);
  }

  #onKey(event) {
    if (!this.#rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const run = this.#rows[this.#active];
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key in steps) this.#move(this.#active + steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.#onSelect(run);
    else if (event.key === "ArrowRight") this.#right(run);
    else if (event.key === "ArrowLeft") this.#left(run);
    else return;
    event.preventDefault();
  }

  #right(run) {
    if (!this.#hasBelow(run)) return;
    if (this.#isClosed(run)) this.#setClosed(run, false);
    else this.#move(this.#active + 1);
  }

  #left(run) {
    const isOpen = this.#hasBelow(run) && !this.#isClosed(run);
    if (isOpen) this.#setClosed(run, true);
    else if (this.#layout.parent[run] >= 0)
      this.#move(this.#rows.indexOf(this.#layout.parent[run]));
  }

  #move(place) {
    this.#active = Math.max(0, Math.min(this.#rows.length - 1, place));
    this.#scrollTo(this.#active);
    this.#draw();
  }

  #scrollTo(place) {
    const { element } = this;
    const top = place * ROW;
    const seen = element.clientHeight - ROW; // the heading stays
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + ROW > element.scrollTop + seen) element.scrollTop = top + ROW - seen;
  }
}
