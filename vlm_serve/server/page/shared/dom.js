// Elements from JavaScript. Text is always text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["checked", "disabled", "hidden", "multiple", "open", "value"]);

/**
 * An HTML element.
 * @param {string} selector its tag, and classes after a point each: "p.note"
 * @param {...(object|Node|string|null|false)} contents attributes as a plain object, which may be
 *   left out, and children; of the attributes `on` has listeners by event, `style` CSS properties
 */
export function h(selector, ...contents) {
  return filled((tag) => document.createElement(tag), selector, contents);
}

/** An SVG element, as `h` makes HTML ones. */
export function svg(selector, ...contents) {
  return filled((tag) => document.createElementNS(SVG, tag), selector, contents);
}

/** Puts other children in place of those that an element has. */
export function replace(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

function filled(create, selector, contents) {
  const [tag, ...classes] = selector.split(".");
  const element = create(tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const attributes = contents[0]?.constructor === Object ? contents.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
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
  element.append(...present(contents));
  return element;
}

/** Children without what stands for none. */
function present(children) {
  return children.flat(3).filter((child) => child || child === 0);
}

/** A function that has `draw` called once in the next frame, however often it is called itself. */
export function onceAFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

let numIds = 0;

/** An id that no other element has. */
export function freshId(stem) {
  numIds += 1;
  return `${stem}-${numIds}`;
}

/** Terms with what is said of them, from pairs. */
export function termList(className, rows) {
  const items = rows.map(([term, value]) => h("div", h("dt", term), h("dd", value)));
  return h(`dl.${className}`, items);
}
