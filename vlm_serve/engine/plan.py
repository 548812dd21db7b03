"""What passes between scheduler and executor: frozen data without behaviour or anything alive, so
that it can cross a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from vlm_serve.cache.experts import Rows
from vlm_serve.cache.records import LogprobRows
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What an executor is told of a sequence once; afterwards only what is new travels, in slices.

    Attributes:
        sequence: the scheduler's number for it.
        token_ids: its prompt.
        positions: int64 `[3, len(token_ids)]`, see `Prompt`.
        rope_delta: see `Prompt`.
        params: sampling options with the checkpoint's defaults filled in.
        seed: of this choice's draws.
    """

    sequence: int
    token_ids: tuple[int, ...]
    positions: torch.Tensor
    rope_delta: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Encode:
    """One media span to run through the vision tower; its embedding is kept under `slot`.

    `pixels` are those of `MediaItem.patches`, `grid` is (1, h, w) in patches, `merge_size` how many
    of them per side become one token.
    """

    pixels: torch.Tensor
    grid: tuple[int, int, int]
    merge_size: int
    slot: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """A media span's embedding that a lower cache tier had, to be kept under `slot`: `[tokens,
    width]` as `Encode` would have made it."""

    rows: torch.Tensor
    slot: int


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Sample one token for sequence `sequence`.

    Attributes:
        position: number of tokens generated before it.
        draft: the token that is drafted for this position; if another one is sampled, the
            sequence's further tasks are void.
        forced: this token is taken whatever is drawn.
        mask: what may come: bit `i % 8` of byte `i // 8` stands for token i; None: everything.
        unbiased: logits are taken as they are, without biases and penalties.
    """

    sequence: int
    position: int
    mask: bytes | None = None
    unbiased: bool = False
    draft: int | None = None
    forced: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `[start, end)` of one registered sequence in one step.

    Attributes:
        kind: "prefill": through the chunk kernel; "decode": exactly one token through the recurrent
            step; "verify": a sampled token and the drafts behind it, each computed as a decode
            token would be. They leave the state row alone: what they would change is kept as
            updates until it is known which of them hold.
        token_ids: those of its tokens that are no part of the prompt. They replace what the
            executor knows from there on.
        src_row, dst_row: state row to start from (-1: zero state) and to leave the state in.
        blocks: physical KV blocks, which replace the executor's table from entry `first_block` on;
            together they cover `end` tokens.
        write_start: K and V of tokens below this position are shared and not written.
        chunk_ends: absolute positions at which GDN chunks end, ascending, the last one is `end`;
            empty for a decode token.
        snapshots: (absolute position, row) pairs; the positions are chunk ends of this slice.
        embeddings: (first token, last token + 1, slot, first row of the embedding) of the media
            tokens in this slice, absolute positions.
        samples: what to sample from the logits after the last token (several for forked choices);
            empty while prefill goes on. Of drafted tokens one task for each token, in order.
        reported_start, reported_end: tokens `[reported_start, reported_end)` are followed by a
            prompt token whose log-probability is wanted; none if the end is not beyond the start.
        updates: where the updates of a verify slice go, one for each token; -1: there is no state.
        pending: so many updates that lie there hold: they are folded into the row first.
        drafts: so many tokens are to be drafted behind what is sampled; `blocks` cover them.
    """

    sequence: int
    kind: Literal["prefill", "decode", "verify"]
    token_ids: tuple[int, ...]
    start: int
    end: int
    src_row: int
    dst_row: int
    first_block: int
    blocks: tuple[int, ...]
    write_start: int
    chunk_ends: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    embeddings: tuple[tuple[int, int, int, int], ...] = ()
    samples: tuple[SampleTask, ...] = ()
    reported_start: int = 0
    reported_end: int = 0
    updates: int = -1
    pending: int = 0
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Before the forward, in this order: `dropped_slots` are embeddings to forget,
    `folds` (row, first update, count) are updates to fold into state rows,
    `row_copies` (source, destination) state rows of forked choices, `copies` (source block,
    destination block, number of rows) of KV; then what is `recalled` is put where it belongs, and
    the spans in `encodes` are encoded. `unread`: the model's layer for drafts leaves the tokens of
    this step out, none of which is of a prefill."""

    slices: tuple[Slice, ...]
    encodes: tuple[Encode, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    row_copies: tuple[tuple[int, int], ...] = ()
    dropped_slots: tuple[int, ...] = ()
    folds: tuple[tuple[int, int, int], ...] = ()
    recalled: tuple[Recalled, ...] = ()
    skip_mtp: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.end - item.start for item in self.slices)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token; `logprobs` maps token id to log-probability (natural log of the model's own
    distribution), the sampled token included, or is empty when none were asked for. `drawn` is what
    would have been sampled, if the token was forced and another one was drawn."""

    token_id: int
    logprobs: dict[int, float]
    drawn: int | None = None


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
        sampled: the tokens of a sequence's SampleTasks, in order, up to the first that is not its
            draft.
        experts: if any sequence wants them, the routed experts of every slice: `[tokens, layers,
            top_k]` expert ids, uint8 up to 256 experts, else uint16.
        prompt_logprobs: of the slices that want them, a row (`cache.logprobs.row_type`) for each
            of the tokens `reported_start + 1 ... reported_end`.
        drafts: what the slices that want some are drafted.
    """

    sampled: dict[int, tuple[Sampled, ...]]
    experts: dict[int, Rows] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
