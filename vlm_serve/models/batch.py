"""Input and output of one forward of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vlm_serve.kernels.checks import KernelArgumentError, check_block_tables, check_meta
from vlm_serve.kernels.linear.low_rank import RowChanges
from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models.cache_layout import CacheTensors


@dataclass(frozen=True)
class ForwardBatch:
    """T packed tokens: the decode tokens (one per decode sequence), the prefill slices, then the
    slices of drafted tokens.

    Attributes:
        token_ids: int64 `[T]`.
        positions: int64 or float64 `[3, T]`, see `mrope_cos_sin`.
        slots: int64 `[T]`, `block * block_size + offset` where a token's K and V are written; -1:
            not written (its block is shared and already holds them).
        logit_rows: int64 `[R]`, the tokens whose logits are wanted.
        decode, prefill, verify: None where the step has no such tokens.
        media: (offset into the T tokens, `[n, embedding_width]`) pairs: embeddings that replace the
            placeholder tokens', and features that the first layers add to the residual.
        deterministic: pad GEMMs and tile attention so that a row's bits do not depend on the batch;
            the same in every step.
        capture_experts: also return the routed expert ids (MoE models only).
        greedy: also return the argmax of the logits, if that costs little.
        changes: the adapters of the T tokens; None if none has one.
        sampled: int64 `[T]` on the device, the ids of tokens that the step before samples: they
            replace `token_ids`, which the host does not know; None: it does.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    decode: DecodeMeta | None = None
    prefill: PrefillMeta | None = None
    verify: VerifyMeta | None = None
    media: tuple[tuple[int, torch.Tensor], ...] = ()
    deterministic: bool = False
    capture_experts: bool = False
    greedy: bool = False
    changes: RowChanges | None = None
    sampled: torch.Tensor | None = None

    def to(self, device: torch.device) -> ForwardBatch:
        """Return the same batch with token ids, positions, slots and rows on a device."""
        if self.sampled is not None:
            return replace(self, token_ids=self.sampled, sampled=None).to(device)
        if self.positions.device == device:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            logit_rows=self.logit_rows.to(device),
        )

    @property
    def metas(self) -> list[AnyMeta]:
        """The kinds of tokens in the step, in their order."""
        return [meta for meta in (self.decode, self.prefill, self.verify) if meta is not None]

    def check(self, caches: CacheTensors, num_rows: int) -> None:
        """Check that the step stays within the pools, of which `num_rows` state rows are its own.

        Raises:
            KernelArgumentError: naming the field.
        """
        for meta in self.metas:
            check_meta(meta, meta.num_tokens, num_rows, caches.num_updates)
            check_block_tables(meta, meta.kv_lens, caches.num_blocks, caches.block_size)
        tokens, count = len(self.token_ids), sum(meta.num_tokens for meta in self.metas)
        if tokens != count:
            raise KernelArgumentError("token_ids", f"{tokens} tokens, the sequences have {count}")


@dataclass(frozen=True)
class ForwardOutput:
    """logits: float32 `[R, vocab]`. experts: `[T, moe_layers, top_k]` uint8 (up to 256 experts) or
    int16/uint16, or None. hidden: `[T, hidden]` behind the final norm in the dtype of activations,
    for a model with an MTP layer, else None. best: R token ids, the first argmax of each row's
    logits, or None if it was not computed."""

    logits: torch.Tensor
    experts: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    best: Sequence[int] | None = None
