// Elements from JavaScript. Text is always text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["checked", "disabled", "hidden", "multiple", "open", "value"]);

/**
 * An HTML element.
 * @param {string} tag
 * @param {object} [facts] attributes; `on` has listeners by event, `style` has CSS properties
 * @param {...(Node|string|null|false)} children
 */
export function h(tag, facts, ...children) {
  return filled(document.createElement(tag), facts, children);
}

/** An SVG element, as `h` makes HTML ones. */
export function svg(tag, facts, ...children) {
  return filled(document.createElementNS(SVG, tag), facts, children);
}

/** Puts other children in place of those that an element has. */
export function replace(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

function filled(element, facts, children) {
  for (const [name, value] of Object.entries(facts ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [type, listener] of Object.entries(value))
        element.addEventListener(type, listener);
    } else if (name === "style") {
      for (const [rule, text] of Object.entries(value)) element.style.setProperty(rule, text);
    } else if (PROPERTIES.has(name)) {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children
    .flat(3)
    .filter((child) => child !== null && child !== undefined && child !== false);
}

let numIds = 0;

/** An id that no other element has. */
export function freshId(stem) {
  numIds += 1;
  return `${stem}-${numIds}`;
}

/** A button with an icon and a name; the name is shown unless `bare`. */
export function button(name, icon, onClick, { bare = false, ...facts } = {}) {
  return h(
    "button",
    {
      type: "button",
      class: bare ? "bare" : null,
      "aria-label": bare ? name : null,
      title: bare ? name : null,
      on: onClick ? { click: onClick } : {},
      ...facts,
    },
    icon,
    bare ? null : h("span", null, name),
  );
}

/** A labelled field of a form. */
export function field(label, input, hint) {
  const id = freshId("field");
  input.id = id;
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    input,
    hint ? h("small", { id: `${id}-hint` }, hint) : null,
  );
}
