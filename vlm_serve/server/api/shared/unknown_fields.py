"""Handling of request fields that no model declares.

A known but unimplemented field is refused by name, unless its value has no effect. All other fields
are ignored, and a response header names them.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm_serve.errors import UnsupportedFieldError
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.shared.sampling import options_elsewhere

IGNORED_HEADER = "x-vlm-serve-ignored-fields"
MAX_IGNORED_NAMED = 32

# Field -> neutral values, which have no effect. None is neutral for every field.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


INSTEAD: dict[str, tuple[str, ...]] = {
    "grammar": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "guided_json": ("structured_outputs", "response_format"),
    "guided_regex": ("structured_outputs",),
    "json_schema": ("response_format",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "structural_tag": ("response_format",),
}
"""Other names for refused fields; the first one that an API takes counts."""


def unimplemented_in(api: str) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a chat-like API refuses, with their neutral values.

    Chat fields that it does not declare would change the answer, so it does not ignore them.
    """
    chat = dict.fromkeys(ChatCompletionRequest.model_fields.keys() - _AIDS, ())
    aids: dict[str, tuple[Any, ...]] = {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "return_token_ids": (False,),
        "verbosity": ("medium",),
    }
    return UNIMPLEMENTED | chat | options_elsewhere(api) | aids


_AIDS = {"prompt_cache_options", "return_progress", "stream_options"}
"""Chat fields that change no answer."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}", re.ASCII)


def ignored_fields(
    extra: dict[str, Any], unimplemented: Mapping[str, tuple[Any, ...]] = UNIMPLEMENTED
) -> list[str]:
    """Return the names of the undeclared fields without effect.

    Raises:
        UnsupportedFieldError: a field is not implemented and would change the answer.
    """
    ignored = []
    for name, value in extra.items():
        if name not in unimplemented:
            ignored.append(name)
        elif value is not None and not _is_neutral(value, unimplemented[name]):
            served = (other for other in INSTEAD.get(name, ()) if other not in unimplemented)
            hint = "".join(f": use {other}" for other in itertools.islice(served, 1))
            raise UnsupportedFieldError(
                f"{name} is not implemented by this server{hint}",
                param=name,
                code="unsupported_field",
            )
    return ignored


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # In Python `True == 1`, but a flag must not pass as the number one.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def ignored_header(*names: list[str]) -> Mapping[str, str]:
    """Return a response header with the ignored fields and suggestions; empty if there are none.

    The lists may grow until it is sent: by documents that prove unreadable.
    """
    return _Header(names)


class _Header(Mapping[str, str]):
    def __init__(self, names: Sequence[list[str]]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter([IGNORED_HEADER] if any(self._names) else [])

    def __len__(self) -> int:
        return int(any(self._names))

    def __getitem__(self, key: str) -> str:
        names = [name for part in self._names for name in part]
        if key != IGNORED_HEADER or not names:
            raise KeyError(key)
        shown = [name for name in names if _PLAIN_NAME.fullmatch(name)][:MAX_IGNORED_NAMED]
        shown = [name + _suggestion(name) for name in shown]
        return ", ".join(shown + ["..."] * (len(shown) < len(names)))


def _suggestion(name: str) -> str:
    if not name.isidentifier():  # a place inside of a field
        return ""
    close = difflib.get_close_matches(name, ChatCompletionRequest.model_fields, n=1, cutoff=0.85)
    return f" ({close[0]}?)" if close and close[0] != name else ""
