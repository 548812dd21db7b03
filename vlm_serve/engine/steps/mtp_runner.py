"""Runs the model's multi-token-prediction (MTP) layer behind a step: it reads the step's hidden
states and drafts tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.requests.plan import SampledToken, Slice
from vlm_serve.engine.steps.batching import Known, KnownSequence
from vlm_serve.engine.steps.draft_graphs import DraftGraphs
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

_CHUNK = 64
_MediaRows = tuple[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MtpInput:
    """Tokens of one sequence that the layer reads in one forward.

    Attributes:
        known: the sequence.
        start: position of the first token, at least 1.
        tokens: token ids.
        unwritten: number of leading tokens whose KV exists already.
        media: (position, embeddings) of placeholder tokens among them.
        wanted: number of drafts behind the last token.
    """

    known: KnownSequence
    start: int
    tokens: tuple[int, ...]
    unwritten: int = 0
    media: tuple[_MediaRows, ...] = ()
    wanted: int = 0


def make_draft_batch(inputs: Sequence[MtpInput], block_size: int) -> ForwardBatch:
    """Build the batch for `Model.draft`, with logits for the inputs that want drafts."""
    offsets, slots, rows, media = [0], list[int](), list[int](), list[_MediaRows]()
    chunk_ends = []
    for one in inputs:
        first, count = offsets[-1], len(one.tokens)
        chunk_ends.append((*range(first + _CHUNK, first + count, _CHUNK), first + count))
        offsets.append(first + count)
        slots += [-1] * one.unwritten
        for position in range(one.start + one.unwritten, one.start + count):
            block, place = divmod(position, block_size)
            slots.append(one.known.table[block] * block_size + place)
        media += [(first + position - one.start, vectors) for position, vectors in one.media]
        if one.wanted:
            rows.append(offsets[-1] - 1)
    none = (-1,) * len(inputs)
    before = [one.known.positions(one.start - 1, one.start - 1 + len(one.tokens)) for one in inputs]
    return ForwardBatch(
        token_ids=torch.tensor([token for one in inputs for token in one.tokens]),
        positions=torch.cat(before, dim=1),
        slots=torch.tensor(slots),
        prefill=PrefillMeta(
            cu_seqlens=tuple(offsets),
            starts=tuple(one.start - 1 for one in inputs),
            block_tables=tuple(one.known.table for one in inputs),
            src_rows=none,
            dst_rows=none,
            chunk_ends=tuple(chunk_ends),
        ),
        media=tuple(media),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )


class MtpRunner:
    """Keeps the layer's KV and the last hidden state of every state row complete for all certain
    tokens, and drafts the next ones. Drafts are greedy, regardless of the sampling options.

    Args:
        model: a model loaded with its MTP layer.
        caches: its pools.
        block_size: tokens per KV block.
        graphs: run the passes that they accept, instead of the model.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        block_size: int,
        graphs: DraftGraphs | None = None,
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._caches = caches
        self._block_size = block_size
        by_kind = caches.of_layer(len(model.spec.layers))
        pools = [by_kind[kind] for kind in ("kv", "kv_scales") if kind in by_kind]
        self._own_pools = [
            pool.view(torch.uint8) if pool.element_size() == 1 else pool for pool in pools
        ]

    def run(
        self,
        packed: Sequence[Slice],
        known: Known,
        embeddings: Mapping[int, torch.Tensor],
        hidden: torch.Tensor,
        sampled: Mapping[int, tuple[SampledToken, ...]],
    ) -> dict[int, tuple[int, ...]]:
        """Draft behind the sampled tokens; return the drafts by sequence number.

        Args:
            packed: the step's slices in their order.
            known: sequences by number.
            embeddings: media embeddings by slot.
            hidden: `[T, hidden]`, hidden states of the step's tokens.
            sampled: sampled tokens by sequence number.
        """
        pool = self._caches["hidden"][:, 0]
        inputs, before, numbers = list[MtpInput](), list[torch.Tensor](), list[int]()
        kept = list[tuple[int, int]]()
        first = 0
        for item in packed:
            tokens = sampled.get(item.sequence, ())
            count = len(tokens) if item.kind == "verify" else item.end - item.start
            kept.append((item.dst_row, first + count - 1))
            kept += [(row, first + end - 1 - item.start) for end, row in item.snapshots]
            known[item.sequence].mtp_cleared_until = 0
            one = _mtp_input(item, known[item.sequence], count, tokens, embeddings)
            if one.tokens:
                if item.start:
                    before.append(pool[item.src_row : item.src_row + 1])
                before.append(hidden[first : first + count - (not one.wanted)])
                inputs.append(one)
                numbers += [item.sequence] * bool(one.wanted)
            first += item.end - item.start
        drafts = self._draft(inputs, torch.cat(before)) if inputs else []
        rows, places = zip(*kept, strict=True)
        pool[list(rows)] = hidden[list(places)]
        return dict(zip(numbers, drafts, strict=True))

    def skip(self, packed: Sequence[Slice], known: Known) -> None:
        """Skip a step. Its keys and values in the layer are set to zero, so that later tokens
        attend to nothing there instead of another sequence's data."""
        for item in packed:
            sequence = known[item.sequence]
            if item.end <= sequence.mtp_cleared_until:
                continue
            for block in range(item.start // self._block_size, len(sequence.table)):
                row = max(0, item.start - block * self._block_size)
                for pool in self._own_pools:
                    pool[sequence.table[block], :, row:] = 0
            sequence.mtp_cleared_until = len(sequence.table) * self._block_size

    def forward(self, batch: ForwardBatch, before: torch.Tensor) -> ForwardOutput:
        """Run a pass of the layer, see `Model.draft`, from a graph if one fits. The batch's tensors
        are on the host."""
        if self._graphs is not None:
            output = self._graphs.run(batch, before)
            if output is not None:
                return output
        return self._model.draft(batch.to(self._caches.device), before, self._caches)

    def _draft(self, inputs: list[MtpInput], before: torch.Tensor) -> list[tuple[int, ...]]:
        """Draft for each input that wants it, token by token. Each draft is read to draft the
        next."""
        batch = make_draft_batch(inputs, self._block_size)
        if self._graphs is not None and self._graphs.run(batch, before) is not None:
            return self._by_graphs(self._graphs, [one for one in inputs if one.wanted])
        chains: list[list[int]] = [[] for one in inputs if one.wanted]
        live = list(range(len(chains)))
        requested = [one for one in inputs if one.wanted]
        while inputs:
            output = self.forward(batch, before)
            assert output.hidden is not None
            for place, token in zip(live, output.logits.argmax(-1).tolist(), strict=True):
                chains[place].append(token)
            unfinished = [place for place in live if len(chains[place]) < requested[place].wanted]
            before = output.hidden[[live.index(place) for place in unfinished]]
            live = unfinished
            inputs = [_next(requested[place], chains[place]) for place in live]
            if inputs:
                batch = make_draft_batch(inputs, self._block_size)
        return [tuple(chain) for chain in chains]

    def _by_graphs(self, graphs: DraftGraphs, requested: list[MtpInput]) -> list[tuple[int, ...]]:
        """Draft behind the first pass with a single wait, at the end. Every sequence takes part to
        the end, with tokens that are written nowhere."""
        if not requested:
            return []
        drafts = [graphs.best[: len(requested)].clone()]
        for depth in range(1, max(one.wanted for one in requested)):
            later = [_later(one, depth) for one in requested]
            graphs.run_later(make_draft_batch(later, self._block_size))
            drafts.append(graphs.best[: len(requested)].clone())
        chains = torch.stack(drafts, dim=1).tolist()
        return [tuple(row[: one.wanted]) for one, row in zip(requested, chains, strict=True)]


def _mtp_input(
    item: Slice,
    known: KnownSequence,
    count: int,
    sampled: Sequence[SampledToken],
    embeddings: Mapping[int, torch.Tensor],
) -> MtpInput:
    """Build the input from the first `count` tokens of a slice, plus the sampled token if drafts
    are wanted. The first token of a sequence is left out: it has no predecessor."""
    start = max(1, item.start)
    tokens = known.token_ids(item)[start - item.start : count]
    wanted = item.drafts if sampled else 0
    if wanted:
        tokens += (sampled[-1].token_id,)
    media = []
    for first, last, slot, row in item.embeddings:
        begin = max(first, start)
        if begin < last:
            media.append((begin, embeddings[slot][row + begin - first : row + last - first]))
    unwritten = max(0, min(item.end, item.write_start) - start)
    return MtpInput(known, start, tokens, unwritten, tuple(media), wanted)


def _next(one: MtpInput, chain: list[int]) -> MtpInput:
    """Return the input that reads the last draft."""
    position = one.start + len(one.tokens) + len(chain) - 1
    return MtpInput(one.known, position, (chain[-1],), wanted=one.wanted)


def _later(one: MtpInput, depth: int) -> MtpInput:
    """Return the input that reads draft number `depth`, which is on the device; or the last one
    again if there are fewer."""
    read = min(depth, one.wanted - 1)
    position = one.start + len(one.tokens) + read - 1
    return MtpInput(one.known, position, (0,), unwritten=int(depth > read), wanted=one.wanted)
