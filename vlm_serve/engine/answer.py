"""The answer of one choice: its text, what may come next, and when it ends."""

from __future__ import annotations

from vlm_serve.engine.constraints import Constraint
from vlm_serve.engine.detokenizer import Detokenizer
from vlm_serve.engine.outputs import FinishReason
from vlm_serve.engine.request import Language, Request
from vlm_serve.grammar.state import GrammarState


class Answer:
    """Grows token by token.

    Attributes:
        constraint: forbids tokens; None: any may come at any time.
        finish_reason: None while it goes on.
        stop_reason: the stop string or stop token that has ended it; None for end of sequence.
    """

    def __init__(self, request: Request, language: Language) -> None:
        params, tokenizer = request.params, language.tokenizer
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._stop_tokens = language.stop_tokens
        self._ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else language.stop_tokens
        )
        self._min_tokens = params.min_tokens
        room = language.max_length - len(request.prompt)
        self._max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self.constraint: Constraint | None = None
        if request.rules is not None or request.grammar is not None or params.min_tokens:
            state = None
            if request.grammar is not None:
                state = GrammarState(request.grammar, tokenizer.token_bytes, language.vocabulary)
            self.constraint = Constraint(
                request.rules, state, self._ends, params.min_tokens, language.vocabulary
            )

    def accept(self, token: int, count: int) -> str:
        """Takes in a token, the answer's `count`-th; returns the text that became certain."""
        may_stop = count >= self._min_tokens
        complete = False
        if self.constraint is not None:
            self.constraint.accept(token)
            complete = self.constraint.finished
        if (token in self._ends and may_stop) or complete:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self._stop_tokens or complete else token
            return self._detokenizer.finish()[0]
        text, stop = self._detokenizer.push(token, check_stop=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif count >= self._max_tokens:
            self.finish_reason = "length"
            text += self._detokenizer.finish()[0]
        return text
