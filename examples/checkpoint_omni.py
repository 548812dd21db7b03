"""Parts specific to Qwen3-Omni's checkpoints: config.json, processors, names of tensors.

Its talker is left out, and of the part that hears only the settings are written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from checkpoint_parts import token_id, write_json
from checkpoint_spec import CheckpointSpec
from tokenizers import Tokenizer

NAMED_TOKENS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Special tokens by the names under which transformers' processor looks for them."""

_MERGERS = {
    "deepstack_merger_list": "merger_list",
    "norm": "ln_q",
    "linear_fc1": "mlp.0",
    "linear_fc2": "mlp.2",
}


def fields(spec: CheckpointSpec, thinker: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json, from that of the thinker alone."""
    whole = {name: thinker.pop(name) for name in ("architectures", "model_type", "dtype")}
    audio = {
        "model_type": f"{spec.model_type}_audio_encoder",
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 32,
        "output_dim": spec.hidden_size,
        "downsample_hidden_size": 8,
    }
    inner = thinker | {
        "model_type": f"{spec.model_type}_thinker",
        "audio_config": audio,
        "position_id_per_seconds": 13,
        "audio_token_id": token_id(tokenizer, "<|audio_pad|>"),
        "audio_start_token_id": token_id(tokenizer, "<|audio_start|>"),
    }
    return whole | {"enable_audio_output": False, "thinker_config": inner}


def write_processors(path: Path, spec: CheckpointSpec) -> None:
    """Write preprocessor_config.json, which is all that published models have, into `path`. A
    video's frames have the pixels that transformers' processor names."""
    settings = {
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "patch_size": spec.patch_size,
        "temporal_patch_size": spec.temporal_patch_size,
        "merge_size": spec.spatial_merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": spec.image_min_pixels,
        "max_pixels": spec.image_max_pixels,
    }
    write_json(path / "preprocessor_config.json", settings)


def name(plain: str) -> str:
    """Return the name of a tensor, from the one that Qwen3-VL has for it."""
    if plain.startswith("model.visual."):
        merger = re.match(
            r"(model\.visual\.)(deepstack_merger_list|merger)(.*\.)(\w+)(\.\w+)", plain
        )
        if merger is not None:
            start, part, place, kind, end = merger.groups()
            plain = f"{start}{_MERGERS.get(part, part)}{place}{_MERGERS[kind]}{end}"
    plain = plain.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return f"thinker.{plain}"
