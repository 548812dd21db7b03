"""Tiles as data: what was measured on an architecture replaces what the kernels were written with.

`tuning/sm_90.json` beside this file holds, by the names of ops, the fields of their tiles that
differ. `benchmarks/gpu_tune.py --table` writes it. It is read once; the start of an engine checks
all of it (`tuning_check.py`). Nothing is tuned while serving. A table's digest is in the name of
the numerics, since other tiles sum in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.triton_support import Target

FOLDER = Path(__file__).resolve().parent / "tuning"
NARROW_BELOW = 4096
"""Columns of a weight below which products of few rows have a narrow tile of its own name: there a
program takes half as many columns, so that there are programs enough."""
FIXED_STEPS = "steps with prompts"
"""Name in a table of a choice: the fixed product was at most a tenth slower there than the library
(`fixed` 1), and multiplies."""
_WHOLE = {"warps": (1, 2, 4, 8), "stages": tuple(range(1, 9))}
_NONE: Mapping[str, Mapping[str, int]] = {}


@cache
def table(architecture: int | str) -> Mapping[str, Mapping[str, int]]:
    """Return an architecture's table, fields by ops; empty where nothing was measured.

    Raises:
        ConfigError: a file that is no such table.
    """
    path = FOLDER / f"sm_{architecture}.json"
    if not path.is_file():
        return _NONE
    try:
        ops = json.loads(path.read_text(encoding="utf-8"))["ops"]
        return {op: {name: int(value) for name, value in tile.items()} for op, tile in ops.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} is no table of tiles: {error}") from error


def digest(architecture: int | str) -> str:
    """Return 8 hexadecimal digits of an architecture's table; "" without one."""
    tiles = table(architecture)
    if not tiles:
        return ""
    text = json.dumps(tiles, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def architecture_of(device: torch.device) -> int | None:
    """Return the compute capability (90) that names a GPU's table; None: it has none."""
    if device.type == "cpu" or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def fixed_steps(device: torch.device) -> bool:
    """Return True if steps with prompts have the fixed product without an option."""
    architecture = architecture_of(device)
    return architecture is not None and table(architecture).get(FIXED_STEPS) == {"fixed": 1}


def tuned(
    op: str, target: Target, usual: Mapping[str, int], shared: Callable[[Mapping[str, int]], int]
) -> dict[str, int]:
    """Return an op's tile: the usual one with what was measured in place of its fields.

    Args:
        op: name in the table.
        target: of launches; only CUDA has tables.
        usual: the tile without a table.
        shared: bytes of shared memory that a tile takes, by its fields.

    Raises:
        ConfigError: the table names a field that the tile has not, a size that is no power of two,
            or more shared memory than there is.
    """
    measured = table(target.arch).get(op, {}) if target.backend == "cuda" else {}
    where = f"tuning/sm_{target.arch}.json: {op}"
    for name, value in measured.items():
        if name not in usual:
            raise ConfigError(f"{where} has no {name}")
        known = _WHOLE.get(name)
        if value < 1 or (value not in known if known else value & (value - 1)):
            raise ConfigError(f"{where}: {name} cannot be {value}")
    tile = {**usual, **measured}
    if measured and shared(tile) > target.shared_memory:
        raise ConfigError(
            f"{where} takes {shared(tile)} bytes of shared memory, of {target.shared_memory}"
        )
    return tile
