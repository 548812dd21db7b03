"""Inputs of captured steps at fixed addresses: first those of sequences that decode, then those of
sequences with drafts or of prompts. A step is padded to the captured size.

Padding is harmless, and reads no uninitialised memory, so it stays finite. Its K and V are written
nowhere.

- A sequence that decodes starts from zero state, leaves its state in a scratch row that no sequence
  reads, and attends to the first key of the first sequence.
- A sequence with drafts has a place of as many tokens as all others, whatever its number of drafts.
  The rest of its place and whole places behind the last one attend to one key, and have no update.
- Prompts are followed by sequences and chunks of no tokens, and tiles of an empty sequence, which
  leaves the zero state in the scratch row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from vlm_serve.engine.steps.adapter_table import AdapterTable, row_tables, write_changes
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import HostRing, StepTables, Table, TableMemory, Tables
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.triton_support import prefill_parts, query_tiles
from vlm_serve.models.batch import ForwardBatch

TileForm = tuple[int, int]
"""Rows of a query tile in attention, and number of heads that share a key."""
_TILES = "tile_sequence/{}/{}", "tile_row/{}/{}"
"""Names of attention's tables, by tile form."""
_OFFSETS = ("cu_seqlens", "first_chunk", "first_tail", "chunk_bounds")
"""Tables whose padding is their last value: all that follows is empty."""
Runs = Sequence[tuple[slice, int]]
"""Consecutive tokens of a step, and where the first of them lies in the buffers."""
_PER_SEQUENCE = ("kv_lens", "src_rows", "dst_rows", "snapshot_rows")


def tile_forms(tensors: Mapping[str, torch.Tensor]) -> tuple[TileForm, ...]:
    """Return the tile forms whose tables attention has added to a step."""
    names = [name.split("/") for name in tensors if name.startswith("tile_sequence/")]
    return tuple((int(rows), int(group)) for _, rows, group in names)


class PrefillTables:
    """Tables of prompts, with one more sequence that is always empty.

    Args:
        size, limits: maximum sizes of steps.
        forms: attention's tile forms. Without them, attention makes its own tables for the largest
            step, in the first forward.

    Attributes:
        tables: those of a step; all are int32.
    """

    def __init__(
        self, size: StepSize, limits: SequenceLimits, forms: Sequence[TileForm] = ()
    ) -> None:
        self._size, self._limits = size, limits
        self._largest = _largest(size, limits)
        self._tiles = {form: len(query_tiles(self._largest, *form)[0]) for form in forms}
        rows, scratch = size.prompts + 1, limits.scratch_row
        columns: list[tuple[str, int, int]] = [
            *((name, rows + 1, 0) for name in ("cu_seqlens", "first_chunk", "first_tail")),
            ("starts", rows, 0),
            ("src_rows", rows, -1),
            ("dst_rows", rows, scratch),
            ("chunk_bounds", size.chunks + 1, 0),
            ("chunk_sequence", size.chunks, 0),
            ("chunk_snapshot", size.chunks, -1),
            ("tail_stop", size.tails, 0),
            ("tail_row", size.tails, scratch),
        ]
        for form, count in self._tiles.items():
            paddings = zip(_TILES, (size.prompts, 0), strict=True)
            columns += [(name.format(*form), count, padding) for name, padding in paddings]
        self.tables: Tables = {
            **{name: Table(torch.int32, (count,), padding) for name, count, padding in columns},
            "block_tables": Table(torch.int32, (rows, limits.max_blocks), wide=True),
        }

    def meta(self, fixed: Mapping[str, torch.Tensor]) -> PrefillMeta:
        """Return the arguments of ops; see `StepBuffers`."""
        self._largest.tensors.update(fixed)
        return self._largest

    def accepts(self, meta: PrefillMeta) -> bool:
        """Return True if a prefill's sequences, chunks, states and tiles fit."""
        size = self._size
        return (
            meta.num_tokens <= size.tokens
            and len(meta) <= size.prompts
            and sum(map(len, meta.chunk_ends)) <= size.chunks
            and len(meta) + len(meta.snapshots) <= size.tails
            and max(map(len, meta.block_tables)) <= self._limits.max_blocks
            and all(
                len(query_tiles(meta, *form)[0]) <= count for form, count in self._tiles.items()
            )
        )

    def write(self, staged: Mapping[str, torch.Tensor], meta: PrefillMeta | None) -> None:
        """Write a prefill that `accepts` allows, or none."""
        if meta is None:
            meta = PrefillMeta((0,), (), (), (), (), ())
        parts = prefill_parts(meta)
        for form in self._tiles:
            tiles = zip(_TILES, query_tiles(meta, *form), strict=True)
            parts |= {name.format(*form): values for name, values in tiles}
        for name in staged.keys() - {"block_tables"}:
            table, values = staged[name], parts[name]
            table[: len(values)] = torch.tensor(values, dtype=table.dtype)
            if name in _OFFSETS:
                table[len(values) :] = values[-1]
        width = staged["block_tables"].shape[1]
        for row, used in enumerate(meta.block_tables):
            staged["block_tables"][row].numpy()[: len(used)] = used[:width]


