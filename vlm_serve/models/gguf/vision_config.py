"""The vision tower's part of a config.json, from the metadata of an mmproj file."""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.metadata import Metadata
from vlm_serve.models.gguf.text_config import Tensors

PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The kernels of both frames of a temporal patch."""
_MERGE_SIZE = 2


def projector_of(metadata: Metadata) -> str:
    """Return the kind of a vision tower, "" for a file that is none."""
    if metadata.text("general.architecture", "") != "clip":
        return ""
    own = "clip.vision.projector_type"
    return metadata.text(own if own in metadata else "clip.projector_type", "")


def vision_config(metadata: Metadata, tensors: Tensors, kind: str) -> dict[str, Any]:
    """Return the fields of a vision tower.

    Args:
        kind: the whole model's `model_type`.

    Raises:
        CheckpointError: it is a tower of another kind, or a key is missing or unsupported.
    """
    projector = projector_of(metadata)
    if projector != "qwen3vl_merger":
        what = (
            f"the vision tower of another kind, {projector!r}" if projector else "no vision tower"
        )
        raise CheckpointError(f"{metadata.name} is {what}; only 'qwen3vl_merger' is supported")
    own = metadata.own("clip.vision.")
    metadata.expect("clip.use_silu", False)
    for name in (*PATCHES, "v.position_embd.weight"):
        if name not in tensors:
            raise CheckpointError(f"{metadata.name} has no tensor {name}")
    kernel = tensors[PATCHES[0]].shape
    if len(kernel) != 4:
        raise CheckpointError(f"{PATCHES[0]} in {metadata.name} has the shape {list(kernel)}")
    depth = own.size("block_count")
    return {
        "model_type": f"{kind}_vision",
        "depth": depth,
        "hidden_size": own.size("embedding_length"),
        "intermediate_size": own.size("feed_forward_length"),
        "num_heads": own.size("attention.head_count"),
        "in_channels": kernel[1],
        "patch_size": own.size("patch_size"),
        "spatial_merge_size": own.size("spatial_merge_size", _MERGE_SIZE),
        "temporal_patch_size": len(PATCHES),
        "out_hidden_size": own.size("projection_dim"),
        "num_position_embeddings": tensors["v.position_embd.weight"].shape[0],
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": deepstack(metadata, depth),
    }


def deepstack(metadata: Metadata, depth: int) -> list[int]:
    """Return the layers with features for the decoder."""
    flags = metadata.numbers("clip.vision.is_deepstack_layers") or []
    if len(flags) > depth:
        raise CheckpointError(
            f"clip.vision.is_deepstack_layers in {metadata.name} has {len(flags)} values for "
            f"{depth} layers"
        )
    return [index for index, flag in enumerate(flags) if flag]
