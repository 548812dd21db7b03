"""Reads the body of any API into a conversation; the only module that knows where turns stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.blocks import read_blocks
from vlm_serve.preprocess.reading.cache_wishes import read_wishes
from vlm_serve.preprocess.reading.chat import read_chat
from vlm_serve.preprocess.reading.conversation import Conversation, Uploads
from vlm_serve.preprocess.reading.decisions import read_decision, read_state
from vlm_serve.preprocess.reading.items import read_response
from vlm_serve.preprocess.reading.turns import join_leading, order_results
from vlm_serve.preprocess.reading.values import object_of, plain_data
from vlm_serve.preprocess.reading.vendor_tools import read_chat_tools

MAX_TEMPLATE_KWARGS = 64

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "generate",
    "/v1/decisions": "decisions",
    "/v1/systemone": "systemone",
    "/v1/cache/probe": "chat",
    "/v1/cache/pin": "chat",
}
"""The API of each route whose requests have a prompt that a cache may hold."""

_READERS: dict[str, Callable[[Mapping[str, Any], Conversation], None]] = {
    "chat": read_chat,
    "responses": read_response,
    "messages": read_blocks,
    "decisions": read_decision,
    "systemone": read_state,
}
_MARKED = ("tools", "system", "messages", "input", "prediction")
_PROMPTS = {"completions": "prompt", "generate": "token_ids"}


def read_conversation(
    api: str, body: Mapping[str, Any], uploads: Uploads | None = None
) -> Conversation:
    """Read a parsed request body; the time it takes is proportional to the body.

    Args:
        api: "chat", "completions", "responses", "messages", "generate", "decisions" or
            "systemone".
        body: the parsed JSON. In Python, media may also be paths, bytes, images or frames.
        uploads: finds media by their names; None: names stay.

    Raises InvalidRequestError, naming the place at fault; MediaNotHeldError among them.
    """
    conversation = Conversation(cache_salt=body.get("cache_salt"), uploads=uploads)
    field = _PROMPTS.get(api)
    if api == "chat" and body.get("messages") is None:
        if body.get("prompt") is None:
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        field = "prompt"
    if field is not None:
        conversation.prompts = _prompts(body.get(field), field)
        return conversation
    kwargs = plain_data(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, dict) or len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(
            f"chat_template_kwargs must be an object of at most {MAX_TEMPLATE_KWARGS} keys",
            param="chat_template_kwargs",
        )
    conversation.template_kwargs = kwargs
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if body.get(name) is not None:
            setattr(conversation, name, object_of(body[name], name))
    fields = {name: body[name] for name in _MARKED if name in body}
    conversation.cache, unmarked = read_wishes(
        api,
        body,
        fields,
        lambda marked: _read(api, marked, Conversation(uploads=uploads)),
        conversation.ignored,
    )
    return _read(api, {**body, **unmarked}, conversation)


def _read(api: str, body: Mapping[str, Any], conversation: Conversation) -> Conversation:
    """Read the messages and tools of a body that has no marks any more."""
    if api == "chat":
        conversation.tools = read_chat_tools(body, conversation)
    _READERS[api](body, conversation)
    if not conversation.previous:
        join_leading(conversation)
        order_results(conversation)
    return conversation


def _prompts(given: Any, field: str) -> Any:
    """Return the prompts of a field that holds a text, token ids, or a list of either."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if not isinstance(given, list):
        raise InvalidRequestError(f"{field} must be text or token ids", param=field)
    return given
