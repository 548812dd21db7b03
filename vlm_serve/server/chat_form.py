"""What the other forms of a chat request (/v1/responses, /v1/messages) have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.errors import UnsupportedFieldError
from vlm_serve.server.protocol import AnswerRequest, ChatCompletionRequest

# What such a form does not declare itself would change the answer if it came as a chat field, so it
# is refused there, not ignored. Field -> values that ask for nothing, as in `fields.UNIMPLEMENTED`.
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
}
_OF_OTHER_FORM = ("messages", "tools", "tool_choice")


class ChatForm(AnswerRequest):
    """A chat request in another API's form."""

    chat_template_kwargs: dict[str, Any] | None = None

    def same_fields(self) -> dict[str, Any]:
        """The fields that were given and that chat has under the same name and in the same form."""
        return {
            name: value
            for name in type(self).model_fields
            if name in ChatCompletionRequest.model_fields and name not in _OF_OTHER_FORM
            if (value := getattr(self, name)) is not None
        }


def text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be text. Raises InvalidRequestError that names it."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return value


def content_of(
    content: Any, where: str, part_of: Callable[[Any, str], dict[str, Any]], parts: str
) -> str | list[dict[str, Any]]:
    """A message's content: text, or chat's form of each of its parts.

    Args:
        part_of: chat's form of a part, given the part and its place.
        parts: what the API calls them.

    Raises InvalidRequestError for anything else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of {parts}", param=where)
    return [part_of(part, f"{where}[{index}]") for index, part in enumerate(content)]


def object_of(part: Any, where: str) -> dict[str, Any]:
    """A part that must be an object. Raises InvalidRequestError that names its place."""
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    return part


def unsupported(where: str, value: Any) -> UnsupportedFieldError:
    """The refusal of a value that the server does not implement."""
    return UnsupportedFieldError(
        f"{where}: {repr(value)[:40]} is not implemented by this server",
        param=where,
        code="unsupported_field",
    )
