"""Checkpoints in the layouts of published ones: fields of config.json, names, types, shards and
processors, with small random weights and the real vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_config import full_config, text_config
from checkpoint_minicpm import write_processors
from checkpoint_parts import MediaShape, write_processor_files
from checkpoint_spec import CheckpointSpec
from published_vocabulary import added_tokens, write, write_vocabulary
from random_weights import draw, entries
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
_EXACT = re.compile(r".*\.linear_attn\.(A_log|norm\.weight)")


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Attributes:
        spec: sizes; heads, patches and rotations are those of the published models.
        vocabulary: see `published_vocabulary`.
        fields, text_fields: of config.json and of its language model, beside those of the spec.
        exact: whether decay rates and norms of state layers are in float32.
        apart: whether every routed expert has tensors of its own.
        renamed: what becomes of names.
        absent: fields that config.json leaves to their defaults.
        template_in: the file that holds the chat template.
        shards: of the weights.
    """

    spec: CheckpointSpec
    vocabulary: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    text_fields: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    apart: bool = False
    renamed: Callable[[str], str] = str
    absent: tuple[str, ...] = ()
    template_in: str = "chat_template.jinja"
    shards: int = 2


_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
_QWEN3_5 = _COMMON | {
    "attn_output_gate": True,
    "eos_token_id": 248044,
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
}
_QWEN3_6 = _QWEN3_5 | {
    "bos_token_id": 248044,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
}
_QWEN3 = _COMMON | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
_HYBRID = CheckpointSpec(
    hidden_size=64,
    num_layers=4,
    intermediate_size=128,
    vocab_size=248320,
    gdn_key_heads=2,
    gdn_value_heads=6,
    gdn_key_dim=128,
    gdn_value_dim=128,
    kv_heads=1,
    head_dim=256,
    vision_depth=3,
    vision_hidden_size=64,
    patch_size=16,
    num_position_embeddings=2304,
    image_min_pixels=65536,
    image_max_pixels=16777216,
    video_min_pixels=4096,
    video_max_pixels=25165824,
    max_position_embeddings=262144,
    rope_theta=1e7,
    dtype="bfloat16",
    mtp=True,
)
_PLAIN = replace(
    _HYBRID, vocab_size=151936, kv_heads=2, head_dim=128, rope_theta=5e6, mtp=False, seed=5
)
_VL = replace(_PLAIN, family="qwen3_vl", deepstack_features=2)
_TEXT = replace(_PLAIN, family="qwen3", vision_depth=0, rope_theta=1e6, seed=6)
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}

OLDER = "Qwen3.6 under older names"
"""The same weights as Qwen3.6-27B; transformers does not read its names."""
LAYOUTS = {
    "Qwen3.5-4B": Layout(
        replace(_HYBRID, tied_embeddings=True, gdn_value_heads=4),
        "qwen3.5",
        text_fields=_QWEN3_5,
        exact=True,
        template_in="both",
    ),
    "Qwen3.5-35B-A3B": Layout(
        replace(_HYBRID, gdn_value_heads=4, seed=2, **_EXPERTS),  # type: ignore[arg-type]
        "qwen3.5",
        text_fields=_QWEN3_5 | {"router_aux_loss_coef": 0.001},
        exact=True,
    ),
    "Qwen3.6-27B": Layout(
        replace(_HYBRID, seed=3),
        "qwen3.5",
        fields={"language_model_only": False},
        text_fields=_QWEN3_6,
        shards=3,
    ),
    "Qwen3.8-35B-A3B, experts apart": Layout(
        replace(_HYBRID, gdn_value_heads=4, seed=4, **_EXPERTS),  # type: ignore[arg-type]
        "qwen3.5",
        text_fields=_QWEN3_6,
        apart=True,
    ),
    "Qwen3.6-27B, vocabulary cut": Layout(
        replace(_HYBRID, vocab_size=248077, mtp=False, seed=11),
        "qwen3.5",
        text_fields=_QWEN3_6,
        shards=1,
    ),
    OLDER: Layout(
        replace(_HYBRID, seed=3),
        "qwen3.5",
        text_fields=_QWEN3_6,
        renamed=lambda name: (
            name.replace("model.language_model.", "language_model.model.")
            .replace("model.visual.", "visual.")
            .replace("lm_head", "language_model.lm_head")
        ),
    ),
    "Qwen3-VL-2B": Layout(
        replace(_VL, tied_embeddings=True),
        "qwen2",
        text_fields=_QWEN3,
        template_in="chat_template.json",
        shards=1,
    ),
    "Qwen3-VL-30B-A3B, experts turned": Layout(
        replace(_VL, num_experts=8, moe_intermediate_size=96, seed=7),
        "qwen2",
        text_fields=_QWEN3,
        template_in="chat_template.json",
    ),
    "Qwen3-Next-80B-A3B": Layout(
        replace(
            _HYBRID,
            family="qwen3_next",
            vocab_size=151936,
            vision_depth=0,
            mtp=True,
            gdn_value_heads=4,
            seed=8,
            **_EXPERTS,  # type: ignore[arg-type]
        ),
        "qwen2",
        text_fields=_QWEN3 | {"output_router_logits": False},
        template_in="tokenizer_config.json",
    ),
    "Qwen3-0.6B": Layout(
        replace(_TEXT, tied_embeddings=True),
        "qwen2",
        text_fields=_QWEN3,
        template_in="tokenizer_config.json",
        shards=1,
    ),
    "Qwen3-30B-A3B-2507": Layout(
        replace(_TEXT, seed=9, **_EXPERTS),  # type: ignore[arg-type]
        "qwen2",
        text_fields=_QWEN3 | {"output_router_logits": False},
        template_in="tokenizer_config.json",
    ),
    "MiniCPM-V 4.6": Layout(
        replace(
            _HYBRID,
            family="minicpmv4_6",
            vision_depth=8,
            patch_size=14,
            num_position_embeddings=4900,
            window_layer=6,
            slice_resolution=448,
            tied_embeddings=True,
            gdn_value_heads=2,
            mtp=False,
            seed=10,
        ),
        "minicpm",
        text_fields=_QWEN3_5,
        absent=("insert_layer_id", "downsample_mode", "dtype"),
        shards=1,
    ),
}
"""By the model whose files are so laid out."""


