"""What a model's weights take in memory, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vlm_serve.kernels.linear.dense import PANEL
from vlm_serve.models.config import ModelConfig
from vlm_serve.models.sizes import TextConfig, VisionConfig
from vlm_serve.options import format_size


@dataclass(frozen=True, slots=True)
class Shape:
    """So many projections of one shape.

    Attributes:
        columns, depth: N and K.
        biases: numbers in the bias of each.
    """

    columns: int
    depth: int
    count: int = 1
    biases: int = 0


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of one rank's weights.

    Attributes:
        projections: with their biases.
        table: the token embeddings.
        others: norms, convolutions, positions of the vision tower.
        mapped: whether the table stays in its file, of which only rows that are looked up are read.
    """

    projections: int
    table: int
    others: int
    mapped: bool

    @property
    def in_memory(self) -> int:
        """What is allocated for them."""
        return self.projections + self.others + (0 if self.mapped else self.table)

    def __str__(self) -> str:
        table = f", beside a table of {format_size(self.table)} in its file" if self.mapped else ""
        return format_size(self.in_memory) + table


def weight_bytes(
    config: ModelConfig,
    *,
    weights: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    compiled: bool,
    tensor_parallel: int = 1,
) -> WeightBytes:
    """The sizes, to within one percent of what a loaded model has.

    Args:
        config: of the model.
        weights: type of projections and table.
        compute: type of everything else.
        device: where they are to live.
        compiled: whether they are packed for compiled CPU kernels, in whole panels.
        tensor_parallel: ranks that share the language model's projections; the rest is on each.
    """

    def size(shape: Shape) -> int:
        if not compiled:
            return shape.count * (shape.columns * shape.depth + shape.biases) * weights.itemsize
        columns = -(-shape.columns // PANEL) * PANEL
        depth = shape.depth + (shape.depth % 2 if weights == torch.bfloat16 else 0)
        return shape.count * (columns * depth * weights.itemsize + 4 * shape.biases)

    text, vision = config.text, config.vision
    projections = sum(map(size, _text_shapes(text))) // tensor_parallel
    others = _text_others(text)
    if vision is not None:
        projections += sum(map(size, _vision_shapes(vision)))
        others += _vision_others(vision)
    return WeightBytes(
        projections=projections,
        table=text.vocab_size * text.hidden_size * weights.itemsize,
        others=others * compute.itemsize,
        mapped=device.type == "cpu" and weights == config.dtype,
    )


def _text_shapes(text: TextConfig) -> Iterator[Shape]:
    hidden, queries = text.hidden_size, text.attention_heads * text.head_dim
    yield Shape(text.vocab_size, hidden)
    heads, values = text.gdn_value_heads, text.value_dim
    yield Shape(text.conv_dim + values + 2 * heads, hidden, text.gdn_layers)
    yield Shape(hidden, values, text.gdn_layers)
    wide = 2 * queries + 2 * text.kv_heads * text.head_dim
    biased = int(text.attention_bias)
    yield Shape(wide, hidden, text.attention_layers, biased * wide)
    yield Shape(hidden, queries, text.attention_layers, biased * hidden)
    if text.moe is None:
        inner = text.intermediate_size
    else:
        moe, inner = text.moe, text.moe.shared_intermediate_size
        experts = text.num_layers * moe.num_experts
        yield Shape(moe.num_experts + 1, hidden, text.num_layers)
        yield Shape(moe.intermediate_size, hidden, 2 * experts)
        yield Shape(hidden, moe.intermediate_size, experts)
    yield Shape(inner, hidden, 2 * text.num_layers)
    yield Shape(hidden, inner, text.num_layers)


def _text_others(text: TextConfig) -> int:
    """Numbers in everything but matrices."""
    norms = (2 * text.num_layers + 1) * text.hidden_size
    delta = text.conv_dim * text.conv_kernel + text.gdn_value_dim + 2 * text.gdn_value_heads
    return norms + text.gdn_layers * delta + text.attention_layers * 2 * text.head_dim


def _vision_shapes(vision: VisionConfig) -> Iterator[Shape]:
    hidden, wide, depth = vision.hidden_size, vision.intermediate_size, vision.depth
    yield Shape(hidden, vision.patch_dim, 1, hidden)
    yield Shape(3 * hidden, hidden, depth, 3 * hidden)
    yield Shape(hidden, hidden, depth, hidden)
    yield Shape(wide, hidden, depth, wide)
    yield Shape(hidden, wide, depth, hidden)
    merged = hidden * vision.merge_size**2
    yield Shape(merged, merged, 1, merged)
    yield Shape(vision.out_hidden_size, merged, 1, vision.out_hidden_size)


def _vision_others(vision: VisionConfig) -> int:
    norms = 2 * (2 * vision.depth + 1) * vision.hidden_size
    return norms + vision.num_positions * vision.hidden_size
