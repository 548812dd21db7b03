// The API key of this tab: in sessionStorage and in the Authorization header, nowhere else.

const NAME = "vlm-serve-key";

export function storedKey() {
  return sessionStorage.getItem(NAME) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
}

/** Headers that a request needs. A header holds Latin-1 only; of any other key the server is told
 * the percent-encoded form, which it refuses like any wrong one. */
export function authorization() {
  const key = storedKey();
  if (!key) return {};
  return { Authorization: `Bearer ${/^[\x21-\x7e]+$/.test(key) ? key : encodeURIComponent(key)}` };
}
