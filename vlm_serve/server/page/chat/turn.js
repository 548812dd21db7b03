// One turn of a conversation: the question, the answer, and what of the prompt was reused.

import { copy, save } from "../shared/clipboard.js";
import { button, field, iconButton } from "../shared/controls.js";
import { h, onceAFrame, replace } from "../shared/dom.js";
import { legend, promptBar } from "../reuse/bar.js";
import { explanation, numbersLine } from "../reuse/report.js";
import { mayGoOn, titleOf } from "./conversation.js";
import { mediumFigure, mediumOf } from "./library.js";
import { copyFrom, rendered } from "./markdown.js";

const FINISHED = {
  length: "The answer reached its maximum length.",
  stopped: "Stopped.",
};

export class TurnView {
  #turn;
  #actions;
  #showSoon = onceAFrame(() => this.#turn.answer.finish === null && this.#show());

  /**
   * @param {object} turn see conversation.js
   * @param {{retry: Function, edit: Function, goOn: Function, giveResults: Function,
   *   showVersion: Function}} actions called with the turn
   * @param {{number: number, count: number}} version which one of how many, from 1
   */
  constructor(turn, actions, version) {
    this.#turn = turn;
    this.#actions = actions;
    this.text = h("div.markdown", { on: { click: (event) => copyFrom(event.target) } });
    this.folded = h("div");
    this.below = h("div.below");
    this.answer = h(
      "article.answer",
      { "aria-label": "Answer" },
      this.folded,
      this.text,
      this.below,
    );
    this.element = h(
      "li.turn",
      this.#question(),
      version.count > 1 && this.#versions(version),
      this.answer,
    );
    this.update();
  }

  /** Shows how far the answer is. Called often: what takes long is done once a frame at most. */
  update() {
    if (this.#turn.answer.finish === null) this.#showSoon();
    else this.#show();
  }

  /** Shows the text anew, with what has been loaded for it meanwhile. */
  renew() {
    const { text } = this.#turn.answer;
    if (text) replace(this.text, rendered(text));
  }

  #versions({ number, count }) {
    const arrow = (name, iconName, other) =>
      iconButton(name, iconName, () => this.#actions.showVersion(this.#turn, other), {
        disabled: other < 1 || other > count,
      });
    return h(
      "div.versions",
      { role: "group", "aria-label": "Versions of this question" },
      arrow("Earlier version", "back", number - 1),
      h("span", { role: "status" }, `${number} of ${count}`),
      arrow("Later version", "forth", number + 1),
    );
  }

  #question() {
    const { text, media, results } = this.#turn;
    if (results !== null) {
      const rows = Object.entries(results).map(([id, result]) =>
        h("div", h("code", id), h("pre", { tabindex: "0" }, result)),
      );
      return h("article.question", { "aria-label": "Results of tools" }, rows);
    }
    const figures = media.map((id) => mediumFigure(mediumOf(id)));
    const edit = () => this.#actions.edit(this.#turn);
    const shown = figures.length > 0 && h("div.figures", figures);
    const pencil = iconButton("Edit this question", "edit", edit);
    return h(
      "article.question",
      { "aria-label": "Question" },
      text && shown,
      h("div.said", pencil, text ? h("p.typed", text) : shown),
    );
  }

  #show() {
    const { text, finish } = this.#turn.answer;
    const waiting = finish === null;
    this.answer.setAttribute("aria-busy", String(waiting));
    replace(this.text, text ? rendered(text) : waiting && h("span.waiting", "…"));
    this.#showFolded();
    replace(this.below, !waiting && this.#ending());
  }

  #showFolded() {
    const { reasoning, calls } = this.#turn.answer;
    const parts = reasoning ? [["Reasoning", reasoning]] : [];
    for (const call of calls) parts.push([`Call of ${call.name}`, indented(call.arguments)]);
    if (this.folded.childElementCount !== parts.length) {
      replace(
        this.folded,
        parts.map(([title]) =>
          h("details.folded", h("summary", title), h("pre", { tabindex: "0" })),
        ),
      );
    }
    for (const [index, [, text]] of parts.entries())
      this.folded.children[index].lastChild.textContent = text;
  }

  #ending() {
    const { text, error, finish, report } = this.#turn.answer;
    const title = titleOf({ turns: [this.#turn] });
    const saveText = () => save(title, "md", "text/markdown", text);
    return [
      error
        ? h("p.problem", { role: "alert" }, error)
        : FINISHED[finish] && h("p.note", FINISHED[finish]),
      finish === "tool_calls" && this.#resultForm(),
      report && reuseOf(this.#turn.answer),
      h(
        "div.tools",
        mayGoOn(this.#turn.answer) &&
          button("Continue", "play", () => this.#actions.goOn(this.#turn), { class: "bare go-on" }),
        text && iconButton("Copy this answer", "copy", () => copy(text)),
        text && iconButton("Save this answer as Markdown", "save", saveText),
        iconButton("Ask again", "retry", () => this.#actions.retry(this.#turn)),
      ),
    ];
  }

  #resultForm() {
    const inputs = this.#turn.answer.calls.map((call) => [call, h("textarea", { rows: 2 })]);
    const give = () => {
      const results = inputs.map(([{ id }, input]) => [id, input.value]);
      this.#actions.giveResults(this.#turn, Object.fromEntries(results));
    };
    return h(
      "div.results",
      inputs.map(([{ name }, input]) => field(`Result of ${name}`, input)),
      button("Send results", null, give),
    );
  }
}

function reuseOf(answer) {
  const numbers = numbersLine(answer).map((text) => h("span", text));
  return h(
    "details.reuse-of",
    h("summary", promptBar(answer.report), h("span.numbers-line", numbers)),
    legend(answer.report),
    explanation(answer.report),
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
