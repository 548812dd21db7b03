"""What the scheduler decides and the runner computes: frozen data without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_serve.cache.experts import Rows
from vlm_serve.engine.constraints import Constraint
from vlm_serve.preprocess.prompt import MediaItem, Prompt
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Encode:
    """One media span to run through the vision tower; its embedding is kept under `slot`."""

    item: MediaItem
    patch: int
    slot: int


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Sample one token from the last row of a slice for sequence `sequence`.

    Attributes:
        params: sampling options with the checkpoint's defaults filled in.
        history: token ids generated so far (penalties, min_tokens, the position of the draw).
        prompt_token_ids: for the repetition penalty.
        banned: token ids that may not be sampled at this step.
        seed: seed of this choice's draws.
        constraint: what else changes its logits.
    """

    sequence: int
    params: SamplingParams
    history: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    banned: tuple[int, ...]
    seed: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `[start, end)` of one sequence in one step.

    Attributes:
        sequence: the scheduler's number for the sequence.
        prompt: the sequence's prompt (positions, rope delta).
        token_ids: the ids of these tokens.
        prefill: through the chunk kernel; else exactly one token through the recurrent step.
        src_row, dst_row: state row to start from (-1: zero state) and to leave the state in.
        block_table: physical KV blocks covering `end` tokens.
        write_start: K and V of tokens below this position are shared and not written.
        chunk_ends: absolute positions at which GDN chunks end, ascending, the last one is `end`;
            empty for a decode token.
        snapshots: (absolute position, row) pairs; the positions are chunk ends of this slice.
        embeddings: (first token, last token + 1, slot, first row of the embedding) of the media
            tokens in this slice, absolute positions.
        samples: what to sample from the logits after the last token (several for forked choices);
            empty while prefill goes on.
        experts: the routed experts of these tokens are wanted.
        prompt_logprobs: how many rivals to report for each prompt token that follows one of these
            tokens; None: no report.
    """

    sequence: int
    prompt: Prompt
    token_ids: tuple[int, ...]
    start: int
    end: int
    prefill: bool
    src_row: int
    dst_row: int
    block_table: tuple[int, ...]
    write_start: int
    chunk_ends: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    embeddings: tuple[tuple[int, int, int, int], ...] = ()
    samples: tuple[SampleTask, ...] = ()
    experts: bool = False
    prompt_logprobs: int | None = None

    @property
    def reported_end(self) -> int:
        """Tokens `[start, reported_end)` of the slice are followed by a prompt token whose
        log-probability is wanted."""
        if self.prompt_logprobs is None:
            return self.start
        return max(self.start, min(self.end, len(self.prompt) - 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Before the forward, in this order: `dropped_slots` are embeddings to forget,
    `row_copies` (source, destination) state rows of forked choices, `copies` (source block,
    destination block, number of rows) of KV; then the spans in `encodes` are encoded."""

    slices: tuple[Slice, ...]
    encodes: tuple[Encode, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    row_copies: tuple[tuple[int, int], ...] = ()
    dropped_slots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.end - item.start for item in self.slices)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token; `logprobs` maps token id to log-probability (natural log of the model's own
    distribution), the sampled token included, or is empty when none were asked for."""

    token_id: int
    logprobs: dict[int, float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of one prompt token, given those before it.

    Attributes:
        logprobs: token id -> log-probability of the most likely tokens and of the prompt's own.
        rank: how likely the prompt's own token was; 1: the most likely one.
    """

    logprobs: dict[int, float]
    rank: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step has computed, by sequence number.

    Attributes:
        sampled: the token of every SampleTask of the plan.
        experts: if any slice wants them, the routed experts of every slice: `[tokens, layers,
            top_k]` expert ids, uint8 up to 256 experts, else uint16.
        prompt_logprobs: of the slices that want them, for the tokens `start + 1 ... reported_end`.
    """

    sampled: dict[int, Sampled]
    experts: dict[int, Rows] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PromptLogprobs]] = field(default_factory=dict)
