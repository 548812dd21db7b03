// Text to the clipboard and to files.

import { h } from "./dom.js";

/** Copies a text. Outside of secure contexts (a LAN address) only the old way works. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea.unseen", { "aria-hidden": "true", value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Saves a text as a file, which is named by a title. */
export function save(title, ending, type, text) {
  const name = `${title.replace(/[^\p{L}\p{N}_-]+/gu, "-")}.${ending}`;
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
