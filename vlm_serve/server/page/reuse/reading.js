// A cache report of a file: what the views show of it, each field of the type that they expect.

const NUMBERS = [
  "prompt_tokens",
  "boundary",
  "joined_tokens",
  "joined_ms",
  "answer_tokens",
  "media_decoded",
  "media_encoded",
  "media_skipped",
  "media_cut_short",
  "kv_boundary",
  "state_boundary",
];
const SPAN = { offset: number, length: number, kind: text, hash: text, source: text };
const SEGMENT = { start: number, end: number, source: text };

/** The report, or null if the value is none. */
export function readReport(told) {
  if (!isObject(told) || !number(told.prompt_tokens)) return null;
  return {
    ...Object.fromEntries(NUMBERS.map((name) => [name, number(told[name])])),
    reason: text(told.reason),
    boundary_key: text(told.boundary_key) || null,
    segments: list(told.segments, SEGMENT),
    media: list(told.media, SPAN),
    snapshots: (Array.isArray(told.snapshots) ? told.snapshots : []).map(number),
  };
}

/** Counts of tokens, or null. */
export function readUsage(told) {
  if (!isObject(told)) return null;
  return {
    prompt_tokens: number(told.prompt_tokens),
    completion_tokens: number(told.completion_tokens),
  };
}

/** Times in milliseconds, or null. */
export function readTimes(told) {
  return isObject(told) ? { first: number(told.first) || null, total: number(told.total) } : null;
}

/** The value if it is a text, else an empty one. */
export function text(value) {
  return typeof value === "string" ? value : "";
}

/** Whether the value has fields. */
export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function number(value) {
  return Number.isFinite(value) ? value : 0;
}

function list(value, fields) {
  const items = (Array.isArray(value) ? value : []).filter(isObject);
  return items.map((item) =>
    Object.fromEntries(Object.entries(fields).map(([name, read]) => [name, read(item[name])])),
  );
}
