"""The inputs of a step with a short prefill at addresses that never change, for captured graphs.

What a step lacks of what was captured is padding: sequences and chunks of no tokens, tiles of an
empty sequence, and tokens whose K and V are written nowhere. An empty sequence leaves the zero
state in the scratch row. No step's token reads any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.decode_buffers import DecodeLimits, DecodeTables, FixedTables, TokenBuffers
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import prefill_parts, query_tiles
from vlm_serve.models.batch import ForwardBatch

_TILES = "tile_sequence/"
"""What the names of attention's tables begin with; the rows of a tile and the heads that share a
key follow."""


@dataclass(frozen=True, slots=True)
class PrefillSizes:
    """What steps stay within.

    Attributes:
        decodes: decoding sequences.
        tokens: prompt tokens, of all sequences together.
        sequences: slices of prompts.
        chunks: of the gated delta rule, of all slices together.
        tails: states that are kept, those at the ends of slices included.
    """

    decodes: int
    tokens: int
    sequences: int

    @property
    def chunks(self) -> int:
        """Whole ones, and three more for each slice, which ends where blocks and snapshots do."""
        return self.tokens // MAX_CHUNK + 3 * self.sequences

    @property
    def tails(self) -> int:
        return 3 * self.sequences

    @property
    def logits(self) -> int:
        """Tokens whose logits a step may want."""
        return self.decodes + self.sequences


class PrefillTables:
    """The tables of a prefill within sizes, and of one more sequence, which is always empty.

    Attributes:
        meta: what ops are given; see `DecodeTables`. Attention adds its own tables to the tensors
            in the first forward.
    """

    def __init__(self, sizes: PrefillSizes, limits: DecodeLimits, device: torch.device) -> None:
        self._sizes, self._limits = sizes, limits
        rows = sizes.sequences + 1
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("cu_seqlens", "first_chunk", "first_tail"), (rows + 1,)),
            **dict.fromkeys(("starts", "src_rows", "dst_rows"), (rows,)),
            "chunk_bounds": (sizes.chunks + 1,),
            **dict.fromkeys(("chunk_sequence", "chunk_snapshot"), (sizes.chunks,)),
            **dict.fromkeys(("tail_stop", "tail_row"), (sizes.tails,)),
            "block_tables": (rows, limits.max_blocks),
        }
        self._tables = FixedTables(shapes, torch.int32, device)
        self.meta = self._largest()
        self.meta.tensors.update(self._tables.fixed)
        self.fill(None)

    def _largest(self) -> PrefillMeta:
        """One token of every sequence but the last, which has the others, in the most tiles."""
        sizes, count = self._sizes, self._sizes.sequences
        offsets = (*range(count), sizes.tokens, sizes.tokens)
        cuts = range(count - 1, sizes.tokens, MAX_CHUNK)
        blocks = max(self._limits.max_blocks, -(-sizes.tokens // self._limits.block_size))
        return PrefillMeta(
            cu_seqlens=offsets,
            starts=(0,) * (count + 1),
            block_tables=((0,) * blocks,) * (count + 1),
            src_rows=(-1,) * (count + 1),
            dst_rows=tuple(range(count + 1)),
            chunk_ends=(
                *((end,) for end in range(1, count)),
                (*cuts[1:], sizes.tokens),
                (),
            ),
        )

    def accepts(self, meta: PrefillMeta) -> bool:
        sizes, limits = self._sizes, self._limits
        return (
            meta.num_tokens <= sizes.tokens
            and len(meta) <= sizes.sequences
            and sum(map(len, meta.chunk_ends)) <= sizes.chunks
            and len(meta) + len(meta.snapshots) <= sizes.tails
            and max(map(len, meta.block_tables)) <= limits.max_blocks
            and all(
                len(query_tiles(meta, rows, group)[0]) <= len(fixed)
                for _, rows, group, fixed in self._tiles()
            )
        )

    def fill(self, meta: PrefillMeta | None) -> None:
        """Takes over a prefill that `accepts` allows, or none."""
        if meta is None:
            meta = PrefillMeta((0,), (), (), (), (), ())
        staged, parts = self._tables.staged, prefill_parts(meta)
        for name in staged.keys() - {"block_tables"}:
            _fill(staged[name], parts[name], self._padding(name, meta, parts))
        staged["block_tables"].zero_()
        for row, table in enumerate(meta.block_tables):
            staged["block_tables"][row].numpy()[: len(table)] = table
        self._tables.send()
        for name, rows, group, fixed in self._tiles():
            sequences, first_rows = query_tiles(meta, rows, group)
            other = self.meta.tensors[name.replace(_TILES, "tile_row/")]
            for device, values, padding in (
                (fixed, sequences, self._sizes.sequences),
                (other, first_rows, 0),
            ):
                host = torch.empty(len(device), dtype=torch.int32, pin_memory=device.is_cuda)
                _fill(host, values, padding)
                device.copy_(host, non_blocking=True)

    def _padding(self, name: str, meta: PrefillMeta, parts: dict[str, Sequence[int]]) -> int:
        if name in ("cu_seqlens", "chunk_bounds", "first_chunk", "first_tail"):
            return parts[name][-1]
        if name in ("src_rows", "chunk_snapshot"):
            return -1
        return self._limits.scratch_row if name in ("dst_rows", "tail_row") else 0

    def _tiles(self) -> list[tuple[str, int, int, torch.Tensor]]:
        """Attention's tables: name, rows of a tile, heads that share a key, sequences of tiles."""
        found = []
        for name, fixed in self.meta.tensors.items():
            if name.startswith(_TILES):
                rows, group = map(int, name.removeprefix(_TILES).split("/"))
                found.append((name, rows, group, fixed))
        return found


