"""Files beside an adapter: a tokenizer or a chat template must be the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlm_serve.errors import CheckpointError

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_PARTS = ("added_tokens", "model", "normalizer", "pre_tokenizer")
"""Parts of a tokenizer's file that decide tokens."""


def check_beside(checkpoint: Path, folder: Path, *, template: str | None = None) -> None:
    """Compare the files beside an adapter with its model's.

    Args:
        checkpoint: of the model.
        folder: of the adapter.
        template: file of the chat template that options name in place of the checkpoint's.

    Raises:
        CheckpointError: the adapter has another tokenizer or another chat template.
    """
    own, models = folder / _TOKENIZER, checkpoint / _TOKENIZER
    if own.is_file() and models.is_file() and _tokens(own) != _tokens(models):
        raise CheckpointError(
            f"the adapter has a {_TOKENIZER} with other tokens than the model's, which is not "
            "supported; without that file it gets the model's"
        )
    own, models = folder / _TEMPLATE, Path(template) if template else checkpoint / _TEMPLATE
    if own.is_file() and (not models.is_file() or _text(own) != _text(models)):
        raise CheckpointError(
            f"the adapter has a {_TEMPLATE} other than the model's: name it with --chat-template "
            "for all requests, or remove the file to use the model's"
        )


def _tokens(file: Path) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {name: found.get(name) for name in _PARTS}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file.name} cannot be read") from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be read") from error
