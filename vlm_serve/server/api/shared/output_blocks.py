"""An answer as a sequence of blocks: reasoning, text and tool calls.

/v1/responses and /v1/messages share this form. Their streams report when each block opens, grows
and closes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.server.answers.json_calls import decodable
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import Piece
from vlm_serve.server.answers.tool_values import is_json
from vlm_serve.server.api.shared.answer import AnswerStream
from vlm_serve.server.failover.attempt import Attempt, new_token
from vlm_serve.server.http.frames import Frames
from vlm_serve.server.http.streaming import Event


@dataclass(slots=True)
class OutputBlock:
    """One block of an answer.

    Attributes:
        index: index of the block in the answer.
        token: unique part of the block's ids.
        name: the called function, in a tool call.
        text: the text so far; in a tool call, the arguments.
        logprobs: entries of the text's tokens, if requested.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    token: str
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockStream(AnswerStream):
    """Turns the deltas of one choice into the events of a stream.

    Args:
        only_prompt: see `AnswerRequest`; deltas are left out.

    Attributes:
        blocks: all blocks so far; the last one may still be open.
        finish_reason, stop_reason: of the choice, once it has ended.
        reasoning_tokens: tokens up to the end of the reasoning.
    """

    def __init__(
        self, parser: OutputParser, attempt: Attempt | None = None, *, only_prompt: bool = False
    ) -> None:
        self._attempt = attempt
        self._only_prompt = only_prompt
        self.blocks: list[OutputBlock] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.reasoning_tokens = 0
        self._num_tokens = 0
        self._parser = parser
        self._frames = Frames(named=True)
        self._logprobs: list[dict[str, Any]] = []
        self._open: OutputBlock | None = None
        self._new = OutputBlock("text", -1, "")  # what has not been told of the open one

    def push(self, prompt: int, deltas: Sequence[Delta]) -> list[Event]:
        if self._only_prompt:
            self.finish_reason = "length"
            return []
        events = [event for delta in deltas for event in self._push(delta)]
        return events + self._tell()

    def _push(self, delta: Delta) -> list[Event]:
        in_text = self._parser.in_content
        pieces = self._parser.feed(delta.text) if delta.text else []
        self._logprobs += self.logprobs_of(delta)
        if not pieces and not (in_text and self._parser.in_content):
            self._logprobs = []  # These tokens are a marker between two blocks.
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            pieces += self._parser.finish(cut=delta.finish_reason == "length")
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        events = [event for piece in pieces for event in self._take(piece)]
        if delta.finish_reason is not None:
            if not self.blocks:  # An empty answer has one empty text block.
                events += self._switch("text")
            events += self._close()
        return events

    @property
    def called(self) -> bool:
        """True if the answer ends with calls for the client to run, all of them whole."""
        calls = any(block.kind == "call" for block in self.blocks)
        return calls and not self._parser.unfinished

    def is_unfinished(self, block: OutputBlock) -> bool:
        """Return True for a call whose arguments are the beginning of JSON."""
        return block.kind == "call" and self._parser.unfinished and not is_json(block.text)

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the logprobs entries of a delta's tokens; empty if not requested."""
        return []

    @abstractmethod
    def opened(self, block: OutputBlock) -> list[Event]: ...

    @abstractmethod
    def grown(self, block: OutputBlock, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Return the events for text added to a block.

        Args:
            text: the added text.
            logprobs: entries of the tokens that produced it.
        """

    @abstractmethod
    def closed(self, block: OutputBlock) -> list[Event]: ...

    def _take(self, piece: Piece) -> list[Event]:
        if piece.kind == "tool_name":
            return self._switch("call", piece.text)
        events: list[Event] = []
        if piece.kind == "tool_arguments":
            assert self._open is not None and self._open.kind == "call"
        elif piece.kind == "reasoning":
            self.reasoning_tokens = self._num_tokens
            events = self._switch("reasoning")
        else:
            events = self._switch("text")
        block = self._open
        assert block is not None
        block.text += piece.text
        logprobs, self._logprobs = self._logprobs, []
        if block.kind == "text":
            block.logprobs += logprobs
        self._new.text += piece.text
        self._new.logprobs += logprobs
        return events

    def _tell(self) -> list[Event]:
        """Return the events for what the open block has grown by."""
        new, block = self._new, self._open
        if block is None or not new.text:
            return []
        self._new = OutputBlock("text", -1, "")
        return self.grown(block, new.text, new.logprobs)

    def _switch(self, kind: Literal["reasoning", "text", "call"], name: str = "") -> list[Event]:
        """Ensure that a block of this kind is open. Every tool call gets a new block."""
        if self._open is not None and self._open.kind == kind and kind != "call":
            return []
        events = self._close()
        index = len(self.blocks)
        self._open = OutputBlock(kind, index, new_token(self._attempt, "block", index), name)
        self.blocks.append(self._open)
        return events + self.opened(self._open)

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        events, block, self._open = self._tell(), self._open, None
        return events + self.closed(block)


_BEGINNING = '{"input": "'


def input_of(arguments: str) -> str:
    """Return the one text of a call's arguments, which the token limit may have cut."""
    given = from_json(arguments or "{}", allow_partial="trailing-strings")
    text = given.get("input", "") if isinstance(given, dict) else ""
    return text if isinstance(text, str) else arguments


class CustomInput:
    """The text of a call whose arguments are still coming.

    Arguments in another form than that of one text are told when they are complete.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False
        self._told = 0

    def grow(self, arguments: str) -> str:
        """Take more of the arguments and return more of the text."""
        self._unread += arguments
        if not self._begun and self._unread.startswith(_BEGINNING):
            self._begun, self._unread = True, self._unread.removeprefix(_BEGINNING)
        if not self._begun:
            return ""
        text, size = decodable(self._unread)
        self._unread = self._unread[size:]
        self._told += len(text)
        return text

    def rest(self, text: str) -> str:
        """Return what is left of the whole text."""
        return text[self._told :]
