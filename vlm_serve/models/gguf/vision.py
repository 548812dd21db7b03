"""A vision tower from an mmproj file: its part of a config.json, the settings of media processors,
and the names that its tensors have in a checkpoint.

An mmproj file has few settings of processors: the others are those that are published with every
Qwen2-VL, Qwen3-VL and Qwen3.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.reader import Metadata, Value, shortest
from vlm_serve.models.gguf.tensors import TOWER, TensorRecipe
from vlm_serve.models.gguf.text_config import Tensors, check_layers, check_sizes

PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The kernels of both frames of a temporal patch."""
_DOWN = "v.blk.0.ffn_down.weight"
_MERGE_SIZE = 2
_IMAGE_PIXELS, _ROTARY_PIXELS = (65536, 16777216), (3136, 12845056)
_VIDEO_PIXELS = 4096, 25165824
_MEAN = _STD = [0.5, 0.5, 0.5]
_WINDOW, _SECOND = 112, 2
"""Pixels per side of a window and positions of a second of video in every published Qwen2.5-VL; its
files name neither."""
_BLOCK = re.compile(r"v\.(blk|deepstack)\.(\d{1,6})\.(\w+)\.(weight|bias)")
_SHARED = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_MERGER = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of tower: names in the checkpoint of its `whole` tensors and of those of a `layer`.

    Attributes:
        kind: `model_type` of models with positions by rotation alone; "": positions are learned,
            and the architecture tells the type.
    """

    whole: Mapping[str, str]
    layer: Mapping[str, str]
    kind: str = ""


PROJECTORS = {
    "qwen3vl_merger": Projector(
        {
            "v.patch_embd": "patch_embed.proj",
            "v.position_embd": "pos_embed",
            "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1",
            "mm.2": "merger.linear_fc2",
        },
        _SHARED | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    ),
    "qwen2vl_merger": Projector(
        _MERGER, _SHARED | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, "qwen2_vl"
    ),
    "qwen2.5vl_merger": Projector(
        _MERGER,
        _SHARED | {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        "qwen2_5_vl",
    ),
}
"""By the name in a file."""
_NAMES = {
    ".patch_embed.": ".patch_embd.",
    ".pos_embed.": ".position_embd.",
    ".norm1.": ".ln1.",
    ".norm2.": ".ln2.",
    ".mlp.linear_fc1.": ".ffn_up.",
    ".mlp.linear_fc2.": ".ffn_down.",
    "v.merger.norm.": "v.post_ln.",
    "v.merger.linear_fc1.": "mm.0.",
    "v.merger.linear_fc2.": "mm.2.",
    ".linear_fc": ".fc",
}
"""Parts of names in a model's own file, and in an mmproj."""
_INNER = re.compile("|".join(map(re.escape, _NAMES)))
_INNER_FEATURES = re.compile(r"v\.deepstack_merger\.(\d{1,6})\.")
_INNER_PATCHES = "v.patch_embed.weight"  # [out * in, frames, side, side]
_THIRD = re.compile(r"(v\.blk\.\d{1,6}\.attn_)[qkv](\.\w+)")
_KEYS = {
    "projection_dim": "mm.2.bias",
    "feed_forward_length": "v.blk.0.ffn_up.bias",
    "image_min_pixels": "clip.vision.shortest_edge",
    "image_max_pixels": "clip.vision.longest_edge",
}
"""Keys of an mmproj, and the tensors or keys of the model's own file that say the same."""
_FEATURES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def projector_of(metadata: Metadata) -> str:
    """Return the kind of a vision tower, "" for a file that is none."""
    if metadata.text("general.architecture", "") != "clip":
        return ""
    key = "clip.vision.projector_type"
    return metadata.text(key if key in metadata else "clip.projector_type", "")


def fitting_projectors(kind: str) -> list[str]:
    """Return the kinds of towers of an architecture whose model type is `kind`."""
    return [name for name, each in PROJECTORS.items() if bool(each.kind) == (kind == "qwen2_vl")]


