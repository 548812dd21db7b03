"""Names, shapes and random values of every weight of a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import checkpoint_internvl
import checkpoint_mamba
import checkpoint_minicpm
import checkpoint_omni
import checkpoint_qwen2
import torch
from checkpoint_entries import Entry, layer_norm, projection
from checkpoint_lfm2 import layer_entries
from checkpoint_lfm2 import vision_entries as tiled_entries
from checkpoint_spec import CheckpointSpec

_DIFFUSERS = {
    **{f"{part}_proj": f"to_{part}" for part in "qkv"},
    "o_proj": "to_out",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
"""Names of attention in Cosmos3's checkpoints."""


def entries(spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield every weight of the checkpoint in module order."""
    for name, shape, rule in _entries(spec):
        if spec.family == "cosmos3_omni":
            name = name.removeprefix("model.language_model.").removeprefix("model.visual.")
            for plain, other in _DIFFUSERS.items():
                name = name.replace(f".self_attn.{plain}.", f".self_attn.{other}.")
        elif spec.family == "qwen3_omni":
            name = checkpoint_omni.name(name)
        yield name, shape, rule


def _entries(spec: CheckpointSpec) -> Iterator[Entry]:
    beside = spec.older and spec.family != "internvl"
    prefix = "model.language_model" if spec.vision_depth and not beside else "model"
    hidden = spec.hidden_size
    embedding = "linear" if spec.tied_embeddings else "embedding"
    table = "embed_tokens"
    if spec.family == "nemotron_h":
        prefix, table = "backbone", "embeddings"
    yield f"{prefix}.{table}.weight", (spec.vocab_size, hidden), embedding
    norm = "centred_norm" if spec.hybrid else "norm"
    for index in range(spec.num_layers):
        layer = f"{prefix}.layers.{index}"
        if spec.family == "lfm2":
            yield from layer_entries(layer, index, spec)
            continue
        if spec.mamba:
            yield from checkpoint_mamba.layer_entries(layer, index, spec)
            continue
        if spec.attends(index):
            yield from _attention(layer, spec)
        else:
            yield from _gated_delta(layer, spec)
        yield from _experts(layer, spec) if spec.has_experts(index) else _dense(layer, spec)
        yield f"{layer}.input_layernorm.weight", (hidden,), norm
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), norm
    last = {"lfm2": "embedding_norm", "nemotron_h": "norm_f"}.get(spec.family, "norm")
    yield f"{prefix}.{last}.weight", (hidden,), norm
    if spec.vision_depth:
        yield from _tower(spec)
    if spec.mtp:
        yield from _predictor(spec)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden), "linear"


def _gated_delta(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, heads = spec.hidden_size, spec.gdn_value_heads
    value = heads * spec.gdn_value_dim
    mixed = 2 * spec.gdn_key_heads * spec.gdn_key_dim + value
    inputs = {"qkv": mixed, "z": value, "b": heads, "a": heads}
    if spec.family == "qwen3_next":
        inputs = {"qkvz": mixed + value, "ba": 2 * heads}
    for name, rows in inputs.items():
        yield f"{layer}.linear_attn.in_proj_{name}.weight", (rows, hidden), "linear"
    yield f"{layer}.linear_attn.conv1d.weight", (mixed, 1, spec.conv_kernel), "linear"
    yield f"{layer}.linear_attn.dt_bias", (heads,), "dt_bias"
    yield f"{layer}.linear_attn.A_log", (heads,), "A_log"
    yield f"{layer}.linear_attn.norm.weight", (spec.gdn_value_dim,), "norm"
    yield f"{layer}.linear_attn.out_proj.weight", (hidden, value), "linear"


def _attention(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, dim, plain = spec.hidden_size, spec.head_dim, not spec.hybrid
    query, key = spec.attention_heads * dim, spec.kv_heads * dim
    yield f"{layer}.self_attn.q_proj.weight", (query if plain else 2 * query, hidden), "linear"
    yield f"{layer}.self_attn.k_proj.weight", (key, hidden), "linear"
    yield f"{layer}.self_attn.v_proj.weight", (key, hidden), "linear"
    yield f"{layer}.self_attn.o_proj.weight", (hidden, query), "linear"
    if spec.older:
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{layer}.self_attn.{name}_proj.bias", (rows,), "bias"
        return
    for name in ("q_norm", "k_norm"):
        rule = "sharp_norm" if plain else "sharp_centred_norm"
        yield f"{layer}.self_attn.{name}.weight", (dim,), rule


def _dense(layer: str, spec: CheckpointSpec, part: str = "mlp", size: int = 0) -> Iterator[Entry]:
    hidden, size = spec.hidden_size, size or spec.intermediate_size
    yield f"{layer}.{part}.gate_proj.weight", (size, hidden), "linear"
    yield f"{layer}.{part}.up_proj.weight", (size, hidden), "linear"
    yield f"{layer}.{part}.down_proj.weight", (hidden, size), "linear"


def _experts(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the experts: one fused tensor, transposed in Qwen3-VL; one per expert in Qwen3-Next,
    Qwen3 and Qwen3-Omni."""
    hidden, count, size = spec.hidden_size, spec.num_experts, spec.moe_intermediate_size
    yield f"{layer}.mlp.gate.weight", (count, hidden), "router"
    if spec.experts_apart:
        for expert in range(count):
            yield from _dense(layer, spec, f"mlp.experts.{expert}", size)
    elif spec.kin == "qwen3_vl":
        yield f"{layer}.mlp.experts.gate_up_proj", (count, hidden, 2 * size), "transposed"
        yield f"{layer}.mlp.experts.down_proj", (count, size, hidden), "transposed"
    else:
        yield f"{layer}.mlp.experts.gate_up_proj", (count, 2 * size, hidden), "stacked"
        yield f"{layer}.mlp.experts.down_proj", (count, hidden, size), "stacked"
    if not spec.hybrid:
        return
    yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), "linear"
    yield from _dense(layer, spec, "mlp.shared_expert", spec.shared_intermediate_size)


