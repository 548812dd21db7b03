// Light, dark, or as the system says.

import { icon, iconButton } from "./controls.js";
import { replace } from "./dom.js";
import { Value } from "./value.js";

const NAME = "vlm-serve-theme";
const THEMES = ["auto", "light", "dark"];

/** The one in force. Canvases subscribe to it: they are painted anew in other colours. */
export const theme = new Value(
  THEMES.includes(localStorage.getItem(NAME)) ? localStorage.getItem(NAME) : "auto",
);

theme.subscribe((name) => {
  document.documentElement.dataset.theme = name;
  localStorage.setItem(NAME, name);
});

export function themeButton() {
  const shown = iconButton("", null, () =>
    theme.set(THEMES[(THEMES.indexOf(theme.get()) + 1) % THEMES.length]),
  );
  theme.subscribe((name) => {
    const text = `Colours: ${name === "auto" ? "as the system" : name}`;
    shown.title = text;
    shown.setAttribute("aria-label", text);
    replace(shown, icon(name));
  });
  return shown;
}
