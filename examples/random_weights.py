"""Names, shapes and random values of every weight of a Qwen3.5 checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from checkpoint_spec import CheckpointSpec

Entry = tuple[str, tuple[int, ...], str]
"""(name, shape, rule of `draw`)."""


def entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Every weight of the checkpoint, in the order of the modules."""
    prefix = "model.language_model" if spec.vision_depth else "model"
    hidden = spec.hidden_size
    embedding = "linear" if spec.tied_embeddings else "embedding"
    yield f"{prefix}.embed_tokens.weight", (spec.vocab_size, hidden), embedding
    for index in range(spec.num_layers):
        layer = f"{prefix}.layers.{index}"
        attention = (index + 1) % spec.full_attention_interval == 0
        yield from _attention(layer, spec) if attention else _gated_delta(layer, spec)
        yield from _experts(layer, spec) if spec.num_experts else _dense(layer, spec)
        yield f"{layer}.input_layernorm.weight", (hidden,), "centred_norm"
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), "centred_norm"
    yield f"{prefix}.norm.weight", (hidden,), "centred_norm"
    if spec.vision_depth:
        yield from _vision(spec)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden), "linear"


def _gated_delta(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, heads = spec.hidden_size, spec.gdn_value_heads
    value = heads * spec.gdn_value_dim
    mixed = 2 * spec.gdn_key_heads * spec.gdn_key_dim + value
    yield f"{layer}.linear_attn.in_proj_qkv.weight", (mixed, hidden), "linear"
    yield f"{layer}.linear_attn.in_proj_z.weight", (value, hidden), "linear"
    yield f"{layer}.linear_attn.in_proj_b.weight", (heads, hidden), "linear"
    yield f"{layer}.linear_attn.in_proj_a.weight", (heads, hidden), "linear"
    yield f"{layer}.linear_attn.conv1d.weight", (mixed, 1, spec.conv_kernel), "linear"
    yield f"{layer}.linear_attn.dt_bias", (heads,), "dt_bias"
    yield f"{layer}.linear_attn.A_log", (heads,), "A_log"
    yield f"{layer}.linear_attn.norm.weight", (spec.gdn_value_dim,), "norm"
    yield f"{layer}.linear_attn.out_proj.weight", (hidden, value), "linear"


def _attention(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, dim = spec.hidden_size, spec.head_dim
    query, key = spec.attention_heads * dim, spec.kv_heads * dim
    yield f"{layer}.self_attn.q_proj.weight", (2 * query, hidden), "linear"
    yield f"{layer}.self_attn.k_proj.weight", (key, hidden), "linear"
    yield f"{layer}.self_attn.v_proj.weight", (key, hidden), "linear"
    yield f"{layer}.self_attn.o_proj.weight", (hidden, query), "linear"
    yield f"{layer}.self_attn.q_norm.weight", (dim,), "sharp_norm"
    yield f"{layer}.self_attn.k_norm.weight", (dim,), "sharp_norm"


def _dense(layer: str, spec: CheckpointSpec, part: str = "mlp", size: int = 0) -> Iterator[Entry]:
    hidden, size = spec.hidden_size, size or spec.intermediate_size
    yield f"{layer}.{part}.gate_proj.weight", (size, hidden), "linear"
    yield f"{layer}.{part}.up_proj.weight", (size, hidden), "linear"
    yield f"{layer}.{part}.down_proj.weight", (hidden, size), "linear"


def _experts(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, count, size = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size
    yield f"{layer}.mlp.gate.weight", (count, hidden), "router"
    yield f"{layer}.mlp.experts.gate_up_proj", (count, 2 * size, hidden), "linear"
    yield f"{layer}.mlp.experts.down_proj", (count, hidden, size), "linear"
    yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), "linear"
    yield from _dense(layer, spec, "mlp.shared_expert", spec.shared_intermediate_size)


def _vision(spec: CheckpointSpec) -> Iterator[Entry]:
    dim, wide, tower = spec.vision_hidden_size, spec.vision_intermediate_size, "model.visual"
    patch = (dim, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    merged = dim * spec.spatial_merge_size**2
    yield from _biased(f"{tower}.patch_embed.proj", patch)
    yield f"{tower}.pos_embed.weight", (spec.num_position_embeddings, dim), "position"
    for index in range(spec.vision_depth):
        block = f"{tower}.blocks.{index}"
        yield from _layer_norm(f"{block}.norm1", dim)
        yield from _layer_norm(f"{block}.norm2", dim)
        yield from _biased(f"{block}.attn.qkv", (3 * dim, dim))
        yield from _biased(f"{block}.attn.proj", (dim, dim))
        yield from _biased(f"{block}.mlp.linear_fc1", (wide, dim))
        yield from _biased(f"{block}.mlp.linear_fc2", (dim, wide))
    yield from _layer_norm(f"{tower}.merger.norm", dim)
    yield from _biased(f"{tower}.merger.linear_fc1", (merged, merged))
    yield from _biased(f"{tower}.merger.linear_fc2", (spec.hidden_size, merged))


def _biased(name: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield f"{name}.weight", shape, "linear"
    yield f"{name}.bias", shape[:1], "bias"


def _layer_norm(name: str, dim: int) -> Iterator[Entry]:
    yield f"{name}.weight", (dim,), "norm"
    yield f"{name}.bias", (dim,), "bias"


def draw(name: str, shape: tuple[int, ...], rule: str, seed: int) -> torch.Tensor:
    """Float32 values of one weight; they depend on its name, shape, rule and the seed alone.

    Every projection keeps the scale of its input. Tied embeddings do so as well: they must be small
    beside what the layers add, or the last token itself would be the best next one. Others have the
    scale of a layer's output; much smaller ones would magnify rounding errors.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if rule == "A_log":
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if rule == "dt_bias":
        # Inverse softplus of time steps spread log-uniformly over 0.001 ... 0.1, as Mamba does:
        # per-token decays between exp(-0.001) and exp(-1.6) before the input's own contribution.
        spread = torch.rand(shape, generator=generator) * math.log(100.0) + math.log(0.001)
        return torch.log(torch.expm1(spread.exp()))
    noise = torch.randn(shape, generator=generator)
    if rule == "linear":
        fan_in = shape[-1] if "experts" in name else math.prod(shape[1:])
        return noise / math.sqrt(fan_in)
    if rule == "router":
        return noise * (3.0 / math.sqrt(shape[-1]))
    offset, scale = {
        "norm": (1.0, 0.1),
        "centred_norm": (0.0, 0.1),
        "sharp_norm": (0.5, 0.1),
        "position": (0.0, 0.5),
        "embedding": (0.0, 1.0),
        "bias": (0.0, 0.1),
    }[rule]
    return offset + scale * noise
