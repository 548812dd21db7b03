"""Has the model's multi-token-prediction layer read what a step has computed, and draft from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.batching import Known, KnownSequence
from vlm_serve.engine.plan import Sampled, Slice
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors

_CHUNK = 64
_MediaRows = tuple[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that the layer reads in one forward.

    Attributes:
        known: the sequence.
        start: position of the first of them, at least 1.
        tokens: their ids.
        unwritten: so many of them, the first ones, have their KV already.
        media: (position, embeddings) of placeholder tokens among them.
        wanted: drafts behind the last one.
    """

    known: KnownSequence
    start: int
    tokens: tuple[int, ...]
    unwritten: int = 0
    media: tuple[_MediaRows, ...] = ()
    wanted: int = 0


def make_draft_batch(pieces: Sequence[Piece], block_size: int) -> ForwardBatch:
    """As `Model.draft` takes it; logits are wanted of the pieces that want drafts."""
    offsets, slots, rows, media = [0], list[int](), list[int](), list[_MediaRows]()
    chunk_ends = []
    for piece in pieces:
        first, count = offsets[-1], len(piece.tokens)
        chunk_ends.append((*range(first + _CHUNK, first + count, _CHUNK), first + count))
        offsets.append(first + count)
        slots += [-1] * piece.unwritten
        for position in range(piece.start + piece.unwritten, piece.start + count):
            block, place = divmod(position, block_size)
            slots.append(piece.known.table[block] * block_size + place)
        media += [(first + position - piece.start, each) for position, each in piece.media]
        if piece.wanted:
            rows.append(offsets[-1] - 1)
    none = (-1,) * len(pieces)
    before = [
        piece.known.positions(piece.start - 1, piece.start - 1 + len(piece.tokens))
        for piece in pieces
    ]
    return ForwardBatch(
        token_ids=torch.tensor([token for piece in pieces for token in piece.tokens]),
        positions=torch.cat(before, dim=1),
        slots=torch.tensor(slots),
        decode=None,
        prefill=PrefillMeta(
            cu_seqlens=tuple(offsets),
            starts=tuple(piece.start - 1 for piece in pieces),
            block_tables=tuple(piece.known.table for piece in pieces),
            src_rows=none,
            dst_rows=none,
            chunk_ends=tuple(chunk_ends),
        ),
        media=tuple(media),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )


class DraftMaker:
    """Keeps the layer's KV and every state row's last hidden state complete for all tokens that are
    certain, and drafts what may follow. Drafts are what is most likely, whatever is sampled.

    Args:
        model: loaded with its layer for drafts.
        caches: its pools.
        block_size: tokens per KV block.
    """

    def __init__(self, model: Model, caches: CacheTensors, block_size: int) -> None:
        self._model = model
        self._caches = caches
        self._block_size = block_size
        own = caches.of_layer(len(model.spec.layers))
        pools = [own[kind] for kind in ("kv", "kv_scales") if kind in own]
        self._own_pools = [
            pool.view(torch.uint8) if pool.element_size() == 1 else pool for pool in pools
        ]

    def run(
        self,
        packed: Sequence[Slice],
        known: Known,
        embeddings: Mapping[int, torch.Tensor],
        hidden: torch.Tensor,
        sampled: Mapping[int, tuple[Sampled, ...]],
    ) -> dict[int, tuple[int, ...]]:
        """What is drafted behind the sampled tokens, by sequence number.

        Args:
            packed: the step's slices in their order.
            known: sequences by number.
            embeddings: of media, by slot.
            hidden: `[T, hidden]`, of the step's tokens.
            sampled: by sequence number.
        """
        pool = self._caches["hidden"][:, 0]
        pieces, before, numbers = list[Piece](), list[torch.Tensor](), list[int]()
        kept = list[tuple[int, int]]()
        first = 0
        for item in packed:
            own = sampled.get(item.sequence, ())
            count = len(own) if item.kind == "verify" else item.end - item.start
            kept.append((item.dst_row, first + count - 1))
            kept += [(row, first + end - 1 - item.start) for end, row in item.snapshots]
            known[item.sequence].cleared = 0
            piece = _piece(item, known[item.sequence], count, own, embeddings)
            if piece.tokens:
                if item.start:
                    before.append(pool[item.src_row : item.src_row + 1])
                before.append(hidden[first : first + count - (not piece.wanted)])
                pieces.append(piece)
                numbers += [item.sequence] * bool(piece.wanted)
            first += item.end - item.start
        drafts = self._draft(pieces, torch.cat(before)) if pieces else []
        rows, places = zip(*kept, strict=True)
        pool[list(rows)] = hidden[list(places)]
        return dict(zip(numbers, drafts, strict=True))

    def leave_out(self, packed: Sequence[Slice], known: Known) -> None:
        """The layer reads nothing of a step. Its keys and values there are zero: who goes on behind
        them attends to nothing, and to nobody else's."""
        for item in packed:
            each = known[item.sequence]
            if item.end <= each.cleared:
                continue
            for block in range(item.start // self._block_size, len(each.table)):
                row = max(0, item.start - block * self._block_size)
                for pool in self._own_pools:
                    pool[each.table[block], :, row:] = 0
            each.cleared = len(each.table) * self._block_size

    def _draft(self, pieces: list[Piece], before: torch.Tensor) -> list[tuple[int, ...]]:
        """The drafts of each piece that wants some; each of them is read to draft the next."""
        chains: list[list[int]] = [[] for piece in pieces if piece.wanted]
        live = list(range(len(chains)))
        asking = [piece for piece in pieces if piece.wanted]
        while pieces:
            batch = make_draft_batch(pieces, self._block_size).to(self._caches.device)
            output = self._model.draft(batch, before, self._caches)
            assert output.hidden is not None
            for place, token in zip(live, output.logits.argmax(-1).tolist(), strict=True):
                chains[place].append(token)
            going_on = [place for place in live if len(chains[place]) < asking[place].wanted]
            before = output.hidden[[live.index(place) for place in going_on]]
            live = going_on
            pieces = [_next(asking[place], chains[place]) for place in live]
        return [tuple(chain) for chain in chains]


def _piece(
    item: Slice,
    known: KnownSequence,
    count: int,
    sampled: Sequence[Sampled],
    embeddings: Mapping[int, torch.Tensor],
) -> Piece:
    """The first `count` tokens of a slice, and the sampled one if drafts are wanted behind it. A
    sequence's very first token has nothing before it."""
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
    return Piece(known, start, tokens, unwritten, tuple(media), wanted)


def _next(piece: Piece, chain: list[int]) -> Piece:
    """Where the last draft is read."""
    position = piece.start + len(piece.tokens) + len(chain) - 1
    return Piece(piece.known, position, (chain[-1],), wanted=piece.wanted)
