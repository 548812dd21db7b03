// A model's Markdown as elements. What a model says is not trusted: raw HTML is shown as text, an
// image is a link that nobody has followed yet, and DOMPurify has the last word.

import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { copy } from "../shared/clipboard.js";
import { iconButton } from "../shared/controls.js";
import { h } from "../shared/dom.js";
import { highlighted } from "./highlighting.js";
import { arrived } from "./loading.js";
import { formula, mathExtensions } from "./mathematics.js";

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
  ALLOWED_ATTR: ["href", "start", "title", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"], // no addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const parser = new Marked({
  gfm: true,
  extensions: mathExtensions(escaped),
  renderer: {
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image: ({ href, text }) =>
      `<a href="${escaped(href)}">${escaped(text || href)} (image, not loaded)</a>`,
  },
});

// Classes come from the parser alone: of code, what it is.
const CLASSES = /^(?:math|math display|language-\S{1,30})$/;

DOMPurify.addHook("uponSanitizeAttribute", (node, facts) => {
  if (facts.attrName === "class")
    facts.keepAttr = node.tagName === "CODE" && CLASSES.test(facts.attrValue);
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

// The parser takes quadratic time for some texts, and recursion for nested ones. Beyond these
// bounds an answer is shown as it is, in slices that are laid out when they come into view.
const MARKDOWN_LETTERS = 32_000;
const PARAGRAPH_LETTERS = 8_000;
const DEPTH = 40;
const SLICE_LETTERS = 16_000;
const FENCE = /^ {0,3}(?:```|~~~)/;
const MARKERS = /[>*+-]|\d[.)]/g;
const PREFIX = /^(?:[ \t>*+-]|\d{1,9}[.)])*/;

let parsed;

arrived.subscribe(() => (parsed = { text: "", fragment: document.createDocumentFragment() }));

/** A fragment with what the text says. */
export function rendered(text) {
  const end = endOfMarkdown(text);
  const head = text.slice(0, end);
  // An answer that still grows beyond the bounds is parsed once.
  if (head !== parsed.text) parsed = { text: head, fragment: asElements(head) };
  const fragment = parsed.fragment.cloneNode(true);
  for (let at = end; at < text.length; at += SLICE_LETTERS)
    fragment.append(h("div.plain", text.slice(at, at + SLICE_LETTERS)));
  return fragment;
}

/** How much of a text is within the bounds: up to a paragraph's end, or all of it. */
function endOfMarkdown(text) {
  let [fenced, paragraph, end] = [false, 0, 0];
  for (let at = 0; at < text.length;) {
    const next = text.indexOf("\n", at) + 1 || text.length;
    const line = text.slice(at, Math.min(next, at + PARAGRAPH_LETTERS));
    if (FENCE.test(line)) fenced = !fenced;
    const blank = line.trim() === "";
    if (blank && !fenced) end = next;
    paragraph = blank || fenced ? 0 : paragraph + next - at;
    if (!fenced && depthOf(line) > DEPTH) return end;
    if (next > MARKDOWN_LETTERS || paragraph > PARAGRAPH_LETTERS) return end;
    at = next;
  }
  return text.length;
}

/** An upper bound of the lists and quotes around a line. */
function depthOf(line) {
  const [prefix] = PREFIX.exec(line);
  const indent = prefix.search(/[^ \t]|$/);
  return (prefix.match(MARKERS)?.length ?? 0) + Math.floor(indent / 2);
}

function asElements(text) {
  const fragment = DOMPurify.sanitize(parser.parse(text), ALLOWED);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div.wide", { tabindex: "0", role: "region", "aria-label": "table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("code.math")) setFormula(code);
  for (const block of fragment.querySelectorAll("pre")) frameCode(block);
  return fragment;
}

function setFormula(code) {
  const display = code.classList.contains("display");
  const shown = formula(code.textContent, display);
  if (shown === null) return;
  const frame = display
    ? h("div.formula.wide", { tabindex: "0" }, shown, copyButton("Copy this formula as TeX", "tex"))
    : h("span.formula", shown);
  const paragraph = code.parentElement;
  // A paragraph cannot have a block in it.
  if (display && paragraph?.tagName === "P" && paragraph.childNodes.length === 1)
    paragraph.replaceWith(frame);
  else code.replaceWith(frame);
}

function frameCode(block) {
  const code = block.firstElementChild;
  const name = /^language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
  const nodes = name && highlighted(code.textContent, name);
  if (nodes) code.replaceChildren(...nodes);
  block.tabIndex = 0;
  const frame = h("div.code-block");
  block.replaceWith(frame);
  frame.append(
    h("div.code-bar", h("span", name || "code"), copyButton("Copy this code", "code")),
    block,
  );
}

function copyButton(name, iconName) {
  return iconButton(name, iconName, null, { class: "bare copy" });
}

const TOLD_MS = 1500;

/** Copies what a button of an answer belongs to, if that is what was clicked. */
export async function copyFrom(target) {
  const clicked = target.closest(".copy");
  const frame = clicked?.closest(".code-block, .formula");
  if (!frame) return;
  await copy((frame.querySelector("annotation") ?? frame.querySelector("pre")).textContent);
  const name = clicked.ariaLabel;
  if (name === "Copied") return;
  clicked.ariaLabel = clicked.title = "Copied";
  setTimeout(() => (clicked.ariaLabel = clicked.title = name), TOLD_MS);
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
