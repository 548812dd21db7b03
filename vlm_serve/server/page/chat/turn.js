// One turn of a conversation: the question, the answer, and what of the prompt was reused.

import { button, field, h, replace } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { copy } from "../shared/clipboard.js";
import { legend, promptBar } from "../reuse/bar.js";
import { linkToNode, numbersLine, sentences } from "../reuse/facts.js";
import { mediumOf } from "./library.js";
import { copyFrom, rendered } from "./markdown.js";
import { mediumFigure } from "./media.js";

const FINISHED = {
  length: "The answer reached its maximum length.",
  stopped: "Stopped.",
  error: null,
};

export class TurnView {
  #turn;
  #actions;
  #asked = null;

  /**
   * @param {object} turn see conversation.js
   * @param {{retry: Function, edit: Function, giveResults: Function, showVersion: Function}} actions
   *   called with the turn
   * @param {{number: number, count: number}} version see branches.js
   */
  constructor(turn, actions, version) {
    this.#turn = turn;
    this.#actions = actions;
    this.text = h("div", { class: "markdown", on: { click: (event) => copyFrom(event.target) } });
    this.folded = h("div");
    this.below = h("div", { class: "below" });
    this.answer = h(
      "article",
      { class: "answer", "aria-label": "Answer" },
      this.folded,
      this.text,
      this.below,
    );
    this.element = h(
      "li",
      { class: "turn" },
      this.#question(),
      version.count > 1 ? this.#versions(version) : null,
      this.answer,
    );
    this.update();
  }

  /** Shows how far the answer is. Called often: what takes long is done once a frame at most. */
  update() {
    this.#asked ??= requestAnimationFrame(() => {
      this.#asked = null;
      this.#show();
    });
    if (this.#turn.answer.finish !== null) {
      cancelAnimationFrame(this.#asked);
      this.#asked = null;
      this.#show();
    }
  }

  /** Shows the text anew, with what has been loaded for it meanwhile. */
  renew() {
    const { text } = this.#turn.answer;
    if (text) replace(this.text, rendered(text));
  }

  #versions({ number, count }) {
    const to = (other) => () => this.#actions.showVersion(this.#turn, other);
    return h(
      "div",
      { class: "versions", role: "group", "aria-label": "Versions of this question" },
      button("Earlier version", icon("back"), to(number - 1), { bare: true, disabled: number === 1 }),
      h("span", { role: "status" }, `${number} of ${count}`),
      button("Later version", icon("forth"), to(number + 1), { bare: true, disabled: number === count }),
    );
  }

  #question() {
    const turn = this.#turn;
    if (turn.results !== null) {
      const rows = Object.entries(turn.results).map(([id, text]) =>
        h("div", null, h("code", null, id), h("pre", { tabindex: "0" }, text)),
      );
      return h("article", { class: "question", "aria-label": "Results of tools" }, rows);
    }
    const figures = turn.media.map((id) => mediumFigure(mediumOf(id)));
    return h(
      "article",
      { class: "question", "aria-label": "Question" },
      figures.length ? h("div", { class: "figures" }, figures) : null,
      turn.text ? h("p", { class: "typed" }, turn.text) : null,
      h(
        "div",
        { class: "tools" },
        button("Edit this question", icon("edit"), () => this.#actions.edit(turn), { bare: true }),
      ),
    );
  }

  #show() {
    const { answer } = this.#turn;
    const waiting = answer.finish === null;
    this.answer.setAttribute("aria-busy", String(waiting));
    replace(
      this.text,
      answer.text ? rendered(answer.text) : waiting ? h("span", { class: "waiting" }, "…") : null,
    );
    this.#showFolded();
    if (!waiting) replace(this.below, this.#ending());
  }

  #showFolded() {
    const { answer } = this.#turn;
    const parts = answer.reasoning ? [["Reasoning", answer.reasoning]] : [];
    for (const call of answer.calls) parts.push([`Call of ${call.name}`, indented(call.arguments)]);
    if (this.folded.childElementCount !== parts.length) {
      replace(
        this.folded,
        parts.map(([title]) =>
          h("details", { class: "folded" }, h("summary", null, title), h("pre", { tabindex: "0" })),
        ),
      );
    }
    for (const [index, [, text]] of parts.entries())
      this.folded.children[index].lastChild.textContent = text;
  }

  #ending() {
    const turn = this.#turn;
    const { answer } = turn;
    const note = answer.error ?? FINISHED[answer.finish];
    return [
      note
        ? h(
            "p",
            { class: answer.error ? "problem" : "note", role: answer.error ? "alert" : null },
            note,
          )
        : null,
      answer.finish === "tool_calls" ? this.#resultForm() : null,
      answer.report ? reuseOf(answer) : null,
      h(
        "div",
        { class: "tools" },
        answer.text
          ? button("Copy this answer", icon("copy"), () => copy(answer.text), { bare: true })
          : null,
        button("Ask again", icon("retry"), () => this.#actions.retry(turn), { bare: true }),
      ),
    ];
  }

  #resultForm() {
    const inputs = this.#turn.answer.calls.map((call) => [
      call.id,
      h("textarea", { rows: 2 }),
      call.name,
    ]);
    const give = () =>
      this.#actions.giveResults(
        this.#turn,
        Object.fromEntries(inputs.map(([id, input]) => [id, input.value])),
      );
    return h(
      "div",
      { class: "results" },
      inputs.map(([, input, name]) => field(`Result of ${name}`, input)),
      button("Send results", null, give),
    );
  }
}

function reuseOf(answer) {
  return h(
    "details",
    { class: "reuse-of" },
    h(
      "summary",
      null,
      promptBar(answer.report),
      legend(answer.report, "span"),
      h(
        "span",
        { class: "numbers-line" },
        numbersLine(answer).map((text) => h("span", null, text)),
      ),
    ),
    h("div", { class: "sentences" }, sentences(answer.report), linkToNode(answer.report)),
  );
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
