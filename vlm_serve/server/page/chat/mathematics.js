// Formulas of answers, set by KaTeX. It builds elements itself; no text is parsed as HTML.

import { h } from "../shared/dom.js";
import { memory, onDemand } from "./loading.js";

const LONGEST = 4000;
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 40, maxExpand: 500 };

const library = onDemand(async () => {
  const address = new URL("../vendor/katex.css", import.meta.url).href;
  const style = h("link", { rel: "stylesheet", href: address });
  const styled = new Promise((resolve, reject) => {
    style.addEventListener("load", resolve);
    style.addEventListener("error", reject);
  });
  document.head.append(style);
  await Promise.all([import("../vendor/katex.js"), styled]);
  return globalThis.katex;
});

const remembered = memory(400);

/** The formula as an element, or null: it is not TeX, or the library is not here yet. */
export function formula(source, display) {
  const katex = source.length <= LONGEST ? library() : null;
  if (!katex) return null;
  const node = remembered(`${display}${source}`, () => typeset(katex, source, display));
  return node?.cloneNode(true) ?? null;
}

function typeset(katex, source, displayMode) {
  try {
    const tree = katex.__renderToDomTree(source, { ...OPTIONS, displayMode });
    withoutStyleAttributes(tree);
    return tree.toNode();
  } catch {
    return null; // shown as it was written
  }
}

/** The page's policy refuses style attributes. Only the copy for screen readers has them. */
function withoutStyleAttributes(tree) {
  const left = [tree];
  while (left.length) {
    const { attributes, children } = left.pop();
    if (attributes) delete attributes.style;
    left.push(...(children ?? []));
  }
}

// Where TeX begins and ends in Markdown. A dollar sign before a blank, or before a digit as in
// prices, begins none: "$5 and $6" is text.
const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;
const INLINE =
  /^(?:\$\$([^$]+?)\$\$|\$(?!\s)((?:\\[\s\S]|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\])/;

function token(type, display, match, source) {
  return { type, raw: match[0], text: source.trim(), display };
}

/** Extensions of the parser. A formula becomes `<code class="math">` for `DOMPurify` to pass. */
export function mathExtensions(escaped) {
  const renderer = ({ text, display }) =>
    `<code class="math${display ? " display" : ""}">${escaped(text)}</code>`;
  return [
    {
      name: "mathBlock",
      level: "block",
      start: (text) => text.match(/^(?:\$\$|\\\[)/m)?.index,
      tokenizer(text) {
        const match = BLOCK.exec(text);
        return match ? token("mathBlock", true, match, match[1] ?? match[2]) : undefined;
      },
      renderer: (it) => `<p>${renderer(it)}</p>`,
    },
    {
      name: "math",
      level: "inline",
      start: (text) => text.match(/\$|\\[([]/)?.index,
      tokenizer(text) {
        const match = INLINE.exec(text);
        if (!match) return undefined;
        const display = (match[1] ?? match[4]) !== undefined;
        return token("math", display, match, match[1] ?? match[2] ?? match[3] ?? match[4]);
      },
      renderer,
    },
  ];
}
