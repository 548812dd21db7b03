"""Descriptions of one forward step, shared by the ops; built once per step, read by every layer.

A step packs its tokens as `[decode tokens | prefill slices]`: `num_decode` sequences contribute one
token each, then every prefill sequence contributes its slice. Host values are plain tuples, over
which the CPU paths loop. `tensors` holds the device copies for kernels, made at most once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True)
class StepMeta:
    """What is derived from a description of tokens, at most once per step.

    Attributes:
        tensors: device copies of the description.
        plans: values that ops derive from it.
        checked: host checks passed so far; see `kernels/checks.py`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    plans: dict[str, object] = field(default_factory=dict, compare=False, repr=False)
    checked: set[tuple[str, int, int]] = field(default_factory=set, compare=False, repr=False)


@dataclass(frozen=True)
class DecodeMeta(StepMeta):
    """One token per sequence, B sequences.

    Attributes:
        block_tables: physical KV block ids of each sequence, enough to cover `kv_lens`;
            their owner may change them after the step.
        kv_lens: number of keys each token attends to, its own included.
        src_rows: state row read by each sequence; -1 means zero state.
        dst_rows: state row written; may equal the source.
        snapshot_rows: second state row to receive the new state, -1 for none.
        table: int32 `[B, W]`, the block tables as one array, if there is one; 0 behind their ends.
    """

    block_tables: tuple[Sequence[int], ...]
    kv_lens: tuple[int, ...]
    src_rows: tuple[int, ...]
    dst_rows: tuple[int, ...]
    snapshot_rows: tuple[int, ...]
    table: npt.NDArray[np.int32] | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return len(self)

    @property
    def cu_seqlens(self) -> Sequence[int]:
        """Offsets, as of slices of one token."""
        return range(len(self) + 1)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each token."""
        return tuple([length - 1 for length in self.kv_lens])


@dataclass(frozen=True)
class PackedSlices(StepMeta):
    """Packed slices of consecutive tokens.

    Attributes:
        cu_seqlens: offsets into the packed tokens of the kind, one more than slices.
        starts: absolute position of each slice's first token; the tokens before it are cached.
        block_tables: physical KV block ids of each sequence, covering start + slice.
    """

    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...]
    block_tables: tuple[Sequence[int], ...]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Number of keys that each slice's last token attends to."""
        slices = zip(self.starts, self.cu_seqlens, self.cu_seqlens[1:], strict=False)
        return tuple([start + end - begin for start, begin, end in slices])


@dataclass(frozen=True)
class PrefillMeta(PackedSlices):
    """Packed variable-length slices, P sequences, N tokens in all.

    Attributes:
        src_rows: state row each sequence starts from; -1 means zero state (selected, not
            multiplied).
        dst_rows: destination row of the final state; may equal the source. Several sequences may
            read one source; destinations are unique.
        chunk_ends: for each sequence, ascending ends of its GDN chunks as packed offsets into the
            prefill tokens; the last one is cu_seqlens[i + 1].
        snapshots: (sequence, chunk index within the sequence, state row): the state after that
            chunk (recurrent and conv tail) is also written to the row.
        fixed: True if `tensors` are a graph's, whose contents change between replays.
    """

    src_rows: tuple[int, ...]
    dst_rows: tuple[int, ...]
    chunk_ends: tuple[tuple[int, ...], ...]
    snapshots: tuple[tuple[int, int, int], ...] = ()
    fixed: bool = False


@dataclass(frozen=True)
class VerifyMeta(PackedSlices):
    """Packed slices of drafted tokens, S sequences, N tokens in all.

    Only after the step is it known how many drafts are accepted. So the step leaves the state rows
    alone and records each token's change as an update.

    Attributes:
        rows: state row of each sequence; no other sequence reads it.
        updates: index of each sequence's first update; the step writes one per token.
        folded: number of the previous updates there to fold into the row first, in place.
    """

    rows: tuple[int, ...]
    updates: tuple[int, ...]
    folded: tuple[int, ...]

    @property
    def folds(self) -> tuple[tuple[int, int, int], ...]:
        """(row, first update, count) of every fold."""
        return tuple(fold for fold in zip(self.rows, self.updates, self.folded, strict=True))


AnyMeta = DecodeMeta | PrefillMeta | VerifyMeta
"""One kind of tokens of a step."""


@dataclass(frozen=True)
class Updates:
    """Pending updates of a layer's state, one entry per token not yet folded into its row.

    Attributes:
        keys: float32 `[entries, Hk, Dk]`, of unit length.
        changes: float32 `[entries, Hv, Dv]`.
        decays: float32 `[entries, Hv]`.
        inputs: inputs of the convolution, `[entries, C]` in the dtype of activations.
    """

    keys: torch.Tensor
    changes: torch.Tensor
    decays: torch.Tensor
    inputs: torch.Tensor


Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Pages with their scales and zero points."""


@dataclass(frozen=True)
class KVLayer:
    """One attention layer's paged keys and values (views into the pool).

    Attributes:
        k, v: `[num_blocks, block_size, kv_heads, head_dim]`, any strides with a dense last dim;
            float32, bfloat16, float16, float8_e4m3fn or int8 (uint8 storage of unsigned codes).
        k_scale, k_zero, v_scale, v_zero: float16 `[num_blocks, block_size, kv_heads]` for int8
            (value = scale * (code - zero)), None otherwise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None

    @property
    def halves(self) -> tuple[Stored, Stored]:
        """Keys and values, each with its scales and zero points."""
        return (self.k, self.k_scale, self.k_zero), (self.v, self.v_scale, self.v_zero)
