// The view "Chat": the list of conversations, the one that is open, and the composer.

import { h, replace } from "../shared/dom.js";
import { served } from "../shared/served.js";
import { Value } from "../shared/value.js";
import { ask } from "./answering.js";
import { attach, roomOf } from "./attaching.js";
import { branch, endWhatWasRunning, everyTurn, showVersion, versionAt } from "./branches.js";
import { conversationBar } from "./bar.js";
import * as commands from "./commands.js";
import { Composer } from "./composer.js";
import { mediaOf, newAnswer, newConversation, newTurn, titleOf } from "./conversation.js";
import { Following } from "./following.js";
import { forget, keepFor, mediumOf } from "./library.js";
import { arrived } from "./loading.js";
import { Sidebar } from "./sidebar.js";
import { conversations, isLasting } from "./store.js";
import { TurnView } from "./turn.js";
import { followUps, welcome } from "./welcome.js";

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
      add: () => this.begin(),
      remove: (each) => this.#remove(each),
      rename: (each) => this.#rename(each),
      read: (file) => this.#import(file),
    });
    this.composer = new Composer({
      send: (text, media) => this.#send(text, media),
      stop: () => this.#stop(),
      room: () => roomOf(this.current.get()),
      editLast: () => this.#editLast(),
      leave: () => this.#leaveEdit(),
    });
    this.welcome = welcome((question, files) => this.#tryExample(question, files));
    this.turns = h("ol", { class: "turns", "aria-label": "Conversation" });
    this.thread = h(
      "div",
      { class: "thread", tabindex: "0", role: "region", "aria-label": "Messages" },
      this.turns,
    );
    this.following = new Following(this.thread, this.turns);
    this.title = h("h1");
    const main = h(
      "main",
      { class: "conversation", tabindex: "-1" },
      conversationBar(this.title, {
        list: () => this.view.classList.toggle("with-sidebar"),
        options: () => this.#options(),
        copy: () => this.#copyCurl(),
        save: () => commands.saveAsFile(this.current.get()),
      }),
      this.thread,
      this.composer.element,
    );
    this.view = h("div", { class: "chat" }, this.sidebar.element, main);
    this.composer.takeDropsOn(main);
    served.subscribe(() => this.welcome.update());
    arrived.subscribe(() => this.#turnViews.forEach((each) => each.renew()));
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

  begin() {
    this.#open(newConversation());
  }

  /** Leads to the search. */
  search() {
    this.view.classList.add("with-sidebar");
    this.sidebar.search.focus();
  }

  /** Stops the answer, else leaves the change of a question, else leads to the box. */
  escape() {
    this.view.classList.remove("with-sidebar");
    if (this.#running.has(this.current.get().id)) this.#stop();
    else if (this.#edited !== null) this.#leaveEdit();
    this.composer.text.focus();
  }

  #open(conversation) {
    this.view.classList.remove("with-sidebar");
    sessionStorage.setItem("vlm-serve-open", conversation.id);
    if (this.#edited !== null) this.#leaveEdit();
    this.current.set(conversation);
    this.#showTurns();
    this.following.begin();
    if (!this.view.hidden && !document.querySelector("dialog[open]")) this.composer.text.focus();
  }

  #showTurns() {
    const conversation = this.current.get();
    const actions = {
      retry: (turn) => this.#retry(turn),
      edit: (turn) => this.#edit(turn),
      giveResults: (turn, results) => this.#ask(newTurn("", [], results)),
      showVersion: (turn, number) => this.#showVersion(turn, number),
    };
    this.#turnViews = new Map(
      conversation.turns.map((turn, index) => [
        turn.id,
        new TurnView(turn, actions, versionAt(conversation, index)),
      ]),
    );
    const views = [...this.#turnViews.values()].map((each) => each.element);
    replace(this.turns, views.length ? views : this.welcome.element);
    this.#showAround();
  }

  #showAround() {
    const conversation = this.current.get();
    this.title.textContent = titleOf(conversation);
    const busy = this.#running.has(conversation.id);
    this.composer.setBusy(busy);
    this.composer.offer(busy ? [] : followUps(conversation));
    this.sidebar.show(this.#list, conversation);
  }

  async #tryExample(question, files) {
    const { media, refusals } = await attach(files, roomOf(this.current.get()));
    for (const medium of media) medium.example = true;
    if (refusals.length) this.composer.say(refusals.join(" "));
    else this.#send(question, media);
  }

  #send(text, media) {
    const conversation = this.current.get();
    if (this.#running.has(conversation.id)) return;
    const index = conversation.turns.findIndex((turn) => turn.id === this.#edited);
    if (index >= 0) branch(conversation, index);
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

  /** Asks again. An answer that came is kept as another version; an error is not. */
  #retry(turn) {
    const conversation = this.current.get();
    if (this.#running.has(conversation.id)) return;
    const index = conversation.turns.indexOf(turn);
    if (turn.answer.error && turn === conversation.turns.at(-1)) {
      turn.answer = newAnswer();
    } else {
      branch(conversation, index);
      turn = newTurn(turn.text, turn.media, turn.results);
      conversation.turns.push(turn);
    }
    this.#showTurns();
    this.#answer(conversation, turn);
  }

  #edit(turn) {
    this.#edited = turn.id;
    this.composer.edit(turn.text, turn.media.map(mediumOf).filter(Boolean));
    this.composer.say("Sending makes another version of this question; the one that is there is kept.", true);
  }

  #editLast() {
    const last = this.current.get().turns.findLast((turn) => turn.results === null);
    if (last && !this.#running.has(this.current.get().id)) this.#edit(last);
  }

  #leaveEdit() {
    this.#edited = null;
    this.composer.edit("", []);
    this.composer.say("");
  }

  async #showVersion(turn, number) {
    const conversation = this.current.get();
    if (this.#running.has(conversation.id)) return;
    const index = conversation.turns.indexOf(turn);
    showVersion(conversation, index, number);
    this.#showTurns();
    this.following.stop();
    const shown = this.#turnViews.get(conversation.turns[index].id);
    shown.element.scrollIntoView({ block: "nearest" });
    shown.element.querySelector(".versions button:enabled")?.focus();
    await this.#keep(conversation);
  }

  async #answer(conversation, turn) {
    const controller = new AbortController();
    this.#running.set(conversation.id, controller);
    this.#list = [conversation, ...this.#list.filter((each) => each.id !== conversation.id)];
    this.#showAround();
    this.following.begin();
    await this.#keep(conversation);
    await ask(conversation, controller.signal, () => this.#turnViews.get(turn.id)?.update());
    this.#running.delete(conversation.id);
    await this.#keep(conversation);
    this.#showAround();
    this.answered.set(this.answered.get() + 1);
  }

  #stop() {
    this.#running.get(this.current.get().id)?.abort();
  }

  async #keep(conversation) {
    conversation.updated = Date.now();
    await keepFor(
      conversation.id,
      mediaOf(everyTurn(conversation)),
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
    if (!(await commands.mayRemove(conversation))) return;
    this.#running.get(conversation.id)?.abort();
    await conversations.remove(conversation.id);
    forget(conversation.id);
    this.#list = this.#list.filter((each) => each.id !== conversation.id);
    if (conversation.id === this.current.get().id) this.#open(this.#list[0] ?? newConversation());
    else this.#showAround();
  }

  async #rename(conversation) {
    const title = await commands.otherTitle(conversation);
    if (title === null) return;
    conversation.title = title;
    await this.#keep(conversation);
    this.#showAround();
  }

  async #import(file) {
    const { conversation, problem } = await commands.readFile(file);
    if (problem !== null) {
      this.view.classList.remove("with-sidebar");
      this.composer.say(problem);
      return;
    }
    await this.#keep(conversation);
    this.#list = [conversation, ...this.#list];
    this.#open(conversation);
  }

  async #options() {
    const conversation = this.current.get();
    const changed = await commands.otherOptions(conversation);
    if (changed === null) return;
    Object.assign(conversation, changed);
    if (conversation.turns.length) await this.#keep(conversation);
  }

  async #copyCurl() {
    this.composer.say(await commands.copyAsCurl(this.current.get()));
  }
}
