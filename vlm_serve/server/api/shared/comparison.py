"""Why less of a prompt was reused than of an earlier one: diagnostics that compare two requests.

`CacheReport.reason` says what the cache had; this says what the client has changed.
"""

from __future__ import annotations

from typing import Any

from vlm_serve.engine.requests.outputs import CacheReport
from vlm_serve.preprocess.identity.prompt_parts import PromptParts
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.answers.generation import AttemptGeneration, Generation
from vlm_serve.server.api.shared.answer import Incoming
from vlm_serve.server.api.shared.fields import AnswerRequest
from vlm_serve.server.failover.attempt import Diagnosis
from vlm_serve.server.http.auth import owner_of

_UNAVAILABLE = "unavailable"
_OF_MESSAGES = {
    "not_found": "previous_message_not_found",
    **dict.fromkeys((_UNAVAILABLE, "reasoning_effort", "verbosity"), _UNAVAILABLE),
}
_OF_RESPONSES = {
    "hit": "cache_hit",
    "not_found": "comparison_response_not_found",
    _UNAVAILABLE: _UNAVAILABLE,
}
"""Kinds of a diagnosis without tokens, in each API; the others are what has changed."""


class Comparison:
    """Compares a request's prompt with that of an earlier answer, and has it kept for later ones.

    Args:
        incoming, body: the request.
        conversation: what is in it.
        compared: id of the earlier answer; None: the prompt is only kept.
        settings: see `PromptParts`.
    """

    def __init__(
        self,
        incoming: Incoming,
        body: AnswerRequest,
        conversation: Conversation,
        compared: str | None,
        **settings: str | None,
    ) -> None:
        self._records = incoming.service.state.prompts
        self._owner = owner_of(incoming.scope, body.cache_salt)
        weights = incoming.key_scope(body).adapter.whole
        self._parts = PromptParts.of(conversation, weights, **settings)
        self._compared = compared
        self._earlier = compared and self._records.find(self._owner, compared)

    def keep(self, answer_id: str, generation: Generation) -> None:
        """Keep the prompt under its answer's id; call it on the event loop, once it is computed."""
        usage = generation.usage
        reusable = usage.cached_tokens + usage.written_tokens
        self._records.put(self._owner, answer_id, self._parts, reusable)

    def as_anthropic(self, generation: Generation) -> dict[str, Any] | None:
        """Return the `diagnostics` of a message; None: nothing that was reusable is missing."""
        found = self._found(generation)
        if found is None or found.kind == "hit":
            return None
        if found.kind in _OF_MESSAGES:
            return {"cache_miss_reason": {"type": _OF_MESSAGES[found.kind]}}
        reason = {"type": f"{found.kind}_changed", "cache_missed_input_tokens": found.missed}
        return {"cache_miss_reason": reason}

    def as_openai(self, generation: Generation) -> dict[str, Any] | None:
        """Return the `prompt_cache_diagnostics` of a response; None if none were asked for."""
        found = self._found(generation)
        if found is None:
            return None
        if found.kind in _OF_RESPONSES:
            return {"type": _OF_RESPONSES[found.kind]}
        changed = "input" if found.kind in ("system", "messages") else found.kind
        return {
            "type": "cache_miss",
            "reason": f"{changed}_changed",
            "cache_missed_tokens": found.missed,
            "comparison_reusable_tokens": found.reusable,
        }

    def _found(self, generation: Generation) -> Diagnosis | None:
        """Return what the comparison says; of an attempt what the first one has said, whose replica
        may have known the earlier answer. None: there is nothing to compare with."""
        if self._compared is None:
            return None
        part = generation.part if isinstance(generation, AttemptGeneration) else None
        found = part and part.diagnosis
        found = found or self._diagnosis(generation)
        if part is not None:
            part.diagnosis = found
        return found

    def _diagnosis(self, generation: Generation) -> Diagnosis:
        if not self._earlier:
            return Diagnosis("not_found")
        usage, reusable = generation.usage, self._earlier.reusable
        missed = max(0, min(reusable, usage.prompt_tokens) - usage.cached_tokens)
        change = self._earlier.parts.change(self._parts)
        if not change:
            gone = missed and _is_gone(usage.cached_tokens, generation.cache_report)
            return Diagnosis(_UNAVAILABLE if gone else "hit")
        return Diagnosis(_UNAVAILABLE if change == "options" else change, missed, reusable)


def _is_gone(cached: int, report: CacheReport | None) -> bool:
    """Return True if the cache no longer has what it had, rather than the client's next turn
    leaving out a part of the prompt that only the answer needed."""
    return not cached or (report is not None and report.reason.endswith("_evicted"))
