// The view "Live cache": the map, the table, the chosen node, the gauges and what happens.

import { known } from "../chat/library.js";
import { request } from "../shared/api.js";
import { button } from "../shared/controls.js";
import { confirmed } from "../shared/dialogs.js";
import { h } from "../shared/dom.js";
import { counted } from "../shared/words.js";
import { Connection } from "./connection.js";
import { Details, PLACES } from "./details.js";
import { Feed } from "./feed.js";
import { Gauges } from "./gauges.js";
import { Icicle } from "./icicle.js";
import { TreeGrid } from "./treegrid.js";

const WORKER = new URL("worker.js", import.meta.url).href;

/** The one script address that is made from a text. */
const workerPolicy = globalThis.trustedTypes?.createPolicy("page", {
  createScriptURL(url) {
    if (url !== WORKER) throw new TypeError(`${url} is no script of this page`);
    return url;
  },
});

export class LiveView {
  #layout = null;
  #choice = null;
  #revealing = false;
  #shown = false;
  #worker = new Worker(workerPolicy ? workerPolicy.createScriptURL(WORKER) : WORKER, {
    type: "module",
  });

  constructor() {
    this.icicle = new Icicle((run) => this.#choose(run));
    this.grid = new TreeGrid((run) => this.#choose(run));
    this.details = new Details();
    this.gauges = new Gauges();
    this.feed = new Feed();
    this.size = h("p.lead", { role: "status" });
    this.state = h("p.problem", { hidden: true });
    this.view = h(
      "main.live",
      { hidden: true, tabindex: "0" },
      h(
        "div.live-bar",
        h("h1", "Live cache"),
        this.size,
        button("Flush all", "trash", () => this.#flush()),
      ),
      this.state,
      this.gauges.element,
      h(
        "div.tree",
        h("div.maps", legend(), this.icicle.element, this.grid.element),
        h("div.side", this.details.element, this.feed.element),
      ),
    );
    this.#worker.onmessage = ({ data }) => this.#fromWorker(data);
    this.connection = new Connection({
      onMessage: (message) => this.#onMessage(message),
      onState: (text) => this.#say(text),
      tellAll: () => {
        const [statuses, events] = [this.gauges.past(), this.feed.past()];
        this.connection.tell("history", { statuses, events });
        this.#worker.postMessage({ ask: "tree" });
      },
    });
    document.addEventListener("visibilitychange", () => this.#look());
    known.subscribe(() => this.icicle.draw());
  }

  /** @param {string} [key] of a node that is chosen as soon as the tree is there */
  setShown(shown, key) {
    this.#shown = shown;
    if (key) {
      this.#choice = key;
      this.#revealing = true;
      this.#worker.postMessage({ choose: key });
    }
    this.#look();
  }

  reconnect() {
    this.connection.reconnect();
  }

  #look() {
    this.connection.look(this.#shown && !document.hidden);
  }

  #say(text) {
    this.state.textContent = text;
    this.state.hidden = !text;
  }

  #onMessage({ event, data }) {
    if (event === "status") this.gauges.add(data);
    else if (event === "tree" || event === "changes") this.#worker.postMessage({ event, data });
    else if (event === "history") {
      this.gauges.addPast(data.statuses);
      this.feed.addPast(data.events);
    }
  }

  #fromWorker({ layout, choice, chosen, happened, tree }) {
    if (tree) this.connection.tell("tree", tree);
    if (happened) this.#happened(happened);
    if (layout) this.#show(layout);
    // A layout that was on its way when something was chosen says nothing of that.
    if (chosen === undefined || !this.#choice || choice !== this.#choice) return;
    this.#showChosen(chosen);
    if (this.#revealing && chosen >= 0) this.#reveal(chosen);
    this.#revealing = false;
  }

  #show(layout) {
    this.#layout = layout;
    this.icicle.show(layout);
    this.grid.show(layout);
    const nodes = counted(layout.numNodes, "node");
    const runs = counted(layout.count, "run");
    const branches = counted(layout.rows, "branch", "branches");
    this.size.textContent = layout.count
      ? `${nodes} in ${runs}, ${branches}`
      : "The cache is empty.";
  }

  #happened(changes) {
    this.feed.add(changes);
    const hits = changes.filter(({ type }) => type === "hit");
    if (!this.#layout || !hits.length) return;
    const { key, parent } = this.#layout;
    const lit = new Set();
    for (const hit of hits)
      for (let run = key.indexOf(hit.run); run >= 0; run = parent[run]) lit.add(run);
    this.icicle.flash(lit);
  }

  #choose(run) {
    this.#choice = this.#layout.key[run];
    this.#worker.postMessage({ choose: this.#choice });
    this.#showChosen(run);
    this.#reveal(run);
  }

  #reveal(run) {
    this.icicle.reveal(run);
    this.grid.reveal(run);
  }

  #showChosen(run) {
    this.icicle.select(run);
    this.grid.select(run);
    if (run >= 0) {
      this.details.show(this.#layout, run);
    } else {
      this.details.gone();
      this.#choice = null;
    }
  }

  async #flush() {
    const question =
      "Everything not in use by a running request is removed, for all users of this server. The next answers are computed from the start.";
    if (!(await confirmed("Flush the whole cache?", question, "Flush all"))) return;
    try {
      await request("/v1/cache/flush", { body: {} });
    } catch (error) {
      this.#say(error.message);
    }
  }
}

function legend() {
  const { leaving, ...tiers } = PLACES;
  const texts = {
    ...tiers,
    medium: "picture or video",
    snapshot: "recurrent state kept",
    pin: "in use or pinned",
    leaving,
  };
  const items = Object.entries(texts).map(([name, text]) =>
    h("li", h(`span.swatch.${name}`), text),
  );
  return h("ul.legend", items);
}
