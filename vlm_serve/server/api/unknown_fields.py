"""What happens to request fields that no model declares.

A field that is known and would change the answer, but is not implemented, is refused by name,
unless its value asks for nothing. Everything else is ignored and named in a response header.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from vlm_serve.server.api.chat.request import ChatCompletionRequest
from vlm_serve.server.http.errors import UnsupportedFieldError

IGNORED_HEADER = "x-vlm-serve-ignored-fields"
MAX_IGNORED_NAMED = 32

# Field -> values that ask for nothing. None asks for nothing in every field.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "top_a": (0, 0.0),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# What another form of a chat request does not declare itself would change the answer if it came as
# a chat field, so it is refused there, not ignored.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    name: () for name in ChatCompletionRequest.model_fields if name != "stream_options"
} | {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "return_token_ids": (False,),
    "return_routed_experts": (False,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "verbosity": ("medium",),
}

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


def ignored_fields(
    extra: dict[str, Any], unimplemented: Mapping[str, tuple[Any, ...]] = UNIMPLEMENTED
) -> list[str]:
    """The names of the undeclared fields that have no effect.

    Raises UnsupportedFieldError for the first one that would have had an effect elsewhere.
    """
    ignored = []
    for name, value in extra.items():
        if name not in unimplemented:
            ignored.append(name)
        elif value is not None and not _asks_for_nothing(value, unimplemented[name]):
            raise UnsupportedFieldError(
                f"{name} is not implemented by this server", param=name, code="unsupported_field"
            )
    return ignored


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python; a flag that was set must not pass as the number one.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def ignored_header(names: list[str]) -> dict[str, str]:
    """The response header that names what was ignored, and beside it what might have been meant; no
    header when nothing was."""
    shown = [name for name in names if _PLAIN_NAME.fullmatch(name)][:MAX_IGNORED_NAMED]
    shown = [name + _meant(name) for name in shown]
    if len(shown) < len(names):
        shown.append("...")
    return {IGNORED_HEADER: ", ".join(shown)} if names else {}


def _meant(name: str) -> str:
    found = difflib.get_close_matches(name, ChatCompletionRequest.model_fields, n=1, cutoff=0.85)
    return f" ({found[0]}?)" if found and found[0] != name else ""
