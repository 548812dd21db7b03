"""The language model's part of a config.json, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.reader import Metadata, TensorEntry

Tensors = dict[str, TensorEntry]
_SOFTMAX = 1
_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        kind: `model_type` with a vision tower.
        text_kind: `model_type` without one; "": there is none.
        state: whether layers have a state.
        experts: whether layers have routed experts; `shared`: and a shared one.
        tiled: whether value heads lie in the order of ggml's broadcasts.
        centred: whether the file adds 1 to the weights of norms.
    """

    kind: str
    text_kind: str
    state: bool = False
    experts: bool = False
    shared: bool = False
    tiled: bool = False
    centred: bool = False

    @property
    def sees(self) -> bool:
        """Return True if there are vision towers for it."""
        return self.kind != self.text_kind


ARCHITECTURES = {
    "qwen35": Architecture("qwen3_5", "qwen3_5_text", state=True, tiled=True, centred=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        state=True,
        experts=True,
        shared=True,
        tiled=True,
        centred=True,
    ),
    "qwen3next": Architecture(
        "qwen3_next", "qwen3_next", state=True, experts=True, shared=True, centred=True
    ),
    "qwen3vl": Architecture("qwen3_vl", "qwen3"),
    "qwen3vlmoe": Architecture("qwen3_vl_moe", "qwen3_moe", experts=True),
    "qwen3": Architecture("qwen3", "qwen3"),
    "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", experts=True),
    "qwen2": Architecture("qwen2", "qwen2"),
    # Its tower tells Qwen2.5-VL from Qwen2-VL. Without one positions are those of text.
    "qwen2vl": Architecture("qwen2_vl", "qwen2"),
}
"""By `general.architecture`."""


def architecture_of(metadata: Metadata) -> tuple[str, Architecture]:
    """Return the architecture and its name.

    Raises:
        CheckpointError: it is not supported, or the file is a vision tower.
    """
    name = metadata.text("general.architecture")
    if name == "clip":
        raise CheckpointError(
            f"{metadata.name} is a vision tower: name the model's file, and this one with --mmproj"
        )
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture {name!r} of {metadata.name} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def check_layers(count: int, tensors: Tensors, prefix: str, metadata: Metadata) -> None:
    """Check a number of layers by the names of tensors: a prefix, a number and a dot.

    Raises:
        CheckpointError: there are tensors of fewer layers. Lists would be as long as a file says.
    """
    ends = (name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
    found = len({number for number in (end.partition(".")[0] for end in ends) if number.isdigit()})
    if count > found:
        raise CheckpointError(
            f"{metadata.name} says that it has {count} layers, but has tensors {prefix}N of {found}"
        )


def check_sizes(config: dict[str, Any], tensors: Tensors, file: str) -> None:
    """Raise CheckpointError if a size is larger than every side of every tensor."""
    largest = max((max(entry.shape, default=1) for entry in tensors.values()), default=1)
    for name, value in config.items():
        if isinstance(value, int) and value > largest and name != "max_position_embeddings":
            raise CheckpointError(
                f"{file} says that {name} is {value}, but no side of a tensor in it is longer than "
                f"{largest}"
            )


def layers_of(metadata: Metadata, name: str) -> tuple[int, int]:
    """Return the numbers of layers and of layers behind them, which predict further tokens."""
    section = metadata.section(f"{name}.")
    count, more = section.size("block_count"), section.count("nextn_predict_layers")
    if more >= count:
        raise CheckpointError(f"{metadata.name} has {count} blocks, {more} of which predict tokens")
    return count - more, more


def text_config(metadata: Metadata, tensors: Tensors) -> dict[str, Any]:
    """Return the fields of the language model.

    Raises:
        CheckpointError: a key is missing, or has an impossible or unsupported value.
    """
    name, kind = architecture_of(metadata)
    section = metadata.section(f"{name}.")
    layers, more = layers_of(metadata, name)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.name} has no tensor token_embd.weight")
    if more and "blk.0.attn_norm.weight" not in tensors:
        raise CheckpointError(
            f"{metadata.name} holds the draft layer alone: name a file of the model that has it too"
        )
    check_layers(max(layers, more), tensors, "blk.", metadata)
    heads, hidden = section.size("attention.head_count"), section.size("embedding_length")
    head_dim = section.size("attention.key_length", hidden // heads)
    section.expect("attention.value_length", head_dim)
    section.expect("attention.sliding_window", 0)
    section.expect("attention.causal", True)
    config: dict[str, Any] = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": section.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": section.size("context_length"),
        "rms_norm_eps": section.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(section, name, head_dim),
        "attention_bias": any(tensor.endswith("attn_output.bias") for tensor in tensors),
        "tie_word_embeddings": not tensors.keys() & {"output.weight", "cls.output.weight"},
    }
    for wanted, part in ((kind.state, _state), (kind.experts, _experts)):
        if wanted:
            config |= part(section)
    if kind.state:
        config["layer_types"] = _layer_types(section, layers, more)
        config["attn_output_gate"] = True
    if not kind.experts:
        config["intermediate_size"] = section.size("feed_forward_length")
    elif kind.shared:
        config["shared_expert_intermediate_size"] = section.size(
            "expert_shared_feed_forward_length"
        )
    if name == "qwen3next":
        config["separate_projections"] = True
    if kind.state:
        config["mtp_num_hidden_layers"] = more
    check_sizes(config, tensors, metadata.name)
    return config


