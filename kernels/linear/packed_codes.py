"""Codes with scales, packed for compiled CPU code; `native/codes/grouped.h` describes their layout
and arithmetic.

e4m3 codes have scales per block or output channel. int8, int6, int4 and e2m1 codes have scales in
groups of k, and may have zero points. So have places in a table, without zero points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.base import WeightRecord
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.dense import TYPES
from vlm_serve.kernels.linear.packed import PANEL, PackedLinear
from vlm_serve.kernels.native_layout import constant

SCALE_TYPES = TYPES | {
    torch.int8: constant("ROOTS"),
    torch.float8_e4m3fn: constant("FLOAT8"),
    torch.float8_e8m0fnu: constant("E8M0"),
}
_TWO_LEVEL = constant("TWO_LEVEL")

MAX_GROUP = constant("MAX_GROUP")
MIN_GROUP = constant("MIN_GROUP")
"""Groups of k are a multiple of this."""
_KINDS = {(8, False): "INT8", (6, False): "INT6", (4, False): "INT4", (4, True): "FLOAT4"}


class PackedCodes(PackedLinear):
    """A packed weight of codes.

    Args:
        tensors: by their names in `WeightRecord`:
            packed: int32 `[panels, words of a column, 32]`.
            scales: of a type in SCALE_TYPES, `[panels, K / group, 32]`.
            zeros: uint8 like scales, if there are any.
            factors: float32 `[panels, 1, 32]` beside scales of one byte and level, and beside
                codes of a table.
            table: uint8 `[16]`, eight-bit codes around 128 of places in a table.
            outer, floors: float16 `[panels, K / outer_group, 32]`, as in IntegerCodes.
        kind: compiled code's constant for these codes.
        columns, depth, group: N, K and number of k per scale.
        bias: float32 `[N]` or None.
        dynamic: quantise activations as well.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        kind: str,
        columns: int,
        depth: int,
        group: int,
        bias: torch.Tensor | None,
        dynamic: bool,
    ) -> None:
        outer = tensors.get("outer")
        if bias is not None:
            tensors = {**tensors, "bias": bias.float().contiguous()}
        record = WeightRecord(
            columns=columns,
            depth=depth,
            type=constant(kind),
            group=group,
            scale_type=SCALE_TYPES[tensors["scales"].dtype] if outer is None else _TWO_LEVEL,
            dynamic=dynamic,
            outer_group=0 if outer is None else depth // outer.shape[1],
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        super().__init__(record, torch.uint8, *tensors.values())
        self.group = group

    @classmethod
    def of(
        cls,
        pieces: Iterable[Codes],
        columns: int,
        depth: int,
        bias: torch.Tensor | None = None,
        *,
        dynamic: bool = False,
    ) -> PackedCodes:
        """Pack `[n, K]` pieces, stacked by rows, all of the same kind, group and scale type.

        Args:
            pieces: the codes. Those of float8 begin with a block.
            columns, depth: N and K of all of them.
            bias: `[N]` or None.
            dynamic: quantise activations beside integers to int8, per row and group of k.

        Raises:
            KernelArgumentError: pieces that differ, or unsupported groups.
        """
        tensors: dict[str, torch.Tensor] = {}
        like: Codes | None = None
        first = group = 0
        for piece in pieces:
            if like is None:
                like, group = piece, _supported(piece, depth)
            _check_alike(piece, like)
            for name, values in _laid_out(piece, group).items():
                if name not in tensors:
                    # Pieces without zero points have them in the middle.
                    fill = 1 << (like.bits - 1) if name == "zeros" else 0
                    tensors[name] = panels(columns, values.shape[1], values.dtype, fill)
                put(tensors[name], first, values)
            first += len(piece.codes)
        assert like is not None, "a weight has codes"
        if isinstance(like, IntegerCodes) and like.table is not None:
            values = torch.tensor(like.table + (0,) * (16 - len(like.table)))
            tensors["table"] = (values + 128).to(torch.uint8)
        return cls(
            tensors,
            kind=_kind(like),
            columns=columns,
            depth=depth,
            group=group,
            bias=bias,
            dynamic=dynamic and isinstance(like, IntegerCodes),
        )

    def takes(self, dtype: torch.dtype) -> bool:
        return True


def packed_group(group: int, depth: int) -> int | None:
    """Return the number of k per scale in memory; None if compiled code supports none.

    This is the file's group, or the largest part of it that compiled code supports; scales are then
    repeated.
    """
    sizes = range(MAX_GROUP, 0, -MIN_GROUP)
    return next((size for size in sizes if group % size == 0 and depth % size == 0), None)


def _supported(piece: Codes, depth: int) -> int:
    """Return the group of a weight in memory."""
    if piece.floored and piece.bits == 8:
        raise KernelArgumentError("pieces", "codes of 8 bits have no minima")
    size = packed_group(piece.group, depth)
    if size is None:
        problem = f"{piece.group} of {depth}, expected a multiple of {MIN_GROUP} in both"
        raise KernelArgumentError("group", problem)
    return size


def _kind(piece: Codes) -> str:
    """Return compiled code's constant for codes."""
    if isinstance(piece, Float8Codes):
        return "FLOAT8"
    if piece.table is not None:
        return f"TABLE{_stored_bits(piece)}"
    return _KINDS[piece.bits, piece.float4]


def _stored_bits(piece: IntegerCodes) -> int:
    """Return the bits of codes in memory. Those of three bits fill words by 32 k."""
    return 4 if piece.bits == 3 and piece.codes.shape[1] % 32 else piece.bits


def _check_alike(piece: Codes, like: Codes) -> None:
    one, other = ((_kind(each), each.group, getattr(each, "table", 0)) for each in (piece, like))
    if one != other:
        raise KernelArgumentError("pieces", "kinds or groups differ within a weight")
    if piece.scales.dtype != like.scales.dtype or piece.floored != like.floored:
        raise KernelArgumentError("pieces", "types of scales differ within a weight")


def _laid_out(piece: Codes, group: int) -> dict[str, torch.Tensor]:
    """Return the rows of a piece's tensors, see `PackedCodes`."""
    times = piece.group // group
    if isinstance(piece, Float8Codes):
        (rows, depth), words = piece.codes.shape, piece.codes.contiguous().view(torch.int32)
        scales = _repeated(piece.scales.repeat_interleave(piece.block[0], 0)[:rows], times)
        return {"packed": words, "scales": scales[:, : depth // group]}
    tensors = {"packed": _words(piece), "scales": _repeated(piece.scales, times)}
    if piece.zeros is not None:
        tensors["zeros"] = _repeated(piece.zeros, times)
    if piece.factors is not None:
        tensors["factors"] = piece.factors[:, None]
    if piece.outer is not None:
        tensors["outer"] = piece.outer.scales
        if piece.outer.floors is not None:
            tensors["floors"] = piece.outer.floors
    return tensors


def panels(columns: int, rows: int, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
    """Allocate `[panels, rows, 32]` for that many columns."""
    values = zeros(-(-columns // PANEL), rows, PANEL, dtype=dtype)
    return values.fill_(fill) if fill else values


def put(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Fill columns of `[panels, rows, 32]` from `first` on; values are `[columns, rows]`."""
    while len(values):
        panel, column = divmod(first, PANEL)
        whole = len(values) // PANEL
        if column == 0 and whole:
            count = whole * PANEL
            squares = values[:count].view(whole, PANEL, -1)
            target[panel : panel + whole] = squares.transpose(1, 2)
        else:
            count = min(PANEL - column, len(values))
            target[panel, :, column : column + count] = values[:count].T
        first, values = first + count, values[count:]


def _words(piece: IntegerCodes) -> torch.Tensor:
    """Pack codes into int32 `[n, K * bits / 32]`."""
    codes, bits = piece.codes.contiguous(), _stored_bits(piece)
    if bits in (3, 6):
        own = bits // 3 * 2
        low = _spread(codes & (1 << own) - 1, own).view(len(codes), -1, 2, 4)
        codes = torch.cat([low, _spread(codes >> own, own // 2).unsqueeze(2)], 2).flatten(1)
    elif bits < 8:
        codes = _spread(codes, bits).flatten(1)
    return codes.view(torch.int32)


def _spread(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of codes, uint8 `[n, words, 4]`: each four k lie in the next bits of all
    bytes."""
    first, *others = codes.view(len(codes), -1, 8 // bits, 4).unbind(2)
    for place, fours in enumerate(others, 1):
        first = first | fours << place * bits
    return first


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, 1) if times > 1 else values
