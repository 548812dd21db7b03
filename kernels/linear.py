"""Dense projections; the GEMMs of every layer, with what follows them on the way out.

On a CPU a packed weight goes through oneDNN, which applies an activation, a factor or a residual
while the product is still in registers, in float32. That saves a pass over the activations, and it
keeps a row's bits apart from the rest of its batch: torch's own silu, sigmoid and gelu do not (the
last elements of each thread's share take a scalar path, whose last bit differs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from vlm_serve.kernels import linear_compiled
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import compiled_wanted
from vlm_serve.kernels.linear_compiled import WeightRecord

MIN_ROWS = 16
MIN_COLUMNS = 16
BLOCK_COLUMNS = 64

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_POST_OPS = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout that `linear` reads fastest, once, when a model is loaded.

    On a CPU that is oneDNN's blocked layout: for a few rows it is read at memory speed, where a
    row-major weight takes 1.4 to 3 times as long (measured at 1 and 8 rows, float32 and bfloat16);
    for thousands of rows it costs nothing. The result is opaque: only `linear` understands it.
    Elsewhere, and for types without such kernels, the weight itself is returned.

    Args:
        weight: `[N, K]`.
    """
    if weight.device.type != "cpu" or weight.dtype not in _packable_dtypes():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MIN_ROWS)
    if (*weight.shape, weight.dtype) not in _depths:
        _depths[*weight.shape, weight.dtype] = _blocked_depth(weight, packed)
    return packed


class Blocks(NamedTuple):
    """Where a packed weight lies: `[ceil(N / 64), depth / v, 64, v]`, zeros where it is padded,
    with v = 2 for bfloat16 and 1 for float32."""

    address: int
    depth: int


def blocks(packed: torch.Tensor) -> Blocks | None:
    """The memory of a weight from `pack`, for compiled kernels that read it themselves; None if
    this machine's oneDNN chose another layout."""
    if not packed.is_mkldnn:
        return None
    depth = _depths.get((*packed.shape, packed.dtype))
    return None if depth is None else Blocks(torch.ops.mkldnn.data_ptr(packed), depth)


_depths: dict[tuple[int, int, torch.dtype], int | None] = {}
"""For every shape and dtype that was packed: K as padded if it lies in `Blocks`. oneDNN documents
no layout, so the first weight of each shape is compared with what it was made from."""


def _blocked_depth(weight: torch.Tensor, packed: torch.Tensor) -> int | None:
    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return None
    columns, k = weight.shape
    count, pair = -(-columns // BLOCK_COLUMNS), 4 // weight.itemsize
    size = torch.ops.mkldnn._nbytes(packed) // weight.itemsize
    depth = int(size // (count * BLOCK_COLUMNS))
    if depth < k or depth % pair or size != count * BLOCK_COLUMNS * depth:
        return None
    length = BLOCK_COLUMNS * depth
    for index in {0, count - 1}:
        place = torch.ops.mkldnn.data_ptr(packed) + index * length * weight.itemsize
        memory = (ctypes.c_uint8 * (length * weight.itemsize)).from_address(place)
        block = torch.frombuffer(memory, dtype=weight.dtype).view(depth // pair, -1, pair)
        expected = weight.new_zeros(BLOCK_COLUMNS, depth)
        own = weight[index * BLOCK_COLUMNS : (index + 1) * BLOCK_COLUMNS]
        expected[: own.shape[0], :k] = own
        if not torch.equal(block.transpose(0, 1).flatten(1), expected):
            return None
    return depth


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias`, then at most one of: an activation, a product, a sum.

    A GEMM library picks another algorithm for a handful of rows, so a row's last bits depend on how
    many rows share the call. From 16 rows on they do not (measured, fp32 and bf16, packed or not),
    except that one-column products of a plain weight take a GEMV path of their own.
    `deterministic` pads both away.

    Args:
        x: `[T, K]` activations.
        weight: `[N, K]`, as it is or from `pack`.
        bias: `[N]` or None.
        activation: applied to the result.
        times, plus: `[T, N]`, multiplied with or added to the result.
        deterministic: give a row the same bits in any batch.

    Returns:
        `[T, N]` in the dtype of x.

    Raises:
        KernelArgumentError: more than one of activation, times and plus.
    """
    if (activation is not None) + (times is not None) + (plus is not None) > 1:
        raise KernelArgumentError("activation", "at most one of activation, times and plus")
    if not deterministic and bias is None and activation is None:
        own = _for_few_rows(x, weight, times, plus)
        if own is not None:
            return linear_compiled.project(x, own, times=times, plus=plus)
    if not deterministic:
        return _product(x, weight, bias, activation, times, plus)
    rows, columns = x.shape[0], weight.shape[0]
    if rows < MIN_ROWS:
        x = _with_rows(x, MIN_ROWS)
        times = None if times is None else _with_rows(times, MIN_ROWS)
        plus = None if plus is None else _with_rows(plus, MIN_ROWS)
    if columns == 1 and not weight.is_mkldnn:
        weight = _with_rows(weight, MIN_COLUMNS)
        bias = None if bias is None else _with_rows(bias, MIN_COLUMNS)
    return _product(x, weight, bias, activation, times, plus)[:rows, :columns]


def _for_few_rows(
    x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None
) -> WeightRecord | None:
    """The weight for compiled code, where that is wanted and knows such inputs."""
    if not compiled_wanted() or not 0 < x.shape[0] <= linear_compiled.MOST_ROWS:
        return None
    place = blocks(weight)
    if place is None or place.depth != x.shape[1] or x.dtype != weight.dtype:
        return None
    if any(part is not None and part.stride(1) != 1 for part in (x, *others)):
        return None
    return WeightRecord(place.address, None, weight.shape[0], place.depth)


def _with_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    out: torch.Tensor
    if not weight.is_mkldnn:
        out = F.linear(x, weight, bias)
        if activation is not None:
            out = _ACTIVATIONS[activation](out)
        if times is not None:
            out = out * times
        return out if plus is None else out + plus
    if times is not None:
        out = _packed_binary(x, times, weight, bias, "mul")
    elif plus is not None:
        out = _packed_binary(x, plus, weight, bias, "add")
    else:
        post_op, algorithm = ("none", "") if activation is None else _POST_OPS[activation]
        out = _packed_unary(x, weight, bias, post_op, [], algorithm)
    return out


def _packable_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)


# The overloads themselves: looking them up anew costs more than a small product.
_packed_unary = torch.ops.mkldnn._linear_pointwise.default
_packed_binary = torch.ops.mkldnn._linear_pointwise.binary