def _predictor(spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, layer = spec.hidden_size, "mtp.layers.0"
    yield "mtp.fc.weight", (hidden, 2 * hidden), "linear"
    yield from _attention(layer, spec)
    yield from _experts(layer, spec) if spec.num_experts else _dense(layer, spec)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    for name in (*norms, *(f"mtp.{each}" for each in names)):
        yield f"{name}.weight", (hidden,), "centred_norm"


def _tower(spec: CheckpointSpec) -> Iterator[Entry]:
    if spec.family == "internvl":
        return checkpoint_internvl.vision_entries(spec)
    if spec.older:
        return checkpoint_qwen2.vision_entries(spec)
    if spec.tiled:
        return tiled_entries(spec)
    return checkpoint_minicpm.vision_entries(spec) if spec.sliced else _vision(spec)


def _vision(spec: CheckpointSpec) -> Iterator[Entry]:
    dim, wide, tower = spec.vision_hidden_size, spec.vision_intermediate_size, "model.visual"
    patch = (dim, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    merged = dim * spec.spatial_merge_size**2
    yield from projection(f"{tower}.patch_embed.proj", patch)
    yield f"{tower}.pos_embed.weight", (spec.num_position_embeddings, dim), "position"
    for index in range(spec.vision_depth):
        block = f"{tower}.blocks.{index}"
        yield from layer_norm(f"{block}.norm1", dim)
        yield from layer_norm(f"{block}.norm2", dim)
        yield from projection(f"{block}.attn.qkv", (3 * dim, dim))
        yield from projection(f"{block}.attn.proj", (dim, dim))
        yield from projection(f"{block}.mlp.linear_fc1", (wide, dim))
        yield from projection(f"{block}.mlp.linear_fc2", (dim, wide))
    late = [f"deepstack_merger_list.{index}" for index in range(len(spec.deepstack))]
    for merger in ["merger", *late]:
        yield from layer_norm(f"{tower}.{merger}.norm", merged if merger in late else dim)
        yield from projection(f"{tower}.{merger}.linear_fc1", (merged, merged))
        yield from projection(f"{tower}.{merger}.linear_fc2", (spec.hidden_size, merged))


def draw(name: str, shape: tuple[int, ...], rule: str, seed: int) -> torch.Tensor:
    """Draw float32 values of one weight from its name, shape and rule and the seed alone.

    Every projection preserves the scale of its input, and so do tied embeddings. Those must be
    small relative to what the layers add, or the last token would be its own best successor. Untied
    embeddings have the scale of a layer's output; much smaller ones would magnify rounding errors.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if rule == "A_log":
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if rule == "dt_bias":
        # Inverse softplus of time steps, log-uniform over 0.001 ... 0.1 as in Mamba:
        # per-token decays between exp(-0.001) and exp(-1.6) before the input's own contribution.
        spread = torch.rand(shape, generator=generator) * math.log(100.0) + math.log(0.001)
        return torch.log(torch.expm1(spread.exp()))
    noise = torch.randn(shape, generator=generator)
    if rule == "linear":
        return noise / math.sqrt(math.prod(shape[1:]))
    if rule in ("stacked", "transposed"):
        return noise / math.sqrt(shape[-1] if rule == "stacked" else shape[-2])
    if rule == "router":
        return noise * (3.0 / math.sqrt(shape[-1]))
    offset, scale = {
        "norm": (1.0, 0.1),
        "centred_norm": (0.0, 0.1),
        "sharp_norm": (1.5, 0.1),
        "sharp_centred_norm": (0.5, 0.1),
        "position": (0.0, 0.5),
        "embedding": (0.0, 1.0),
        "bias": (0.0, 0.1),
    }[rule]
    return offset + scale * noise
