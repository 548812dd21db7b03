// The stream of cache events: one connection for each browser, however many tabs show it, and none
// while nobody looks. Of the tabs that look, the one that holds the lock reads and tells the others.

import { failure, request } from "../shared/api.js";
import { serverSentEvents } from "../shared/sse.js";

const NAME = "vlm-serve-events";
const PAUSE_MS = 2000;

export class Connection {
  #actions;
  #tabs = new BroadcastChannel(NAME);
  #looking = null;
  #reading = null;

  /**
   * @param {{onMessage: (message: {event: string, data: object}) => void,
   *   onState: (text: string) => void, tellAll: () => void}} actions
   *   `onState`: with what there is to say of the connection, or "" if it is fine; `tellAll`: is to
   *   `tell` what there is, for another tab has begun to look
   */
  constructor(actions) {
    this.#actions = actions;
    this.#tabs.onmessage = ({ data }) => this.#fromTab(data);
  }

  /** Sends a message to the other tabs. */
  tell(event, data) {
    this.#tabs.postMessage({ message: { event, data } });
  }

  /** Begins or ends looking. */
  look(looks) {
    if (looks === (this.#looking !== null)) return;
    if (!looks) {
      this.#looking.abort();
      this.#looking = null;
      return;
    }
    this.#looking = new AbortController();
    this.#tabs.postMessage({ ask: "tree" });
    this.#lead(this.#looking.signal);
  }

  /** Reads anew, with whatever key there is now. */
  reconnect() {
    this.#reading?.abort();
  }

  async #lead(signal) {
    // Locks are there in secure contexts only; on a LAN address each tab reads for itself.
    if (!navigator.locks) return this.#read(signal);
    try {
      await navigator.locks.request(NAME, { signal }, () => this.#read(signal));
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  async #read(signal) {
    while (!signal.aborted) {
      this.#reading = new AbortController();
      try {
        const both = AbortSignal.any([signal, this.#reading.signal]);
        const response = await request("/v1/cache/events", { signal: both });
        this.#say("");
        for await (const { event, data } of serverSentEvents(response)) {
          const message = { event, data: JSON.parse(data) };
          this.#actions.onMessage(message);
          this.#tabs.postMessage({ message });
        }
      } catch (error) {
        const meant = failure(error);
        if (meant.name !== "AbortError") this.#say(meant.message);
        else if (!signal.aborted) continue;
      }
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
    this.#reading = null;
  }

  #say(text) {
    this.#actions.onState(text);
    this.#tabs.postMessage({ state: text });
  }

  #fromTab({ ask, message, state }) {
    if (ask === "tree") {
      if (this.#reading !== null) this.#actions.tellAll();
    } else if (this.#looking !== null) {
      if (message) this.#actions.onMessage(message);
      else this.#actions.onState(state);
    }
  }
}
