// The tree as a table for keyboards and screen readers: a row for each run, of which only those in
// sight exist. Follows the treegrid pattern of the ARIA practices, with aria-activedescendant.

import { h, replace } from "../shared/dom.js";
import { bytes, count, counted } from "../shared/words.js";
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
  #asked = false;

  /** @param {(run: number) => void} onSelect */
  constructor(onSelect) {
    this.#onSelect = onSelect;
    const heading = h(
      "div",
      { role: "row", class: "heading", "aria-rowindex": "1" },
      HEADINGS.map((text) => h("span", { role: "columnheader" }, text)),
    );
    this.body = h("div", { role: "rowgroup", class: "rows" });
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
      h("div", { role: "rowgroup", class: "headings" }, heading),
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

  #draw() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      this.#drawNow();
    });
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
    const l = this.#layout;
    const hasBelow = l.next[run] > run + 1;
    const tier = TIERS[l.tier[run]];
    const cells = [
      `${count(l.start[run])}–${count(l.end[run])}`,
      count(l.nodes[run]),
      this.#media(run),
      l.firstMark[run + 1] - l.firstMark[run] || "–",
      PLACES[tier],
      count(l.hits[run]),
      count(l.pins[run]),
      bytes(l.bytes[run]),
    ];
    const [head, ...rest] = cells.map((text, index) =>
      h(
        "span",
        { role: "gridcell" },
        index === 4 ? h("span", { class: `swatch ${tier}` }) : null,
        text,
      ),
    );
    head.style.setProperty("padding-left", `${Math.min(12, l.level[run]) * 12 - 4}px`);
    head.prepend(
      h(
        "span.twisty",
        { "aria-hidden": "true" },
        hasBelow ? (this.#isClosed(run) ? "▸" : "▾") : "·",
      ),
    );
    return h(
      "div",
      {
        id: `node-${place}`,
        role: "row",
        class: place === this.#active ? "active" : null,
        "aria-level": l.level[run],
        "aria-rowindex": place + 2,
        "aria-selected": String(run === this.#selected),
        "aria-expanded": hasBelow ? String(!this.#isClosed(run)) : null,
        style: { transform: `translateY(${place * ROW}px)` },
      },
      head,
      rest,
    );
  }

  #media(run) {
    const { media, firstMedium } = this.#layout;
    const spans = media.slice(firstMedium[run], firstMedium[run + 1]).filter((span) => span.begins);
    const images = spans.filter((span) => span.kind === "image").length;
    const parts = [
      images ? counted(images, "picture") : null,
      spans.length > images ? counted(spans.length - images, "video part") : null,
    ];
    return parts.filter(Boolean).join(", ") || "–";
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
    if (event.target.classList.contains("twisty") && this.#layout.next[run] > run + 1)
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
    if (this.#layout.next[run] === run + 1) return;
    if (this.#isClosed(run)) this.#setClosed(run, false);
    else this.#move(this.#active + 1);
  }

  #left(run) {
    const isOpen = this.#layout.next[run] > run + 1 && !this.#isClosed(run);
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