def vision_config(metadata: Metadata, tensors: Tensors, kind: str) -> dict[str, Any]:
    """Return the fields of a vision tower.

    Args:
        kind: the architecture's `model_type` with a tower.

    Raises:
        CheckpointError: it is a tower of another kind, or a key is missing or unsupported.
    """
    projector, known = projector_of(metadata), fitting_projectors(kind)
    if projector not in known:
        problem = (
            f"the vision tower of another kind, {projector!r}" if projector else "no vision tower"
        )
        only = " and ".join(map(repr, known))
        raise CheckpointError(f"{metadata.name} is {problem}; only {only} is supported")
    tower, own = metadata.section("clip.vision."), PROJECTORS[projector].kind
    for name in (*PATCHES, _DOWN if own else "v.position_embd.weight"):
        if name not in tensors:
            raise CheckpointError(f"{metadata.name} has no tensor {name}")
    kernel = tensors[PATCHES[0]].shape
    if len(kernel) != 4:
        raise CheckpointError(f"{PATCHES[0]} in {metadata.name} has the shape {list(kernel)}")
    depth, side = tower.size("block_count"), tower.size("patch_size")
    check_layers(depth, tensors, "v.blk.", metadata)
    if kernel[2:] != (side, side):
        raise CheckpointError(
            f"clip.vision.patch_size in {metadata.name} is {side}, but {PATCHES[0]} has the shape "
            f"{list(kernel)}"
        )
    config = {
        "model_type": f"{own or kind}_vision",
        "depth": depth,
        "hidden_size": tower.size("embedding_length"),
        "num_heads": tower.size("attention.head_count"),
        "in_channels": kernel[1],
        "patch_size": side,
        "spatial_merge_size": tower.size("spatial_merge_size", _MERGE_SIZE),
        "temporal_patch_size": len(PATCHES),
        "out_hidden_size": tower.size("projection_dim"),
    }
    if own:
        config |= _rotary(metadata, tensors, config, gated=own == "qwen2_5_vl")
    else:
        metadata.expect("clip.use_silu", False)
        config |= {
            "intermediate_size": tower.size("feed_forward_length"),
            "num_position_embeddings": tensors["v.position_embd.weight"].shape[0],
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": deepstack(metadata, depth),
        }
    check_sizes(config, tensors, metadata.name)
    return config if own != "qwen2_5_vl" else config | _windows(metadata, depth)


def _rotary(
    metadata: Metadata, tensors: Tensors, config: dict[str, Any], *, gated: bool
) -> dict[str, Any]:
    """Return the further fields of a tower with positions by rotation alone. Feed-forwards are as
    wide as their tensors: the converter writes the decoder's width for Qwen2-VL's."""
    metadata.expect("clip.use_gelu", False)
    metadata.expect("clip.use_silu", gated)
    wide = tensors[_DOWN].shape[0 if _is_older(tensors) else -1]
    if gated:
        return {"intermediate_size": wide, "hidden_act": "silu"}
    return {
        "embed_dim": config["hidden_size"],
        "hidden_size": config["out_hidden_size"],
        "mlp_ratio": wide // config["hidden_size"],
        "hidden_act": "quick_gelu",
    }


