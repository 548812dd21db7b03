"""The supported models: their names in config.json, and the modules that read them."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import DTYPES, Changes, Config, read_json
from vlm_serve.models.files import INDEX_FILE, SIDECAR, open_files, other_weights, weight_files
from vlm_serve.models.quantization.scheme import METHODS, QuantScheme
from vlm_serve.models.relatives import missing_of
from vlm_serve.models.spec import ModelSpec

_SECTION = "vision_config"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The features of a model type.

    Attributes:
        models: published models of the type, with their sizes.
        module: its `spec(Config) -> ModelSpec` reads the type; it may have a table of `DEFAULTS`.
        source: transformers' class of its config.json, if it has one.
        media: kinds of media in prompts.
        state: whether layers keep a state, so that hits need snapshots.
        experts: whether layers have routed experts.
        compiled: whether compiled code runs whole steps on a CPU.
        quantised: supported `quant_method` values.
    """

    models: str
    module: str
    source: str = ""
    media: tuple[str, ...] = ("image", "video")
    state: bool = True
    experts: bool = False
    compiled: bool = True
    quantised: tuple[str, ...] = METHODS


_NO_CHANGES = Changes()
_QWEN3_5 = "vlm_serve.models.families.qwen3_5"
_QWEN3_VL = "vlm_serve.models.families.qwen3_vl"
_QWEN3_NEXT = "vlm_serve.models.families.qwen3_next"
_QWEN3 = "vlm_serve.models.families.qwen3"
_MINICPMV = "vlm_serve.models.families.minicpmv"

FAMILIES = {
    "qwen3_5": Served(
        "Qwen3.5 0.8B, 2B, 4B, 9B, 27B; Qwen3.6 27B; Qwen3.8 27B", _QWEN3_5, "Qwen3_5Config"
    ),
    "qwen3_5_moe": Served(
        "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B; Qwen3.6 35B-A3B; Qwen3.8 MoE",
        _QWEN3_5,
        "Qwen3_5MoeConfig",
        experts=True,
    ),
    "qwen3_5_text": Served(
        "Qwen3.5 to 3.8 without a tower", _QWEN3_5, "Qwen3_5TextConfig", media=()
    ),
    "qwen3_5_moe_text": Served(
        "Qwen3.5 to 3.8 MoE without a tower",
        _QWEN3_5,
        "Qwen3_5MoeTextConfig",
        media=(),
        experts=True,
    ),
    "qwen3_vl": Served("Qwen3-VL 2B, 4B, 8B, 32B", _QWEN3_VL, "Qwen3VLConfig", state=False),
    "qwen3_vl_moe": Served(
        "Qwen3-VL 30B-A3B, 235B-A22B", _QWEN3_VL, "Qwen3VLMoeConfig", state=False, experts=True
    ),
    "qwen3_next": Served(
        "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        _QWEN3_NEXT,
        "Qwen3NextConfig",
        media=(),
        experts=True,
    ),
    "qwen3": Served(
        "Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B", _QWEN3, "Qwen3Config", media=(), state=False
    ),
    "qwen3_moe": Served(
        "Qwen3 30B-A3B, 235B-A22B; Qwen3-Coder 30B-A3B, 480B-A35B",
        _QWEN3,
        "Qwen3MoeConfig",
        media=(),
        state=False,
        experts=True,
    ),
    "minicpmv4_6": Served("MiniCPM-V 4.6", _MINICPMV, "MiniCPMV4_6Config"),
    "minicpmv4_7": Served("MiniCPM-V 4.7", _MINICPMV, "MiniCPMV4_7Config"),
    "minicpm_ocr": Served("MiniCPM-OCR 1.0", _MINICPMV, "MiniCPMOcrConfig"),
}
"""By `model_type` of config.json."""

PARTS = {
    "qwen3_vl_text": Served("Qwen3-VL", _QWEN3_VL, "Qwen3VLTextConfig", media=(), state=False),
    "qwen3_vl_moe_text": Served(
        "Qwen3-VL MoE", _QWEN3_VL, "Qwen3VLMoeTextConfig", media=(), state=False, experts=True
    ),
}
"""Language models that trainers save without the tower that all published ones have."""


