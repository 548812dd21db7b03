"""Runs a model without an engine: pools full of NaN, scattered blocks, batches made by hand.

A test says which slices of which sequences make up a step; the driver does what scheduler and
executor would.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput


@dataclass
class Sequence_:
    """One prompt and what has become of it.

    Attributes:
        tokens: prompt, then generated tokens.
        positions: int64 `[3, prompt length]`.
        media: (offset, embeddings) of its placeholder runs.
        cuts: extra positions, besides multiples of the chunk size, at which GDN chunks end.
    """

    tokens: list[int]
    positions: torch.Tensor
    media: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    cuts: tuple[int, ...] = ()
    row: int = -1
    started: bool = False
    blocks: list[int] = field(default_factory=list)

    def position(self, index: int) -> torch.Tensor:
        """int64 `[3, 1]` position of a prompt or generated token."""
        known = self.positions.shape[1]
        if index < known:
            return self.positions[:, index : index + 1]
        return self.positions.max().expand(3, 1) + 1 + index - known


def text_sequence(tokens: Sequence[int], cuts: Iterable[int] = ()) -> Sequence_:
    """A sequence without media: all three position axes count the tokens."""
    return Sequence_(list(tokens), torch.arange(len(tokens)).expand(3, -1), cuts=tuple(cuts))


class Driver:
    """Pools for one model and the steps over them.

    Args:
        model: what runs.
        block_size: tokens per KV block; also the GDN chunk size, at most 64.
        num_blocks, num_rows: sizes of the pools.
        scratch_rows: further rows, that no sequence gets.
        deterministic: see ForwardBatch.
        state: type of the recurrent states.
        kv: type of the pages, that of activations if not given; uint8 for int8 codes with scales.
        most_drafts: tokens of a slice of drafts.
        ranks: how many share the model.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        num_rows: int = 16,
        scratch_rows: int = 0,
        deterministic: bool = False,
        state: torch.dtype = torch.float32,
        kv: torch.dtype | None = None,
        most_drafts: int = 0,
        ranks: int = 1,
    ) -> None:
        self.model = model
        self.forward = model.forward
        self.block_size = block_size
        self.deterministic = deterministic
        self.caches = model.spec.cache_layout(ranks, mtp=model.drafts).allocate(
            num_blocks,
            num_rows + scratch_rows,
            block_size,
            {
                "kv": kv or model.dtype,
                "inputs": model.dtype,
                "state": state,
                "activations": model.dtype,
                "exact": torch.float32,
                **({"scales": torch.float16} if kv == torch.uint8 else {}),
            },
            num_updates=num_rows * most_drafts,
        )
        self._most_drafts = most_drafts
        for pool in self.caches.tensors.values():
            pool.fill_(255 if pool.dtype == torch.uint8 else float("nan"))
        self._free_blocks = random.Random(0).sample(range(num_blocks), num_blocks)
        self._free_rows = random.Random(1).sample(range(num_rows), num_rows)

    def take_row(self) -> int:
        return self._free_rows.pop()

    def step(
        self,
        decodes: Sequence[Sequence_] = (),
        prefills: Sequence[tuple[Sequence_, int, int]] = (),
        *,
        drafts: Sequence[tuple[Sequence_, int, int]] = (),
        snapshots: Sequence[tuple[Sequence_, int, int]] = (),
        all_logits: bool = True,
        capture_experts: bool = False,
    ) -> ForwardOutput:
        """One forward: the last token of each decode sequence, and prompt slices [start, end).

        Args:
            drafts: (sequence, start, how many of its updates hold): its tokens from `start` on.
            snapshots: (sequence, position, row): the state at that position also goes to the row.
            all_logits: logits of every token, else of each slice's last one.
        """
        slices = [(one, len(one.tokens) - 1, len(one.tokens)) for one in decodes] + list(prefills)
        slices += [(one, start, len(one.tokens)) for one, start, _ in drafts]
        for one, _, end in slices:
            self._make_room(one, end)
        media = []
        offset = 0
        for one, start, end in slices:
            for place, embedding in one.media:
                first, last = max(start, place), min(end, place + embedding.shape[0])
                if first < last:
                    part = embedding[first - place : last - place]
                    media.append((offset + first - start, part))
            offset += end - start
        ends = torch.tensor([end - start for _, start, end in slices]).cumsum(0) - 1
        batch = ForwardBatch(
            token_ids=torch.tensor([t for one, a, b in slices for t in one.tokens[a:b]]),
            positions=torch.cat(
                [one.position(i) for one, a, b in slices for i in range(a, b)], dim=1
            ),
            slots=torch.tensor([self._slot(one, i) for one, a, b in slices for i in range(a, b)]),
            decode=self._decode_meta(decodes) if decodes else None,
            prefill=self._prefill_meta(prefills, snapshots) if prefills else None,
            media=tuple(media),
            logit_rows=torch.arange(offset) if all_logits else ends,
            deterministic=self.deterministic,
            capture_experts=capture_experts,
            verify=self._verify_meta(drafts) if drafts else None,
            greedy=True,
        )
        output = self.forward(batch, self.caches)
        for one, _, _ in slices:
            one.started = True
        return output

    def prefill(self, one: Sequence_, splits: Sequence[int] = ()) -> torch.Tensor:
        """Logits `[prompt, vocab]` of a prompt, run in slices that end at `splits`."""
        edges = [0, *splits, len(one.tokens)]
        steps = [self.step(prefills=[(one, a, b)]) for a, b in zip(edges, edges[1:], strict=False)]
        return torch.cat([output.logits for output in steps])

    def generate(self, one: Sequence_, num_tokens: int) -> list[int]:
        """Greedy continuation of a prompt."""
        logits = self.step(prefills=[(one, 0, len(one.tokens))], all_logits=False).logits
        generated = []
        for _ in range(num_tokens):
            generated.append(int(logits[-1].argmax()))
            one.tokens.append(generated[-1])
            logits = self.step(decodes=[one]).logits
        return generated

    def _make_room(self, one: Sequence_, length: int) -> None:
        if one.row < 0:
            one.row = self.take_row()
        while len(one.blocks) * self.block_size < length:
            one.blocks.append(self._free_blocks.pop())

    def _slot(self, one: Sequence_, index: int) -> int:
        return one.blocks[index // self.block_size] * self.block_size + index % self.block_size

    def _decode_meta(self, decodes: Sequence[Sequence_]) -> DecodeMeta:
        return DecodeMeta(
            block_tables=tuple(tuple(one.blocks) for one in decodes),
            kv_lens=tuple(len(one.tokens) for one in decodes),
            src_rows=tuple(one.row if one.started else -1 for one in decodes),
            dst_rows=tuple(one.row for one in decodes),
            snapshot_rows=(-1,) * len(decodes),
        )

    def fold(self, one: Sequence_, count: int) -> None:
        """Brings a row up to date."""
        self.model.fold(self.caches, [(one.row, one.row * self._most_drafts, count)])

    def _verify_meta(self, drafts: Sequence[tuple[Sequence_, int, int]]) -> VerifyMeta:
        cu_seqlens = [0]
        for one, start, _ in drafts:
            cu_seqlens.append(cu_seqlens[-1] + len(one.tokens) - start)
        return VerifyMeta(
            cu_seqlens=tuple(cu_seqlens),
            starts=tuple(start for _, start, _ in drafts),
            block_tables=tuple(tuple(one.blocks) for one, _, _ in drafts),
            rows=tuple(one.row for one, _, _ in drafts),
            updates=tuple(one.row * self._most_drafts for one, _, _ in drafts),
            folded=tuple(pending for _, _, pending in drafts),
        )

    def _prefill_meta(
        self,
        prefills: Sequence[tuple[Sequence_, int, int]],
        snapshots: Sequence[tuple[Sequence_, int, int]],
    ) -> PrefillMeta:
        cu_seqlens, chunk_ends, emitted = [0], [], []
        for index, (one, start, end) in enumerate(prefills):
            ends = [
                i
                for i in range(start + 1, end + 1)
                if i % self.block_size == 0 or i == end or i in one.cuts
            ]
            chunk_ends.append(tuple(cu_seqlens[-1] + i - start for i in ends))
            emitted += [
                (index, ends.index(position), row)
                for other, position, row in snapshots
                if other is one
            ]
            cu_seqlens.append(cu_seqlens[-1] + end - start)
        return PrefillMeta(
            cu_seqlens=tuple(cu_seqlens),
            starts=tuple(start for _, start, _ in prefills),
            block_tables=tuple(tuple(one.blocks) for one, _, _ in prefills),
            src_rows=tuple(one.row if one.started else -1 for one, _, _ in prefills),
            dst_rows=tuple(one.row for one, _, _ in prefills),
            chunk_ends=tuple(chunk_ends),
            snapshots=tuple(emitted),
        )
