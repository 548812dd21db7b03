// The view "Chat": the list of conversations, the one that is open, and the composer.

import { h } from "../shared/dom.js";
import { Value } from "../shared/value.js";
import { conversationBar } from "./bar.js";
import { attach, Composer } from "./composer.js";
import {
  again,
  branch,
  endWhatWasRunning,
  everyTurn,
  mediaOf,
  newConversation,
  newTurn,
  reopen,
  showVersion,
  titleOf,
} from "./conversation.js";
import { readFile, saveAsFile } from "./exchange.js";
import { forget, keepFor, mediumOf } from "./library.js";
import { modelChoice } from "./model.js";
import { askForDefaults, askForOptions } from "./options.js";
import { ask, copyAsCurl } from "./request.js";
import { Sidebar } from "./sidebar.js";
import { conversations, isLasting } from "./store.js";
import { Thread } from "./thread.js";
import { followUps, welcome } from "./welcome.js";

export class ChatView {
  #list = [];
  #running = new Map();
  #edited = null;
  #tabs = new BroadcastChannel("vlm-serve-conversations");

  constructor() {
    /** The conversation that is open. */
    this.current = new Value(newConversation());
    /** Counts answers that have ended. */
    this.answered = new Value(0);
    this.sidebar = new Sidebar({
      open: (conversation) => this.#open(conversation),
      add: () => this.begin(),
      remove: (conversation) => this.#remove(conversation),
      rename: (conversation, title) => this.#rename(conversation, title),
      read: (file) => this.#import(file),
      setDefaults: askForDefaults,
    });
    this.composer = new Composer({
      send: (text, media) => this.#send(text, media),
      stop: () => this.#stop(),
      media: () => this.#media(),
      editLast: () => this.#editLast(),
      leave: () => this.#leaveEdit(),
    });
    const actions = {
      retry: (turn) => this.#retry(turn),
      edit: (turn) => this.#edit(turn),
      goOn: (turn) => this.#goOn(turn),
      giveResults: (turn, results) => this.#ask(newTurn("", [], results)),
      showVersion: (turn, number) => this.#showVersion(turn, number),
    };
    this.thread = new Thread(
      actions,
      welcome((question, files) => this.#tryExample(question, files)),
    );
    this.title = h("h1");
    const choose = (model) => this.#change(this.current.get(), { model });
    this.model = modelChoice(this.current, choose);
    const bar = conversationBar(this.title, {
      list: () => this.view.classList.toggle("with-sidebar"),
      setOptions: () => this.#setOptions(),
      copy: async () => this.composer.say(await copyAsCurl(this.current.get())),
      save: () => saveAsFile(this.current.get()),
    });
    const main = h(
      "main.conversation",
      { tabindex: "-1" },
      bar,
      this.thread.element,
      this.composer.element,
    );
    this.view = h("div.chat", this.sidebar.element, main);
    this.composer.takeDropsOn(main);
    this.#tabs.onmessage = ({ data }) => this.#changedElsewhere(data);
  }

  /** Shows what earlier visits have left. */
  async load() {
    await this.#readList();
    const id = sessionStorage.getItem("vlm-serve-open");
    const open = this.#list.find((conversation) => conversation.id === id);
    this.sidebar.note.textContent = (await isLasting())
      ? ""
      : "This browser stores nothing: conversations end with the tab.";
    this.#open(open ?? this.#list[0] ?? newConversation());
  }

  async #readList() {
    const stored = await conversations.all();
    this.#list = stored.sort((a, b) => b.updated - a.updated);
    this.#list.forEach(endWhatWasRunning);
  }

  /** Begins a conversation with the model of the one that is open. */
  begin() {
    this.#open({ ...newConversation(), model: this.current.get().model });
  }

  /** Leads to the search. */
  search() {
    this.view.classList.add("with-sidebar");
    this.sidebar.search.focus();
  }

  /** Stops the answer, else leaves the change of a question, else leads to the box. */
  escape() {
    this.view.classList.remove("with-sidebar");
    if (this.#isBusy()) this.#stop();
    else if (this.#edited !== null) this.#leaveEdit();
    this.composer.text.focus();
  }

  #open(conversation) {
    this.view.classList.remove("with-sidebar");
    sessionStorage.setItem("vlm-serve-open", conversation.id);
    if (this.#edited !== null) this.#leaveEdit();
    this.current.set(conversation);
    this.#showTurns();
    this.thread.follow();
    if (!this.view.hidden && !document.querySelector("dialog[open]")) this.composer.text.focus();
  }

  #showTurns() {
    this.thread.show(this.current.get());
    this.#showAround();
  }

  #showAround() {
    const conversation = this.current.get();
    this.title.textContent = titleOf(conversation);
    const busy = this.#isBusy();
    this.composer.setBusy(busy);
    this.composer.offer(busy ? [] : followUps(conversation));
    this.sidebar.show(this.#list, conversation);
  }

  /** Whether an answer of the open conversation streams. */
  #isBusy() {
    return this.#running.has(this.current.get().id);
  }

