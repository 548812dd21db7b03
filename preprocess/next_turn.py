"""How much of a prompt and its answer the next turn's prompt begins with.

Templates trim answers, drop their thoughts and write the arguments of calls anew, and a text may be
tokenised differently. So the conversation is rendered again, with the answer as clients send it
back and one more turn behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.expand import Expansion, PromptPiece, common_length, split_pieces
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.rendering import Rendering
from vlm_serve.preprocess.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SharedByNextTurn:
    """Compares the tokens of one prompt and its answers with the prompt of the next turn.

    Attributes:
        tokenizer: the checkpoint's.
        rendering, expansion: the prompt.
    """

    tokenizer: Tokenizer
    rendering: Rendering
    expansion: Expansion

    def __call__(self, answer: Mapping[str, Any], token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens of prompt and answer that both share.

        Args:
            answer: the assistant's message in OpenAI's form, as a client sends it back.
            token_ids: the answer's tokens.

        Raises InvalidRequestError if the template refuses the answer.
        """
        request, typed = self.rendering.request, self.rendering.typed
        conversation = read_conversation("chat", {"messages": [answer]})
        text = request.render_answered(typed, conversation)
        pattern = self.tokenizer.special_pattern
        return self._shared(tuple(split_pieces(text, pattern)), token_ids)

    def _shared(self, other: Sequence[PromptPiece], token_ids: Sequence[int]) -> int:
        """Count shared tokens from the first piece on that differs; its media, if any, come before
        it in both."""
        pieces = self.rendering.pieces
        same = common_length(pieces, other)
        # The last piece of a prompt is text that the answer continues.
        whole = len(self.expansion.token_ids)
        at = whole if same == len(pieces) else self.expansion.piece_starts[same]
        own = [*self.expansion.token_ids[at:], *token_ids]
        count = 0
        for piece in other[same:]:
            for token in self._encode(piece):
                if count == len(own) or own[count] != token:
                    return at + count
                count += 1
        return at + count

    def _encode(self, piece: PromptPiece) -> Sequence[int]:
        if piece.is_special:
            return (self.tokenizer.special_tokens[piece.text],)
        return self.tokenizer.encode_plain(self.rendering.typed.restore(piece.text))
