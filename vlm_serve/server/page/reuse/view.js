// The view "What was reused": every answer of a conversation, its prompt as a bar on one scale.

import { h, replace } from "../shared/dom.js";
import { count } from "../shared/words.js";
import { titleOf } from "../chat/conversation.js";
import { legend, promptBar } from "./bar.js";
import { linkToNode, numbersList, sentences } from "./facts.js";

/**
 * @param {import("../shared/value.js").Value} current the conversation that is open
 * @param {{subscribe: Function}[]} causes what changes the view besides
 */
export function reuseView(current, causes) {
  const body = h("div", { class: "reuse-body" });
  const view = h("main", { class: "reuse", hidden: true, tabindex: "0" }, body);
  const show = () => !view.hidden && replace(body, contents(current.get()));
  for (const cause of [current, ...causes]) cause.subscribe(show);
  return { view, show };
}

function contents(conversation) {
  const answered = conversation.turns.filter((turn) => turn.answer.report);
  const title = h("h1", null, "What was reused");
  if (!answered.length) {
    return [
      title,
      h(
        "p",
        { class: "lead" },
        "Ask something about a picture, then ask again. For each answer this page shows which part of its prompt was reused, which part was computed, and why not more was reused.",
      ),
    ];
  }
  const scale = Math.max(...answered.map((turn) => turn.answer.report.prompt_tokens));
  return [
    title,
    h(
      "p",
      { class: "lead" },
      `The prompts of “${titleOf(conversation)}”, each a bar on one scale of ${count(scale)} tokens.`,
    ),
    h(
      "ol",
      { class: "reports" },
      answered.map((turn) => entry(turn, scale)),
    ),
  ];
}

function entry({ text, answer }, scale) {
  return h(
    "li",
    null,
    h("h2", null, text || "(no text)"),
    promptBar(answer.report, { scale, detailed: true }),
    legend(answer.report),
    h(
      "div",
      { class: "told" },
      h("div", { class: "sentences" }, sentences(answer.report), linkToNode(answer.report)),
      numbersList(answer),
    ),
  );
}
