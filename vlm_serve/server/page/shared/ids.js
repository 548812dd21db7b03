// Random names. crypto.randomUUID is there in secure contexts only, and a LAN address is none.

export function randomId() {
  const words = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(words, (word) => word.toString(16).padStart(2, "0")).join("");
}
