"""Inputs of a step with a short prefill at fixed addresses, for captured graphs.

A step is padded to the captured size: with sequences and chunks of no tokens, tiles of an empty
sequence, and tokens whose K and V are written nowhere. An empty sequence leaves the zero state in
the scratch row. No token of the step reads any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.engine.decode_buffers import DecodeLimits, DecodeTables, TokenTables
from vlm_serve.engine.step_tables import HostRing, Shapes, StepTables, TableMemory
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import prefill_parts, query_tiles
from vlm_serve.models.batch import ForwardBatch

TileForm = tuple[int, int]
"""Rows of a query tile in attention, and number of heads that share a key."""
_SEQUENCES, _ROWS = "tile_sequence/{}/{}", "tile_row/{}/{}"
"""Names of attention's tables, by tile form."""


def tile_forms(tensors: Mapping[str, torch.Tensor]) -> tuple[TileForm, ...]:
    """Return the tile forms whose tables attention has added to a step."""
    names = [name.split("/") for name in tensors if name.startswith("tile_sequence/")]
    return tuple((int(rows), int(group)) for _, rows, group in names)


@dataclass(frozen=True, slots=True)
class PrefillSizes:
    """Maximum sizes of steps.

    Attributes:
        decodes: decoding sequences.
        tokens: prompt tokens of all sequences together.
        sequences: prefill slices.
        chunks: chunks of the gated delta rule, of all slices together.
        tails: stored states, including those at the ends of slices.
    """

    decodes: int
    tokens: int
    sequences: int

    @property
    def chunks(self) -> int:
        """Number of whole chunks, plus three per slice, whose chunks also end at blocks and
        snapshots."""
        return self.tokens // MAX_CHUNK + 3 * self.sequences

    @property
    def tails(self) -> int:
        return 3 * self.sequences

    @property
    def logits(self) -> int:
        """Maximum number of tokens whose logits a step needs."""
        return self.decodes + self.sequences


class PrefillTables:
    """Tables of a prefill of limited size, with one more sequence that is always empty.

    Args:
        sizes, limits: maximum sizes of steps.
        forms: attention's tile forms. Without them, attention makes its own tables for the largest
            step, in the first forward.
    """

    def __init__(
        self, sizes: PrefillSizes, limits: DecodeLimits, forms: Sequence[TileForm] = ()
    ) -> None:
        self._sizes, self._limits = sizes, limits
        self._largest = _largest(sizes, limits)
        self._tiles = {form: len(query_tiles(self._largest, *form)[0]) for form in forms}

    @property
    def shapes(self) -> Shapes:
        """Types and shapes; all are int32."""
        sizes, rows = self._sizes, self._sizes.sequences + 1
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("cu_seqlens", "first_chunk", "first_tail"), (rows + 1,)),
            **dict.fromkeys(("starts", "src_rows", "dst_rows"), (rows,)),
            "chunk_bounds": (sizes.chunks + 1,),
            **dict.fromkeys(("chunk_sequence", "chunk_snapshot"), (sizes.chunks,)),
            **dict.fromkeys(("tail_stop", "tail_row"), (sizes.tails,)),
            "block_tables": (rows, self._limits.max_blocks),
        }
        for form, count in self._tiles.items():
            shapes[_SEQUENCES.format(*form)] = shapes[_ROWS.format(*form)] = (count,)
        return {name: (torch.int32, shape) for name, shape in shapes.items()}

    def meta(self, fixed: Mapping[str, torch.Tensor]) -> PrefillMeta:
        """Return the arguments of ops; see `DecodeTables.meta`."""
        self._largest.tensors.update(fixed)
        return self._largest

    def accepts(self, meta: PrefillMeta) -> bool:
        """Return True if a prefill's sequences, chunks, states and tiles fit."""
        sizes, limits = self._sizes, self._limits
        return (
            meta.num_tokens <= sizes.tokens
            and len(meta) <= sizes.sequences
            and sum(map(len, meta.chunk_ends)) <= sizes.chunks
            and len(meta) + len(meta.snapshots) <= sizes.tails
            and max(map(len, meta.block_tables)) <= limits.max_blocks
            and all(
                len(query_tiles(meta, *form)[0]) <= count for form, count in self._tiles.items()
            )
        )

    def fill(self, staged: Mapping[str, torch.Tensor], meta: PrefillMeta | None) -> None:
        """Write a prefill that `accepts` allows, or none, followed by padding."""
        if meta is None:
            meta = PrefillMeta((0,), (), (), (), (), ())
        parts = prefill_parts(meta)
        for form in self._tiles:
            tiles = query_tiles(meta, *form)
            parts[_SEQUENCES.format(*form)], parts[_ROWS.format(*form)] = tiles
        for name in staged.keys() - {"block_tables"}:
            table, values = staged[name], parts[name]
            table.fill_(self._padding(name, parts))
            table[: len(values)] = torch.tensor(values, dtype=table.dtype)
        blocks = staged["block_tables"].zero_()
        for row, used in enumerate(meta.block_tables):
            blocks[row].numpy()[: len(used)] = used

    def _padding(self, name: str, parts: Mapping[str, Sequence[int]]) -> int:
        if name in ("cu_seqlens", "chunk_bounds", "first_chunk", "first_tail"):
            return parts[name][-1]
        if name in ("src_rows", "chunk_snapshot"):
            return -1
        if name.startswith("tile_sequence/"):
            return self._sizes.sequences
        return self._limits.scratch_row if name in ("dst_rows", "tail_row") else 0


