// What an empty conversation shows: pictures and questions to begin with; and what may be asked next.

import { icon } from "../shared/controls.js";
import { h, replace } from "../shared/dom.js";
import { served } from "../shared/api.js";
import { mediumOf } from "./library.js";

const FOLDER = new URL("../examples/", import.meta.url);

const PICTURES = [
  {
    files: ["shapes.png"],
    questions: ["What color is the star?", "Where is the triangle?", "What color is the circle?"],
  },
  {
    files: ["star.png", "heart.png"],
    questions: ["Which picture has the star?", "Which picture has the heart?"],
  },
  {
    files: ["change.mp4"],
    shown: ["change.png"],
    questions: ["What happens?", "What color is the circle at the start?"],
  },
];
const TEXTS = [
  "Explain what a prefix cache saves, in three sentences.",
  "Write a Python function that reverses a list.",
];

/**
 * The first entry of an empty conversation; it follows what is known of the server.
 * @param {(question: string, files: File[]) => void} onChoose called with a chosen example
 */
export function welcome(onChoose) {
  const body = h("div");
  served.subscribe(({ sees }) =>
    replace(body, sees === false ? withoutPictures(onChoose) : withPictures(onChoose)),
  );
  return h("li.welcome", body);
}

function withPictures(onChoose) {
  return [
    h("h2", "Ask about a picture, then ask again."),
    h(
      "p",
      "Drop, paste or choose pictures, videos and texts. The second answer shows how much of the first one's work was reused, and why not more.",
    ),
    h("p.try", "Or try one of these:"),
    examples(PICTURES.map((example) => card(example, onChoose))),
  ];
}

function withoutPictures(onChoose) {
  const ask = (question) => ({ type: "button", on: { click: () => onChoose(question, []) } });
  return [
    h("h2", "Ask something, then ask again."),
    h(
      "p",
      "This model reads text alone. Below each answer stands how much of earlier work was reused.",
    ),
    examples(TEXTS.map((question) => h("button", ask(question), question))),
  ];
}

function examples(buttons) {
  const items = buttons.map((button) => h("li", button));
  return h("ul.examples", items);
}

function card({ files, shown = files, questions }, onChoose) {
  const [question] = questions;
  const choose = async () => onChoose(question, await Promise.all(files.map(fetched)));
  const images = shown.map((name) => h("img", { src: new URL(name, FOLDER).href, alt: "" }));
  return h(
    "button.example",
    { type: "button", on: { click: choose } },
    h("span.thumbs", images, shown !== files && icon("play")),
    h("span", question),
  );
}

async function fetched(name) {
  const response = await fetch(new URL(name, FOLDER));
  const content = await response.blob();
  return new File([content], name, { type: content.type });
}

/** Questions about the example of a conversation that have not been asked yet. */
export function followUps({ turns }) {
  const media = turns.flatMap((turn) => turn.media).map(mediumOf);
  if (!media.every((medium) => medium?.example)) return [];
  const names = media.map(({ name }) => name);
  const example = PICTURES.find(({ files }) => String(files) === String(names));
  const asked = turns.map((turn) => turn.text);
  return example?.questions.filter((question) => !asked.includes(question)) ?? [];
}
