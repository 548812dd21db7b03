// The server's one word on why a request reused no more, as a sentence.

const SENTENCES = {
  full: "Nothing more could have been reused: the last token is always computed.",
  unseen: "Everything that was seen before was reused; what follows is new.",
  cold: "Nothing like it was seen before, so all of it was computed.",
  below_granularity: "The prompt is shorter than the smallest piece that the cache keeps.",
  media_changed: "At that place stood another picture or video the last time.",
  media_grown: "The video goes on where it ended before; what was seen of it was reused.",
  span_clamp: "What is known ends inside a picture or video, and half a picture is of no use.",
  no_snapshot: "Keys and values go on, but the recurrent state was not stored further than this.",
  snapshot_evicted: "The recurrent state was stored further on, and had to make room since.",
  kv_evicted: "The next piece was stored, and had to make room since.",
  in_flight: "Another request is computing the next piece at this moment.",
  salt: "It is known under another tenant's salt only, and tenants share nothing.",
  experts_missing:
    "The routed experts of the next piece were not recorded, and the request asked for them.",
  prompt_logprobs: "A log-probability that was asked for is not known further than this.",
  tier_error: "A lower tier could not give back what it holds.",
  disabled: "The prefix cache is off.",
};

/** Why not more, in words. */
export function sentenceOf(reason) {
  return SENTENCES[reason] ?? `The server gives the reason “${reason}”.`;
}

const SOURCES = {
  device: "reused from memory",
  host: "reused from host memory",
  disk: "reused from disk",
  shared: "reused from the shared store",
  computed: "computed",
};

/** Where a part of the prompt came from, in words. */
export function sourceName(source) {
  return SOURCES[source] ?? `reused from ${source}`;
}
