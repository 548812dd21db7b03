// A value that tells whoever subscribed when it becomes another.

export class Value {
  #value;
  #listeners = [];

  constructor(value) {
    this.#value = value;
  }

  get() {
    return this.#value;
  }

  set(value) {
    if (Object.is(value, this.#value)) return;
    this.#value = value;
    for (const listener of this.#listeners) listener(value);
  }

  /** Calls the listener now and at every change. */
  subscribe(listener) {
    this.#listeners.push(listener);
    listener(this.#value);
  }
}
