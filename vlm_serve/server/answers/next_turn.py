"""The next turn of a conversation, for an engine that keeps the ends of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.engine.requests.outputs import FinishReason
from vlm_serve.preprocess.identity.prompt import SharedTokens
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import Piece


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A next turn whose client sends the parsed answer back.

    Attributes:
        kind: "agent" if the answer may call tools, "chat" otherwise.
        shared_tokens: compares the prompts.
        parser: makes a parser of one choice.
    """

    kind: str
    shared_tokens: SharedTokens
    parser: Callable[[], OutputParser]

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        """Return how many tokens the next prompt begins with, see `engine.request.NextTurn`."""
        parser = self.parser()
        pieces = parser.feed(text) + parser.finish(cut=reason != "stop")
        return self.shared_tokens(_message(pieces), token_ids)


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the answer as clients of /v1/chat/completions send it back."""
    texts: dict[str, str] = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "tool_name":
            function = {"name": piece.text, "arguments": ""}
            calls.append({"id": f"call{len(calls):05}", "type": "function", "function": function})
        elif piece.kind == "tool_arguments":
            calls[piece.call]["function"]["arguments"] += piece.text
        else:
            texts[piece.kind] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
