// Where a question is written: text, and pictures, videos and text files by button, drop and paste.

import { button, freshId, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { attach, bytesInRequest } from "./attaching.js";
import { mediumFigure } from "./media.js";

const MAX_HEIGHT = 220;

export class Composer {
  #media = [];
  #busy = false;
  #actions;

  /**
   * @param {{send: (text: string, media: object[]) => void, stop: () => void,
   *   room: () => {limit: number, used: number}, editLast: () => void, leave: () => void}} actions
   *   `room`: as `attach` takes it, without the files that are attached here
   */
  constructor(actions) {
    this.#actions = actions;
    const id = freshId("question");
    this.text = h("textarea", {
      id,
      rows: 1,
      placeholder: "Ask about a picture or video",
      on: {
        keydown: (event) => this.#onKey(event),
        input: () => this.#fit(),
        paste: (event) => this.#onPaste(event),
      },
    });
    this.file = h("input", {
      type: "file",
      class: "unseen",
      multiple: true,
      tabindex: "-1",
      "aria-label": "Pictures, videos and texts",
      on: { change: () => this.#addFiles([...this.file.files]) },
    });
    this.attached = h("div", { class: "attached" });
    this.notice = h("p", { class: "notice", role: "status" });
    this.leave = button("Leave it as it was", null, () => this.#actions.leave(), { hidden: true });
    this.next = h("div", { class: "next" });
    this.action = h("div");
    this.element = h(
      "div",
      { class: "composer" },
      this.next,
      h("div", { class: "noticed" }, this.notice, this.leave),
      this.attached,
      h(
        "div",
        { class: "line" },
        button("Add pictures, videos or texts", icon("clip"), () => this.file.click(), { bare: true }),
        this.file,
        h("label", { for: id, class: "unseen" }, "Question"),
        this.text,
        this.action,
      ),
    );
    this.setBusy(false);
  }

  /** Makes an area take dropped files. */
  takeDropsOn(area) {
    const over = (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      area.classList.add("dropping");
    };
    area.addEventListener("dragover", over);
    area.addEventListener(
      "dragleave",
      (event) => area.contains(event.relatedTarget) || area.classList.remove("dropping"),
    );
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.#addFiles([...event.dataTransfer.files]);
    });
  }

  setBusy(busy) {
    this.#busy = busy;
    const shown = busy
      ? button("Stop", icon("stop"), () => this.#actions.stop(), { bare: true, class: "round" })
      : button("Send", icon("send"), () => this.#send(), { bare: true, class: "round primary" });
    replace(this.action, shown);
  }

  /** Puts a question back to be changed. */
  edit(text, media) {
    this.text.value = text;
    this.#media = [...media];
    this.#showMedia();
    this.#fit();
    this.text.focus();
    this.text.setSelectionRange(text.length, text.length);
  }

  /** Says something above the box; `changing`: a question that is sent already is in it. */
  say(text, changing = false) {
    this.notice.textContent = text;
    this.leave.hidden = !changing;
  }

  /** Offers questions to ask with one click. */
  offer(questions) {
    const offers = questions.map((question) =>
      button(question, null, () => this.#actions.send(question, []), { class: "offer" }),
    );
    replace(this.next, offers);
  }

  #onKey(event) {
    if (event.key === "ArrowUp" && !this.text.value && !this.#media.length) {
      event.preventDefault();
      this.#actions.editLast();
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#send();
  }

  #onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.#addFiles(files);
  }

  async #addFiles(files) {
    const { limit, used } = this.#actions.room();
    const mine = this.#media.reduce((sum, { blob }) => sum + bytesInRequest(blob.size), 0);
    const { media, refusals } = await attach(files, { limit, used: used + mine });
    this.notice.textContent = refusals.join(" ");
    this.#media.push(...media);
    this.file.value = "";
    this.#showMedia();
    this.text.focus();
  }

  #showMedia() {
    const figures = this.#media.map((medium) => {
      const drop = () => {
        this.#media = this.#media.filter((each) => each !== medium);
        this.#showMedia();
        this.text.focus();
      };
      return h(
        "div",
        { class: "attachment" },
        mediumFigure(medium),
        button(`Remove ${medium.name}`, icon("close"), drop, { bare: true }),
      );
    });
    replace(this.attached, figures);
  }

  #fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, MAX_HEIGHT)}px`;
  }

  #send() {
    const text = this.text.value.trim();
    if (this.#busy || (!text && !this.#media.length)) return;
    const media = this.#media;
    this.text.value = "";
    this.#media = [];
    this.say("");
    this.#showMedia();
    this.#fit();
    this.#actions.send(text, media);
  }
}
