"""Finds out, beside the engine's thread, what next turns share with answers that have ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vlm_serve.engine.requests.outputs import FinishReason
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.errors import EngineClosedError, VlmServeError
from vlm_serve.preprocess.identity.prompt import SharedTokens

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlainTurn:
    """The next turn of a caller who sends an answer's text back as it is."""

    shared_tokens: SharedTokens

    @property
    def kind(self) -> str:
        return "chat"

    def shared(self, text: str, token_ids: Tokens[int], reason: FinishReason) -> int:
        """See `NextTurn`."""
        return self.shared_tokens({"role": "assistant", "content": text}, token_ids)


class NextTurns:
    """Renders conversations again, one after the other: their answers have been delivered already.

    Args:
        post: runs a command on the engine's thread; raises EngineClosedError.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vlm-serve-turns")

    def ask(self, sequence: Sequence, report: Callable[[int], None]) -> None:
        """Report later, on the engine's thread, how many tokens the next turn shares. What cannot
        be rendered shares nothing."""
        turn, reason = sequence.request.next_turn, sequence.answer.finish_reason
        assert turn is not None and reason is not None
        text, token_ids = "".join(sequence.texts), sequence.generated

        def run(reason: FinishReason = reason) -> None:
            shared = 0
            try:
                shared = turn.shared(text, token_ids, reason)
            except VlmServeError:
                pass  # the template refuses the answer, and would refuse it from the client too
            except Exception:
                _log.exception("a next turn could not be rendered")
            with contextlib.suppress(EngineClosedError):
                self._post(lambda: report(shared))

        self._pool.submit(run)

    def close(self) -> None:
        """Drop waiting calls; a running one finishes unseen."""
        self._pool.shutdown(wait=False, cancel_futures=True)
