// Puts the page together: the three views, what stands above them, and the state of the server.

import { ChatView } from "./chat/view.js";
import { known, loadLibrary } from "./chat/library.js";
import { LiveView } from "./live/view.js";
import { reuseView } from "./reuse/view.js";
import { learnServed, server, storedKey } from "./shared/api.js";
import { askForKey } from "./shared/dialogs.js";
import { button, iconButton } from "./shared/controls.js";
import { h, replace } from "./shared/dom.js";
import { onShortcuts, showShortcuts } from "./shared/keyboard.js";
import { themeButton } from "./shared/theme.js";

const NAMES = { chat: "Chat", reuse: "What was reused", live: "Live cache" };

const chat = new ChatView();
const reuse = reuseView(chat.current, [chat.answered, known]);
const live = new LiveView();
const views = { chat: chat.view, reuse: reuse.view, live: live.view };

const links = Object.entries(NAMES).map(([name, title]) => h("a", { href: `#${name}` }, title));
const state = h("div.server-state", { role: "status" });

document.body.append(
  h("a.skip", { href: "#chat", on: { click: skip } }, "Skip to the content"),
  h(
    "header.top",
    h("span.brand", "vlm-serve"),
    h("nav", { "aria-label": "Views" }, links),
    chat.model,
    iconButton("Keyboard shortcuts", "keys", showShortcuts, { class: "bare keys" }),
    iconButton("API key", "key", () => changeKey(false)),
    themeButton(),
  ),
  state,
  ...Object.values(views),
);

let asking = false;

/** Asks for a key until the server takes it, or the reader has had enough. */
async function changeKey(wrong) {
  if (asking) return;
  asking = true;
  while (await askForKey(wrong)) {
    await greet();
    wrong = server.get() === "key";
    if (!wrong) break;
  }
  asking = false;
}

/** Learns what is served, and with that whether the server is there and takes the key. */
async function greet() {
  try {
    await learnServed();
    live.reconnect();
  } catch {
    // What is wrong is shown by the state of the server.
  }
}

server.subscribe((status) => {
  const giveKey = button("Enter a key", "key", () => changeKey(false));
  const problems = {
    gone: ["The server does not answer. Trying again…"],
    key: ["The server requires an API key. ", giveKey],
  };
  replace(state, problems[status] && h("p.problem", problems[status]));
  if (status === "key") changeKey(storedKey() !== "");
  if (status === "ok") queueMicrotask(greet);
});

function show() {
  const [asked, key] = location.hash.slice(1).split("/");
  const name = Object.hasOwn(views, asked) ? asked : "chat";
  for (const view of Object.values(views)) view.hidden = view !== views[name];
  for (const link of links) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${NAMES[name]} · vlm-serve`;
  reuse.show();
  live.setShown(name === "live", key);
}

function skip(event) {
  event.preventDefault();
  Object.values(views)
    .find((view) => !view.hidden)
    .querySelector("[tabindex]")
    ?.focus();
}

function go(name, act) {
  return () => {
    if (chat.view.hidden || name !== "chat") location.hash = name;
    // The view is shown by an event that comes later.
    if (act) setTimeout(act);
  };
}

onShortcuts({
  "Ctrl+/": showShortcuts,
  "Ctrl+KeyK": go("chat", () => chat.search()),
  "Alt+KeyN": go("chat", () => chat.begin()),
  "Alt+Digit1": go("chat"),
  "Alt+Digit2": go("reuse"),
  "Alt+Digit3": go("live"),
  Escape: () => !chat.view.hidden && chat.escape(),
});

window.addEventListener("hashchange", show);
await loadLibrary();
show();
await chat.load();
