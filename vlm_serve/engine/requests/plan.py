"""Messages between scheduler and executor: frozen data without behaviour, so that it can cross a
process boundary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.cache.experts import Rows
from vlm_serve.cache.records import LogprobRows
from vlm_serve.sampling_params import SamplingParams

Column = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Data about a sequence that an executor receives once. Later, slices carry only what is new.

    Attributes:
        sequence: the scheduler's number for the sequence.
        token_ids: its prompt.
        positions: `[3, len(token_ids)]`, see `Prompt`.
        rope_delta: see `Prompt`.
        params: sampling options with the checkpoint's defaults filled in.
        seed: seed of this choice's draws.
    """

    sequence: int
    token_ids: tuple[int, ...]
    positions: torch.Tensor
    rope_delta: float
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Encode:
    """A media span to run through the vision tower; its embedding is stored under `slot`.

    `pixels` are those of `MediaItem.patches`; with a `table`, both are those of `coded`. `grid` is
    (1, h, w) in patches, `merge_size` is the number of patches per side that become one token.
    `adapter` is its request's slot of an adapter.
    """

    pixels: torch.Tensor
    grid: tuple[int, int, int]
    merge_size: int
    slot: int
    adapter: int = -1
    table: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Recalled:
    """Embedding of a media span from a lower cache tier, to be stored under `slot`: `[tokens,
    width]` as `Encode` would have made it."""

    rows: torch.Tensor
    slot: int


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Sample one token for sequence `sequence`.

    Attributes:
        position: number of tokens generated before it.
        draft: the token drafted for this position. If another token is sampled, the sequence's
            further tasks are void.
        forced: token to take regardless of what is drawn.
        mask: allowed tokens: bit `i % 8` of byte `i // 8` stands for token i; None allows all.
        unbiased: use the logits without biases and penalties.
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
        kind: "prefill": through the chunk kernel. "decode": exactly one token through the recurrent
            step. "verify": a sampled token and the drafts behind it, each computed as a decode
            token would be. A verify slice does not write the state row. Its changes are stored as
            updates until the accepted drafts are known.
        token_ids: its tokens behind the prompt. They replace the executor's tokens from there on.
        src_row, dst_row: state rows to start from (-1: zero state) and to leave the state in.
        blocks: physical KV blocks. They replace the executor's table from entry `first_block` on;
            the whole table covers `end` tokens.
        write_start: K and V of tokens below this position are shared and not written.
        chunk_ends: absolute positions at which chunks end, ascending, the last one is `end`;
            empty for a decode token.
        snapshots: (absolute position, row) pairs; the positions are chunk ends of this slice.
        embeddings: (first token, last token + 1, slot, first row of the embedding) of the media
            tokens in this slice, absolute positions.
        samples: tasks to sample from the logits after the last token (several for forked choices);
            empty while prefill continues, and for the last token of an answer that has ended. A
            verify slice has one task per token, in order.
        reported_start, reported_end: tokens `[reported_start, reported_end)` precede prompt tokens
            whose log-probabilities are wanted; none if the end is not beyond the start.
        updates: index of the first update of a verify slice, one per token; -1 for a model without
            state.
        pending: number of accepted updates at that index, to be folded into the row first.
        drafts: number of tokens to draft behind the sampled ones; `blocks` cover them.
        adapter: slot of its adapter; -1 for none.
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
    adapter: int = -1


class PartialFold(NamedTuple):
    """A copy of a state row with the first of its pending updates folded in: the state at a block
    boundary that verified drafts have passed.

    Attributes:
        source, destination: state rows.
        first: index of the first pending update.
        updates: how many of them are folded in.
    """

    source: int
    destination: int
    first: int
    updates: int


