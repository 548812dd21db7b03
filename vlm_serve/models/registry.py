"""The supported models: their names in config.json, and the modules that read them."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Changes, Config, read_json
from vlm_serve.models.files import INDEX_FILE, SIDECAR, other_weights, weight_files
from vlm_serve.models.quantization.scheme import METHODS, QuantScheme
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.weights import HEAD_NAMES
from vlm_serve.preprocess.text.family import answering_part

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
_Text = partial(Served, media=())
_QWEN3_5 = "vlm_serve.models.families.qwen3_5"
_QWEN3_VL = "vlm_serve.models.families.qwen3_vl"
_QWEN3_NEXT = "vlm_serve.models.families.qwen3_next"
_QWEN3 = "vlm_serve.models.families.qwen3"
_QWEN2 = "vlm_serve.models.families.qwen2"
_QWEN2_VL = "vlm_serve.models.families.qwen2_vl"
_MINICPMV = "vlm_serve.models.families.minicpmv"
_LFM2 = "vlm_serve.models.families.lfm2"
_LFM2_VL = "vlm_serve.models.families.lfm2_vl"
_INTERNVL = "vlm_serve.models.families.internvl"
_LFM2_MOE = "vlm_serve.models.families.lfm2_moe"
_GRANITE = "vlm_serve.models.families.granitemoehybrid"
_NEMOTRON = "vlm_serve.models.families.nemotron_h"

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
    "qwen3_5_text": _Text("Qwen3.5 to 3.8 without a tower", _QWEN3_5, "Qwen3_5TextConfig"),
    "qwen3_5_moe_text": _Text(
        "Qwen3.5 to 3.8 MoE without a tower",
        _QWEN3_5,
        "Qwen3_5MoeTextConfig",
        experts=True,
    ),
    "qwen3_vl": Served("Qwen3-VL 2B, 4B, 8B, 32B", _QWEN3_VL, "Qwen3VLConfig", state=False),
    "qwen3_vl_moe": Served(
        "Qwen3-VL 30B-A3B, 235B-A22B", _QWEN3_VL, "Qwen3VLMoeConfig", state=False, experts=True
    ),
    "cosmos3_omni": Served("Cosmos3 reasoners", _QWEN3_VL, "Cosmos3OmniConfig", state=False),
    "qwen3_omni_moe": Served(
        "Qwen3-Omni 30B-A3B, its thinker",
        _QWEN3_VL,
        "Qwen3OmniMoeThinkerConfig",
        state=False,
        experts=True,
    ),
    "qwen3_next": _Text(
        "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
        _QWEN3_NEXT,
        "Qwen3NextConfig",
        experts=True,
    ),
    "qwen3": _Text("Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B", _QWEN3, "Qwen3Config", state=False),
    "qwen3_moe": _Text(
        "Qwen3 30B-A3B, 235B-A22B; Qwen3-Coder 30B-A3B, 480B-A35B",
        _QWEN3,
        "Qwen3MoeConfig",
        state=False,
        experts=True,
    ),
    "qwen2": _Text(
        "Qwen2.5 0.5B, 1.5B, 3B, 7B, 14B, 32B, 72B; Qwen2.5-Coder; QwQ 32B",
        _QWEN2,
        "Qwen2Config",
        state=False,
    ),
    "qwen2_vl": Served("Qwen2-VL 2B, 7B, 72B", _QWEN2_VL, "Qwen2VLConfig", state=False),
    "qwen2_5_vl": Served("Qwen2.5-VL 3B, 7B, 32B, 72B", _QWEN2_VL, "Qwen2_5_VLConfig", state=False),
    "internvl": Served(
        "InternVL3 1B to 78B, InternVL3.5 1B to 241B-A28B, as transformers saves them",
        _INTERNVL,
        "InternVLConfig",
        state=False,
    ),
    "lfm2": _Text("LFM2 350M, 700M, 1.2B, 2.6B; LFM2.5 1.2B", _LFM2, "Lfm2Config"),
    "lfm2_moe": _Text("LFM2 8B-A1B, 24B-A2B", _LFM2_MOE, "Lfm2MoeConfig", experts=True),
    "lfm2_vl": Served(
        "LFM2-VL 450M, 1.6B, 3B; LFM2.5-VL 1.6B", _LFM2_VL, "Lfm2VlConfig", media=("image",)
    ),
    "granitemoehybrid": _Text(
        "Granite 4.0 Micro, H-Micro, H-Tiny, H-Small",
        _GRANITE,
        "GraniteMoeHybridConfig",
        experts=True,
    ),
    "nemotron_h": _Text(
        "Nemotron 3 Nano 30B-A3B, Nemotron-H 8B, 47B, 56B; Nemotron Nano 2 9B, 12B",
        _NEMOTRON,
        "NemotronHConfig",
        experts=True,
    ),
    "minicpmv4_6": Served("MiniCPM-V 4.6", _MINICPMV, "MiniCPMV4_6Config"),
    "minicpmv4_7": Served("MiniCPM-V 4.7", _MINICPMV, "MiniCPMV4_7Config"),
    "minicpm_ocr": Served("MiniCPM-OCR 1.0", _MINICPMV, "MiniCPMOcrConfig"),
}
"""By `model_type` of config.json."""

PARTS = {
    "qwen3_vl_text": _Text("", _QWEN3_VL, "Qwen3VLTextConfig", state=False),
    "qwen2_vl_text": _Text("", _QWEN2_VL, "Qwen2VLTextConfig", state=False),
    "qwen2_5_vl_text": _Text("", _QWEN2_VL, "Qwen2_5_VLTextConfig", state=False),
    "qwen3_vl_moe_text": _Text("", _QWEN3_VL, "Qwen3VLMoeTextConfig", state=False, experts=True),
    "qwen3_omni_moe_thinker": Served(
        "", _QWEN3_VL, "Qwen3OmniMoeThinkerConfig", state=False, experts=True
    ),
}
"""Parts of models that trainers save without the others that all published ones have."""


KINDS = {
    "audio; take Qwen3-VL": """audio_config enable_audio_output minicpmo qwen2_5_omni qwen2_audio
        qwen3_asr voxtral""",
    "a tower of RADIO's kind and sound; take Nemotron 3 Nano": "nemotron_h_omni",
    "Mamba2 beside other parts; take Granite 4": """mamba_n_heads mamba_num_heads bamba falcon_h1
        mamba2 zamba2""",
    "the first Mamba's recurrence; take Granite 4": "mamba_d_conv mamba_d_state jamba mamba zamba",
    "short convolutions beside other parts; take LFM2": "conv_L_cache conv lfm3 lfm3_vl",
    "a decay per channel (KDA) and compressed keys (MLA); take Qwen3.5": """bailing_hybrid glm5_next
        kimi_k3 kimi_linear""",
    "a recurrence without a delta rule; take Qwen3.5": "minimax rwkv xlstm",
    "a delta rule with negative eigenvalues; take Qwen3.5": "olmo_hybrid",
    "sparse attention, whose keys an index chooses; take Qwen3.8": """index_n_heads index_topk
        index_topk_blocks deepseek_v32 deepseek_v4 dots3_note glm_moe_dsa minimax_m3_vl
        qwen4_exp=Qwen3.8-Flash-Next""",
    "compressed keys (MLA); take Qwen3-VL": """kv_lora_rank deepseek_v2 deepseek_v3 glm4_moe_lite
        kimi_k2 kimi_k25 kimi_vl longcat_flash minicpm3 mistral4""",
    "sliding windows; take Qwen3-VL": """sliding_attention hybrid_sliding gemma2 gemma3 gemma3n
        gemma4 gpt_oss inkling inkling2 mellum ministral muse_glimmer step3p5 step3p7 zaya""",
    "partial rotations; take Qwen3-VL": "glm4 glm46v glm4v glm4v_moe glm_ocr",
    "another vision tower; take Qwen3-VL": """vision_config cosmos3_edge deepseek_ocr2
        deepseek_vl granite4_vision hunyuan_vl keye lighton_ocr
        llava_onevision minicpmv mistral3 molmo2 ovis2 paddleocr_vl qianfan_ocr smolvlm
        video_llama_3""",
    "the layout of its own code; take its files in transformers' layout (-hf)": "internvl_chat",
    "no norms of queries and keys; take Qwen3": """llama llama4 ministral3 mistral mixtral phi3
        qwen2_moe solar_open""",
    "norms over all heads, or a router with biases; take Qwen3": "glm4_moe minimax_m2 olmo2",
}
"""What a model has, by `model_type` of config.json, with a name for it if it has another one, or by
a field or a name in `layer_types` that an unknown type has. The first kind counts."""


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
    spec = with_stored_head(spec, path)
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
    changes = replace(changes, fields=answering_part(changes.fields))
    raw = _named_as_text(changes.apply(answering_part(raw)))
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
    kind = f"model_type {raw.get('model_type')!r}"
    return f"{kind} is not supported{_missing_of(raw)}; supported are {known}"


def _missing_of(config: Mapping[str, Any]) -> str:
    """Return the sentence about what the model of a config.json has that is missing here; "" if
    nobody knows."""
    kind, inner = str(config.get("model_type")).removesuffix("_text"), config.get("text_config")
    sections = [config, inner if isinstance(inner, Mapping) else {}]
    marks = {name for section in sections for name, value in section.items() if value}
    for names in (section.get("layer_types") for section in sections):
        marks.update(map(str, names) if isinstance(names, list) else ())
    for known in ({kind}, marks):
        for has, types in KINDS.items():
            names = dict(name.partition("=")[::2] for name in types.split())
            if not known.isdisjoint(names):
                name = names.get(kind) or kind.replace("_", "-").capitalize()
                return f": {name} has {has}"
    return ""


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


def with_stored_head(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the model with the head that its files have if config.json does not tie embeddings
    itself: some classes of transformers tie them by default, but not beside a head of its own."""
    sections = [spec.config, spec.config.get("text_config") or {}]
    silent = all("tie_word_embeddings" not in section for section in sections)
    if not (spec.tied_embeddings and silent) or set(HEAD_NAMES).isdisjoint(tensor_names(path)):
        return spec
    return replace(spec, tied_embeddings=False)


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
