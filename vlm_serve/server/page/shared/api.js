// Requests to the server that the page came from, the key for them, and what is known of it.

import { Value } from "./value.js";

const PATIENCE_MS = 1500;
const KEY_NAME = "vlm-serve-key";

/** "ok", "gone" (nobody answers) or "key" (it asks for a key, or for another one). */
export const server = new Value("ok");

/** What is served: {names, sees, limit, defaults}, models and adapters by their names. `sees` (whether
 * the model takes pictures) is null, `limit` (bytes of a request) infinite and `defaults` (of
 * sampling) undefined as long as the server has not said. */
export const served = new Value({ names: [], sees: null, limit: Infinity });

/** The API key of this tab: in sessionStorage and in the Authorization header, nowhere else. */
export function storedKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

/** Headers that a request needs. A header holds Latin-1 only; of any other key the server is told
 * the percent-encoded form, which it refuses like any wrong one. */
function authorization() {
  const key = storedKey();
  if (!key) return {};
  return { Authorization: `Bearer ${/^[\x21-\x7e]+$/.test(key) ? key : encodeURIComponent(key)}` };
}

/**
 * The server's response to a request with this tab's key.
 * @throws {Error} with a sentence: the server does not answer, or not with what was asked for
 * @throws {DOMException} `signal` has ended it
 */
export async function request(path, { body, signal, method } = {}) {
  const init = {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers: authorization(),
    signal,
    cache: "no-store",
  };
  if (body !== undefined) {
    init.headers["Content-Type"] = "application/json";
    init.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(here(path), init);
  } catch (error) {
    throw failure(error);
  }
  if (response.ok) {
    server.set("ok");
    return response;
  }
  if (response.status === 401) server.set("key");
  throw new Error(await complaint(response));
}

/** The JSON body of the response to a request. */
export async function requestJson(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    throw failure(error);
  }
}

/** Asks the server what it serves. @throws what `request` does */
export async function learnServed() {
  const { data } = await requestJson("/v1/models");
  const info = { names: data.map(({ id }) => id), sees: null, limit: Infinity };
  try {
    const model = await requestJson("/get_model_info");
    info.sees = model.has_image_understanding;
    info.limit = model.max_body_bytes ?? Infinity;
    info.defaults = model.sampling_defaults;
  } catch {
    // A gateway may not have the route; the server then says itself what it does not take.
  }
  served.set(info);
}

/** What a failed fetch, or reading its body, means. */
export function failure(error) {
  if (error instanceof DOMException && error.name === "AbortError") return error;
  if (!(error instanceof TypeError)) return error;
  lost();
  return new Error("The server does not answer.");
}

async function complaint(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** A route's address beside the page, which a proxy may serve below a path of its own. */
export function here(path) {
  return new URL(`.${path}`, document.baseURI).href;
}

/** Asks for a sign of life until there is one. */
async function lost() {
  if (server.get() === "gone") return;
  server.set("gone");
  while (server.get() === "gone") {
    await new Promise((resolve) => setTimeout(resolve, PATIENCE_MS));
    if (document.hidden) continue;
    try {
      await fetch(here("/ready"), { cache: "no-store" });
      server.set("ok");
    } catch {
      // Still nobody there.
    }
  }
}
