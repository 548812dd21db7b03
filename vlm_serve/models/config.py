"""What a checkpoint's config.json says about a Qwen3.5 model; no weights needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.sizes import LayerType, MoEConfig, RopeConfig, TextConfig, VisionConfig

_TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
_FULL_TYPES = ("qwen3_5", "qwen3_5_moe")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model but its weights.

    Attributes:
        vision: None for a text-only checkpoint; then the token ids of media are None too.
        dtype: the checkpoint's own; bfloat16 if it names none.
        eos_token_ids: tokens that end a generation, from the generation config if there is one.
        generation: the content of generation_config.json: defaults of sampling.
    """

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read config.json and, if present, generation_config.json of a checkpoint directory.

        Raises:
            CheckpointError: a file is missing or broken, or the model is of an unsupported kind.
        """
        config = _read_json(Path(path) / "config.json")
        file = Path(path) / "generation_config.json"
        generation = _read_json(file) if file.is_file() else {}
        stops = generation.get("eos_token_id")
        read = cls.from_dict(config if stops is None else config | {"eos_token_id": stops})
        return replace(read, generation=generation)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a config.json.

        Raises:
            CheckpointError: a field is missing or has an unsupported value.
        """
        kind = config.get("model_type")
        if kind not in _FULL_TYPES + _TEXT_TYPES:
            known = ", ".join(_FULL_TYPES + _TEXT_TYPES)
            raise CheckpointError(f"model type {kind!r} is not supported; supported are {known}")
        if config.get("quantization_config"):
            raise CheckpointError("quantised checkpoints are not supported")
        full = kind in _FULL_TYPES
        text = _section(config, "text_config") if full else config
        vision = _section(config, "vision_config") if config.get("vision_config") else None
        # transformers reads the outer switch; older files carry only the inner one.
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))

        def media_token(name: str) -> int | None:
            return None if vision is None else int(_get(config, name))

        return cls(
            text=_text(text, moe="moe" in kind, tied=bool(tied)),
            vision=None if vision is None else _vision(vision),
            image_token_id=media_token("image_token_id"),
            video_token_id=media_token("video_token_id"),
            vision_start_token_id=media_token("vision_start_token_id"),
            vision_end_token_id=media_token("vision_end_token_id"),
            eos_token_ids=_eos(config.get("eos_token_id", text.get("eos_token_id"))),
            dtype=_dtype(config, text),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object")
    return value


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = _get(config, name)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} in config.json must be an object")
    return value


def _get(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise CheckpointError(f"config.json lacks {name}")
    return value


def _size(config: Mapping[str, Any], name: str) -> int:
    value = _get(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} in config.json must be a positive integer, not {value!r}")
    return value


def _require(config: Mapping[str, Any], name: str, expected: object) -> None:
    value = config.get(name, expected)
    if value != expected:
        raise CheckpointError(f"{name} {value!r} is not supported, only {expected!r}")


def _text(config: Mapping[str, Any], *, moe: bool, tied: bool) -> TextConfig:
    _require(config, "hidden_act", "silu")
    _require(config, "attn_output_gate", True)
    sizes = TextConfig(
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=0 if moe else _size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        layer_types=_layer_types(config),
        attention_heads=_size(config, "num_attention_heads"),
        kv_heads=_size(config, "num_key_value_heads"),
        head_dim=_size(config, "head_dim"),
        attention_bias=bool(config.get("attention_bias", False)),
        gdn_key_heads=_size(config, "linear_num_key_heads"),
        gdn_value_heads=_size(config, "linear_num_value_heads"),
        gdn_key_dim=_size(config, "linear_key_head_dim"),
        gdn_value_dim=_size(config, "linear_value_head_dim"),
        conv_kernel=_size(config, "linear_conv_kernel_dim"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        moe=_moe(config) if moe else None,
        tied_embeddings=tied,
        max_position_embeddings=_size(config, "max_position_embeddings"),
    )
    for several, few, what in (
        (sizes.gdn_value_heads, sizes.gdn_key_heads, "linear_num_value_heads"),
        (sizes.attention_heads, sizes.kv_heads, "num_attention_heads"),
    ):
        if several % few:
            raise CheckpointError(f"{what} {several} is no multiple of its {few} key heads")
    return sizes


def _layer_types(config: Mapping[str, Any]) -> tuple[LayerType, ...]:
    count = _size(config, "num_hidden_layers")
    given = config.get("layer_types")
    if given is None:
        interval = config.get("full_attention_interval", 4)
        given = [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(count)
        ]
    unknown = set(given) - {"linear_attention", "full_attention"}
    if unknown:
        raise CheckpointError(f"layer type {sorted(unknown)[0]!r} is not supported")
    if len(given) < count:
        raise CheckpointError(f"layer_types names {len(given)} layers of {count}")
    return tuple(given[:count])


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _require(rope, "rope_type", "default")
    _require(rope, "mrope_interleaved", True)
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    rotary_dim = int(_size(config, "head_dim") * fraction)
    sections = tuple(rope.get("mrope_section", (11, 11, 10)))
    if len(sections) != 3 or rotary_dim % 2:
        raise CheckpointError(f"mrope_section {list(sections)} does not fit {rotary_dim} dims")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return RopeConfig(float(theta), rotary_dim, (sections[0], sections[1], sections[2]))


def _moe(config: Mapping[str, Any]) -> MoEConfig:
    moe = MoEConfig(
        num_experts=_size(config, "num_experts"),
        top_k=_size(config, "num_experts_per_tok"),
        intermediate_size=_size(config, "moe_intermediate_size"),
        shared_intermediate_size=_size(config, "shared_expert_intermediate_size"),
    )
    if moe.top_k > moe.num_experts:
        raise CheckpointError(f"num_experts_per_tok {moe.top_k} exceeds {moe.num_experts} experts")
    return moe


def _vision(config: Mapping[str, Any]) -> VisionConfig:
    _require(config, "hidden_act", "gelu_pytorch_tanh")
    if config.get("deepstack_visual_indexes"):
        raise CheckpointError("deepstack vision features are not supported")
    rope = config.get("rope_parameters") or {}
    _require(rope, "rope_type", "axial")
    sizes = VisionConfig(
        depth=_size(config, "depth"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        heads=_size(config, "num_heads"),
        in_channels=int(config.get("in_channels", 3)),
        patch_size=_size(config, "patch_size"),
        temporal_patch_size=_size(config, "temporal_patch_size"),
        merge_size=_size(config, "spatial_merge_size"),
        out_hidden_size=_size(config, "out_hidden_size"),
        num_positions=_size(config, "num_position_embeddings"),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )
    if sizes.hidden_size % (4 * sizes.heads):
        raise CheckpointError("the vision hidden_size must be a multiple of 4 * num_heads")
    return sizes


def _eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> torch.dtype:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name) or text.get(name)
        if value is not None:
            if value not in _DTYPES:
                raise CheckpointError(f"{name} {value!r} is not supported")
            return _DTYPES[value]
    return torch.bfloat16
