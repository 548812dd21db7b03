"""Republications of a vision-language model's text part: their config.json still has the section of
a tower whose tensors were left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vlm_serve.errors import CheckpointError
from vlm_serve.models.files import INDEX_FILE, weight_files
from vlm_serve.models.spec import ModelSpec

_SECTION = "vision_config"
_log = logging.getLogger(__name__)


def without_lost_tower(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the model without its vision tower if the weight files hold no tensor of one. Missing
    or broken files decide nothing."""
    if spec.vision is None:
        return spec
    names = _names(path)
    # One of a tower's layers is enough: a tower without its first tensor is damaged, not left out.
    parts = (spec.vision.anchor, f".{spec.vision.layers}")
    if not names or any(part in f".{name}" for name in names for part in parts):
        return spec
    _tell(path)
    config = {name: value for name, value in spec.config.items() if name != _SECTION}
    return replace(spec, vision=None, config=config)


def _names(path: Path) -> Collection[str]:
    """Return the names of all tensors."""
    with suppress(CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError):
        files = weight_files(path)
        if (path / INDEX_FILE).is_file():
            found = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            return set(found)
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
