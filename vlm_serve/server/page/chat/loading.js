// Libraries that only some answers need: loaded when the first such answer is shown. What they make
// is kept, for an answer that grows shows it again and again.

import { Value } from "../shared/value.js";

/** Counts what has been loaded; answers that wait for it are then shown anew. */
export const arrived = new Value(0);

/**
 * What `load` resolves to, or null until then. A failure is final until the page is opened again.
 * @template T
 * @param {() => Promise<T>} load
 * @returns {() => T|null}
 */
export function onDemand(load) {
  let asked = false;
  let loaded = null;
  return () => {
    if (!asked) {
      asked = true;
      load().then(
        (value) => {
          loaded = value;
          arrived.set(arrived.get() + 1);
        },
        () => {}, // the answer stays as it was written
      );
    }
    return loaded;
  };
}

/**
 * What `compute` returns for a key, computed once. All is forgotten when there are `most`.
 * @template T
 * @param {number} most
 * @returns {(key: string, compute: () => T) => T}
 */
export function memory(most) {
  const results = new Map();
  return (key, compute) => {
    if (!results.has(key)) {
      if (results.size >= most) results.clear();
      results.set(key, compute());
    }
    return results.get(key);
  };
}
