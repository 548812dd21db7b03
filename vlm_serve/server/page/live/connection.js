// The stream of cache events: one connection for each browser, however many tabs show it, and none
// while nobody looks. Of the tabs that look, the one that holds the lock reads and tells the others.

import { failure, request } from "../shared/api.js";
import { serverSentEvents } from "../shared/sse.js";

const NAME = "vlm-serve-events";
const PAUSE_MS = 2000;

export class Connection {
  #onMessage;
  #onState;
  #tabs = new BroadcastChannel(NAME);
  #looking = null;
  #reading = null;
  #wholeFor = null;

  /**
   * @param {(message: {event: string, data: object}) => void} onMessage
   * @param {(text: string) => void} onState what there is to say of the connection; "" if it is fine
   */
  constructor(onMessage, onState) {
    this.#onMessage = onMessage;
    this.#onState = onState;
    this.#tabs.onmessage = ({ data }) => this.#fromTab(data);
  }

  /** Says what this tab can tell another one that comes later: `whole` gets what sends a message. */
  answerWith(whole) {
    this.#wholeFor = whole;
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
    if (!navigator.locks) {
      await this.#read(signal);
      return;
    }
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
          this.#onMessage(message);
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
    this.#onState(text);
    this.#tabs.postMessage({ state: text });
  }

  #fromTab({ ask, message, state }) {
    if (ask === "tree") {
      if (this.#reading !== null)
        this.#wholeFor?.((event, data) => this.#tabs.postMessage({ message: { event, data } }));
    } else if (this.#looking !== null) {
      if (message) this.#onMessage(message);
      else this.#onState(state);
    }
  }
}