def _windows(metadata: Metadata, depth: int) -> dict[str, Any]:
    """Return the fields of windows and times: the last layer of each period attends to the whole
    picture."""
    tower = metadata.section("clip.vision.")
    period = tower.size("n_wa_pattern")
    return {
        "window_size": tower.size("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
        "tokens_per_second": _SECOND,
    }


def _is_older(tensors: Tensors) -> bool:
    """Return True if feed-forwards' first products are called their last ones: older converters of
    Qwen2-VL's towers did that."""
    down, hidden = tensors[_DOWN].shape, tensors[PATCHES[0]].shape[0]
    return down[-1] == hidden != down[0]


def deepstack(metadata: Metadata, depth: int) -> list[int]:
    """Return the layers with features for the decoder."""
    flags = metadata.numbers("clip.vision.is_deepstack_layers") or []
    if len(flags) > depth:
        raise CheckpointError(
            f"clip.vision.is_deepstack_layers in {metadata.name} has {len(flags)} values for "
            f"{depth} layers"
        )
    return [index for index, flag in enumerate(flags) if flag]


def processors(metadata: Metadata, vision: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contents of the processors' files by their names.

    Args:
        metadata: of the mmproj file.
        vision: its `vision_config`.
    """
    tower = metadata.section("clip.vision.")
    shared = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": _channels(tower, "image_mean", _MEAN),
        "image_std": _channels(tower, "image_std", _STD),
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    }
    rotary = bool(PROJECTORS[projector_of(metadata)].kind)
    low, high = _ROTARY_PIXELS if rotary else _IMAGE_PIXELS
    images = tower.size("image_min_pixels", low), tower.size("image_max_pixels", high)
    files = {"preprocessor_config.json": shared | {"size": _bounds(images)}}
    if not rotary:  # Published Qwen2-VL have one file for both.
        files["video_preprocessor_config.json"] = shared | {"size": _bounds(_VIDEO_PIXELS)}
    return files


def _bounds(pixels: tuple[int, int]) -> dict[str, int]:
    return {"shortest_edge": pixels[0], "longest_edge": pixels[1]}


def _channels(section: Metadata, key: str, default: list[float]) -> list[float]:
    values = section.numbers(key)
    if values is None:
        return default
    numbers = [shortest(value) for value in values if isinstance(value, float)]
    if len(numbers) != len(default) or not all(0 <= number < 1e6 for number in numbers):
        raise CheckpointError(f"clip.vision.{key} in {section.name} must be three numbers")
    return numbers


def vision_tensors(
    metadata: Metadata, tensors: Tensors, vision: dict[str, Any], prefix: str
) -> dict[str, TensorRecipe]:
    """Return every tensor by its name.

    Args:
        metadata, tensors: of the file.
        vision: its `vision_config`.
        prefix: of names in the checkpoint.

    Raises:
        CheckpointError: a tensor that such a tower does not have.
    """
    projector, file = PROJECTORS[projector_of(metadata)], metadata.name
    layer = dict(projector.layer)
    if projector.kind and _is_older(tensors):
        layer |= {"ffn_up": layer["ffn_down"], "ffn_down": layer["ffn_up"]}
    features: Sequence[int] = vision.get("deepstack_visual_indexes", ())
    recipes: dict[str, TensorRecipe] = {}
    for name, entry in tensors.items():
        if name in PATCHES:
            continue
        stem, _, end = name.rpartition(".")
        whole = projector.whole.get(stem)
        target = f"{whole}.{end}" if whole else _of_layer(name, layer, features)
        if target is None:
            raise CheckpointError(f"{file} has a tensor {name}, which such towers do not have")
        recipes[prefix + target] = TensorRecipe(name, entry.shape)
    first, second = (tensors[patch].shape for patch in PATCHES)
    if first != second:
        raise CheckpointError(f"{PATCHES[1]} in {file} has the shape {list(second)}")
    shape = (first[0], first[1], len(PATCHES), *first[2:])
    recipes[f"{prefix}patch_embed.proj.weight"] = TensorRecipe(
        PATCHES[0], shape, change="frames", others=(PATCHES[1],)
    )
    return recipes


def joined_thirds(tensors: Tensors) -> tuple[Tensors, dict[str, list[str]]]:
    """Return a tower's tensors with queries, keys and values in one, and the names in the file of
    those that make up each."""
    joined: Tensors = {}
    sources: dict[str, list[str]] = {}
    for name, entry in tensors.items():
        target, shape, every = name, entry.shape, [name]
        match = _THIRD.fullmatch(name)
        thirds = [f"{match[1]}{third}{match[2]}" for third in "qkv"] if match else []
        if match and all(third in tensors for third in thirds):
            every = thirds
            target, shape = f"{match[1]}qkv{match[2]}", (3 * shape[0], *shape[1:])
        joined[target], sources[target] = replace(entry, shape=shape), every
    return joined, sources


def inner_tower(
    values: Mapping[str, Value], tensors: Tensors, name: str, file: str
) -> tuple[dict[str, Value], Tensors, dict[str, list[str]]]:
    """Return a tower in the model's own file, as Ollama writes it, in the form of an mmproj: its
    metadata, its tensors, and the names of those in the file that make up each of them.

    Args:
        values, tensors: of the model, or of all its parts.
        name: of the architecture.
        file: for messages.
    """
    own = Metadata(values, file, f"{name}.vision.")
    features = own.numbers("deepstack_visual_indexes") or []
    renamed: Tensors = {}
    sources: dict[str, list[str]] = {}
    joined, every = joined_thirds(tensors)
    for source, entry in joined.items():
        target = _INNER.sub(lambda part: _NAMES[part[0]], source)
        if match := _INNER_FEATURES.match(target):
            place = dict(enumerate(features)).get(int(match[1]), match[1])
            target = f"v.deepstack.{place}.{target[match.end() :]}"
        if source == _INNER_PATCHES and len(entry.shape) == 4:
            channels, shape = own.size("num_channels", 3), entry.shape
            entry = replace(entry, shape=(shape[0] // channels, channels, *shape[2:]))
            renamed[PATCHES[1]] = entry
        if target.startswith(TOWER):
            renamed[target], sources[target] = entry, every[source]
    kept = {key.replace(f"{name}.vision.", "clip.vision."): value for key, value in values.items()}
    for key, other in _KEYS.items():
        if other in renamed or other in kept:
            value = renamed[other].shape[0] if other in renamed else kept[other]
            kept.setdefault(f"clip.vision.{key}", value)
    layers = range(min(own.size("block_count"), len(tensors)))
    kept["clip.vision.is_deepstack_layers"] = np.isin(layers, features)
    kept |= {"general.architecture": "clip", "clip.projector_type": "qwen3vl_merger"}
    return kept, renamed, sources


def with_sources(recipe: TensorRecipe, sources: Mapping[str, list[str]]) -> TensorRecipe:
    """Return a recipe by the names of a file, see `inner_tower`."""
    first, *others = sources.get(recipe.source, [recipe.source])
    if first == _INNER_PATCHES:
        return TensorRecipe(first, recipe.shape)
    if others:
        return TensorRecipe(first, recipe.shape, change="rows", others=tuple(others))
    named = (sources.get(other, [other])[0] for other in recipe.others)
    return replace(recipe, source=first, others=tuple(named))


def _of_layer(name: str, layer: Mapping[str, str], features: Sequence[int]) -> str | None:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    kind, index, base, end = match[1], int(match[2]), match[3], match[4]
    if kind == "blk":
        return f"blocks.{index}.{layer[base]}.{end}" if base in layer else None
    if base not in _FEATURES or index not in features:
        return None
    return f"deepstack_merger_list.{features.index(index)}.{_FEATURES[base]}.{end}"