def read_spec(path: Path | str, changes: Changes = _NO_CHANGES) -> ModelSpec:
    """Return the model in a checkpoint directory, or that of a config.json alone.

    Args:
        path: the directory or the file.
        changes: of config.json.

    Raises:
        CheckpointError: a file is missing or broken, or the model is of an unsupported kind.
        ConfigError: a change has no effect.
    """
    path = Path(path)
    if path.suffix == ".json":
        return spec_of(_with_sidecar(path), changes)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"the checkpoint has no config.json{other_weights(path)}")
    spec = _without_lost_tower(spec_of(_with_sidecar(path / "config.json"), changes), path)
    spec = _with_stored_dtype(spec, path)
    file = path / "generation_config.json"
    return replace(spec, generation=read_json(file) if file.is_file() else {})


def _with_sidecar(path: Path) -> Mapping[str, Any]:
    """Return a config.json, completed by the file of ModelOpt's older exports."""
    raw, sidecar = read_json(path), path.with_name(SIDECAR)
    if "quantization_config" in raw or not sidecar.is_file():
        return raw
    return {**raw, "quantization_config": {"quant_method": "modelopt", **read_json(sidecar)}}


def spec_of(raw: Mapping[str, Any], changes: Changes = _NO_CHANGES) -> ModelSpec:
    """Return the model described by the content of a config.json; raises as `read_spec`."""
    raw = _named_as_text(changes.apply(raw))
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES | PARTS:
        raise CheckpointError(_unknown(raw))
    scheme = QuantScheme.of(raw)
    served = (FAMILIES | PARTS)[kind]
    module = importlib.import_module(served.module)
    config = Config(raw, served.source, getattr(module, "DEFAULTS", {}), class_of=_class_of)
    spec: ModelSpec = module.spec(config)
    if spec.vision is not None and spec.vision.out_hidden_size != spec.hidden_size:
        raise CheckpointError(
            f"out_hidden_size {spec.vision.out_hidden_size} of the vision tower is not the model's "
            f"hidden_size {spec.hidden_size}"
        )
    changes.check(raw, {"model_type", *config.read})
    return replace(spec, quantization=scheme, defaulted=config.defaulted, config=raw)


def _named_as_text(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose type is that of a language model if all that it describes is one:
    it has the fields of `text_config` itself."""
    kind = f"{raw.get('model_type')}_text"
    flat = "hidden_size" in raw and not (raw.get("text_config") or raw.get(_SECTION))
    return {**raw, "model_type": kind} if flat and kind in FAMILIES | PARTS else raw


def _unknown(raw: Mapping[str, Any]) -> str:
    """Return the message about a type that is not supported."""
    known = "; ".join(f"{family.models} ({name})" for name, family in FAMILIES.items())
    why = missing_of(raw)
    return f"model_type {raw.get('model_type')!r} is not supported{why}; supported are {known}"


def _class_of(source: str) -> Any:
    # Imported late, because it takes half a second and only reading a config needs it.
    import transformers

    return getattr(transformers, source, None)


def _without_lost_tower(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the model without its vision tower if the weight files hold no tensor of one.

    Republications of a vision-language model's text part are like that: their config.json still has
    the section of a tower whose tensors were left out. Missing or broken files decide nothing.
    """
    if spec.vision is None:
        return spec
    names = tensor_names(path)
    # One of a tower's layers is enough: a tower without its first tensor is damaged, not left out.
    parts = (spec.vision.anchor, f".{spec.vision.layers}")
    if not names or any(part in f".{name}" for name in names for part in parts):
        return spec
    _tell(path)
    config = {name: value for name, value in spec.config.items() if name != _SECTION}
    return replace(spec, vision=None, config=config)


def _with_stored_dtype(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the model with the type of its table of embeddings if config.json says `auto`."""
    sections = (spec.config, spec.config.get("text_config") or {})
    if "auto" not in [part.get(name) for part in sections for name in ("dtype", "torch_dtype")]:
        return spec
    for file in open_files(path):
        name = next((each for each in file.names() if each.endswith("embed_tokens.weight")), None)
        if name is not None and file.tensor(name).dtype in DTYPES.values():
            return replace(spec, dtype=file.tensor(name).dtype)
    return spec


def tensor_names(path: Path) -> Collection[str]:
    """Return the names of all tensors; none if files are missing or broken."""
    faults = (CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError)
    with suppress(*faults, RecursionError):
        files = weight_files(path)
        if (path / INDEX_FILE).is_file():
            weight_map = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            return set(weight_map)
        names: set[str] = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        return names
    return ()


@cache
def _tell(path: Path) -> None:
    _log.warning(
        "config.json has a %s, but the checkpoint has no tensors of a vision tower: it is served "
        "as text alone and takes no pictures or videos",
        _SECTION,
    )
