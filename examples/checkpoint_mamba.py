"""Parts specific to checkpoints with Mamba2, of Granite 4 and Nemotron-H: config.json, names of
weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoint_entries import Entry, projection
from checkpoint_spec import CheckpointSpec

KINDS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Kinds of layers in published files, by their letters."""


def fields(spec: CheckpointSpec) -> dict[str, Any]:
    """Return config.json with the fields of published files."""
    return {
        "architectures": [f"{spec.architecture}ForCausalLM"],
        "model_type": spec.model_type,
        **spec.text_sizes,
        "tie_word_embeddings": spec.tied_embeddings,
        "num_experts_per_tok": spec.experts_per_token,
        **(_granite(spec) if spec.family == "granitemoehybrid" else _nemotron(spec)),
    }


def _granite(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "rms_norm_eps": 1e-5,
        "rope_theta": spec.rope_theta,
        "position_embedding_type": "nope" if "M" in spec.kinds else "rope",
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 3,
        "num_local_experts": spec.num_experts,
        "intermediate_size": spec.moe_intermediate_size,
        "shared_intermediate_size": spec.intermediate_size,
        "layer_types": [KINDS[kind] for kind in spec.kinds],
        "mamba_n_heads": spec.gdn_value_heads,
        "mamba_d_head": spec.gdn_value_dim,
        "mamba_n_groups": spec.gdn_key_heads,
        "mamba_d_state": spec.gdn_key_dim,
        "mamba_d_conv": spec.conv_kernel,
        "mamba_expand": spec.gdn_value_heads * spec.gdn_value_dim // spec.hidden_size,
    }


def _nemotron(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "head_dim": spec.head_dim,
        "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": spec.kinds,
        "mamba_num_heads": spec.gdn_value_heads,
        "mamba_head_dim": spec.gdn_value_dim,
        "n_groups": spec.gdn_key_heads,
        "ssm_state_size": spec.gdn_key_dim,
        "conv_kernel": spec.conv_kernel,
        # transformers raises steps to this minimum in prompts alone, the server everywhere: a
        # random model's steps would lie below the usual 0.001 and its logits differ by 0.01.
        "time_step_min": 1e-9,
        "intermediate_size": spec.intermediate_size,
        "n_routed_experts": max(1, spec.num_experts),
        "moe_intermediate_size": spec.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": spec.shared_intermediate_size,
        "routed_scaling_factor": 2.5,
    }


def layer_entries(layer: str, index: int, spec: CheckpointSpec) -> Iterator[Entry]:
    """Yield the weights of a layer."""
    granite, kind, hidden = spec.family == "granitemoehybrid", spec.kinds[index], spec.hidden_size
    if kind == "M":
        yield from _mamba(f"{layer}.{'mamba' if granite else 'mixer'}", spec)
    elif kind == "*":
        yield from _attention(f"{layer}.{'self_attn' if granite else 'mixer'}", spec)
    elif kind == "E":
        yield from _experts(f"{layer}.mixer", spec)
    else:
        yield from _mlp(f"{layer}.mixer", hidden, spec.intermediate_size)
    if granite:
        yield from _granite_behind(layer, spec)
    for name in ("input_layernorm", "post_attention_layernorm") if granite else ("norm",):
        yield f"{layer}.{name}.weight", (hidden,), "norm"


def _granite_behind(layer: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, size, count = spec.hidden_size, spec.intermediate_size, spec.num_experts
    yield f"{layer}.shared_mlp.input_linear.weight", (2 * size, hidden), "linear"
    yield f"{layer}.shared_mlp.output_linear.weight", (hidden, size), "linear"
    if count:
        name, size = f"{layer}.block_sparse_moe", spec.moe_intermediate_size
        yield f"{name}.router.layer.weight", (count, hidden), "router"
        yield f"{name}.input_linear.weight", (count, 2 * size, hidden), "stacked"
        yield f"{name}.output_linear.weight", (count, hidden, size), "stacked"


def _mlp(name: str, hidden: int, size: int) -> Iterator[Entry]:
    yield f"{name}.up_proj.weight", (size, hidden), "linear"
    yield f"{name}.down_proj.weight", (hidden, size), "linear"


def _experts(name: str, spec: CheckpointSpec) -> Iterator[Entry]:
    yield f"{name}.gate.weight", (spec.num_experts, spec.hidden_size), "router"
    yield f"{name}.gate.e_score_correction_bias", (spec.num_experts,), "bias"
    for expert in range(spec.num_experts):
        yield from _mlp(f"{name}.experts.{expert}", spec.hidden_size, spec.moe_intermediate_size)
    yield from _mlp(f"{name}.shared_experts", spec.hidden_size, spec.shared_intermediate_size)


def _attention(name: str, spec: CheckpointSpec) -> Iterator[Entry]:
    hidden, dim = spec.hidden_size, spec.head_dim
    for part, heads in {"q": spec.attention_heads, "k": spec.kv_heads, "v": spec.kv_heads}.items():
        yield f"{name}.{part}_proj.weight", (heads * dim, hidden), "linear"
    yield f"{name}.o_proj.weight", (hidden, spec.attention_heads * dim), "linear"


def _mamba(name: str, spec: CheckpointSpec) -> Iterator[Entry]:
    heads, hidden = spec.gdn_value_heads, spec.hidden_size
    inner = heads * spec.gdn_value_dim
    mixed = inner + 2 * spec.gdn_key_heads * spec.gdn_key_dim
    yield f"{name}.in_proj.weight", (inner + mixed + heads, hidden), "linear"
    yield from projection(f"{name}.conv1d", (mixed, 1, spec.conv_kernel))
    yield f"{name}.dt_bias", (heads,), "dt_bias"
    yield f"{name}.A_log", (heads,), "A_log"
    yield f"{name}.D", (heads,), "norm"
    yield f"{name}.norm.weight", (inner,), "norm"
    yield f"{name}.out_proj.weight", (hidden, inner), "linear"
