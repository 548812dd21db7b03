// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en-GB");
const SHORT = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 3, useGrouping: false });
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(number) {
  return WHOLE.format(number).replaceAll(",", "\u202f");
}

/** "1 token", "3 tokens". */
export function counted(number, noun, plural = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : plural}`;
}

export function bytes(number) {
  let size = 0;
  while (number >= 1024 && size + 1 < SIZES.length) {
    number /= 1024;
    size += 1;
  }
  return `${SHORT.format(number)} ${SIZES[size]}`;
}

/** A time from milliseconds: "84 ms", "1.27 s". */
export function duration(milliseconds) {
  if (milliseconds < 1) return `${milliseconds.toFixed(2)} ms`;
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  return `${SHORT.format(milliseconds / 1000)} s`;
}

/** A share of 0 to 1. All and nothing are said only where they hold. */
export function percent(share) {
  if (share > 0 && share < 0.01) return "under 1 %";
  if (share < 1 && share > 0.99) return "over 99 %";
  return `${Math.round(share * 100)} %`;
}

export function rate(number) {
  return number >= 100 ? count(Math.round(number)) : SHORT.format(number);
}

/** A list in a sentence: "a, b and c". */
export function listed(items) {
  return items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
}
