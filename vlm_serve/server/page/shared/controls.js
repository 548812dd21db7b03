// Buttons, fields and their icons.

import { freshId, h, svg } from "./dom.js";

/** Lines in a square of 20 by 20 units, in the colour of the text around them. */
const PATHS = {
  plus: "M10 4v12M4 10h12",
  minus: "M4 10h12",
  fit: "M3 7V3h4M13 3h4v4M17 13v4h-4M7 17H3v-4",
  clip: "M14.5 9.5 9 15a3 3 0 0 1-4.3-4.3l6-6a2 2 0 0 1 2.8 2.8l-5.8 5.8a.8.8 0 0 1-1.2-1.2l5-5",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  retry: "M15.5 8A6 6 0 1 0 16 11.5M16 4v4h-4",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11.5 5.5l3 3",
  copy: "M7 7V4h9v9h-3M4 7h9v9H4z",
  save: "M10 3v9M6 8.5l4 4 4-4M4 16h12",
  trash: "M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10M9 9v4M11 9v4",
  menu: "M3 6h14M3 10h14M3 14h14",
  options: "M4 6h7M15 6h1M4 14h1M9 14h7M13 4v4M7 12v4",
  key: "M8.5 11.5a3.5 3.5 0 1 1 1-1L16 17M13.5 14.5l2-2",
  close: "M5 5l10 10M15 5 5 15",
  light:
    "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  dark: "M16 12.5A6.5 6.5 0 0 1 7.5 4a6.5 6.5 0 1 0 8.500 8.5z",
  auto: "M10 3a7 7 0 1 0 0 14zM10 3a7 7 0 0 1 0 14",
  pin: "M8 3h4l-.5 5 2.500 2.500H6L8.500 8zM10 10.500V17",
  file: "M5 2.500h6.500L15 6v11.500H5zM11.500 2.500V6H15M7.500 10h5M7.500 13.500h5",
  keys: "M2.500 5.500h15v9h-15zM5.500 8.500h.01M8.500 8.500h.01M11.500 8.500h.01M14.500 8.500h.01M6.500 11.500h7",
  import: "M10 12V3M6 6.500L10 2.500l4 4M4 16h12",
  back: "M12 5l-5 5 5 5",
  forth: "M8 5l5 5-5 5",
  play: "M7 5l8 5-8 5z",
  code: "M7 5.500 2.500 10 7 14.500M13 5.500l4.500 4.500-4.500 4.500",
  tex: "M14.500 6.500V4h-9l5 6-5 6h9v-2.500",
  terminal: "M2.500 4h15v12h-15zM5.500 7.500 8 10l-2.500 2.500M10 12.500h4",
};

/** The icon of that name; screen readers pass over it. */
export function icon(name) {
  const attributes = { viewBox: "0 0 20 20", "aria-hidden": "true", focusable: "false" };
  return svg("svg.icon", attributes, svg("path", { d: PATHS[name] }));
}

/** A button with a text, and before it an icon unless `iconName` is null. */
export function button(text, iconName, onClick, attributes) {
  const facts = { type: "button", on: { click: onClick }, ...attributes };
  return h("button", facts, iconName && icon(iconName), h("span", text));
}

/** A button that shows an icon alone; its name is in its label and its tooltip. */
export function iconButton(name, iconName, onClick, attributes) {
  const names = { "aria-label": name, title: name };
  const facts = { type: "button", class: "bare", ...names, on: { click: onClick }, ...attributes };
  return h("button", facts, icon(iconName));
}

/** A labelled field of a form. */
export function field(label, input, hint) {
  const id = freshId("field");
  input.id = id;
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  const small = hint && h("small", { id: `${id}-hint` }, hint);
  return h("div.field", h("label", { for: id }, label), input, small);
}

/** A choice of values; `empty`: what to call the empty one. */
export function select(values, chosen, empty = "", attributes = {}) {
  const choices = values.map((value) =>
    h("option", { value, selected: value === chosen }, value || empty),
  );
  return h("select", attributes, choices);
}

/** An input for files that a button beside it clicks; `onChoose` gets the files. */
export function fileInput(label, onChoose, attributes) {
  const change = () => {
    const files = [...input.files];
    input.value = "";
    onChoose(files);
  };
  const facts = { type: "file", tabindex: "-1", "aria-label": label, on: { change } };
  const input = h("input.unseen", { ...facts, ...attributes });
  return input;
}
