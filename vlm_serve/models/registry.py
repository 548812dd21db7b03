"""The supported models: their names in config.json, and the modules that read them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, read_json
from vlm_serve.models.files import SIDECAR, other_weights
from vlm_serve.models.quantization.scheme import METHODS, QuantScheme
from vlm_serve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Served:
    """The features of a model type.

    Attributes:
        module: its `spec(Config) -> ModelSpec` reads the type; it may have a table of `DEFAULTS`.
        source: transformers' class of its config.json, if it has one.
        media: kinds of media in prompts.
        state: whether layers keep a state, so that hits need snapshots.
        experts: whether layers have routed experts.
        compiled: whether compiled code runs whole steps on a CPU.
        quantised: supported `quant_method` values.
    """

    module: str
    source: str = ""
    media: tuple[str, ...] = ("image", "video")
    state: bool = True
    experts: bool = False
    compiled: bool = True
    quantised: tuple[str, ...] = METHODS


_QWEN3_5 = "vlm_serve.models.families.qwen3_5"
_QWEN3_VL = "vlm_serve.models.families.qwen3_vl"
_QWEN3_NEXT = "vlm_serve.models.families.qwen3_next"
_MINICPMV = "vlm_serve.models.families.minicpmv"

FAMILIES = {
    "qwen3_5": Served(_QWEN3_5, "Qwen3_5Config"),
    "qwen3_5_moe": Served(_QWEN3_5, "Qwen3_5MoeConfig", experts=True),
    "qwen3_5_text": Served(_QWEN3_5, "Qwen3_5TextConfig", media=()),
    "qwen3_5_moe_text": Served(_QWEN3_5, "Qwen3_5MoeTextConfig", media=(), experts=True),
    "qwen3_vl": Served(_QWEN3_VL, "Qwen3VLConfig", state=False),
    "qwen3_vl_moe": Served(_QWEN3_VL, "Qwen3VLMoeConfig", state=False, experts=True),
    "qwen3_next": Served(_QWEN3_NEXT, "Qwen3NextConfig", media=(), experts=True),
    "minicpmv4_6": Served(_MINICPMV, "MiniCPMV4_6Config"),
    "minicpmv4_7": Served(_MINICPMV, "MiniCPMV4_7Config"),
}
"""By `model_type` of config.json."""


def read_spec(path: Path | str) -> ModelSpec:
    """Return the model in a checkpoint directory, or that of a config.json alone.

    Raises:
        CheckpointError: a file is missing or broken, or the model is of an unsupported kind.
    """
    path = Path(path)
    if path.suffix == ".json":
        return spec_of(_with_sidecar(path))
    if not (path / "config.json").is_file():
        raise CheckpointError(f"the checkpoint has no config.json{other_weights(path)}")
    spec = spec_of(_with_sidecar(path / "config.json"))
    file = path / "generation_config.json"
    return replace(spec, generation=read_json(file) if file.is_file() else {})


def _with_sidecar(path: Path) -> Mapping[str, Any]:
    """Return a config.json, completed by the file of ModelOpt's older exports."""
    raw, beside = read_json(path), path.with_name(SIDECAR)
    if "quantization_config" in raw or not beside.is_file():
        return raw
    return {**raw, "quantization_config": {"quant_method": "modelopt", **read_json(beside)}}


def spec_of(raw: Mapping[str, Any]) -> ModelSpec:
    """Return the model described by the content of a config.json; raises as `read_spec`."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"model_type {kind!r} is not supported; supported are {known}")
    scheme = QuantScheme.of(raw)
    served = FAMILIES[kind]
    module = importlib.import_module(served.module)
    config = Config(raw, served.source, getattr(module, "DEFAULTS", {}), class_of=_class_of)
    spec: ModelSpec = module.spec(config)
    if spec.vision is not None and spec.vision.out_hidden_size != spec.hidden_size:
        raise CheckpointError(
            f"out_hidden_size {spec.vision.out_hidden_size} of the vision tower is not the model's "
            f"hidden_size {spec.hidden_size}"
        )
    return replace(spec, quantization=scheme, defaulted=config.defaulted)


def _class_of(source: str) -> Any:
    # Imported late, because it takes half a second and only reading a config needs it.
    import transformers

    return getattr(transformers, source, None)
