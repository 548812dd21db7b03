"""Compiles a GPU's kernels at start, before a request has to wait for one.

Triton compiles a kernel when it first meets a combination of types, alignments and constants, which
takes up to seconds. Tiles of experts and of quantised products depend on a step's tokens; other
kernels run only if a choice is forked, a sequence is long or a draft is accepted. So steps of every
order of size run once, and every kernel that works between steps. If the engine serves
adapters, these steps run with one too.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from vlm_serve.engine.numerics.arithmetic import Types
from vlm_serve.engine.steps.adapter_table import idle_adapter
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.kv_write import copy_kv_rows
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.state_copy import copy_rows
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.options.config import EngineConfig

_log = logging.getLogger(__name__)

_LONG = 8192
"""Keys of a sequence that are attended in several parts."""
_SEQUENCES = (1, 2, 4, 8, 9, 17, 33)
"""Decoding sequences for which some kernels are others than for one less. With codes, products of
up to 8 rows are compiled for powers of two, those of more by tiles of rows."""
_DRAFTED = 2


def warm_up(model: Model, types: Types, config: EngineConfig) -> None:
    """Run steps of 1, 2, 4 ... tokens, decode steps of long sequences, drafts and copies.

    Args:
        model: the model; of its pools nothing is left.
        types: of pools.
        config: options, with a block size.
    """
    begin = time.perf_counter()
    _log.info("compiling the kernels of all steps that are not kept yet: minutes, once")
    with torch.inference_mode(), launching_on(model.device):
        adapter = idle_adapter(model.modules, config)
        steps = _Steps(model, types, config)
        for changes in (None, adapter) if adapter is not None else (None,):
            steps.changes = changes
            tokens = 1
            while tokens < config.max_num_batched_tokens:
                steps.prefill(tokens)
                tokens *= 2
            steps.prefill(1, start=_LONG)
            for count in _SEQUENCES:
                steps.decode(count)
        if adapter is not None and model.spec.vision is not None:
            steps.encode()
        steps.changes = None
        steps.copy()
        if config.speculative != "off":
            steps.verify()
    model.unbind()
    _log.info("compiled the kernels of all steps in %.1f s", time.perf_counter() - begin)


class _Steps:
    """Steps of one sequence on pools of its own.

    Args:
        model, types, config: see `warm_up`.

    Attributes:
        changes: the adapter of all rows; None: none.
    """

    def __init__(self, model: Model, types: Types, config: EngineConfig) -> None:
        assert config.block_size is not None
        self._model, self._config, self._size = model, config, config.block_size
        self.changes: AdapterChanges | None = None
        layout = model.spec.cache_layout(model.ranks.size, mtp=model.drafts)
        self._has_state = layout.has_state
        rows = 2 if layout.has_state else 0
        drafted = _DRAFTED if config.speculative != "off" else 0
        self._caches: CacheTensors = layout.allocate(
            2, rows, self._size, types.pools, model.device, num_updates=drafted
        )
        for pool in (*self._caches.of_unit("block"), *self._caches.of_unit("row")):
            pool.zero_()

    def prefill(self, tokens: int, start: int = 0) -> None:
        """Compute a slice behind `start` tokens; all are of one block, and none is written."""
        chunk = self._config.chunk_size
        row = 0 if self._has_state else -1
        meta = PrefillMeta(
            cu_seqlens=(0, tokens),
            starts=(start,),
            block_tables=(self._blocks(start + tokens),),
            src_rows=(-1,),
            dst_rows=(row,),
            chunk_ends=((*range(chunk, tokens, chunk), tokens),),
        )
        self._forward(tokens, self._caches, prefill=meta)

    def decode(self, count: int) -> None:
        """Compute a token behind many keys, in so many sequences.

        On a GPU their state rows are one and the same memory: rows are large, and nobody reads
        these. torch's own operations refuse to write such rows.
        """
        caches = self._caches
        rows = tuple(range(count)) if self._has_state else (-1,) * count
        shared = {
            kind: self._rows_of(pool, count)
            for kind, pool in caches.tensors.items()
            if any(pool is row_pool for row_pool in caches.of_unit("row"))
        }
        shrunk = replace(
            caches,
            tensors={**caches.tensors, **shared},
            num_rows=count if self._has_state else 0,
        )
        tables = (self._blocks(_LONG),) * count
        meta = DecodeMeta(tables, (_LONG,) * count, rows, rows, (-1,) * count)
        self._forward(count, shrunk, decode=meta)

    def _rows_of(self, pool: torch.Tensor, count: int) -> torch.Tensor:
        shape = (count, *pool.shape[1:])
        return pool.new_zeros(shape) if pool.device.type == "cpu" else pool[:1].expand(shape)

    def verify(self) -> None:
        """Compute drafts, and fold one of them into the state."""
        row, update = (0, 0) if self._has_state else (-1, -1)
        meta = VerifyMeta(
            cu_seqlens=(0, _DRAFTED),
            starts=(1,),
            block_tables=(self._blocks(1 + _DRAFTED),),
            rows=(row,),
            updates=(update,),
            folded=(0,),
        )
        self._forward(_DRAFTED, self._caches, verify=meta)
        if self._has_state:
            self._model.fold(self._caches, [(0, 0, 1)])

    def encode(self) -> None:
        """Run the tower over a small picture."""
        vision = self._model.spec.vision
        assert vision is not None
        side = 4 * vision.merge_size
        pixels = torch.zeros(side * side, vision.patch_dim)
        self._model.encode_media(
            pixels,
            [(1, side, side)],
            [vision.merge_size],
            deterministic=self._config.deterministic,
            changes=self.changes,
        )

    def copy(self) -> None:
        """Copy as forked choices and shared blocks do."""
        if self._has_state:
            copy_rows(self._caches.of_unit("row"), (0,), (1,))
        copy_kv_rows(self._caches["kv"], self._caches.tensors.get("kv_scales"), [(0, 1, 1)])

    def _blocks(self, tokens: int) -> tuple[int, ...]:
        return (0,) * -(-tokens // self._size)

    def _forward(
        self,
        tokens: int,
        caches: CacheTensors,
        *,
        prefill: PrefillMeta | None = None,
        decode: DecodeMeta | None = None,
        verify: VerifyMeta | None = None,
    ) -> None:
        batch = ForwardBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.arange(tokens).expand(3, -1),
            slots=torch.full((tokens,), -1),
            decode=decode,
            prefill=prefill,
            logit_rows=torch.arange(0 if decode is not None else tokens - 1, tokens),
            deterministic=self._config.deterministic,
            verify=verify,
            changes=RowChanges.of_all(self.changes, tokens),
        )
        self._model.forward(batch.to(self._model.device), caches)
