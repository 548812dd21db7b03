"""Results for callers: deltas while a request runs, with their reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlm_serve.cache.experts import Rows
from vlm_serve.errors import VlmServeError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of one prompt token, given those before it.

    Attributes:
        logprobs: log-probabilities by token id: the most likely tokens and the prompt's own.
        rank: rank of the prompt's own token by probability; 1 is the most likely one.
    """

    logprobs: dict[int, float]
    rank: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` is the reused part of the prompt, and
    `written_tokens` the part behind it that the cache has now. Drafts are counted as accepted or
    rejected; accepted ones are part of the completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    written_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Part of a prompt that has been processed: `tokens`, reused ones included, in `seconds` since
    its first step was planned."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens `[start, end)` of a prompt and their source: a tier ("device", "host", "disk") or
    "computed"."""

    start: int
    end: int
    source: str


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """One image, or one temporal patch of a video, in a prompt.

    Attributes:
        offset, length: its placeholder tokens.
        kind: "image" or "video".
        hash: first hexadecimal digits of its content hash.
        source: "encoded": by the vision tower; "cached": the embedding was on the device; a lower
            tier's name: the embedding was fetched from there; "reused": no embedding was needed.
        width, height: its size after the resize, in pixels.
        item: index of its medium in the prompt.
        item_hash: hash of the whole medium, in 32 hexadecimal digits.
    """

    offset: int
    length: int
    kind: str
    hash: str
    source: str
    width: int = 0
    height: int = 0
    item: int = 0
    item_hash: str = ""


@dataclass(frozen=True, slots=True)
class KeptMark:
    """A mark of the prompt, and how much of the prompt before it is kept for its time.

    Attributes:
        position: where it stands.
        kept_tokens: less than that if no state could be stored there; 0 if pins would hold too
            much.
        seconds: how long they are kept.
    """

    position: int
    kept_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightChange:
    """New weights in the middle of a choice. Its prompt and tokens are computed again by them,
    or their KV is kept if generation was paused in place.

    Attributes:
        choice: its index.
        token: index of its first token that was chosen by them.
        weights: their digest, in hexadecimal.
    """

    choice: int
    token: int
    weights: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Cache report of one request (docs/architecture.md#reasons).

    Attributes:
        prompt_tokens: length of the prompt.
        kv_boundary: deepest boundary at which KV alone was present.
        state_boundary: deepest boundary with a ready state snapshot.
        boundary: number of reused tokens.
        tiers: tokens reused from each tier.
        media_decoded: images and videos decoded for this request.
        media_encoded: images and videos with at least one part encoded by the vision tower.
        media_skipped: images and videos that needed no vision encoding at all.
        media_cut_short: videos of which a part is missing or does not decode; the rest is shown.
        media_repeated: media spans with the content of an earlier span of the prompt; they are
            encoded once.
        reason: why the boundary is not deeper; "full" when nothing more could be reused.
        experts_missing: reused tokens without recorded experts; 0 if experts were not requested.
        logprobs_reused: prompt tokens whose log-probabilities came from the cache.
        joined_tokens: reused tokens that it waited for, while another request computed them.
        joined_ms: time of that wait, in milliseconds.
        answer_tokens: reused tokens that the model generated itself, in earlier answers. Those from
            lower tiers do not count.
        segments: the whole prompt, in order, split by source.
        media: its media spans, in order.
        snapshots: positions of the prompt at which the cache has a state now.
        marks: the client's marks and lifetimes, in order.
        boundary_key: hexadecimal key of the cache's node that ends at `boundary`, None at 0.
        weights: digest of the weights that began with the prompt, if these may change; else "".
        weight_changes: the later ones, in order. Tokens from there on, and all that they follow
            from, were computed by those.
        resumed: how often the answer was resumed by another engine; all else describes the first
            attempt.
    """

    prompt_tokens: int
    kv_boundary: int
    state_boundary: int
    boundary: int
    tiers: dict[str, int] = field(default_factory=dict)
    media_decoded: int = 0
    media_encoded: int = 0
    media_skipped: int = 0
    media_cut_short: int = 0
    media_repeated: int = 0
    reason: str = "cold"
    experts_missing: int = 0
    logprobs_reused: int = 0
    joined_tokens: int = 0
    joined_ms: float = 0.0
    answer_tokens: int = 0
    segments: tuple[PromptSegment, ...] = ()
    media: tuple[PromptMedia, ...] = ()
    snapshots: tuple[int, ...] = ()
    marks: tuple[KeptMark, ...] = ()
    boundary_key: str | None = None
    weights: str = ""
    weight_changes: tuple[WeightChange, ...] = ()
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """One increment of one choice.

    Attributes:
        index: the choice.
        text: text that became final with these tokens (never half a character, never part of a stop
            string); may be empty. From `Pipeline.stream`, without the thought.
        reasoning: such text of the thought, from `Pipeline.stream`; the engine does not split.
        token_ids: the tokens, including an end-of-sequence token.
        logprobs: per token, see `SampledToken.logprobs`; empty if not requested.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or stop token id that ended the choice; None for end of
            sequence.
        usage: counts of the whole request so far.
        cache_report: set on every delta.
        routed_experts: on the last delta, if requested: expert ids `[tokens, layers, top_k]` of all
            tokens but the last, from `routed_experts_prompt_start` on; uint8 up to 256 experts,
            else uint16. Zero in the gaps.
        routed_experts_gaps: (first, last + 1) positions of the tokens whose rows are unknown.
        prompt_logprobs: on the first delta, if requested: rows of the prompt's tokens from
            `prompt_logprobs_start` on, without the first token.
        vector: see `SampledToken.vector`.
        error: set (with finish_reason "error") when the request failed.
        progress: if requested, in deltas without tokens before the first token.
        time: creation time in monotonic seconds.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    cache_report: CacheReport | None = None
    routed_experts: Rows | None = field(default=None, compare=False)
    routed_experts_gaps: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    vector: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    error: VlmServeError | None = None
    reasoning: str = ""
    progress: PromptProgress | None = None
    time: float = field(default_factory=monotonic, compare=False)
