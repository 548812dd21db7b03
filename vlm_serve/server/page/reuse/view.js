// The view "What was reused": every answer of a conversation, its prompt as a bar on one scale.

import { h, replace } from "../shared/dom.js";
import { count } from "../shared/words.js";
import { titleOf } from "../chat/conversation.js";
import { legend, promptBar } from "./bar.js";
import { explanation, numbersList } from "./report.js";

/**
 * @param {import("../shared/value.js").Value} current the conversation that is open
 * @param {{subscribe: Function}[]} causes what changes the view besides
 */
export function reuseView(current, causes) {
  const body = h("div.reuse-body");
  const view = h("main.reuse", { hidden: true, tabindex: "0" }, body);
  const show = () => !view.hidden && replace(body, contents(current.get()));
  for (const cause of [current, ...causes]) cause.subscribe(show);
  return { view, show };
}

function contents(conversation) {
  const answered = conversation.turns.filter((turn) => turn.answer.report);
  const scale = Math.max(...answered.map((turn) => turn.answer.report.prompt_tokens));
  const lead = answered.length
    ? `The prompts of “${titleOf(conversation)}”, each a bar on one scale of ${count(scale)} tokens.`
    : "Ask something about a picture, then ask again. For each answer this page shows which part of its prompt was reused, which part was computed, and why not more was reused.";
  const entries = answered.map((turn) => entry(turn, scale));
  return [
    h("h1", "What was reused"),
    h("p.lead", lead),
    answered.length > 0 && h("ol.reports", entries),
  ];
}

function entry({ text, answer }, scale) {
  return h(
    "li",
    h("h2", text || "(no text)"),
    promptBar(answer.report, { scale, detailed: true }),
    legend(answer.report),
    h("div.told", explanation(answer.report), numbersList(answer)),
  );
}
