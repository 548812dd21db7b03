// The server's one word on why a request reused no more, as a sentence.

const SENTENCES = {
  full: "Everything possible was reused: the last token is always computed.",
  unseen: "Everything cached was reused; the rest of the prompt is new.",
  cold: "No earlier prompt begins like this one, so all of it was computed.",
  below_granularity: "The prompt is shorter than the cache's smallest unit.",
  media_changed: "The earlier prompt had another picture or video at this position.",
  media_grown: "The video is longer than before; its cached part was reused.",
  span_clamp: "The cached prefix ends inside a picture or video, which cannot be reused in part.",
  no_snapshot: "Keys and values are cached further, but no recurrent state is.",
  snapshot_evicted: "A later recurrent state was cached, but has been evicted since.",
  kv_evicted: "The next block was cached, but has been evicted since.",
  in_flight: "Another request is computing the next block right now.",
  salt: "It is cached for another tenant only, and tenants share nothing.",
  experts_missing:
    "The routed experts of the next block were not recorded, and the request needs them.",
  prompt_logprobs: "A requested log-probability is not cached beyond this point.",
  tier_error: "A lower tier failed to return its entry.",
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
