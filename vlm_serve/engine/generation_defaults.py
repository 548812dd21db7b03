"""Defaults of sampling: the checkpoint's, neutral ones, or those of another folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlm_serve.errors import ConfigError
from vlm_serve.models import ModelSpec
from vlm_serve.models.config import read_json
from vlm_serve.options.config import EngineConfig

GENERATION = "generation_config.json"


def with_generation(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model with the configured defaults of sampling.

    Raises:
        ConfigError: there is no generation_config.json in the named folder.
        CheckpointError: the file cannot be read.
    """
    chosen = config.generation_config
    if chosen == "vllm":
        return replace(spec, generation={})
    folder = generation_folder(config)
    return spec if folder is None else replace(spec, generation=read_json(folder / GENERATION))


def generation_folder(config: EngineConfig) -> Path | None:
    """Return the folder of another generation_config.json; None: the checkpoint's own is used.

    Raises:
        ConfigError: there is no such file.
    """
    if config.generation_config in ("auto", "vllm"):
        return None
    folder = Path(config.generation_config)
    if not (folder / GENERATION).is_file():
        raise ConfigError(
            f"generation_config must be auto, vllm or a folder with {GENERATION}, got "
            f"{config.generation_config!r}",
            param="generation_config",
        )
    return folder