  /** The media of the open conversation. */
  #media() {
    return mediaOf(this.current.get().turns).map(mediumOf).filter(Boolean);
  }

  async #tryExample(question, files) {
    const { media, refusals } = await attach(files, this.#media());
    for (const medium of media) medium.example = true;
    if (refusals.length) this.composer.say(refusals.join(" "));
    else this.#send(question, media);
  }

  #send(text, media) {
    if (this.#isBusy()) return;
    const conversation = this.current.get();
    const index = conversation.turns.findIndex((turn) => turn.id === this.#edited);
    if (index >= 0) branch(conversation, index);
    this.#edited = null;
    const ids = media.map((medium) => medium.id);
    this.#ask(newTurn(text, ids));
  }

  #ask(turn) {
    if (this.#isBusy()) return;
    this.current.get().turns.push(turn);
    this.#showTurns();
    this.#answer(turn);
  }

  #retry(turn) {
    if (!this.#isBusy()) this.#ask(again(this.current.get(), turn));
  }

  #goOn(turn) {
    if (this.#isBusy() || !reopen(this.current.get(), turn)) return;
    this.thread.update(turn);
    this.#answer(turn);
  }

  #edit(turn) {
    this.#edited = turn.id;
    this.composer.edit(turn.text, turn.media.map(mediumOf).filter(Boolean));
    this.composer.say(
      "Sending makes another version of this question; the one that is there is kept.",
      true,
    );
  }

  #editLast() {
    const last = this.current.get().turns.findLast((turn) => turn.results === null);
    if (last && !this.#isBusy()) this.#edit(last);
  }

  #leaveEdit() {
    this.#edited = null;
    this.composer.edit("", []);
    this.composer.say("");
  }

  async #showVersion(turn, number) {
    if (this.#isBusy()) return;
    const conversation = this.current.get();
    const index = conversation.turns.indexOf(turn);
    showVersion(conversation, index, number);
    this.#showTurns();
    this.thread.reveal(conversation.turns[index]);
    await this.#keep(conversation);
  }

  async #answer(turn) {
    const conversation = this.current.get();
    const controller = new AbortController();
    this.#running.set(conversation.id, controller);
    this.#list = [conversation, ...this.#listWithout(conversation)];
    this.#showAround();
    this.thread.follow();
    await this.#keep(conversation);
    await ask(conversation, controller.signal, () => this.thread.update(turn));
    this.#running.delete(conversation.id);
    await this.#keep(conversation);
    this.#showAround();
    this.answered.set(this.answered.get() + 1);
  }

  #listWithout(conversation) {
    return this.#list.filter(({ id }) => id !== conversation.id);
  }

  #stop() {
    this.#running.get(this.current.get().id)?.abort();
  }

  async #keep(conversation) {
    conversation.updated = Date.now();
    await keepFor(conversation.id, mediaOf(everyTurn(conversation)));
    await conversations.put(conversation);
    this.#tabs.postMessage(conversation.id);
  }

  async #changedElsewhere(id) {
    if (this.#running.size) return;
    await this.#readList();
    const mine = this.current.get();
    const other = this.#list.find((conversation) => conversation.id === id);
    if (mine.id === id && other) this.#open(other);
    else this.sidebar.show(this.#list, mine);
  }

  async #remove(conversation) {
    this.#running.get(conversation.id)?.abort();
    await conversations.remove(conversation.id);
    await forget(conversation.id);
    this.#list = this.#listWithout(conversation);
    if (conversation.id === this.current.get().id) this.#open(this.#list[0] ?? newConversation());
    else this.#showAround();
  }

  async #rename(conversation, title) {
    conversation.title = title;
    await this.#keep(conversation);
    this.#showAround();
  }

  async #import(file) {
    const { conversation, problem } = await readFile(file);
    if (problem !== null) {
      this.view.classList.remove("with-sidebar");
      this.composer.say(problem);
      return;
    }
    await this.#keep(conversation);
    this.#list = [conversation, ...this.#list];
    this.#open(conversation);
  }

  async #setOptions() {
    const conversation = this.current.get();
    const options = await askForOptions(conversation.options);
    if (options !== null) await this.#change(conversation, { options });
  }

  async #change(conversation, facts) {
    Object.assign(conversation, facts);
    if (conversation.turns.length) await this.#keep(conversation);
  }
}
