"""The names that a vision tower's tensors have in a checkpoint, with what makes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.made import Made
from vlm_serve.models.gguf.text_config import Tensors
from vlm_serve.models.gguf.vision_config import PATCHES

_BLOCK = re.compile(r"v\.(blk|deepstack)\.(\d{1,6})\.(\w+)\.(weight|bias)")
_WHOLE = {
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
    "v.post_ln.weight": "merger.norm.weight",
    "v.post_ln.bias": "merger.norm.bias",
    "mm.0.weight": "merger.linear_fc1.weight",
    "mm.0.bias": "merger.linear_fc1.bias",
    "mm.2.weight": "merger.linear_fc2.weight",
    "mm.2.bias": "merger.linear_fc2.bias",
}
_LAYER = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_FEATURES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def vision_tensors(
    tensors: Tensors, features: Sequence[int], prefix: str, file: str
) -> dict[str, Made]:
    """Return every tensor by its name.

    Args:
        features: layers with features for the decoder.
        prefix: of names in the checkpoint.
        file: name of the file, for messages.

    Raises:
        CheckpointError: a tensor that such a tower does not have.
    """
    found: dict[str, Made] = {}
    for name, entry in tensors.items():
        if name in PATCHES:
            continue
        target = _WHOLE.get(name) or _of_layer(name, features)
        if target is None:
            raise CheckpointError(f"{file} has a tensor {name}, which such towers do not have")
        found[prefix + target] = Made(name, entry.shape)
    first, second = (tensors[each].shape for each in PATCHES)
    if first != second:
        raise CheckpointError(f"{PATCHES[1]} in {file} has the shape {list(second)}")
    shape = (first[0], first[1], len(PATCHES), *first[2:])
    found[f"{prefix}patch_embed.proj.weight"] = Made(
        PATCHES[0], shape, change="frames", second=PATCHES[1]
    )
    return found


def _of_layer(name: str, features: Sequence[int]) -> str | None:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    kind, index, base, end = match[1], int(match[2]), match[3], match[4]
    if kind == "blk":
        return f"blocks.{index}.{_LAYER[base]}.{end}" if base in _LAYER else None
    if base not in _FEATURES or index not in features:
        return None
    return f"deepstack_merger_list.{features.index(index)}.{_FEATURES[base]}.{end}"
