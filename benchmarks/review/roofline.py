"""Times of a decode step and a prefill from bytes and multiplications alone.

    python benchmarks/review/roofline.py [CONFIG ...]

Copying at 3.0 TB/s (H100) and 4.3 TB/s (H200), bfloat16 products at 800 TFLOP/s, 1.3 us a launch
and 1.2 us between two. Launches are those of `launches.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout

CARDS = {"H100": 3.0e12, "H200": 4.3e12}
FLOPS, PREFILL_FLOPS, ATTENTION_FLOPS = 800e12, 750e12, 450e12
LAUNCH_SECONDS = 2.5e-6
REACHED = 0.88
"""Share of the bandwidth that good kernels reach."""
LAUNCHES = {32: (215, 332, 324), 64: (415, 652, 636), 40: (545, 652, 642)}
"""By the number of layers: launches of decode steps of up to 8, up to 64, and more sequences."""
STATE = 128 * 128


@dataclass
class Shape:
    """Sizes of a text model from its config.json."""

    config: dict[str, Any]

    def __post_init__(self) -> None:
        text = self.config
        self.hidden, self.layers = text["hidden_size"], text["num_hidden_layers"]
        self.attention = self.layers // 4
        self.delta = self.layers - self.attention
        self.queries = text["num_attention_heads"] * 256
        self.keys = text["num_key_value_heads"] * 256
        self.delta_heads = text["linear_num_value_heads"]
        keys, values = text["linear_num_key_heads"] * 128, self.delta_heads * 128
        delta = 2 * keys + 2 * values + 2 * self.delta_heads + values
        attention = 2 * self.queries + 2 * self.keys + self.queries
        self.mixers = (self.delta * delta + self.attention * attention) * self.hidden
        self.head = text["vocab_size"] * self.hidden

    def feed_forward(self, tokens: int) -> float:
        """Return the weights that so many tokens read: of experts, those that any of them uses."""
        text, hidden = self.config, self.hidden
        if "num_experts" not in text:
            return float(self.layers * 3 * text["intermediate_size"] * hidden)
        experts, chosen = text["num_experts"], text["num_experts_per_tok"]
        used = experts * (1 - (1 - chosen / experts) ** tokens)
        shared = 3 * 512 * hidden + experts * hidden
        return float(self.layers * (3 * text["moe_intermediate_size"] * hidden * used + shared))

    @property
    def active(self) -> float:
        """Multiplications of a token by the layers' weights."""
        return self.mixers + self.feed_forward(1)


def decode_line(shape: Shape, card: str, batch: int, context: int) -> str:
    """Describe a decode step."""
    weights = 2 * (shape.mixers + shape.feed_forward(batch) + shape.head)
    state = 2 * batch * shape.delta * shape.delta_heads * STATE * 4
    keys = batch * context * shape.attention * 2 * shape.keys * 2
    logits = batch * shape.config["vocab_size"] * 4 * 3
    read = (weights + state + keys + logits) / CARDS[card]
    floor = max(read, 2 * batch * (shape.active + shape.head) / FLOPS)
    few, some, many = LAUNCHES[shape.layers]
    launches = few if batch <= 8 else some if batch <= 64 else many
    seconds = floor / REACHED + launches * LAUNCH_SECONDS
    return (
        f"{card}, batch {batch} at {context}: weights {weights / 1e9:.1f} GB, states "
        f"{state / 1e9:.2f}, keys {keys / 1e9:.2f}; floor {1e3 * floor:.2f} ms, with {launches} "
        f"launches {1e3 * seconds:.2f} ms, {batch / seconds:.0f} tokens/s"
    )


def prefill_line(shape: Shape, card: str, tokens: int, past: int) -> str:
    """Describe a prefill behind a known prefix."""
    dense = 2 * tokens * shape.active
    attention = shape.attention * 4 * shape.queries * tokens * (past + tokens / 2)
    weights = 2 * (shape.mixers + shape.feed_forward(tokens))
    floor = max(dense / PREFILL_FLOPS, weights / CARDS[card])
    return (
        f"{card}, prefill of {tokens} behind {past}: products {dense / 1e12:.1f} TFLOP, attention "
        f"{attention / 1e12:.2f}; {1e3 * floor:.1f} ms and {1e3 * attention / ATTENTION_FLOPS:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", type=Path, nargs="*", default=checkout.CONFIGS)
    for path in parser.parse_args(arguments).configs:
        config = json.loads(path.read_text())
        shape = Shape(config.get("text_config", config))
        row = shape.delta * shape.delta_heads * STATE * 4
        print(f"{path.stem}: {shape.active / 1e9:.2f} B a token, state {row / 2**20:.1f} MiB a row")
        for card in CARDS:
            for batch, context in ((1, 4096), (8, 4096), (64, 4096), (256, 1024)):
                print(f"  {decode_line(shape, card, batch, context)}")
            for tokens, past in ((4096, 0), (32_768, 0), (64, 4096), (64, 32_768)):
                print(f"  {prefill_line(shape, card, tokens, past)}")


if __name__ == "__main__":
    main()
