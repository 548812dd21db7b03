"""A folder with an adapter, as PEFT saves it: adapter_config.json and one file of safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.models.adapters.changes import LowRank
from vlm_serve.models.adapters.experts import FusedExperts, fused, is_fused
from vlm_serve.models.adapters.fields import CONFIG_FILE, AdapterFields, read_fields
from vlm_serve.models.files import fetched_adapter
from vlm_serve.models.tensor_files import SafetensorsFile

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_KINDS = {
    "lora_embedding_": "a tuned table of embeddings",
    "lora_magnitude_vector": "DoRA's magnitudes",
    "modules_to_save": "a module saved whole",
    ".lora_B.bias": "a tuned bias",
    ".bias": "a tuned bias",
}
"""Parts of tensors' names of adapters that are refused, and what they are."""
_BASE = (".base_layer.weight", ".base_layer.bias", "embed_tokens.weight", "lm_head.weight")
"""Ends of names of the model's own tensors. PEFT saves them with a changed `lm_head`."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A folder's content.

    Attributes:
        path: the folder.
        modules: by the names of modules in the file, without PEFT's prefix.
        experts: of routed experts in one tensor, by the names of those tensors.
        base: names of tensors that must be the model's own, see `check_base`.
    """

    path: Path
    modules: Mapping[str, LowRank]
    experts: Mapping[str, FusedExperts]
    base: Sequence[str] = ()

    @property
    def max_rank(self) -> int:
        """The largest rank of its modules."""
        return max(each.rank for each in self._changes)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(each.nbytes for each in self._changes)

    @property
    def layout_bytes(self) -> int:
        """Bytes of all factors as compiled code takes them, about."""
        return sum(each.layout_bytes for each in self._changes)

    @property
    def _changes(self) -> list[LowRank | FusedExperts]:
        return [*self.modules.values(), *self.experts.values()]


def find_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter: a directory, or a hub id, which is downloaded.

    Raises:
        ModelNotFoundError: there is neither.
        CheckpointError: the folder has no adapter.
    """
    path = Path(name)
    if not path.is_dir():
        path = fetched_adapter(str(name))
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"the folder has no {CONFIG_FILE}: it holds no adapter of PEFT")
    return path


def read_adapter(name: str | Path, dtype: torch.dtype | None = None) -> AdapterFile:
    """Read an adapter.

    Args:
        name: directory or hub id.
        dtype: to convert the factors to; None: as stored.

    Raises:
        ModelNotFoundError: neither a directory nor a hub id that can be fetched.
        CheckpointError: a file is missing or cut, a tensor is unknown, has another rank than
            adapter_config.json states, or values that are no numbers; or something is not
            supported.
    """
    path = find_adapter(name)
    fields = read_fields(_json(path / CONFIG_FILE))
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        old = " (adapter_model.bin is a pickle: save it anew with safe_serialization)"
        beside = old if (path / "adapter_model.bin").is_file() else ""
        raise CheckpointError(f"the folder has no {WEIGHTS_FILE}{beside}")
    file = SafetensorsFile(weights)
    base = [name for name in sorted(file.names()) if _is_base(name)]
    factors = _factors(file, set(file.names()) - set(base), dtype)
    together = {name: own for name, own in factors.items() if is_fused(name)}
    apart = {name: _pair(name, own, fields) for name, own in factors.items() if not is_fused(name)}
    return AdapterFile(path, apart, fused(together, fields), base)


def _json(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} is no table")
    return found


def _is_base(name: str) -> bool:
    changed = any(part in name for part in (".lora_", "modules_to_save"))
    return name.endswith(_BASE) and not changed


def _factors(
    file: SafetensorsFile, names: Iterable[str], dtype: torch.dtype | None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return A and B of every module."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            kind = next((what for part, what in _KINDS.items() if part in name), None)
            raise CheckpointError(f"{name} is {kind or 'no tensor of LoRA'}: not supported")
        factors.setdefault(match[1], {})[match[2]] = _checked(name, file.tensor(name), dtype)
    if not factors:
        raise CheckpointError(f"{WEIGHTS_FILE} holds no tensors")
    for module, own in factors.items():
        for kind in "AB":
            if kind not in own:
                raise CheckpointError(f"{module} has no lora_{kind}.weight")
    return factors


def _checked(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{name} is {tensor.dtype}, which is not supported")
    if tensor.ndim < 2 or not tensor.numel():
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, expected two dimensions")
    # Kernels of convolutions: one number per input, and per output.
    flat = tensor.flatten(1).to(dtype or tensor.dtype).contiguous()
    if not all(math.isfinite(float(each)) for each in torch.aminmax(flat)):
        raise CheckpointError(f"{name} holds values that are NaN or infinite")
    return flat


def _pair(module: str, own: Mapping[str, torch.Tensor], fields: AdapterFields) -> LowRank:
    down, up, stated = own["A"], own["B"], fields.rank_of(module)
    if down.shape[0] != stated or up.shape[1] != stated:
        raise CheckpointError(
            f"{module} has rank {down.shape[0]} in lora_A and {up.shape[1]} in lora_B, but "
            f"{CONFIG_FILE} says {stated}"
        )
    return LowRank(down, up, fields.scale_of(module, stated))


__all__ = ["AdapterFile", "LowRank", "ModelNotFoundError", "find_adapter", "read_adapter"]
