// A model's Markdown as elements. What a model says is not trusted: raw HTML is shown as text, an
// image is a link that nobody has followed yet, and DOMPurify has the last word.

import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["href", "start", "title", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const parser = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image: ({ href, text }) =>
      `<a href="${escaped(href)}">${escaped(text || href)} (image, not loaded)</a>`,
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** A fragment with what the text says. */
export function rendered(text) {
  const fragment = DOMPurify.sanitize(parser.parse(text), ALLOWED);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "wide";
    frame.tabIndex = 0;
    frame.role = "region";
    frame.ariaLabel = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) block.tabIndex = 0;
  return fragment;
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
