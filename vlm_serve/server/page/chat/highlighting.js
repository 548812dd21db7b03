// Code of answers in colours. highlight.js finds the words and their kinds; the elements are made here.

import { h } from "../shared/dom.js";
import { memory, onDemand } from "./loading.js";

const LONGEST = 12_000;

/** Languages that are here, by their file; with other names that models give them. */
const LANGUAGES = {
  bash: ["sh", "shell", "zsh", "console"],
  c: ["h"],
  cpp: ["c++", "cc", "hpp", "cuda"],
  csharp: ["cs", "c#"],
  css: [],
  diff: ["patch"],
  dockerfile: ["docker"],
  go: ["golang"],
  ini: ["toml"],
  java: [],
  javascript: ["js", "jsx", "mjs"],
  json: ["jsonc", "json5"],
  kotlin: ["kt"],
  latex: ["tex"],
  lua: [],
  makefile: ["make"],
  markdown: ["md"],
  php: [],
  powershell: ["ps1"],
  python: ["py", "python3"],
  r: [],
  ruby: ["rb"],
  rust: ["rs"],
  sql: [],
  swift: [],
  typescript: ["ts", "tsx"],
  xml: ["html", "svg", "vue"],
  yaml: ["yml"],
};
const FILES = new Map(
  Object.entries(LANGUAGES).flatMap(([file, names]) =>
    [file, ...names].map((name) => [name, file]),
  ),
);

const core = onDemand(async () => (await import("../vendor/highlight.js")).default);
const grammars = new Map();
const remembered = memory(100);

/** The code as a list of nodes, or null: the language is unknown, or not here yet. */
export function highlighted(code, name) {
  const language = FILES.get(name.toLowerCase());
  if (language === undefined || code.length > LONGEST) return null;
  if (!grammars.has(language))
    grammars.set(
      language,
      onDemand(() => import(`../vendor/languages/${language}.js`)),
    );
  const [library, grammar] = [core(), grammars.get(language)()];
  if (!library || !grammar) return null;
  const nodes = remembered(`${language} ${code}`, () => coloured(library, grammar, language, code));
  return nodes.map((node) => node.cloneNode(true));
}

function coloured(library, grammar, language, code) {
  if (!library.getLanguage(language)) library.registerLanguage(language, grammar.default);
  const { _emitter } = library.highlight(code, { language, ignoreIllegals: true });
  return elementsOf(_emitter.root);
}

/** The elements of a node's children: `{scope, children}` or a text each. */
function elementsOf({ children }) {
  return children.map((child) =>
    typeof child === "string"
      ? document.createTextNode(child)
      : h(child.scope ? `span.code-${child.scope.split(".")[0]}` : "span", elementsOf(child)),
  );
}