def _largest(sizes: PrefillSizes, limits: DecodeLimits) -> PrefillMeta:
    """Return the prefill with the most tiles: one token in every sequence but the last, which has
    the rest."""
    count = sizes.sequences
    offsets = (*range(count), sizes.tokens, sizes.tokens)
    cuts = range(count - 1, sizes.tokens, MAX_CHUNK)
    blocks = max(limits.max_blocks, -(-sizes.tokens // limits.block_size))
    return PrefillMeta(
        cu_seqlens=offsets,
        starts=(0,) * (count + 1),
        block_tables=((0,) * blocks,) * (count + 1),
        src_rows=(-1,) * (count + 1),
        dst_rows=tuple(range(count + 1)),
        chunk_ends=(*((end,) for end in range(1, count)), (*cuts[1:], sizes.tokens), ()),
        fixed=True,
    )


class PrefillBuffers:
    """Inputs of a step: first those of decoding sequences, then those of prompt tokens.

    Args:
        sizes, limits, forms: see `PrefillTables`.
        ring, device, memory: see `StepTables`.
        packs: provide `packed`.

    Attributes:
        batch: argument of the model.
        packed: int64, the places of a step's tokens in their order; None if not asked for.
    """

    def __init__(
        self,
        sizes: PrefillSizes,
        limits: DecodeLimits,
        ring: HostRing,
        device: torch.device,
        forms: Sequence[TileForm] = (),
        *,
        packs: bool = False,
        memory: TableMemory | None = None,
    ) -> None:
        self._sizes = sizes
        self._tokens = TokenTables(sizes.decodes + sizes.tokens)
        self._decode = DecodeTables(sizes.decodes, limits)
        self._prefill = PrefillTables(sizes, limits, forms)
        parts = {
            "tokens": self._tokens.shapes,
            "decode": self._decode.shapes,
            "prefill": self._prefill.shapes,
            "logits": {"rows": (torch.int64, (sizes.logits,))},
            "packed": {"rows": (torch.int64, (sizes.decodes + sizes.tokens,))} if packs else {},
        }
        self._tables = StepTables(parts, ring, device, memory)
        fixed = self._tables.fixed
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=self._decode.meta(fixed["decode"]),
            prefill=self._prefill.meta(fixed["prefill"]),
            media=(),
            logit_rows=fixed["logits"]["rows"],
        )
        self.packed = fixed["packed"].get("rows")
        self.fill(None)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Return True if a step's sequences, tokens and logits fit."""
        return (
            batch.prefill is not None
            and (batch.decode is None or len(batch.decode) <= self._sizes.decodes)
            and len(batch.logit_rows) <= self._sizes.logits
            and self._prefill.accepts(batch.prefill)
        )

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a step that `accepts` allows, its tensors on the host; None writes padding
        alone."""
        decode = None if batch is None else batch.decode
        prefill = None if batch is None else batch.prefill
        decodes, first = 0 if decode is None else len(decode), self._sizes.decodes
        prompt = slice(decodes, decodes + (0 if prefill is None else prefill.num_tokens))
        staged = self._tables.stage()
        self._tokens.fill(staged["tokens"], batch, (slice(0, decodes), 0), (prompt, first))
        first_block = 0 if prefill is None else prefill.block_tables[0][0]
        self._decode.fill(staged["decode"], decode, first_block)
        self._prefill.fill(staged["prefill"], prefill)
        rows = staged["logits"]["rows"].zero_()
        if batch is not None:
            wanted = batch.logit_rows
            rows[: len(wanted)] = torch.where(wanted < decodes, wanted, wanted + (first - decodes))
        if self.packed is not None:
            packed, last = staged["packed"]["rows"].zero_(), decodes + prompt.stop - prompt.start
            packed[:decodes] = torch.arange(decodes)
            packed[decodes:last] = torch.arange(first, first + last - decodes)
        self._tables.send()
