"""Check of a whole table of tiles, before the first launch reads a part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.triton_support import Target, record_launches
from vlm_serve.kernels.tuning import FIXED_STEPS, NARROW_BELOW, table


def check_table(architecture: int) -> None:
    """Check what an architecture's table says of every op: known names, sizes, shared memory.

    Args:
        architecture: compute capability (90).

    Raises:
        ConfigError: it names an op that has no tile, or a tile that `tuning.tuned` refuses.
    """
    for op, fields in table(architecture).items():
        if op == FIXED_STEPS and fields in ({"fixed": 0}, {"fixed": 1}):
            continue
        tile = tile_of(op)
        if tile is None:
            raise ConfigError(f"tuning/sm_{architecture}.json: no op has the name {op!r}")
        with record_launches(Target("cuda", architecture)):
            tile()


def tile_of(op: str) -> Callable[[], Mapping[str, int]] | None:
    """Return what computes an op's tile of 16-bit operands for the current target, by its fields;
    None for an unknown op."""
    # The kernels import Triton: only for a machine that has a table.
    from vlm_serve.kernels.linear import few_codes_triton, few_rows_triton, fixed_triton
    from vlm_serve.kernels.paged_attention.tiles_triton import decode_tile

    name, _, narrow = op.partition(", narrow")
    columns = NARROW_BELOW - 1 if op.endswith(", narrow") else NARROW_BELOW
    half = torch.bfloat16
    if not narrow and name == "few rows":
        # Gated, a program has two tiles of weights.
        return lambda: few_rows_triton.tile_of(half, columns, gated=True)._asdict()
    if not narrow and name == "few rows of codes":
        return lambda: few_codes_triton.tile_of(half, columns)._asdict()
    if not narrow and name == "fixed product":
        return lambda: fixed_triton.tile_of(half, columns)._asdict()
    if match := re.fullmatch(r"attention decode, head dim (\d+)", op):
        return lambda: vars(decode_tile(half, int(match[1]), 1))
    return None
