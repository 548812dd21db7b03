// The tree as an icicle on a canvas: positions of the prompts from left to right, branches from top
// to bottom. The canvas is as large as what is seen of it; scrolling and zooming only draw it anew.

import { iconButton } from "../shared/controls.js";
import { h, onceAFrame } from "../shared/dom.js";
import { theme } from "../shared/theme.js";
import { count, counted } from "../shared/words.js";
import { drawRuns, palette } from "./drawing.js";
import { runAt } from "./layout.js";

const ROW = { least: 5, usual: 26, most: 44 };
const MOST_PIXELS_PER_TOKEN = 24;
const STEP = 1.5;
const FLASH_MS = 900;
const MARGIN = 8;

export class Icicle {
  #layout = null;
  #zoom = 1;
  #selected = -1;
  #flashes = new Map();
  #colour = null;
  #onSelect;

  /** Asks for a drawing in the next frame. */
  draw = onceAFrame(() => this.#draw());

  /** @param {(run: number) => void} onSelect called with the index of a run that was clicked on */
  constructor(onSelect) {
    this.#onSelect = onSelect;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.space = h("div.icicle-space", this.canvas);
    this.scroller = h(
      "div.icicle",
      {
        tabindex: "0",
        role: "group",
        "aria-label":
          "Map of the cache. The table beside it shows the same data. Plus and minus zoom, 0 shows all.",
        on: {
          scroll: () => this.draw(),
          click: (event) => this.#select(event),
          pointermove: (event) => this.#point(event),
          pointerleave: () => (this.tip.hidden = true),
          keydown: (event) => this.#onKey(event),
        },
      },
      this.space,
    );
    this.scroller.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
    this.tip = h("div.tip", { hidden: true });
    this.tools = h(
      "div.tools",
      iconButton("Zoom in", "plus", () => this.zoomBy(STEP)),
      iconButton("Zoom out", "minus", () => this.zoomBy(1 / STEP)),
      iconButton("Show all", "fit", () => this.zoomBy(0)),
    );
    this.element = h("div.icicle-frame", this.scroller, this.tip, this.tools);
    new ResizeObserver(() => this.#fit()).observe(this.scroller);
    theme.subscribe(() => this.#repaint());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#repaint());
  }

  show(layout) {
    this.#layout = layout;
    this.#fit();
  }

  select(run) {
    this.#selected = run;
    this.draw();
  }

  /** Brings a run into view. */
  reveal(run) {
    const { scroller } = this;
    const { x, y } = this.#scale();
    const top = this.#layout.top[run] * y;
    if (top < scroller.scrollTop || top > scroller.scrollTop + scroller.clientHeight - y)
      scroller.scrollTop = top - scroller.clientHeight / 2;
    const left = this.#layout.start[run] * x;
    if (left < scroller.scrollLeft || left > scroller.scrollLeft + scroller.clientWidth)
      scroller.scrollLeft = left - MARGIN;
  }

  /** Lights up runs for a moment. */
  flash(runs) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const run of runs) this.#flashes.set(this.#layout.key[run], performance.now() + FLASH_MS);
    this.draw();
  }

  /** Zooms by a factor around the middle of what is seen; 0 shows all. */
  zoomBy(factor, at = { x: this.scroller.clientWidth / 2, y: this.scroller.clientHeight / 2 }) {
    if (!this.#layout) return;
    const before = this.#scale();
    const { scroller } = this;
    const most = MOST_PIXELS_PER_TOKEN / (before.x / this.#zoom);
    this.#zoom = factor === 0 ? 1 : Math.max(1, Math.min(most, this.#zoom * factor));
    const after = this.#scale();
    const left = ((scroller.scrollLeft + at.x) / before.x) * after.x - at.x;
    const top = ((scroller.scrollTop + at.y) / before.y) * after.y - at.y;
    this.#fit();
    scroller.scrollTo(left, top);
  }

  #scale() {
    const { clientWidth, clientHeight } = this.scroller;
    const { length, rows } = this.#layout;
    const fitting = Math.max(ROW.least, Math.min(ROW.usual, clientHeight / Math.max(1, rows)));
    return {
      x: ((clientWidth - MARGIN) / Math.max(1, length)) * this.#zoom,
      y: Math.max(ROW.least, Math.min(ROW.most, fitting * this.#zoom)),
    };
  }

  #fit() {
    if (!this.#layout || !this.scroller.clientWidth) return;
    const { x, y } = this.#scale();
    this.space.style.width = `${Math.max(this.scroller.clientWidth, this.#layout.length * x + MARGIN)}px`;
    this.space.style.height = `${Math.max(this.scroller.clientHeight, this.#layout.rows * y)}px`;
    this.draw();
  }

  #repaint() {
    this.#colour = null;
    this.draw();
  }

  #draw() {
    const { canvas, scroller } = this;
    const { clientWidth: width, clientHeight: height } = scroller;
    if (!this.#layout || !width) return;
    const start = performance.now();
    const ratio = window.devicePixelRatio;
    const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
    // Setting a size clears the canvas, even to the same one.
    if (canvas.width !== columns || canvas.height !== rows) {
      canvas.width = columns;
      canvas.height = rows;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.#colour ??= palette(scroller);
    const seen = { left: scroller.scrollLeft, top: scroller.scrollTop, width, height };
    drawRuns(context, this.#layout, {
      seen,
      scale: this.#scale(),
      colour: this.#colour,
      selected: this.#selected,
      glow: (key) => this.#glow(key),
      onLoad: () => this.draw(),
    });
    // Told to whoever observes, and not kept.
    performance.measure("icicle", { start, end: performance.now() });
    performance.clearMeasures("icicle");
    if (this.#flashes.size) this.draw();
  }

  /** How much a run still glows, from 1 to 0. */
  #glow(key) {
    const until = this.#flashes.get(key);
    if (until === undefined) return 0;
    const left = (until - performance.now()) / FLASH_MS;
    if (left <= 0) this.#flashes.delete(key);
    return Math.max(0, left);
  }

  #at({ clientX, clientY }) {
    if (!this.#layout) return -1;
    const box = this.scroller.getBoundingClientRect();
    const { x, y } = this.#scale();
    return runAt(
      this.#layout,
      (clientX - box.left + this.scroller.scrollLeft) / x,
      (clientY - box.top + this.scroller.scrollTop) / y,
    );
  }

  #select(event) {
    const run = this.#at(event);
    if (run >= 0) this.#onSelect(run);
  }

  #point(event) {
    const run = this.#at(event);
    this.tip.hidden = run < 0;
    if (run < 0) return;
    const { start, end, hits, pins } = this.#layout;
    this.tip.textContent = `tokens ${count(start[run])} to ${count(end[run])} · ${counted(hits[run], "hit")}${pins[run] ? " · in use" : ""}`;
    const box = this.element.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth - 4);
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${event.clientY - box.top + 16}px)`;
  }

  #onKey(event) {
    const factor = { "+": STEP, "=": STEP, "-": 1 / STEP, 0: 0 }[event.key];
    if (factor === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.zoomBy(factor);
  }

  #onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = this.scroller.getBoundingClientRect();
    this.zoomBy(Math.exp(-event.deltaY / 300), {
      x: event.clientX - box.left,
      y: event.clientY - box.top,
    });
  }
}
