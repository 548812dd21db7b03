// What an empty conversation shows: pictures and questions to begin with; and what may be asked next.

import { h } from "../shared/dom.js";
import { icon } from "../shared/icons.js";
import { served } from "../shared/served.js";
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
 * @param {(question: string, files: File[]) => void} onChoose called with a chosen example
 * @returns {{element: Element, update: () => void}} `update` follows what is known of the server
 */
export function welcome(onChoose) {
  const body = h("div");
  const update = () => {
    const sees = served.get().sees !== false;
    body.replaceChildren(...(sees ? withPictures(onChoose) : withoutPictures(onChoose)));
  };
  update();
  return { element: h("li", { class: "welcome" }, body), update };
}

function withPictures(onChoose) {
  return [
    h("h2", null, "Ask about a picture, then ask again."),
    h(
      "p",
      null,
      "Drop, paste or choose pictures, videos and texts. The second answer shows how much of the first one's work was reused, and why not more.",
    ),
    h("p", { class: "try" }, "Or try one of these:"),
    h("ul", { class: "examples" }, PICTURES.map((each) => h("li", null, card(each, onChoose)))),
  ];
}

function withoutPictures(onChoose) {
  const buttons = TEXTS.map((question) =>
    h(
      "li",
      null,
      h("button", { type: "button", on: { click: () => onChoose(question, []) } }, question),
    ),
  );
  return [
    h("h2", null, "Ask something, then ask again."),
    h("p", null, "This model reads text alone. Below each answer stands how much of earlier work was reused."),
    h("ul", { class: "examples" }, buttons),
  ];
}

function card({ files, shown = files, questions }, onChoose) {
  const [question] = questions;
  const choose = async () => onChoose(question, await Promise.all(files.map(fetched)));
  return h(
    "button",
    { type: "button", class: "example", on: { click: choose } },
    h(
      "span",
      { class: "thumbs" },
      shown.map((name) => h("img", { src: new URL(name, FOLDER).href, alt: "" })),
      shown === files ? null : icon("play"),
    ),
    h("span", null, question),
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
