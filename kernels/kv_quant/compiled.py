"""Records of key and value pages for compiled CPU code (`native/attention/kv_pages.h`)."""

from __future__ import annotations

import ctypes

import torch

from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.native_layout import constant, struct

_FORMS = {
    torch.float32: constant("KV_FLOAT32"),
    torch.bfloat16: constant("KV_BFLOAT16"),
    torch.float16: constant("KV_FLOAT16"),
    torch.float8_e4m3fn: constant("KV_FLOAT8"),
    torch.uint8: constant("KV_INT8"),
}
# Values that are exact in bfloat16, in which products take their operands.
_NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)

_Pages = struct("Pages")


def pages_record(kv: KVLayer, compute: torch.dtype) -> ctypes.Structure | None:
    """Describe a layer's pages; return None if compiled code cannot attend to them in that dtype.

    Args:
        kv: keys and values of one layer, all of its dims contiguous.
        compute: dtype of the activations: float32 reads pages of every type, bfloat16 those with
            values that are exact in bfloat16.
    """
    known = tuple(_FORMS) if compute == torch.float32 else _NARROW
    scales = (kv.k_scale, kv.k_zero, kv.v_scale, kv.v_zero)
    strides = {factors.stride() for factors in scales if factors is not None}
    if (
        compute not in (torch.float32, torch.bfloat16)
        or kv.k.dtype not in known
        or kv.k.stride() != kv.v.stride()
        or kv.k.stride(3) != 1
        or len(strides) > 1
    ):
        return None
    record = _Pages(
        form=_FORMS[kv.k.dtype],
        block_size=kv.k.shape[1],
        block_stride=kv.k.stride(0),
        token_stride=kv.k.stride(1),
        head_stride=kv.k.stride(2),
        k=kv.k.data_ptr(),
        v=kv.v.data_ptr(),
    )
    for name, values in zip(("k_scales", "k_zeros", "v_scales", "v_zeros"), scales, strict=True):
        if values is not None:
            setattr(record, name, values.data_ptr())
    for block, token, head in strides:
        record.scale_block_stride = block
        record.scale_token_stride = token
        record.scale_head_stride = head
    return record
