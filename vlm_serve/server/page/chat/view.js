// The view "Chat": the list of conversations, the one that is open, and the composer.

import { here, requestJson, server } from "../shared/api.js";
import { copy, save } from "../shared/clipboard.js";
import { confirmed } from "../shared/dialogs.js";
import { button, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { storedKey } from "../shared/key.js";
import { Value } from "../shared/value.js";
import { ask } from "./answering.js";
import { Composer } from "./composer.js";
import { newAnswer, newConversation, newTurn, titleOf } from "./conversation.js";
import { forget, keepFor, mediumOf } from "./library.js";
import { askForOptions } from "./options.js";
import { curlCommand, exported } from "./request.js";
import { Sidebar } from "./sidebar.js";
import { conversations, isLasting } from "./store.js";
import { TurnView } from "./turn.js";

const NEAR_END = 80;

export class ChatView {
  #list = [];
  #running = new Map();
  #turnViews = new Map();
  #edited = null;
  #tabs = new BroadcastChannel("vlm-serve-conversations");

  constructor() {
    /** The conversation that is open. */
    this.current = new Value(newConversation());
    /** Counts answers that have ended. */
    this.answered = new Value(0);
    this.sidebar = new Sidebar({
      open: (each) => this.#open(each),
      add: () => this.#open(newConversation()),
      remove: (each) => this.#remove(each),
    });
    this.composer = new Composer({
      onSend: (text, media) => this.#send(text, media),
      onStop: () => this.#stop(),
    });
    this.turns = h("ol", { class: "turns", "aria-label": "Conversation" });
    this.thread = h(
      "div",
      { class: "thread", tabindex: "0", role: "region", "aria-label": "Messages" },
      this.turns,
    );
    this.title = h("h1");
    const main = h(
      "main",
      { class: "conversation", tabindex: "-1" },
      this.#bar(),
      this.thread,
      this.composer.element,
    );
    this.view = h("div", { class: "chat" }, this.sidebar.element, main);
    this.main = main;
    this.composer.takeDropsOn(main);
    this.#tabs.onmessage = ({ data }) => this.#changedElsewhere(data);
  }

  /** Shows what earlier visits have left. */
  async load() {
    this.#list = await conversations.all();
    const open = this.#list.find((each) => each.id === sessionStorage.getItem("vlm-serve-open"));
    for (const each of this.#list) endWhatWasRunning(each);
    this.sidebar.note.textContent = (await isLasting())
      ? ""
      : "This browser stores nothing: conversations end with the tab.";
    this.#open(open ?? this.#list[0] ?? newConversation());
  }

  #bar() {
    return h(
      "header",
      { class: "conversation-bar" },
      button("Conversations", icon("menu"), () => this.view.classList.toggle("with-sidebar"), {
        bare: true,
        class: "bare menu",
      }),
      this.title,
      button("Options", icon("options"), () => this.#options(), { bare: true }),
      button("Copy as a curl command", icon("copy"), () => this.#copyCurl(), { bare: true }),
      button("Export as JSON", icon("save"), () => this.#export(), { bare: true }),
    );
  }

  #open(conversation) {
    this.view.classList.remove("with-sidebar");
    sessionStorage.setItem("vlm-serve-open", conversation.id);
    this.current.set(conversation);
    this.#showTurns();
    this.thread.scrollTop = this.thread.scrollHeight;
  }

  #showTurns() {
    const conversation = this.current.get();
    const actions = {
      retry: (turn) => this.#retry(turn),
      edit: (turn) => this.#edit(turn),
      giveResults: (turn, results) => this.#ask(newTurn("", [], results)),
    };
    this.#turnViews = new Map(
      conversation.turns.map((turn) => [turn.id, new TurnView(turn, actions)]),
    );
    const views = [...this.#turnViews.values()].map((each) => each.element);
    replace(this.turns, views.length ? views : welcome());
    this.#showAround();
  }

  #showAround() {
    const conversation = this.current.get();
    this.title.textContent = titleOf(conversation);
    this.composer.setBusy(this.#running.has(conversation.id));
    this.sidebar.show(this.#list, conversation);
  }

  #send(text, media) {
    this.#cutBefore(this.#edited);
    this.#edited = null;
    this.#ask(
      newTurn(
        text,
        media.map((medium) => medium.id),
      ),
    );
  }

  #ask(turn) {
    const conversation = this.current.get();
    if (this.#running.has(conversation.id)) return;
    conversation.turns.push(turn);
    this.#showTurns();
    this.#answer(conversation, turn);
  }

  #retry(turn) {
    const conversation = this.current.get();
    if (this.#running.has(conversation.id)) return;
    conversation.turns.splice(conversation.turns.indexOf(turn) + 1);
    turn.answer = newAnswer();
    this.#showTurns();
    this.#answer(conversation, turn);
  }

  #edit(turn) {
    this.#edited = turn.id;
    this.composer.edit(turn.text, turn.media.map(mediumOf).filter(Boolean));
    this.composer.notice.textContent = "Sending replaces this question and what came after it.";
  }

  #cutBefore(turnId) {
    const { turns } = this.current.get();
    const index = turns.findIndex((turn) => turn.id === turnId);
    if (index >= 0) turns.splice(index);
  }

  async #answer(conversation, turn) {
    const controller = new AbortController();
    this.#running.set(conversation.id, controller);
    this.#list = [conversation, ...this.#list.filter((each) => each.id !== conversation.id)];
    this.#showAround();
    this.thread.scrollTop = this.thread.scrollHeight;
    await this.#keep(conversation);
    await ask(conversation, controller.signal, () => this.#progress(turn));
    this.#running.delete(conversation.id);
    await this.#keep(conversation);
    this.#showAround();
    this.answered.set(this.answered.get() + 1);
  }

  #progress(turn) {
    const { scrollHeight, scrollTop, clientHeight } = this.thread;
    const follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.#turnViews.get(turn.id)?.update();
    if (follows) requestAnimationFrame(() => (this.thread.scrollTop = this.thread.scrollHeight));
  }

  #stop() {
    this.#running.get(this.current.get().id)?.abort();
  }

  async #keep(conversation) {
    conversation.updated = Date.now();
    await keepFor(
      conversation.id,
      conversation.turns.flatMap((turn) => turn.media),
    );
    await conversations.put(conversation);
    this.#tabs.postMessage(conversation.id);
  }

  async #changedElsewhere(id) {
    if (this.#running.size) return;
    this.#list = await conversations.all();
    for (const each of this.#list) endWhatWasRunning(each);
    const mine = this.current.get();
    const other = this.#list.find((each) => each.id === id);
    if (mine.id === id && other) this.#open(other);
    else this.sidebar.show(this.#list, mine);
  }

  async #remove(conversation) {
    if (
      !(await confirmed(
        "Delete this conversation?",
        `“${titleOf(conversation)}” and its pictures are removed from this browser.`,
        "Delete",
      ))
    )
      return;
    this.#running.get(conversation.id)?.abort();
    await conversations.remove(conversation.id);
    forget(conversation.id);
    this.#list = this.#list.filter((each) => each.id !== conversation.id);
    if (conversation.id === this.current.get().id) this.#open(this.#list[0] ?? newConversation());
    else this.#showAround();
  }

  async #options() {
    const conversation = this.current.get();
    let models = [];
    try {
      models = (await requestJson("/v1/models")).data.map((each) => each.id);
    } catch {
      // The dialog goes without the choice of a model; the state of the server is shown elsewhere.
    }
    const changed = await askForOptions(conversation.options, models, conversation.model);
    if (changed === null) return;
    Object.assign(conversation, changed);
    if (conversation.turns.length) await this.#keep(conversation);
  }

  async #copyCurl() {
    await copy(
      await curlCommand(
        this.current.get(),
        here("/").slice(0, -1),
        server.get() === "key" || storedKey() !== "",
      ),
    );
    this.composer.notice.textContent =
      "The command is on the clipboard. Pictures are read from files of their names.";
  }

  async #export() {
    const conversation = this.current.get();
    save(
      `${titleOf(conversation).replace(/[^\w-]+/g, "-")}.json`,
      "application/json",
      await exported(conversation),
    );
  }
}

function welcome() {
  return h(
    "li",
    { class: "welcome" },
    h("h2", null, "Ask about a picture, then ask again."),
    h(
      "p",
      null,
      "Drop, paste or choose pictures and videos. The second answer shows how much of the first one's work was reused, and why not more.",
    ),
  );
}

/** A reload has ended what was still streaming. */
function endWhatWasRunning(conversation) {
  for (const { answer } of conversation.turns)
    if (answer.finish === null) answer.finish = "stopped";
}