def write_layout(path: Path, layout: Layout, template: str) -> Path:
    """Write the checkpoint directory, and return it."""
    path.mkdir(parents=True)
    write_files(path, layout, template)
    named = dict(_stored(layout))
    files: dict[str, str] = {}
    for shard in range(layout.shards):
        part = {name: named[name] for name in sorted(named)[shard :: layout.shards]}
        file = f"model-{shard + 1:05d}-of-{layout.shards:05d}.safetensors"
        file = file if layout.shards > 1 else "model.safetensors"
        save_file(part, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    if layout.shards > 1:
        write(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    return path


def write_files(path: Path, layout: Layout, template: str) -> None:
    """Write everything but the weights."""
    spec, ids = layout.spec, added_tokens(layout.vocabulary)
    kind = f"{spec.architecture}Processor" if spec.sliced else "Qwen3VLProcessor"
    processor = {"processor_class": kind} if spec.vision_depth else {}
    inside = {"chat_template": template}
    places = ("tokenizer_config.json", "both")
    write_vocabulary(
        path, layout.vocabulary, **processor, **inside if layout.template_in in places else {}
    )
    if layout.template_in in ("chat_template.jinja", "both"):
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    if layout.template_in == "chat_template.json":
        write(path / "chat_template.json", inside)
    text = dict(layout.text_fields) | text_config(spec)
    if spec.sliced:
        media = {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
        config = dict(layout.fields) | full_config(spec, text) | media
        write_processors(path, spec)
    elif spec.vision_depth:
        media = {
            f"{name}_token_id": ids[f"<|{token}|>"]
            for name, token in (
                ("image", "image_pad"),
                ("video", "video_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        }
        config = dict(layout.fields) | full_config(spec, text) | media
        write_processor_files(path, _media(spec))
    else:
        config = dict(layout.fields) | text
    write(path / "config.json", {name: config[name] for name in config.keys() - {*layout.absent}})
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    write(path / "generation_config.json", sampling | {"eos_token_id": ends})


def _media(spec: CheckpointSpec) -> MediaShape:
    return MediaShape(
        patch_size=spec.patch_size,
        temporal_patch_size=spec.temporal_patch_size,
        merge_size=spec.spatial_merge_size,
        image_min_pixels=spec.image_min_pixels,
        image_max_pixels=spec.image_max_pixels,
        video_min_pixels=spec.video_min_pixels,
        video_max_pixels=spec.video_max_pixels,
    )


def _stored(layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape, rule in entries(layout.spec):
        drawn = draw(name, shape, rule, layout.spec.seed)
        exact = layout.exact and _EXACT.fullmatch(name)
        tensor = drawn if exact else drawn.to(torch.bfloat16)
        for own, part in _apart(name, tensor) if layout.apart else [(name, tensor)]:
            yield layout.renamed(own), part.contiguous()


def _apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts of a fused tensor one by one; other tensors as they are."""
    place, _, kind = name.rpartition(".")
    if not place.endswith(".experts"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            yield f"{place}.{expert}.down_proj.weight", weight
        else:
            for half, part in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield f"{place}.{expert}.{half}_proj.weight", part
