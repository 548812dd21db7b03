"""Active requests and their choices."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlm_serve.cache.experts import ExpertPiece
from vlm_serve.cache.tiers.store_calls import WaitBudget
from vlm_serve.engine.requests.answer import Answer
from vlm_serve.engine.requests.outputs import CacheReport, Delta, PromptLogprobs, Usage
from vlm_serve.engine.requests.plan import (
    SampledToken,
    SampleTask,
    SequenceInfo,
)
from vlm_serve.engine.requests.prompt_rows import PromptLog
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import KEY_BYTES

if TYPE_CHECKING:
    from vlm_serve.cache.logprobs import WantedRows
    from vlm_serve.cache.records import Lease
    from vlm_serve.cache.suspension import Suspended

Rows = npt.NDArray[Any]
Gaps = tuple[tuple[int, int], ...]

_FIRST_CAPACITY = 64


class SequenceGroup:
    """All choices of one request, with the state that they share.

    Args:
        request: the request.
        numbers: source of sequence numbers.
        language: tokenizer, stop tokens and limits of answers.

    Attributes:
        sequences: its choices.
        report, cached_tokens: results of its first admission.
        encoded_spans: starts of the media spans that the vision tower encoded for it.
        recalled_spans: tiers of the media spans whose embeddings were fetched, by the spans'
            starts.
        prompt_log: log-probabilities of the prompt's tokens; None if not requested.
        drafted_tokens, accepted_tokens: numbers of drafts and of accepted drafts.
    """

    def __init__(self, request: Request, numbers: Iterator[int], language: Language) -> None:
        self.request = request
        self.report: CacheReport | None = None
        self.cached_tokens = 0
        self.encoded_spans: set[int] = set()
        self.recalled_spans: dict[int, str] = {}
        params = request.params
        self.prompt_log = (
            PromptLog(params.prompt_logprobs_start, len(request.prompt), params.prompt_logprobs)
            if params.prompt_logprobs is not None
            else None
        )
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.sequences = [
            Sequence(next(numbers), self, index, Answer(request, language))
            for index in range(request.params.n)
        ]

    @property
    def usage(self) -> Usage:
        generated = sum(sequence.num_generated for sequence in self.sequences)
        return Usage(
            len(self.request.prompt),
            generated,
            self.cached_tokens,
            self.accepted_tokens,
            self.drafted_tokens - self.accepted_tokens,
        )

    @property
    def finished(self) -> bool:
        return all(sequence.answer.finish_reason is not None for sequence in self.sequences)

    @property
    def wanted_rows(self) -> WantedRows | None:
        """Requested log-probabilities of the prompt that are still missing."""
        return self.prompt_log.wanted if self.prompt_log is not None else None


class Sequence:
    """Token ids, keys and lengths of one choice: `num_cached <= num_computed <= num_tokens`.

    Attributes:
        info: data for executors.
        priority: lower values run first: the request's own, or the best of those that wait for it.
        prefill_target: tokens below this position go through the chunk kernel. It is the whole
            length each time the sequence starts from shared entries, so recomputed tokens count as
            prompt; with `CacheConfig.exact_only` it is the prompt's, and decode steps compute the
            answer's tokens again.
        settled_blocks: number of entries of the lease's table that the executor has and that will
            not change; valid from the lease's first commit.
        snapshot_positions: cut points at which a state snapshot is wanted, with their kind.
        suspect_until: set when a step with this sequence has raised. The sequence runs alone until
            it has computed this many tokens.
        experts: routed experts of its tokens; None if not requested.
        fetching: True while something is being fetched from which it can start deeper.
        patience: time spent waiting for lower cache tiers, including preprocessing.
        overtakes: while waiting, False once it did not fit into the whole budget for overtaking.
        pending: number of accepted updates that its state row does not contain yet.
        forced: tokens that its answer begins with, regardless of what is drawn.
        adapter_slot: the slot of its adapter while it runs; -1 without one.
        texts: the answer's text by pieces, if a next turn is expected.
    """

    def __init__(self, number: int, group: SequenceGroup, index: int, answer: Answer) -> None:
        request = group.request
        prompt, params = request.prompt, request.params
        self.number = number
        self.group = group
        self.request = request
        self.prompt = prompt
        self.index = index
        self.priority = request.priority
        self.answer = answer
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        self.info = SequenceInfo(
            number, prompt.token_ids, prompt.positions, prompt.rope_delta, params, seed + index
        )
        self.token_ids = list(prompt.token_ids)
        self.keys = prompt.keys.fork(secrets.token_bytes(KEY_BYTES) if request.cold else None)
        self.num_cached = 0
        self.num_computed = 0
        self.prefill_target = len(self.token_ids)
        self.lease: Lease | None = None
        self.settled_blocks = 0
        self.suspended: Suspended | None = None
        self.snapshot_positions: dict[int, str] = {}
        self.suspect_until = 0
        self.fetching = False
        self.patience = WaitBudget(prompt.waited)
        self.overtakes = True
        self.pending = 0
        self.adapter_slot = -1
        self.forced = request.forced[index] if index < len(request.forced) else ()
        self.texts: list[str] = []
        self.experts = ExpertLog() if params.return_routed_experts else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.info.token_ids)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.prompt) :])

    @property
    def pending_forks(self) -> list[Sequence]:
        """Choices that fork from this one when it samples its first token."""
        if self.index != 0 or self.num_generated > 0:
            return []
        return [s for s in self.group.sequences[1:] if s.answer.finish_reason is None]

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_target

    @property
    def replaying(self) -> bool:
        """True while forced tokens remain."""
        return bool(self.forced) and self.num_generated < len(self.forced)

    def check_lengths(self) -> None:
        assert 0 <= self.num_cached <= self.num_computed <= self.num_tokens
        assert self.prefill_target <= self.num_tokens

    def sample_task(self) -> SampleTask:
        """Return the task that samples its next token.

        Raises InvalidRequestError for a forced token that the request's rules forbid.
        """
        position = self.num_generated
        return self._task(position, *self.answer.mask(self.token_ids, position))

    def draft_tasks(self, first: SampleTask, drafts: Tokens[int]) -> tuple[SampleTask, ...]:
        """Return the tasks that sample the next tokens if the drafts are accepted, beginning with
        `first`. Cut the drafts at the first one that the request's rules forbid. Raise as
        `sample_task` does."""
        tasks = [first]
        masks = self.answer.masks_ahead(first.mask, self.token_ids, first.position, drafts)
        for draft, mask in zip(drafts, masks, strict=False):
            tasks[-1] = replace(tasks[-1], draft=draft)
            tasks.append(self._task(first.position + len(tasks), *mask))
        return tuple(tasks)

    def _task(self, position: int, mask: bytes | None, unbiased: bool) -> SampleTask:
        if position >= len(self.forced):
            return SampleTask(self.number, position, mask, unbiased)
        forced = self.forced[position]
        if mask is not None and not mask[forced // 8] >> forced % 8 & 1:
            raise InvalidRequestError(
                f"forced: token {forced} is forbidden by the request's rules", param="forced"
            )
        return SampleTask(self.number, position, mask, unbiased, forced=forced)

    def accept(self, sampled: SampledToken) -> Delta:
        """Append a sampled token, decide whether the choice ends, and return the increment."""
        token, answer, group = sampled.token_id, self.answer, self.group
        self.token_ids.append(token)
        self.keys.extend((token,))
        text = answer.accept(token, self.num_generated)
        if self.request.next_turn is not None:
            self.texts.append(text)
        rows, gaps = self._routed_experts()
        return Delta(
            index=self.index,
            text=text,
            token_ids=(token,),
            logprobs=(sampled.logprobs,) if self.request.params.logprobs is not None else (),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            usage=group.usage,
            cache_report=group.report,
            routed_experts=rows,
            routed_experts_gaps=gaps,
            prompt_logprobs=self._first_report(),
            vector=sampled.vector,
        )

    def _first_report(self) -> tuple[PromptLogprobs, ...] | None:
        """Return the prompt's log-probabilities for a choice's first delta."""
        log = self.group.prompt_log
        if log is None or self.num_generated != 1:
            return None
        return log.report(self.prompt.token_ids)

    def _routed_experts(self) -> tuple[Rows | None, Gaps]:
        """Return the requested rows once the choice has ended."""
        if self.experts is None or self.answer.finish_reason is None:
            return None, ()
        start = self.request.params.routed_experts_prompt_start
        return self.experts.take(start, self.num_tokens - 1)


class ExpertLog:
    """Routed experts of one choice, token by token, from its own steps or from the cache.

    Rows `[tokens, layers, top_k]` of expert ids. There may be gaps: cached tokens without
    recorded rows. Rows written again (after a preemption) replace the old ones."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._known = np.zeros(0, dtype=bool)

    def put(self, start: int, rows: Rows) -> None:
        """Store the rows of tokens `[start, start + len(rows))`."""
        end = start + len(rows)
        if self._rows is None:
            self._rows = np.zeros((0, *rows.shape[1:]), dtype=rows.dtype)
        if end > len(self._known):
            self._resize(max(end, 2 * len(self._known), _FIRST_CAPACITY))
        self._rows[start:end] = rows
        self._known[start:end] = True

    def replay(self, pieces: Iterable[ExpertPiece]) -> None:
        """Take over the rows of cached tokens. Where the cache has none, rows known already are
        kept."""
        for piece in pieces:
            if piece.rows is not None:
                self.put(piece.start, piece.rows[: piece.end - piece.start])

    def num_unknown(self, end: int) -> int:
        """Return how many of the tokens `[0, end)` have no row."""
        return end - int(self._known[:end].sum())

    def take(self, start: int, end: int) -> tuple[Rows, Gaps]:
        """Return the rows of tokens `[start, end)`, zero where unknown, and the unknown positions
        as (first, last + 1) pairs."""
        assert self._rows is not None, "nothing was ever computed"
        known = np.zeros(end - start, dtype=bool)
        have = self._known[start:end]
        known[: len(have)] = have
        rows = np.zeros((end - start, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(have)] = self._rows[start:end]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], known, [True]))))
        bounds = [int(edge) + start for edge in edges]
        return rows, tuple(zip(bounds[::2], bounds[1::2], strict=True))

    def copy(self) -> ExpertLog:
        """Return an independent copy, for a choice that forks."""
        twin = ExpertLog()
        twin._rows = None if self._rows is None else self._rows.copy()
        twin._known = self._known.copy()
        return twin

    def _resize(self, capacity: int) -> None:
        assert self._rows is not None
        rows = np.zeros((capacity, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(self._rows)] = self._rows
        known = np.zeros(capacity, dtype=bool)
        known[: len(self._known)] = self._known
        self._rows, self._known = rows, known
