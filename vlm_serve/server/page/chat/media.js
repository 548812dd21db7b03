// A picture, video, document or text of this browser in its place in a conversation.

import { h } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { bytes } from "../shared/words.js";
import { urlOf } from "./library.js";

/** @param {object|null} medium null: it is not in this browser any more */
export function mediumFigure(medium) {
  if (medium === null) return h("span", { class: "gone" }, "no longer in this browser");
  if (medium.kind === "text" || medium.kind === "document") {
    const size = h("small", null, bytes(medium.blob.size));
    return h("span", { class: "file" }, icon("file"), h("span", null, medium.name), size);
  }
  const src = urlOf(medium);
  if (medium.kind === "image") return h("img", { src, alt: medium.name, title: medium.name });
  return h("video", {
    src,
    controls: true,
    muted: true,
    preload: "metadata",
    "aria-label": medium.name,
  });
}
