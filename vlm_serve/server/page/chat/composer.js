// Where a question is written: text, and pictures, videos and text files by button, drop and paste.
// A file becomes a medium, or a sentence why not.

import { served } from "../shared/api.js";
import { button, fileInput, iconButton } from "../shared/controls.js";
import { freshId, h, replace } from "../shared/dom.js";
import { bytes } from "../shared/words.js";
import { kindOf, mediumFigure, taken } from "./library.js";

const MAX_HEIGHT = 220;

export class Composer {
  #media = [];
  #busy = false;
  #actions;

  /**
   * @param {{send: (text: string, media: object[]) => void, stop: () => void,
   *   media: () => object[], editLast: () => void, leave: () => void}} actions
   *   `media`: what the conversation has already
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
    const label = "Pictures, videos and texts";
    const file = fileInput(label, (files) => this.#addFiles(files), { multiple: true });
    this.attached = h("div.attached");
    this.notice = h("p.notice", { role: "status" });
    this.leave = button("Leave it as it was", null, () => this.#actions.leave(), { hidden: true });
    this.next = h("div.next");
    this.action = h("div");
    this.element = h(
      "div.composer",
      this.next,
      h("div.noticed", this.notice, this.leave),
      this.attached,
      h(
        "div.line",
        iconButton("Add pictures, videos or texts", "clip", () => file.click()),
        file,
        h("label.unseen", { for: id }, "Question"),
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
      ? iconButton("Stop", "stop", () => this.#actions.stop(), { class: "round" })
      : iconButton("Send", "send", () => this.#send(), { class: "round primary" });
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
    const { media, refusals } = await attach(files, [...this.#actions.media(), ...this.#media]);
    this.notice.textContent = refusals.join(" ");
    this.#media.push(...media);
    this.#showMedia();
    this.text.focus();
  }

  #showMedia() {
    const figures = this.#media.map((medium) => {
      const drop = () => {
        this.#media = this.#media.filter((other) => other !== medium);
        this.#showMedia();
        this.text.focus();
      };
      const remove = iconButton(`Remove ${medium.name}`, "close", drop);
      return h("div.attachment", mediumFigure(medium), remove);
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

/** Bytes that a file takes in a request: media travel as base64. */
function bytesInRequest(size) {
  return 4 * Math.ceil(size / 3);
}

/**
 * Takes files in. No file is read before its size is known to fit.
 * @param {File[]} files
 * @param {object[]} others media that the request has besides
 * @returns {Promise<{media: object[], refusals: string[]}>}
 */
export async function attach(files, others) {
  let used = others.reduce((sum, { blob }) => sum + bytesInRequest(blob.size), 0);
  const media = [];
  const refusals = [];
  for (const file of files) {
    const refusal = refusalOf(file, used);
    const kind = refusal ? null : await kindOf(file);
    if (kind === null || kind === "empty") {
      const none = "neither a picture, a video, a PDF document nor a text";
      refusals.push(refusal ?? `${file.name} is ${kind ?? none}.`);
    } else {
      used += bytesInRequest(file.size);
      media.push(await taken(file, kind));
    }
  }
  return { media, refusals };
}

function refusalOf(file, used) {
  const { limit } = served.get();
  const needed = bytesInRequest(file.size);
  if (needed > limit)
    return `${file.name} has ${bytes(file.size)}, and ${bytes(needed)} as it is sent. This server takes requests of up to ${bytes(limit)}.`;
  if (needed + used > limit)
    return `${file.name} does not fit beside the other files of this conversation: this server takes requests of up to ${bytes(limit)}.`;
  return null;
}
