"""Answer of one choice: allowed next tokens, text, and end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from vlm_serve.engine.requests.detokenizer import Detokenizer
from vlm_serve.engine.requests.outputs import FinishReason
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.thought import ThoughtState
from vlm_serve.grammar.state import GrammarState
from vlm_serve.preprocess.text.family import THINK_END
from vlm_serve.sampling_params import MAX_BAD_WORD_LENGTH

_LONGEST_BAD_WORD = 4 * MAX_BAD_WORD_LENGTH
"""Maximum number of tokens of a bad word: one per byte of its text."""


class Answer:
    """Answer that grows token by token. Used by the engine's thread only.

    Attributes:
        grammar: state of its grammar; None without one.
        thought: state of its thought; None if its text is not followed.
        finish_reason: None while it continues.
        stop_reason: the stop string or stop token that ended it; None for end of sequence.
    """

    def __init__(self, request: Request, language: Language) -> None:
        params, tokenizer = request.params, language.tokenizer
        self.grammar: GrammarState | None = None
        if request.grammar is not None:
            self.grammar = GrammarState(request.grammar, tokenizer.token_bytes, language.vocabulary)
        self.thought: ThoughtState | None = None
        if request.thought is not None:
            self.thought = ThoughtState(
                request.thought,
                tokenizer.token_bytes,
                params.thinking_token_budget,
                request.closing,
            )
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._stop_tokens = language.stop_tokens
        self._ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else language.stop_tokens
        )
        self._min_tokens = params.min_tokens
        tokens_left = language.max_length - len(request.prompt)
        self._max_tokens = (
            tokens_left if params.max_tokens is None else min(tokens_left, params.max_tokens)
        )
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            THINK_END,
            include_stop=self._include_stop,
            skip_special=params.skip_special_tokens,
        )
        self._all = np.packbits(np.ones(language.vocabulary, dtype=bool), bitorder="little")
        self._bad_words = request.bad_words
        self._allowed: npt.NDArray[np.uint8] | None = None
        if params.allowed_token_ids is not None:
            flags = np.zeros(language.vocabulary, dtype=bool)
            flags[list(params.allowed_token_ids)] = True
            self._allowed = np.packbits(flags, bitorder="little")

    @property
    def uncertain(self) -> str:
        """Which rule needs the last token to say what may come next; "" if none does."""
        if self.grammar is not None:
            return "grammar"
        if self.thought is not None and self.thought.has_budget:
            return "thinking budget"
        return "bad words" if self._bad_words else ""

    @property
    def is_limited(self) -> bool:
        """True if rules limit what comes next, now or later."""
        return self._allowed is not None or self._min_tokens > 0

    def tokens_left(self, count: int) -> int:
        """Return how many tokens may follow the answer's first `count`."""
        return self._max_tokens - count

    def masks_ahead(
        self, first: bytes | None, token_ids: Sequence[int], count: int, drafts: Sequence[int]
    ) -> list[tuple[bytes | None, bool]]:
        """Return the results of `mask` behind each draft. Stop at the first draft that is forbidden
        or ends the answer.

        Args:
            first: mask of the first draft.
            token_ids, count: as for `mask`.
            drafts: tokens that may come.
        """
        masks: list[tuple[bytes | None, bool]] = []
        mask, tokens = first, [*token_ids[-_LONGEST_BAD_WORD:]]
        with ExitStack() as stack:
            for part in (self.grammar, self.thought):
                if part is not None:
                    stack.enter_context(part.ahead())
            for draft in drafts:
                forbidden = mask is not None and not mask[draft // 8] >> draft % 8 & 1
                if forbidden or draft in self._ends:
                    break
                if self.thought is not None:
                    self.thought.accept(draft)
                if self.grammar is not None:
                    self.grammar.accept(draft)
                    if self.grammar.finished:
                        break
                tokens.append(draft)
                count += 1
                masks.append(self.mask(tokens, count))
                mask = masks[-1][0]
        return masks

    def mask(self, token_ids: Sequence[int], count: int) -> tuple[bytes | None, bool]:
        """Return (`SampleTask.mask`, `SampleTask.unbiased`) for the next token.

        If all rules together forbid every token, only one rule stays in force and the logits are
        used unbiased. This rule is the grammar; without a grammar it is the list of allowed tokens.
        While a grammar has yet to begin, tokens that end the answer are banned. A thought whose
        budget is used up allows its closing token alone, whatever the rules say.

        Args:
            token_ids: prompt and answer so far, or their end.
            count: tokens of the answer.
        """
        closing = self.thought.forced if self.thought is not None else None
        if closing is not None:
            bits = np.zeros_like(self._all)
            bits[closing // 8] = 1 << closing % 8
            return bits.tobytes(), True
        grammar = self.grammar.allowed() if self.grammar is not None else None
        banned = [
            word[-1]
            for word in self._bad_words
            if len(word) <= count + 1 and _ends_with(token_ids, word[:-1])
        ]
        if count < self._min_tokens or (self.grammar is not None and self.grammar.waiting):
            banned += self._ends
        if not banned and self._allowed is None and grammar is None:
            return None, False
        bits = self._all.copy()
        for token in banned:
            bits[token // 8] &= 0xFF ^ 1 << token % 8
        for part in (self._allowed, grammar):
            if part is not None:
                bits &= part[: len(bits)]
        if bits.any():
            return bits.tobytes(), False
        remaining = self._allowed if self.grammar is None else grammar
        return None if remaining is None else remaining.tobytes(), True

    def accept(self, token: int, count: int) -> str:
        """Append a token, the answer's `count`-th; return the text that has become final."""
        may_stop = count >= self._min_tokens
        complete, quiet = False, 0
        if self.thought is not None:
            inside = self.thought.accept(token)
            quiet = inside if self.thought.quiet else 0
        if self.grammar is not None:
            self.grammar.accept(token)
            complete = self.grammar.finished
        if (token in self._ends and may_stop) or complete:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self._stop_tokens or complete else token
            text = ""
            if self._include_stop:
                text = self._detokenizer.push(token, check_stop=False)[0]
            return text + self._detokenizer.finish()[0]
        text, stop = self._detokenizer.push(token, check_stop=may_stop, quiet=quiet)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif count >= self._max_tokens:
            self.finish_reason = "length"
            text += self._detokenizer.finish()[0]
        return text


def _ends_with(token_ids: Sequence[int], ending: tuple[int, ...]) -> bool:
    return tuple(token_ids[len(token_ids) - len(ending) :]) == ending
