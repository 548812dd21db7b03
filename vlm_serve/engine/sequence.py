"""One choice of one request while it lives in the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlm_serve.engine.constraints import Constraint, LogitRules
from vlm_serve.engine.detokenizer import Detokenizer, TokenBytes
from vlm_serve.engine.expert_log import ExpertLog, Gaps, Rows
from vlm_serve.engine.outputs import CacheReport, Delta, FinishReason, Usage
from vlm_serve.engine.plan import PromptLogprobs, Sampled
from vlm_serve.grammar.state import Grammar, GrammarState
from vlm_serve.preprocess.keys import KEY_BYTES, PromptKeys
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vlm_serve.cache.records import Lease
    from vlm_serve.cache.suspension import Suspended


@dataclass(eq=False)
class Request:
    """What the caller submitted. `params` has the checkpoint's defaults filled in.

    A `cold` one shares nothing with others: it matches nothing and publishes nothing, and its media
    are encoded for it alone.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    on_delta: Callable[[Delta], None]
    priority: int = 0
    arrival: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    report: CacheReport | None = None
    cached_tokens: int = 0
    encoded_items: set[int] = field(default_factory=set)
    cold: bool = False
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    vocabulary: int = 0
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Of its tokens from the second on, as far as they have been computed."""

    @property
    def usage(self) -> Usage:
        generated = sum(sequence.num_generated for sequence in self.sequences)
        return Usage(len(self.prompt), generated, self.cached_tokens)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What lower cache tiers gave a sequence: (start, end, tier) of the tokens that came up."""

    segments: tuple[tuple[int, int, str], ...]
    failed: bool


class Sequence:
    """Token ids, keys and lengths of one choice: `num_cached <= num_computed <= num_tokens`.

    Attributes:
        prefill_target: tokens below this go through the chunk kernel. It is the whole length each
            time the sequence starts from shared entries, so recomputed tokens count as prompt.
        snapshot_positions: cut points at which a state snapshot is wanted, with their kind.
        suspect_until: set after a step with this sequence has raised: it runs alone until it has
            computed that many tokens.
        experts: the routed experts of its tokens, None if they were not asked for.
        fetching: entries of lower cache tiers are on their way up for it.
        fetched: what came up since it began to wait; it asks once.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        index: int,
        tokenizer: TokenBytes,
        stop_tokens: frozenset[int],
        max_length: int,
    ) -> None:
        self.number = number
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt.token_ids)
        self.keys: PromptKeys = request.prompt.keys.fork()
        if request.cold:
            self.keys.root = secrets.token_bytes(KEY_BYTES)
        self.num_cached = 0
        self.num_computed = 0
        self.prefill_target = len(self.token_ids)
        self.lease: Lease | None = None
        self.suspended: Suspended | None = None
        self.snapshot_positions: dict[int, str] = {}
        self.suspect_until = 0
        self.fetching = False
        self.fetched: Fetched | None = None
        self.finish_reason: FinishReason | None = None
        params = request.params
        self.experts = ExpertLog() if params.return_routed_experts else None
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        self.seed = seed + index
        self._stop_tokens = stop_tokens
        self._ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else stop_tokens
        )
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self.constraint = self._make_constraint(tokenizer)
        self._max_length = max_length
        if params.max_tokens is not None:
            self._max_length = min(max_length, len(self.token_ids) + params.max_tokens)

    def _make_constraint(self, tokenizer: TokenBytes) -> Constraint | None:
        rules, grammar = self.request.rules, self.request.grammar
        if rules is None and grammar is None:
            return None
        state = None
        if grammar is not None:
            state = GrammarState(grammar, tokenizer.token_bytes, self.request.vocabulary)
        return Constraint(rules, state, self._ends)

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def match_limit(self) -> int:
        """How many tokens may come from the cache. The last token is always computed, and all are
        while log-probabilities of the prompt are missing."""
        if self.reports_prompt:
            return 0
        return self.num_tokens - 1

    @property
    def reports_prompt(self) -> bool:
        """Log-probabilities of the prompt are wanted and have yet to be computed."""
        request = self.request
        missing = len(request.prompt_logprobs) < len(request.prompt) - 1
        return request.params.prompt_logprobs is not None and missing

    def report_prompt(self, start: int, reports: list[PromptLogprobs]) -> None:
        """Keeps the reports of the tokens from `start + 1` on; known ones were computed again."""
        known = self.request.prompt_logprobs
        known.extend(reports[len(known) - start :])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.prompt) :])

    @property
    def unborn(self) -> list[Sequence]:
        """The choices that fork from this one when it samples its first token."""
        if self.index != 0 or self.num_generated > 0:
            return []
        return [s for s in self.request.sequences[1:] if s.finish_reason is None]

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_target

    @property
    def banned(self) -> tuple[int, ...]:
        """Token ids that may not come next: nothing ends before `min_tokens`."""
        return tuple(sorted(self._ends)) if self.num_generated < self._min_tokens else ()

    @property
    def _min_tokens(self) -> int:
        return self.request.params.min_tokens

    def check_lengths(self) -> None:
        assert 0 <= self.num_cached <= self.num_computed <= self.num_tokens
        assert self.prefill_target <= self.num_tokens

    def accept(self, sampled: Sampled) -> Delta:
        """Appends a sampled token, decides whether the choice ends, says what became visible."""
        token = sampled.token_id
        self.token_ids.append(token)
        self.keys.extend((token,))
        may_stop = self.num_generated >= self._min_tokens
        stop_reason: int | str | None = None
        complete = False
        if self.constraint is not None:
            self.constraint.accept(token)
            complete = self.constraint.finished
        if (token in self._ends and may_stop) or complete:
            self.finish_reason = "stop"
            stop_reason = None if token in self._stop_tokens or complete else token
            text, _ = self._detokenizer.finish()
        else:
            text, stop = self._detokenizer.push(token, check_stop=may_stop)
            if stop is not None:
                self.finish_reason, stop_reason = "stop", stop
            elif self.num_tokens >= self._max_length:
                self.finish_reason = "length"
                rest, stop = self._detokenizer.finish()
                text += rest
        rows, gaps = self._routed_experts()
        return Delta(
            index=self.index,
            text=text,
            token_ids=(token,),
            logprobs=(sampled.logprobs,) if self.request.params.logprobs is not None else (),
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            usage=self.request.usage,
            cache_report=self.request.report,
            routed_experts=rows,
            routed_experts_gaps=gaps,
            prompt_logprobs=self._first_report(),
        )

    def _first_report(self) -> tuple[PromptLogprobs, ...] | None:
        """The prompt's log-probabilities, on a choice's first delta."""
        if self.request.params.prompt_logprobs is None or self.num_generated != 1:
            return None
        return tuple(self.request.prompt_logprobs)

    def _routed_experts(self) -> tuple[Rows | None, Gaps]:
        """Of a choice that has ended: the rows that were asked for."""
        if self.experts is None or self.finish_reason is None:
            return None, ()
        start = self.request.params.routed_experts_prompt_start
        return self.experts.take(start, self.num_tokens - 1)
