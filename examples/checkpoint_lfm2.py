"""Parts specific to LFM2's checkpoints: config.json and the names of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoint_spec import CheckpointSpec

Entry = tuple[str, tuple[int, ...], str]
"""(name, shape, rule of `random_weights.draw`)."""


def fields(spec: CheckpointSpec) -> dict[str, Any]:
    """Return config.json of the language model, with the fields of published files."""
    sizes: dict[str, Any] = {
        "block_ff_dim": spec.intermediate_size,
        "block_auto_adjust_ff_dim": False,
    }
    if spec.num_experts:
        sizes = {
            "intermediate_size": spec.intermediate_size,
            "moe_intermediate_size": spec.moe_intermediate_size,
            "num_dense_layers": spec.dense_layers,
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        }
    return {
        **sizes,
        "architectures": [f"{spec.architecture}ForCausalLM"],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.attention_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_eps": 1e-5,
        "rope_theta": spec.rope_theta,
        "tie_embedding": spec.tied_embeddings,
        "conv_L_cache": spec.conv_kernel,
        "conv_bias": spec.conv_bias,
        "layer_types": [
            "full_attention" if spec.attends(index) else "conv" for index in range(spec.num_layers)
        ],
    }


def layer_entries(layer: str, index: int, spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the weights of a layer."""
    hidden, part = spec.hidden_size, f"{layer}.feed_forward"
    yield from _attention(layer, spec) if spec.attends(index) else _convolution(layer, spec)
    if spec.has_experts(index):
        yield f"{part}.gate.weight", (spec.num_experts, hidden), "router"
        yield f"{part}.expert_bias", (spec.num_experts,), "bias"
        for expert in range(spec.num_experts):
            yield from _mlp(f"{part}.experts.{expert}", hidden, spec.moe_intermediate_size)
    else:
        yield from _mlp(part, hidden, spec.intermediate_size)
    yield f"{layer}.operator_norm.weight", (hidden,), "norm"
    yield f"{layer}.ffn_norm.weight", (hidden,), "norm"


def _mlp(name: str, hidden: int, size: int) -> Iterator[Entry]:
    for part, shape in {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}.items():
        yield f"{name}.{part}.weight", shape, "linear"


def _attention(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, dim = spec.hidden_size, spec.head_dim
    for name, heads in {"q": spec.attention_heads, "k": spec.kv_heads, "v": spec.kv_heads}.items():
        yield f"{layer}.self_attn.{name}_proj.weight", (heads * dim, hidden), "linear"
    yield f"{layer}.self_attn.out_proj.weight", (hidden, spec.attention_heads * dim), "linear"
    for name in ("q_layernorm", "k_layernorm"):
        yield f"{layer}.self_attn.{name}.weight", (dim,), "sharp_norm"


def _convolution(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, name = spec.hidden_size, f"{layer}.conv"
    shapes = {
        "in_proj": (3 * hidden, hidden),
        "conv": (hidden, 1, spec.conv_kernel),
        "out_proj": (hidden, hidden),
    }
    for part, shape in shapes.items():
        yield f"{name}.{part}.weight", shape, "linear"
        if spec.conv_bias:
            yield f"{name}.{part}.bias", shape[:1], "bias"
