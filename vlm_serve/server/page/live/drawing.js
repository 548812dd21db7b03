// How runs look on a canvas. Draws what lies in the seen part, and nothing else.

import { mediumOfHash, urlOf } from "../chat/library.js";
import { h } from "../shared/dom.js";
import { count } from "../shared/words.js";
import { TIERS } from "./layout.js";

const FONT = "11px system-ui, sans-serif";
const LABEL = { width: 54, height: 13 };
const PICTURE = { width: 18, height: 16 };

const pictures = new Map();

/** What gives the colours of the moment, by name, as a canvas takes them. */
export function palette(element) {
  const colours = new Map();
  return (name) => {
    if (!colours.has(name)) {
      const probe = h("span", { style: { color: `var(--${name})` } });
      element.append(probe);
      colours.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return colours.get(name);
  };
}

/**
 * @param {CanvasRenderingContext2D} context whose units are CSS pixels
 * @param {object} layout see layout.js
 * @param {{seen: object, scale: {x: number, y: number}, colour: (name: string) => string,
 *   selected: number, glow: (key: string) => number, onLoad: () => void}} how
 */
export function drawRuns(context, layout, how) {
  const { seen, scale } = how;
  const { top, bottom, start, end, next } = layout;
  const first = { x: seen.left / scale.x, y: seen.top / scale.y };
  const last = { x: (seen.left + seen.width) / scale.x, y: (seen.top + seen.height) / scale.y };
  const drawn = [];
  let index = 0;
  while (index < layout.count && top[index] < last.y) {
    // What starts right of the seen part has all that comes after it there as well.
    if (bottom[index] <= first.y || start[index] >= last.x) {
      index = next[index];
      continue;
    }
    if (end[index] > first.x) drawn.push([index, drawRun(context, layout, index, how)]);
    index += 1;
  }
  // On top of all bars: what stands at the end of one reaches into the next.
  for (const [run, bar] of drawn) {
    for (const at of layout.snapshots[run])
      drawSnapshot(context, at * scale.x - seen.left, bar, how.colour);
    if (layout.pins[run] > 0) outline(context, bar, how.colour("pin"), 1.5);
    if (run === how.selected) outline(context, bar, how.colour("text"), 2.5);
  }
}

function drawRun(context, layout, index, { seen, scale, colour, glow, onLoad }) {
  const bar = seenBar(layout, index, seen, scale);
  context.fillStyle = colour(TIERS[layout.tier[index]]);
  context.beginPath();
  const radius = Math.min(3, bar.width / 2, bar.height / 2);
  context.roundRect(bar.x, bar.y, bar.width, bar.height, radius);
  context.fill();
  const light = glow(layout.key[index]);
  if (light > 0) {
    context.globalAlpha = 0.55 * light;
    context.fillStyle = colour("background");
    context.fill();
    context.globalAlpha = 1;
  }
  for (const span of layout.media[index])
    drawMedium(context, span, bar, { seen, scale, colour, onLoad });
  drawLabel(context, layout, index, bar, colour);
  return bar;
}

/** The part of a run that is seen, less a gap: a bar may be much longer than the screen. */
function seenBar(layout, index, seen, scale) {
  const gap = scale.y >= 8 ? 1.5 : 0.5;
  const x = Math.max(layout.start[index] * scale.x - seen.left, -4);
  const y = Math.max(layout.top[index] * scale.y - seen.top, -4);
  const right = Math.min(layout.end[index] * scale.x - seen.left, seen.width + 4);
  const bottom = Math.min(layout.bottom[index] * scale.y - seen.top, seen.height + 4);
  return {
    x,
    y: y + gap / 2,
    width: Math.max(0.75, right - x - gap),
    height: Math.max(0.75, bottom - y - gap),
  };
}

function drawMedium(context, { at, length, hash, begins }, bar, { seen, scale, colour, onLoad }) {
  const x = Math.max(bar.x, at * scale.x - seen.left);
  const right = Math.min(bar.x + bar.width, Math.max((at + length) * scale.x - seen.left, x + 2));
  const height = Math.min(bar.height, Math.max(3, scale.y * 0.75));
  const y = bar.y + (bar.height - height) / 2;
  if (right <= x) return;
  context.fillStyle = colour("medium");
  context.fillRect(x, y, right - x, height);
  const medium = hash && begins ? mediumOfHash(hash) : null;
  if (medium === null || right - x < PICTURE.width || height < PICTURE.height) return;
  const picture = pictureOf(medium, onLoad);
  if (picture === null) return;
  const size = Math.min(height - 2, right - x - 2);
  const ratio = picture.width / picture.height;
  const width = Math.min(right - x - 2, size * Math.max(1, ratio));
  context.drawImage(picture, x + 1, y + (height - width / ratio) / 2, width, width / ratio);
}

/** A small picture of a medium; null while it is loading. */
function pictureOf(medium, onLoad) {
  if (!pictures.has(medium.id)) {
    pictures.set(medium.id, null);
    const loading =
      medium.kind === "image"
        ? createImageBitmap(medium.blob, { resizeHeight: 64, resizeQuality: "medium" })
        : firstFrame(medium);
    loading.then(
      (picture) => {
        pictures.set(medium.id, picture);
        onLoad();
      },
      () => {},
    );
  }
  return pictures.get(medium.id);
}

async function firstFrame(medium) {
  const video = document.createElement("video");
  video.muted = true;
  video.preload = "auto";
  video.src = urlOf(medium);
  await new Promise((resolve, reject) => {
    video.onloadeddata = resolve;
    video.onerror = reject;
  });
  return createImageBitmap(video, { resizeHeight: 64, resizeQuality: "medium" });
}

function drawSnapshot(context, x, bar, colour) {
  const y = bar.y + bar.height / 2;
  const size = Math.min(4.5, bar.height / 2);
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.closePath();
  context.fillStyle = colour("snapshot");
  context.fill();
  context.strokeStyle = colour("background");
  context.lineWidth = 1;
  context.stroke();
}

function outline(context, bar, stroke, width) {
  context.strokeStyle = stroke;
  context.lineWidth = width;
  context.strokeRect(
    bar.x + width / 2,
    bar.y + width / 2,
    Math.max(0, bar.width - width),
    Math.max(0, bar.height - width),
  );
}

function drawLabel(context, layout, index, bar, colour) {
  const hasMedia = layout.media[index].length > 0;
  const lines = hasMedia ? 3 : 1;
  if (bar.width < LABEL.width || bar.height < lines * LABEL.height) return;
  context.font = FONT;
  context.textBaseline = "middle";
  context.fillStyle = colour("on-bar");
  const text = `${count(layout.end[index] - layout.start[index])} tokens`;
  const middle = hasMedia ? Math.max(bar.y, 0) + 10 : bar.y + bar.height / 2;
  if (context.measureText(text).width + 12 < bar.width)
    context.fillText(text, Math.max(bar.x, 0) + 6, middle);
}
