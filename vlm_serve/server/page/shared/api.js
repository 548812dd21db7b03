// Requests to the server that the page came from, and what is known of it.

import { authorization } from "./key.js";
import { Value } from "./value.js";

const PATIENCE_MS = 1500;

/** The server has answered, and not with what was asked for. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Nobody has answered. */
export class UnreachableError extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

/** "ok", "gone" (nobody answers) or "key" (it asks for a key, or for another one). */
export const server = new Value("ok");

/**
 * The server's response to a request with this tab's key.
 * @throws {ApiError|UnreachableError|DOMException} the last where `signal` has ended it
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
  throw new ApiError(response.status, await told(response));
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

/** What a failed fetch, or reading its body, means. */
export function failure(error) {
  if (error instanceof DOMException && error.name === "AbortError") return error;
  if (!(error instanceof TypeError)) return error;
  lost();
  return new UnreachableError();
}

async function told(response) {
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
