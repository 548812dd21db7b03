"""The model's own tensors in an adapter's file: PEFT saves the output projection with its factors.

They change nothing if they are the model's. Otherwise the adapter was made for another model, or
changes more than its factors say.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.adapters.changes import unprefixed
from vlm_serve.models.adapters.folder import WEIGHTS_FILE, AdapterFile
from vlm_serve.models.files import SafetensorsFile, TensorFile, open_files

_HEAD, _EMBEDDINGS = "lm_head", "embed_tokens"
_PLAIN = {"weight", "bias"}
"""Tensors of a module that is not quantised."""
_NUMBERS = 1 << 24
"""Compared at a time."""


def check_base(checkpoint: Path, file: AdapterFile, *, tied: bool) -> None:
    """Compare tensors of an adapter's file that are no factors with the model's.

    Types may differ: equal as rounded to one of both types is equal.

    Args:
        checkpoint: of the model.
        file: the adapter.
        tied: whether the model's output projection is its table of embeddings.

    Raises:
        CheckpointError: one is not the model's, or the model's is quantised.
    """
    if not file.base:
        return
    stored = SafetensorsFile(file.path / WEIGHTS_FILE)
    known: dict[str, dict[str, tuple[TensorFile, str]]] = defaultdict(dict)
    for each in open_files(checkpoint):
        for name in each.names():
            module, _, kind = unprefixed(name).rpartition(".")
            known[module][kind] = each, name
    for name in file.base:
        plain = unprefixed(name.removeprefix("base_model.model.")).replace(".base_layer.", ".")
        module, _, kind = plain.rpartition(".")
        if module == _HEAD and (tied or module not in known):
            module = _EMBEDDINGS
        if known.get(module, {}).keys() - _PLAIN:
            raise CheckpointError(
                f"{name} cannot be compared with the model's tensor, which is quantised: save the "
                "adapter without it (PEFT's save_embedding_layers=False)"
            )
        if module not in known or kind not in known[module]:
            raise CheckpointError(f"{name} is no tensor of LoRA, nor of the model: not supported")
        models, full = known[module][kind]
        if not _equal(stored.tensor(name), models.tensor(full)):
            raise CheckpointError(
                f"{name} differs from the model's tensor: an adapter that changes the model's own "
                "weights is not supported"
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return False
    pieces = [torch.split(each.flatten(), _NUMBERS) for each in (one, other)]
    pairs = list(zip(*pieces, strict=True))
    return any(
        all(torch.equal(left.to(dtype), right.to(dtype)) for left, right in pairs)
        for dtype in (one.dtype, other.dtype)
    )
