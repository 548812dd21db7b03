"""The compiled forward: a step as one call into `native/step.cpp`.

A decode step consists of hundreds of short operations. Launching them one by one from Python takes
longer than computing them. A prefill runs through the same code, so decode steps and prefills write
the same values.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from vlm_serve.kernels.linear.low_rank import RowChanges
from vlm_serve.kernels.metadata import AnyMeta, VerifyMeta
from vlm_serve.kernels.native_layout import struct
from vlm_serve.kernels.native_library import call, load
from vlm_serve.kernels.native_records import snapshot_rows, tables
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.program import Program

_Step = struct("Step")


class CompiledStep:
    """Runs the steps of one model.

    A token's bits depend on its own sequence alone. The rest of the step, the start of its slice,
    and prompt or answer make no difference.

    Args:
        program: the model.
        caches: its pools.

    Attributes:
        looks_up: whether it looks up the embeddings of tokens.

    Raises:
        BuildError: the library can be neither found nor built.
    """

    def __init__(self, program: Program, caches: CacheTensors) -> None:
        self._program = program, program.record()
        self._folding = program.record(folding=True)
        self._reports_hidden = program.reports_hidden
        self.looks_up = program.looks_up
        self._dtype = program.dtype
        self._caches = caches
        self._bits = 8 * program.dtype.itemsize
        load()

    def run(
        self, batch: ForwardBatch, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Sequence[int] | None]:
        """Run one forward.

        Args:
            batch: its tensors on the host.
            x: `[T, hidden]` embeddings in the dtype of activations, contiguous; None: they are
                looked up.

        Returns:
            (float32 logits `[R, vocab]`, int64 `[T, layers, top_k]` expert ids if requested, `[T,
            hidden]` in the dtype of activations if the program reports hidden states, the first
            argmax of each row's logits if requested).

        Raises:
            KernelArgumentError: a row or block outside of the pools, as from the kernels.
            MemoryError: the contexts are too long for one step.
        """
        _, program = self._program
        tokens, rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        logits = torch.empty(rows, program.vocab)
        ids = None
        if batch.capture_experts and program.top_k:
            ids = torch.empty(tokens, program.expert_layers, program.top_k, dtype=torch.int64)
        hidden = None
        if self._reports_hidden:
            hidden = torch.empty(tokens, program.hidden, dtype=self._dtype)
        best = array("q", [0]) * rows if batch.greedy else None
        batch.check(self._caches, self._caches.num_rows)
        layout, positions = _Layout(batch), batch.positions.double().contiguous()
        media = _Media(batch, self._dtype) if batch.media else None
        changes = None if batch.changes is None else StepChanges(batch.changes)
        step = _Step(
            tokens=tokens,
            sequences=layout.sequences,
            rows=rows,
            threads=torch.get_num_threads(),
            x=None if x is None else x.data_ptr(),
            token_ids=batch.token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            best=None if best is None else best.buffer_info()[0],
            hidden=None if hidden is None else hidden.data_ptr(),
            expert_ids=None if ids is None else ids.data_ptr(),
            **layout.addresses(),
            **({} if media is None else media.fields()),
            **({} if changes is None else changes.fields()),
        )
        call("vlm_step", ctypes.byref(program), ctypes.byref(step), self._bits)
        return logits, ids, hidden, best

    def fold(self, folds: Sequence[tuple[int, int, int]]) -> None:
        """Implement `Model.fold`, which checks the arguments, as a step of no tokens."""
        rows, updates, folded = (array("q", column) for column in zip(*folds, strict=True))
        offsets = array("q", [0]) * (len(folds) + 1)
        arrays = {
            "first_token": offsets,
            "src_rows": rows,
            "dst_rows": rows,
            "updates": updates,
            "folded": folded,
        }
        step = _Step(
            sequences=len(folds),
            threads=torch.get_num_threads(),
            **{name: values.buffer_info()[0] for name, values in arrays.items()},
        )
        call("vlm_step", ctypes.byref(self._folding), ctypes.byref(step), self._bits)


class _Layout:
    """The tokens, rows and blocks of each sequence; decode sequences come first."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._first_token, self._start = [0], list[int]()
        self._src_rows, self._dst_rows = list[int](), list[int]()
        self._snapshot_rows, self._tables = list[int](), list[int]()
        self._updates, self._folded = list[int](), list[int]()
        self._kept: list[array[int]] = []
        for meta in batch.metas:
            self._add(meta)

    def _add(self, meta: AnyMeta) -> None:
        before, first = len(self._start), self._first_token[-1]
        self._first_token.extend(first + end for end in meta.cu_seqlens[1:])
        self._start.extend(meta.starts)
        if isinstance(meta, VerifyMeta):
            self._src_rows.extend(meta.rows)
            self._dst_rows.extend(meta.rows)
            self._updates += [-1] * before + [*meta.updates]
            self._folded += [0] * before + [*meta.folded]
        else:
            self._src_rows.extend(meta.src_rows)
            self._dst_rows.extend(meta.dst_rows)
        self._snapshot_rows.extend(snapshot_rows(meta))
        places, kept = tables(meta)
        self._tables.extend(places)
        self._kept += kept

    @property
    def sequences(self) -> int:
        return len(self._start)

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tables, by their names in `Step`; they lie one behind the
        other."""
        parts = {
            "first_token": self._first_token,
            "start": self._start,
            "src_rows": self._src_rows,
            "dst_rows": self._dst_rows,
            "tables": self._tables,
            "updates": self._updates,
            "folded": self._folded,
            "snapshot_rows": self._snapshot_rows,
        }
        whole, places = array("q"), dict[str, int]()
        for name, column in parts.items():
            if column:
                places[name] = len(whole)
                whole.extend(column)
        self._kept.append(whole)
        base = whole.buffer_info()[0]
        return {name: base + 8 * place for name, place in places.items()}


class StepChanges:
    """The adapters of a step's rows, as fields of compiled code's `Step`."""

    def __init__(self, changes: RowChanges) -> None:
        self._changes = changes
        self._tables = array("q", (adapter.address() for adapter in changes.adapters))

    def fields(self) -> dict[str, int]:
        """Return the fields for `Step`, which are addresses of this object's memory."""
        return {
            "adapters": len(self._tables),
            "widest": max(adapter.widest for adapter in self._changes.adapters),
            "adapter_of": self._changes.of_rows.buffer_info()[0],
            "changes": self._tables.buffer_info()[0],
        }


class _Media:
    """The tokens with features of media, and the addresses of those features."""

    def __init__(self, batch: ForwardBatch, dtype: torch.dtype) -> None:
        self._rows = [rows.to(dtype).contiguous() for _, rows in batch.media]
        self._arrays = {
            "media_first": array("q", (offset for offset, _ in batch.media)),
            "media_tokens": array("q", map(len, self._rows)),
            "media_rows": array("q", (rows.data_ptr() for rows in self._rows)),
        }

    def fields(self) -> dict[str, int]:
        """Return the fields for `Step`."""
        places = {name: values.buffer_info()[0] for name, values in self._arrays.items()}
        return {"media": len(self._rows), "media_stride": self._rows[0].shape[1], **places}