class ChangedBlocks(NamedTuple):
    """Physical KV `blocks` that replace a sequence's table from entry `first` on; `place` is the
    sequence's among the rows."""

    place: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """One decode token of each of many sequences, a column for each kind of number.

    A step that only extends the one before consists of these: nothing of it is built sequence by
    sequence. All columns have an entry for each sequence, in the same order.

    Attributes:
        sequences: their numbers; the same object as in the step before if they are the same.
        starts: int64, positions of the tokens.
        positions: int64, number of tokens generated before the sampled ones.
        state_rows: int32, state rows to start from and to leave the state in; -1 without state.
        tokens: int64, their ids. None: what the step before samples for the sequence, which the
            host may not know yet.
        blocks: of the sequences whose tables have grown or changed.
        snapshots: (place, row) of second rows for the state behind a token.
        masks: (place, `SampleTask.mask`, `SampleTask.unbiased`) of sampled tokens that are limited.
        adapters: slots of adapters; None if there is none.
    """

    sequences: tuple[int, ...]
    starts: Column
    positions: Column
    state_rows: Column
    tokens: Column | None
    blocks: tuple[ChangedBlocks, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    masks: tuple[tuple[int, bytes | None, bool], ...] = ()
    adapters: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def tasks(self) -> list[SampleTask]:
        """Return what is sampled, in the order of the rows."""
        masks = {place: (mask, unbiased) for place, mask, unbiased in self.masks}
        return [
            SampleTask(number, position, *masks.get(place, (None, False)))
            for place, (number, position) in enumerate(
                zip(self.sequences, self.positions.tolist(), strict=True)
            )
        ]

    def slices(self, block_size: int, known: Mapping[int, int] | None = None) -> tuple[Slice, ...]:
        """Return the same as slices.

        Args:
            block_size: tokens per KV block.
            known: ids by sequence, where `tokens` is None; without them they are 0.
        """
        changed = {place: (first, blocks) for place, first, blocks in self.blocks}
        snapshots, own = dict(self.snapshots), self.tokens
        starts, rows = self.starts.tolist(), self.state_rows.tolist()
        slices = []
        for place, (task, start, row) in enumerate(zip(self.tasks(), starts, rows, strict=True)):
            first_block, blocks = changed.get(place, (start // block_size + 1, ()))
            token = (known or {}).get(task.sequence, 0) if own is None else int(own[place])
            slices.append(
                Slice(
                    sequence=task.sequence,
                    kind="decode",
                    token_ids=(token,),
                    start=start,
                    end=start + 1,
                    src_row=row,
                    dst_row=row,
                    first_block=first_block,
                    blocks=blocks,
                    write_start=0,
                    snapshots=((start + 1, snapshots[place]),) if place in snapshots else (),
                    samples=(task,),
                    adapter=-1 if self.adapters is None else self.adapters[place],
                )
            )
        return tuple(slices)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Before the forward, an executor does the following in this order:

    1. Forget the embeddings in `dropped_slots`.
    2. Copy state rows and fold the first of their pending updates into the copies:
       `partial_folds`.
    3. Fold the updates of `folds` (row, first update, count) into state rows.
    4. Copy the state rows of forked choices: `row_copies` (source, destination).
    5. Copy KV: `copies` (source block, destination block, number of rows).
    6. Store the `recalled` embeddings.
    7. Encode the spans in `encodes`.

    A plan may have folds and no slices; then there is no forward.

    If `skip_mtp` is set, the model's MTP layer does not read this step's tokens; then no slice is a
    prefill.

    A plan with `rows` only extends the step before, and has nothing else.
    """

    slices: tuple[Slice, ...]
    encodes: tuple[Encode, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    row_copies: tuple[tuple[int, int], ...] = ()
    dropped_slots: tuple[int, ...] = ()
    folds: tuple[tuple[int, int, int], ...] = ()
    recalled: tuple[Recalled, ...] = ()
    skip_mtp: bool = False
    partial_folds: tuple[PartialFold, ...] = ()
    rows: DecodeRows | None = None

    @property
    def num_tokens(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        return sum(item.end - item.start for item in self.slices)

    def tokens_by_sequence(self) -> Iterator[tuple[int, int]]:
        """Yield (sequence, number of its tokens)."""
        for number in self.rows.sequences if self.rows is not None else ():
            yield number, 1
        for item in self.slices:
            yield item.sequence, item.end - item.start


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. `logprobs` maps token ids to log-probabilities (natural log of the model's
    own distribution), including the sampled token; empty if not requested. `drawn` is the token
    drawn instead, if a forced token differs from it. Where a model pools, `vector` holds the logits
    of `Model.pooled` or the hidden state, and the token means nothing."""

    token_id: int
    logprobs: dict[int, float]
    drawn: int | None = None
    vector: npt.NDArray[np.float32] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step, by sequence number.

    Attributes:
        sampled: tokens of a sequence's SampleTasks, in order, up to the first that differs from its
            draft.
        experts: if any sequence wants them, the routed experts of every slice: `[tokens, layers,
            top_k]` expert ids, uint8 up to 256 experts, else uint16.
        prompt_logprobs: for slices that want them, a row (`cache.logprobs.row_type`) for each of
            the tokens `reported_start + 1 ... reported_end`.
        drafts: drafts for the slices that requested some.
        awaited: False if a GPU may still be computing: nothing was read back from it.
        unsound: sequences whose logits, or what is asked of them, are no finite numbers; what else
            is here of them means nothing.
        tokens: for a plan with rows of which nothing else is asked: the sampled ids, in their
            order, in place of `sampled`.
    """

    sampled: dict[int, tuple[SampledToken, ...]]
    experts: dict[int, Rows] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    awaited: bool = True
    unsound: frozenset[int] = frozenset()
    tokens: list[int] | None = None
