"""Names the fields of config.json that determine a tensor's shape, for error messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADS = "num_attention_heads, head_dim"
_KEYS = "num_key_value_heads, head_dim"
_VALUES = "linear_num_value_heads, linear_value_head_dim"
_CHANNELS = f"linear_num_key_heads, linear_key_head_dim, {_VALUES}"
_EXPERTS = "moe_intermediate_size"
_SHARED = "shared_expert_intermediate_size"

_FIELDS = {
    r"(embed_tokens|lm_head)\.weight": ("vocab_size", "hidden_size"),
    r"self_attn\.q_proj\.\w+": (f"{_HEADS}, attn_output_gate", "hidden_size"),
    r"self_attn\.[kv]_proj\.\w+": (_KEYS, "hidden_size"),
    r"self_attn\.o_proj\.\w+": ("hidden_size", _HEADS),
    r"self_attn\.[qk]_norm\.weight": ("head_dim",),
    r"linear_attn\.in_proj_qkvz?\.weight": (_CHANNELS, "hidden_size"),
    r"linear_attn\.in_proj_z\.weight": (_VALUES, "hidden_size"),
    r"linear_attn\.in_proj_(a|b|ba)\.weight": ("linear_num_value_heads", "hidden_size"),
    r"linear_attn\.conv1d\.weight": (_CHANNELS, "", "linear_conv_kernel_dim"),
    r"linear_attn\.(A_log|dt_bias)": ("linear_num_value_heads",),
    r"linear_attn\.norm\.weight": ("linear_value_head_dim",),
    r"linear_attn\.out_proj\.weight": ("hidden_size", _VALUES),
    r"mlp\.gate\.weight": ("num_experts", "hidden_size"),
    r"experts\.gate_up_proj": (
        "num_experts",
        f"{_EXPERTS}, hidden_size",
        f"{_EXPERTS}, hidden_size",
    ),
    r"experts\.down_proj": ("num_experts", f"{_EXPERTS}, hidden_size", f"{_EXPERTS}, hidden_size"),
    r"experts\.\d+\.(gate|up)_proj\.weight": (_EXPERTS, "hidden_size"),
    r"experts\.\d+\.down_proj\.weight": ("hidden_size", _EXPERTS),
    r"shared_expert\.(gate|up)_proj\.weight": (_SHARED, "hidden_size"),
    r"shared_expert\.down_proj\.weight": ("hidden_size", _SHARED),
    r"mlp\.(gate|up)_proj\.weight": ("intermediate_size", "hidden_size"),
    r"mlp\.down_proj\.weight": ("hidden_size", "intermediate_size"),
    r"patch_embed\.proj\.weight": (
        "hidden_size",
        "in_channels",
        "temporal_patch_size",
        "patch_size",
        "patch_size",
    ),
    r"pos_embed\.weight": ("num_position_embeddings", "hidden_size"),
    r"blocks\.\d+\.attn\.\w+\.\w+": ("hidden_size", "hidden_size"),
    r"blocks\.\d+\.mlp\.linear_fc1\.\w+": ("intermediate_size", "hidden_size"),
    r"blocks\.\d+\.mlp\.linear_fc2\.\w+": ("hidden_size", "intermediate_size"),
    r"blocks\.\d+\.norm\d\.\w+": ("hidden_size",),
    r"merger\w*(\.\d+)?\.norm\.\w+": ("hidden_size, spatial_merge_size",),
    r"merger\w*(\.\d+)?\.linear_fc1\.\w+": ("hidden_size, spatial_merge_size",) * 2,
    r"merger\w*(\.\d+)?\.linear_fc2\.\w+": (
        "out_hidden_size",
        "hidden_size, spatial_merge_size",
    ),
    r"(input_layernorm|post_attention_layernorm|(^|\.)norm)\.weight": ("hidden_size",),
}
"""Fields by axes of tensors, by suffixes of names; the first match wins."""
_STORED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_\w+)$")
"""Tensors in place of a quantised weight, with other axes."""


def mismatch(name: str, found: Sequence[int], *wanted: Sequence[int]) -> str:
    """Return the sentence about a tensor of another shape than the config implies.

    Args:
        wanted: the accepted shapes.
    """
    implied = " or ".join(str(list(each)) for each in wanted)
    sentence = f"{name} has shape {list(found)}, the config implies {implied}"
    fields = _fields(name, found, wanted[0])
    return f"{sentence} by {fields}" if fields else sentence


def _fields(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    """Return the fields behind the axes that differ, "" where none are known."""
    plain = _STORED.sub(".weight", name)
    ends = next((axes for end, axes in _FIELDS.items() if re.search(f"(^|\\.){end}$", plain)), ())
    if plain == name and len(found) == len(wanted):
        pairs = zip(ends, found, wanted, strict=False)
        ends = tuple(fields for fields, mine, theirs in pairs if mine != theirs)
    return ", ".join(dict.fromkeys(filter(None, ends)))
