"""Collects the tokens that end an answer, from all files of a checkpoint that name any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from vlm_serve.errors import CheckpointError

IdOf = Callable[[str], int | None]
Known = Callable[[int], bool]


def special_names(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of "eos_token" and the like, as chat templates see them.

    Args:
        configs: contents of tokenizer_config.json and special_tokens_map.json; the first with a
            given name wins. A token is text or an object with its `content`.
    """
    names: dict[str, str] = {}
    for name, value in ((name, value) for config in configs for name, value in config.items()):
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            names.setdefault(name, content)
    return names


def find_ends(
    eos_token: str,
    end_of_turn: str,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    id_of: IdOf,
    known: Known,
) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's own, and those of every config.

    A checkpoint without generation_config.json may name in config.json only the end of a document.
    Its tokenizer then names the end of a turn.

    Args:
        eos_token: the tokenizer's; "" if it names none: then the family's `end_of_turn` ends too.
        generation, config: contents of generation_config.json and config.json.
        id_of: returns the id of a token.
        known: returns True if a token has the id.

    Raises CheckpointError for an unassigned id in the first file that names any.
    """
    own = id_of(eos_token)
    if own is None:
        own = id_of(end_of_turn)
    found = set() if own is None else {own}
    text_config = config.get("text_config")
    inner = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    given = [generation.get("eos_token_id"), config.get("eos_token_id"), inner]
    decisive = next((value for value in given if value is not None), None)
    for value in given:
        for token_id in value if isinstance(value, list) else [value]:
            if _is_token(token_id, known):
                found.add(token_id)
            elif value is not None and value is decisive:
                raise CheckpointError(
                    f"eos_token_id {token_id!r} is not a token of this checkpoint"
                )
    return frozenset(found)


def _is_token(token_id: Any, known: Known) -> TypeGuard[int]:
    whole = isinstance(token_id, int) and not isinstance(token_id, bool)
    return whole and 0 <= token_id < 1 << 32 and known(token_id)