def _fill(table: torch.Tensor, values: Sequence[int], padding: int) -> None:
    table.fill_(padding)
    table[: len(values)] = torch.tensor(values, dtype=table.dtype)


class PrefillBuffers:
    """Inputs of a step: places for decoding sequences first, then those for prompt tokens.

    Attributes:
        batch: what the model is given.
    """

    def __init__(self, sizes: PrefillSizes, limits: DecodeLimits, device: torch.device) -> None:
        self._sizes = sizes
        self._tokens = TokenBuffers(sizes.decodes + sizes.tokens, device)
        self._decode = DecodeTables(sizes.decodes, limits, device)
        self._prefill = PrefillTables(sizes, limits, device)
        self._wanted = FixedTables({"rows": (sizes.logits,)}, torch.int64, device)
        self.batch = ForwardBatch(
            token_ids=self._tokens.token_ids,
            positions=self._tokens.positions,
            slots=self._tokens.slots,
            decode=self._decode.meta,
            prefill=self._prefill.meta,
            media=(),
            logit_rows=self._wanted.fixed["rows"],
        )
        self._tokens.fill(None)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Whether a step's sequences, tokens and logits find their places."""
        return (
            batch.prefill is not None
            and (batch.decode is None or len(batch.decode) <= self._sizes.decodes)
            and len(batch.logit_rows) <= self._sizes.logits
            and self._prefill.accepts(batch.prefill)
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Takes over a step that `accepts` allows, its tensors on the host."""
        assert batch.prefill is not None
        decodes, first = 0 if batch.decode is None else len(batch.decode), self._sizes.decodes
        prompt = slice(decodes, decodes + batch.prefill.num_tokens)
        self._tokens.fill(batch, (slice(0, decodes), 0), (prompt, first))
        self._decode.fill(batch.decode)
        self._prefill.fill(batch.prefill)
        rows = self._wanted.staged["rows"].zero_()
        wanted = batch.logit_rows
        rows[: len(wanted)] = torch.where(wanted < decodes, wanted, wanted + (first - decodes))
        self._wanted.send()
