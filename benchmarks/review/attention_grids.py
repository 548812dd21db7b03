"""Grids of paged attention on a GPU: decoding in a graph, and a hit behind a long prefix.

    python benchmarks/review/attention_grids.py

Launches are recorded for Hopper without a GPU: 16 heads, 4 of keys, 256 wide, blocks of 64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import checkout  # noqa: F401
import torch

from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.paged_attention.triton import attention_decode, attention_prefill
from vlm_serve.kernels.triton_support import Launch, Target, record_launches

HEADS, KEY_HEADS, WIDTH, BLOCK = 16, 4, 256, 64
NEW, MULTIPROCESSORS = 64, 132


def _queries(count: int) -> tuple[torch.Tensor, KVLayer]:
    keys = torch.empty(8, BLOCK, KEY_HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    queries = torch.empty(count, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    return queries, KVLayer(keys, keys)


def decode(batch: int, longest: int) -> Launch:
    """Return the launch for a graph of so many sequences of at most so many tokens."""
    queries, layer = _queries(batch)
    rows = (-1,) * batch
    tables = ((0,) * (longest // BLOCK),) * batch
    meta = DecodeMeta(tables, (longest,) * batch, rows, rows, rows)
    with record_launches(Target("cuda", 90)) as recorded:
        attention_decode(queries, layer, meta, scale=1.0)
    return recorded[0]


def hit(start: int) -> Launch:
    """Return the launch for `NEW` tokens behind so many known ones."""
    queries, layer = _queries(NEW)
    blocks = (0,) * ((start + NEW) // BLOCK + 1)
    meta = PrefillMeta((0, NEW), (start,), (blocks,), (-1,), (-1,), ((NEW,),))
    with record_launches(Target("cuda", 90)) as recorded:
        attention_prefill(queries, layer, meta, scale=1.0)
    return recorded[0]


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    for longest in (8192, 262_144):
        for batch in (1, 8, 16, 32, 64, 256):
            launch = decode(batch, longest)
            parts = launch.arguments["most"]
            print(f"contexts up to {longest}, batch {batch}: grid {launch.grid}, parts {parts}")
    for start in (4096, 32_768, 131_072):
        launch = hit(start)
        tile, part = launch.arguments["KEY_TILE"], launch.arguments["PART"]
        walked = -(-(start + NEW) // part) - launch.arguments["most"] + 1
        grid = f"grid {launch.grid} of {MULTIPROCESSORS} multiprocessors"
        print(f"{NEW} tokens behind {start}: {grid}, {walked * part // tile} tiles of keys at most")


if __name__ == "__main__":
    main()
