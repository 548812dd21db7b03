"""Files beside an adapter: a tokenizer or a chat template must be the model's own."""

from __future__ import annotations

import logging
from pathlib import Path

from vlm_serve.errors import CheckpointError
from vlm_serve.models.adapters.tokens import (
    TOKENIZER_FILE,
    difference,
    family_in,
    lacks_marks,
    read_tokens,
)
from vlm_serve.preprocess.template import named_chat_template

_log = logging.getLogger(__name__)


def check_beside(checkpoint: Path, folder: Path, *, template: str | None = None) -> None:
    r"""Compare the files beside an adapter with its model's.

    A pattern without `\p{M}`, which transformers writes for many models, is a line in the log.

    Args:
        checkpoint: of the model.
        folder: of the adapter.
        template: file of the chat template that options name in place of the checkpoint's.

    Raises:
        CheckpointError: the adapter has another tokenizer or another chat template.
    """
    if (folder / TOKENIZER_FILE).is_file() and (checkpoint / TOKENIZER_FILE).is_file():
        _check_tokens(checkpoint, folder)
    name, own = named_chat_template(folder)
    if not own:
        return
    if template:
        models = _text(Path(template))
    else:
        _, models = named_chat_template(checkpoint)
    if _plain(own) != _plain(models):
        raise CheckpointError(
            f"the adapter has a chat template in {name} other than the model's: name it with "
            "--chat-template for all requests, or remove it there to use the model's"
        )


def _check_tokens(checkpoint: Path, folder: Path) -> None:
    tokens, model, family = read_tokens(folder), read_tokens(checkpoint), family_in(checkpoint)
    other = difference(tokens, model, family)
    if other:
        raise CheckpointError(
            f"the adapter has a {TOKENIZER_FILE} with other tokens than the model's, which is not "
            f"supported: it has {other}; without that file it gets the model's"
        )
    if lacks_marks(tokens, model, family):
        _log.warning(
            "the adapter in %s has a %s that splits words at combining marks, as the class "
            "Qwen2Tokenizer of transformers writes it, and the model's does not: such words may "
            "have other tokens than in training",
            folder.name,
            TOKENIZER_FILE,
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be read") from error


def _plain(template: str) -> str:
    """Return a template without what an editor or a writer of JSON changes."""
    return template.replace("\r\n", "\n").strip()
