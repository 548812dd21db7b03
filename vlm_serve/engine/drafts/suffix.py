"""Drafts from earlier text: the sequence itself, a prediction sent with the request, and earlier
answers of the same model to the same tenant.

After Saxena 2023, "Prompt lookup decoding", and Oliaro et al. 2024, "SuffixDecoding".
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from itertools import count

from vlm_serve.engine.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.drafts.texts import (
    MAX_COMPARED,
    ORDER,
    Answers,
    Text,
    longer,
    nearest,
    repeated,
)
from vlm_serve.engine.sequence import Sequence

BYTES_PER_TOKEN = 200
"""Bytes per token of an earlier answer: its dictionary entry, its predecessor link, and the
token."""
ANSWER_BYTES = 64 << 20
"""Maximum bytes of all earlier answers."""
CONTEXT_BYTES = 12
"""Bytes per token of the prompt before an answer; these are only compared."""
MAX_MISSED = 4
"""Maximum number of mismatches, roughly in a row, before the followed text yields no more
drafts."""
MAX_PROMPT_TOKENS = 1 << 14
"""Number of tokens at the end of a prompt that are searched."""


class _Follower:
    """Follows a sequence through texts that it may repeat."""

    def __init__(self, sequence: Sequence, answers: Answers | None) -> None:
        self._seen = max(0, len(sequence.prompt) - MAX_PROMPT_TOKENS)
        self._own = Text()
        self._answers = answers
        self._prediction = Text(sequence.request.prediction)
        self._text: Tokens[int] = self._prediction.tokens
        self._position = 0
        # Number of equal tokens so far. A prediction is trusted from the start.
        self._length = MAX_EVIDENCE if sequence.request.prediction else 0
        self._missed = 0
        self._start = len(sequence.prompt)

    @property
    def evidence(self) -> int:
        """Number of equal tokens in the followed text, at most `MAX_EVIDENCE`."""
        return min(self._length, MAX_EVIDENCE)

    def propose(self, tokens: list[int], limit: int) -> tuple[int, ...]:
        new = tokens[self._seen :]
        for position, token in enumerate(new, self._seen):
            if position >= self._start:
                self._follow(token)
        self._own.extend(new)
        self._seen = len(tokens)
        if self._length < ORDER or self._position >= len(self._text):
            self._look_up()
        if self._missed > MAX_MISSED or not self._position < len(self._text):
            return ()
        if self._text is self._own.tokens:
            return repeated(self._text, self._position, limit)
        return tuple(self._text[self._position : self._position + limit])

    def _follow(self, token: int) -> None:
        """Advance by one token in the followed text. After a mismatch, keep following: the next
        tokens may be equal again."""
        held = self._position < len(self._text) and self._text[self._position] == token
        if held:
            self._position, self._length = self._position + 1, self._length + 1
            self._missed = 0 if self._length >= ORDER else self._missed
        else:
            self._position = nearest(self._text, self._position, token, lost=not self._length)
            self._length = 0
            self._missed += 1

    def _look_up(self) -> None:
        """Move to the longest match of the latest tokens.

        The first tokens of an answer match their first occurrence in the prompt: copies start where
        a text starts. A text with a single mismatch is not left for a short match elsewhere.
        """
        own, generated = self._own.tokens, self._seen - self._start
        best = longer(self._prediction.find(own), self._own.find(own))
        if self._answers is not None:
            best = longer(best, self._answers.find(own))
        if best is None and 0 < generated < ORDER:
            best = self._own.first(generated)
        follows = self._missed <= 1 and self._position < len(self._text)
        if best is not None and (best.length > ORDER or not follows):
            # Count equal tokens of the answer only: equal prompts say little about answers.
            self._text, self._position = best.text, best.at
            self._length = min(best.length, generated)
            self._missed = int(self._length < ORDER)


class SuffixDrafter:
    """Drafts by suffix lookup. A token costs a few lookups, whatever the length of the texts.

    Args:
        most_bytes: maximum bytes of earlier answers; the oldest are removed first.

    Attributes:
        num_bytes: bytes of the stored answers.
    """

    def __init__(self, most_bytes: int = ANSWER_BYTES) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._followers: dict[int, _Follower] = {}
        self._answers: dict[bytes, Answers] = {}
        self._order: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._numbers = count()

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        follower = self._followers.get(sequence.number)
        if follower is None:
            follower = _Follower(sequence, self._answers.get(sequence.keys.root))
            self._followers[sequence.number] = follower
        return follower.propose(sequence.token_ids, limit)

    def evidence(self, sequence: Sequence) -> int:
        return self._followers[sequence.number].evidence

    def forget(self, sequence: Sequence) -> None:
        self._followers.pop(sequence.number, None)
        before, generated_ids = sequence.info.token_ids[-MAX_COMPARED:], sequence.generated
        size = len(before) * CONTEXT_BYTES + len(generated_ids) * BYTES_PER_TOKEN
        if sequence.request.cold or not generated_ids or size > self._most_bytes:
            return
        while self.num_bytes + size > self._most_bytes:
            self._remove_oldest()
        number, root = next(self._numbers), sequence.keys.root
        text = array("i", (*before, *generated_ids))
        self._answers.setdefault(root, Answers()).add(number, text, first=len(before))
        self._order[number] = root, size
        self.num_bytes += size

    def _remove_oldest(self) -> None:
        number, (root, size) = self._order.popitem(last=False)
        answers = self._answers[root]
        self.num_bytes -= size
        answers.remove(number)
        if not answers.texts:
            del self._answers[root]