def _state(section: Metadata) -> dict[str, Any]:
    heads, inner = section.size("ssm.time_step_rank"), section.size("ssm.inner_size")
    if inner % heads:
        raise CheckpointError(
            f"ssm.inner_size {inner} in {section.name} is no multiple of its {heads} value heads"
        )
    return {
        "linear_conv_kernel_dim": section.size("ssm.conv_kernel"),
        "linear_key_head_dim": section.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": section.size("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _experts(section: Metadata) -> dict[str, Any]:
    section.expect("expert_gating_func", _SOFTMAX)
    section.expect("expert_weights_norm", True)
    section.expect("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
        "norm_topk_prob": True,
        "moe_intermediate_size": section.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _layer_types(section: Metadata, layers: int, more: int) -> list[str]:
    recurrent = section.numbers("attention.recurrent_layers")
    if recurrent is None:
        interval = section.size("full_attention_interval", _INTERVAL)
        recurrent = [(index + 1) % interval != 0 for index in range(layers)]
    elif len(recurrent) not in (layers, layers + more):
        raise CheckpointError(
            f"attention.recurrent_layers in {section.name} has {len(recurrent)} values for "
            f"{layers} layers"
        )
    kinds = {True: "linear_attention", False: "full_attention"}
    return [kinds[bool(flag)] for flag in recurrent[:layers]]


def _rope(section: Metadata, name: str, head_dim: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": section.number("rope.freq_base"),
    }
    if name in ("qwen35", "qwen35moe", "qwen3next"):
        fields["partial_rotary_factor"] = section.size("rope.dimension_count", head_dim) / head_dim
    else:
        section.expect("rope.dimension_count", head_dim)
    sections = section.numbers("rope.dimension_sections")
    if sections is not None:
        fields |= {"mrope_section": sections[:3], "mrope_interleaved": name != "qwen2vl"}
    scaling = section.text("rope.scaling.type", "none")
    if scaling == "yarn":
        fields |= _yarn(section)
    elif scaling != "none":
        section.expect("rope.scaling.type", "none", "yarn")
    return fields


def _yarn(section: Metadata) -> dict[str, Any]:
    """Return YaRN's fields; those that are absent are left to their defaults. yarn_attn_factor has
    no effect in libllama, which computes it from the factor."""
    yarn: dict[str, Any] = {"rope_type": "yarn"}
    readers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "factor": ("factor", section.number),
        "original_max_position_embeddings": ("original_context_length", section.size),
        "beta_fast": ("yarn_beta_fast", section.number),
        "beta_slow": ("yarn_beta_slow", section.number),
    }
    section.expect("rope.scaling.yarn_ext_factor", 1.0)
    section.expect("rope.scaling.attn_factor", 1.0)
    for field, (key, read) in readers.items():
        if f"rope.scaling.{key}" in section or field in (
            "factor",
            "original_max_position_embeddings",
        ):
            yarn[field] = read(f"rope.scaling.{key}")
    return yarn
