// Where a question is written: text, and pictures and videos by button, drop and paste.

import { button, freshId, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { kindOf, taken } from "./library.js";
import { mediumFigure } from "./media.js";

const MAX_HEIGHT = 220;

export class Composer {
  #media = [];
  #busy = false;
  #onSend;
  #onStop;

  /**
   * @param {{onSend: (text: string, media: object[]) => void, onStop: () => void}} actions
   */
  constructor({ onSend, onStop }) {
    this.#onSend = onSend;
    this.#onStop = onStop;
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
      accept: "image/*,video/*",
      tabindex: "-1",
      "aria-label": "Pictures and videos",
      on: { change: () => this.#addFiles([...this.file.files]) },
    });
    this.attached = h("div", { class: "attached" });
    this.notice = h("p", { class: "notice", role: "status" });
    this.action = h("div");
    this.element = h(
      "div",
      { class: "composer" },
      this.notice,
      this.attached,
      h(
        "div",
        { class: "line" },
        button("Add pictures or videos", icon("clip"), () => this.file.click(), { bare: true }),
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
      ? button("Stop", icon("stop"), () => this.#onStop(), { bare: true, class: "round" })
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

  #onKey(event) {
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
    const refused = files.filter((file) => kindOf(file) === null);
    const media = files.filter((file) => kindOf(file) !== null);
    this.notice.textContent = refused
      .map((file) => `${file.name} is neither a picture nor a video.`)
      .join(" ");
    this.#media.push(...(await Promise.all(media.map(taken))));
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
    this.notice.textContent = "";
    this.#showMedia();
    this.#fit();
    this.#onSend(text, media);
  }
}