def _largest(size: StepSize, limits: SequenceLimits) -> PrefillMeta:
    """Return the prefill with the most tiles: one token in every sequence but the last, which has
    the rest."""
    count = size.prompts
    offsets = (*range(count), size.tokens, size.tokens)
    cuts = range(count - 1, size.tokens, MAX_CHUNK)
    blocks = max(limits.max_blocks, -(-size.tokens // limits.block_size))
    return PrefillMeta(
        cu_seqlens=offsets,
        starts=(0,) * (count + 1),
        block_tables=((0,) * blocks,) * (count + 1),
        src_rows=(-1,) * (count + 1),
        dst_rows=tuple(range(count + 1)),
        chunk_ends=(*((end,) for end in range(1, count)), (*cuts[1:], size.tokens), ()),
        fixed=True,
    )


def runs_of(
    offsets: Sequence[int], room: int, skipped: int = 0, first: int = 0
) -> list[tuple[slice, int]]:
    """Return the runs of packed slices in places of `room` tokens, the first of which is `first`.
    `skipped`: tokens of the step before the slices."""
    return [
        (slice(skipped + begin, skipped + end), first + place * room)
        for place, (begin, end) in enumerate(pairwise(offsets))
    ]


def places_of(runs: Runs) -> torch.Tensor:
    """Return int64, where each token of a step lies."""
    return torch.cat([torch.arange(first, first + run.stop - run.start) for run, first in runs])


def index_table(size: int) -> dict[str, Table]:
    """Return a table of places of tokens."""
    return {"rows": Table(torch.int64, (size,))}


def token_tables(size: int) -> dict[str, Table]:
    """Return the tables of tokens, see `ForwardBatch`; a slot of -1 is written nowhere."""
    return {
        "token_ids": Table(torch.int64, (size,)),
        "positions": Table(torch.float64, (3, size)),
        "slots": Table(torch.int64, (size,), -1),
    }


def write_tokens(staged: Mapping[str, torch.Tensor], batch: ForwardBatch, runs: Runs) -> None:
    """Write a batch's tokens."""
    for run, first in runs:
        target = slice(first, first + run.stop - run.start)
        staged["token_ids"][target] = batch.token_ids[run]
        staged["positions"][:, target] = batch.positions[:, run]
        staged["slots"][target] = batch.slots[run]


def place_tables(size: StepSize, limits: SequenceLimits, least: int = 1) -> dict[str, Table]:
    """Return attention's tables for tokens in places: keys per token, blocks per place. Padding
    attends to `least` keys, those that are hidden included."""
    return {
        "kv_lens": Table(torch.int32, (size.drafted * size.room,), least),
        "block_tables": Table(torch.int32, (size.drafted, limits.max_blocks), wide=True),
    }


def write_places(
    staged: Mapping[str, torch.Tensor],
    size: StepSize,
    limits: SequenceLimits,
    starts: Sequence[int],
    offsets: Sequence[int],
    blocks: Sequence[Sequence[int]],
) -> None:
    """Write packed slices, whose first tokens attend to `starts` keys before their own."""
    ends = []
    for start, (run, first) in zip(starts, runs_of(offsets, size.room), strict=True):
        ends.append(start + run.stop - run.start)
        target = slice(first, first + run.stop - run.start)
        staged["kv_lens"][target] = torch.arange(start + 1, ends[-1] + 1)
    _write_blocks(staged["block_tables"], blocks, ends, limits, 0)


def _columns(metas: Sequence[AnyMeta], limits: SequenceLimits) -> int:
    """Return the columns of block tables that a step reads; at least one, for padding."""
    used = [
        meta.table.shape[1]
        if isinstance(meta, DecodeMeta) and meta.table is not None
        else max(-(-length // limits.block_size) for length in meta.kv_lens)
        for meta in metas
    ]
    return max([1, *used])


def _write_blocks(
    staged: torch.Tensor,
    blocks: Sequence[Sequence[int]],
    lengths: Sequence[int],
    limits: SequenceLimits,
    instead: int,
) -> None:
    """Write the blocks that cover each sequence's keys, followed by padding: the first block of the
    first sequence, or `instead` if there is none."""
    for row, (table, length) in enumerate(zip(blocks, lengths, strict=True)):
        used = -(-length // limits.block_size)
        staged[row].numpy()[:used] = table[:used]
    staged[len(blocks) :, 0] = blocks[0][0] if blocks else instead


class StepBuffers:
    """Inputs of a step of one size.

    Host values of its batch are the maximum of all steps, since they size grids and scratch memory.
    The values of a step are in tensors only.

    Args:
        size: room of the step.
        limits: of its sequences.
        ring, device, memory: see `StepTables`.
        adapters: of the sequences' slots; None: they have none.
        forms: of the prompts' attention, see `PrefillTables`.
        packs: prompts have `packed`.

    Attributes:
        batch: argument of the model. Logits are those of all tokens, or beside prompts of some, in
            their order, without padding between them.
        packed: int64, the places of a step's tokens in their order; None: there is no padding
            between them, or it is not asked for.
    """

    def __init__(
        self,
        size: StepSize,
        limits: SequenceLimits,
        ring: HostRing,
        device: torch.device,
        memory: TableMemory | None = None,
        *,
        adapters: AdapterTable | None = None,
        forms: Sequence[TileForm] = (),
        packs: bool = False,
    ) -> None:
        self._size, self._limits = size, limits
        self._prefill = PrefillTables(size, limits, forms) if size.prompts else None
        decode_alone = not size.drafted and not size.prompts
        parts: dict[str, Tables] = {"tokens": token_tables(size.rows)}
        if size.decodes:
            parts["decode"] = self._decode_tables()
        if size.drafted:
            parts["verify"] = self._verify_tables()
        if self._prefill is not None:
            parts["prefill"] = self._prefill.tables
        if not decode_alone:
            parts["logits"] = index_table(size.logits)
        if packs:
            parts["packed"] = index_table(size.rows)
        if adapters is not None:
            parts["changes"] = row_tables(size.rows, adapters.sizes.slots)
            if size.drafted:
                # Logits are packed, other rows lie in places.
                parts["kept changes"] = parts["changes"]
        self._tables = StepTables(parts, ring, device, memory)
        fixed = self._tables.fixed
        rows = torch.arange(size.rows, device=device) if decode_alone else fixed["logits"]["rows"]
        self.batch = ForwardBatch(
            token_ids=fixed["tokens"]["token_ids"],
            positions=fixed["tokens"]["positions"],
            slots=fixed["tokens"]["slots"],
            decode=self._decode_meta(fixed["decode"]) if size.decodes else None,
            prefill=None if self._prefill is None else self._prefill.meta(fixed["prefill"]),
            logit_rows=rows,
            verify=self._verify_meta(fixed["verify"]) if size.drafted else None,
            changes=None
            if adapters is None
            else adapters.rows(fixed["changes"], fixed.get("kept changes")),
        )
        self.packed = fixed["packed"]["rows"] if packs else rows if size.drafted else None
        self.fill(None)

    def accepts(self, batch: ForwardBatch) -> bool:
        """Return True if a step's sequences, drafts, prompts and logits fit, and it has no others:
        one without drafts or prompts needs the logits of all its tokens."""
        size, decode, verify, prefill = self._size, batch.decode, batch.verify, batch.prefill
        if (decode is None and not size.drafted and not size.prompts) or (
            decode is not None and len(decode) > size.decodes
        ):
            return False
        if (verify is None) == bool(size.drafted) or (prefill is None) == bool(size.prompts):
            return False
        wanted = len(batch.logit_rows)
        if prefill is not None:
            assert self._prefill is not None
            return wanted <= size.logits and self._prefill.accepts(prefill)
        return wanted == len(batch.token_ids) and (
            verify is None
            or (
                len(verify) <= size.drafted
                and max(end - begin for begin, end in pairwise(verify.cu_seqlens)) <= size.room
                and max(verify.kv_lens) <= self._limits.longest
            )
        )

    def fill(self, batch: ForwardBatch | None) -> None:
        """Write a step that `accepts` allows, its tensors on the host; None writes padding
        alone."""
        decode, verify, prefill = (
            (None, None, None) if batch is None else (batch.decode, batch.verify, batch.prefill)
        )
        metas = [] if batch is None else batch.metas
        size, staged = self._size, self._tables.stage(_columns(metas, self._limits))
        decodes = 0 if decode is None else len(decode)
        runs = [(slice(0, decodes), 0)]
        packed = verify or prefill
        if verify is not None:
            runs += runs_of(verify.cu_seqlens, size.room, decodes, size.decodes)
        if prefill is not None:
            runs += runs_of((0, prefill.num_tokens), size.tokens, decodes, size.decodes)
        if size.decodes:
            self._write_decode(staged["decode"], decode, packed.block_tables[0][0] if packed else 0)
        if size.drafted:
            self._write_verify(staged["verify"], verify)
        if self._prefill is not None:
            self._prefill.write(staged["prefill"], prefill)
        if batch is not None:
            write_tokens(staged["tokens"], batch, runs)
            if "logits" in staged:
                places = places_of(runs)
                wanted = places if size.drafted else places[batch.logit_rows]
                staged["logits"]["rows"][: len(wanted)] = wanted
                if "packed" in staged:
                    staged["packed"]["rows"][: len(places)] = places
        changes = None if batch is None else batch.changes
        if "changes" in staged:
            write_changes(staged["changes"], changes, runs)
        if "kept changes" in staged:
            write_changes(staged["kept changes"], changes)
        self._tables.send()

    def _decode_tables(self) -> Tables:
        """Return the tables of sequences of one token."""
        padding = 1, -1, self._limits.scratch_row, -1
        count = self._size.decodes
        return {
            **{
                name: Table(torch.int32, (count,), fill)
                for name, fill in zip(_PER_SEQUENCE, padding, strict=True)
            },
            "block_tables": Table(torch.int32, (count, self._limits.max_blocks), wide=True),
        }

    def _decode_meta(self, fixed: Mapping[str, torch.Tensor]) -> DecodeMeta:
        count, limits = self._size.decodes, self._limits
        return DecodeMeta(
            block_tables=((0,) * limits.max_blocks,) * count,
            kv_lens=(limits.longest,) * count,
            src_rows=(-1,) * count,
            dst_rows=tuple(range(count)),
            snapshot_rows=(-1,) * count,
            tensors=dict(fixed),
        )

    def _write_decode(
        self, staged: Mapping[str, torch.Tensor], meta: DecodeMeta | None, instead: int
    ) -> None:
        """Write sequences of one token, or none; `instead`: see `_write_blocks`."""
        if meta is not None:
            for name in _PER_SEQUENCE:
                staged[name][: len(meta)] = torch.tensor(getattr(meta, name))
        if meta is not None and meta.table is not None:
            width = staged["block_tables"].shape[1]
            staged["block_tables"][: len(meta)] = torch.from_numpy(meta.table[:, :width])
            staged["block_tables"][len(meta) :, 0] = int(meta.table[0, 0])
            return
        blocks, lengths = ((), ()) if meta is None else (meta.block_tables, meta.kv_lens)
        _write_blocks(staged["block_tables"], blocks, lengths, self._limits, instead)

    def _verify_tables(self) -> Tables:
        """Return the tables of sequences with drafts, see `verify_tables` of the kernels."""
        size = self._size
        return {
            **place_tables(size, self._limits),
            "slices": Table(torch.int32, (size.drafted, 5)),
            "entries": Table(torch.int32, (size.drafted * size.room,), -1),
        }

    def _verify_meta(self, fixed: Mapping[str, torch.Tensor]) -> VerifyMeta:
        size, limits = self._size, self._limits
        firsts = range(0, size.drafted * size.room, size.room)
        return VerifyMeta(
            cu_seqlens=(*firsts, firsts.stop),
            starts=(limits.longest - size.room,) * size.drafted,
            block_tables=((0,) * limits.max_blocks,) * size.drafted,
            rows=tuple(range(size.drafted)),
            updates=tuple(firsts),
            folded=(0,) * size.drafted,
            tensors=dict(fixed),
        )

    def _write_verify(self, staged: Mapping[str, torch.Tensor], meta: VerifyMeta | None) -> None:
        """Write sequences with drafts, or none."""
        size, slices = self._size, staged["slices"]
        slices[:, 3] = torch.arange(0, size.drafted * size.room, size.room)
        if meta is None:
            return
        write_places(staged, size, self._limits, meta.starts, meta.cu_seqlens, meta.block_tables)
        runs = runs_of(meta.cu_seqlens, size.room)
        for place, (fold, (run, first)) in enumerate(zip(meta.folds, runs, strict=True)):
            if fold[0] < 0:  # There is no state.
                continue
            count = run.stop - run.start
            slices[place, :3], slices[place, 4] = torch.tensor(fold), count
            staged["entries"][first : first + count] = torch.arange(fold[1], fold[1] + count)
