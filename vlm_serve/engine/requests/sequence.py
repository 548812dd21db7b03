"""Active requests and their choices."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlm_serve.cache.tiers.store_calls import WaitBudget
from vlm_serve.engine.requests.answer import Answer
from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage, WeightChange
from vlm_serve.engine.requests.plan import (
    SampledToken,
    SampleTask,
    SequenceInfo,
)
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import KEY_BYTES

if TYPE_CHECKING:
    from vlm_serve.cache.records import Lease
    from vlm_serve.cache.suspension import Suspended
    from vlm_serve.preprocess.identity.keys import WeightsIdentity


class SequenceGroup:
    """All choices of one request, with the state that they share.

    Args:
        request: the request.
        numbers: source of sequence numbers.
        language: tokenizer, stop tokens and limits of answers.

    Attributes:
        sequences: its choices.
        report, cached_tokens: results of its first admission.
        written_tokens: prompt tokens behind those that the cache has since the prefill.
        encoded_spans: starts of the media spans that the vision tower encoded for it.
        recalled_spans: tiers of the media spans whose embeddings were fetched, by the spans'
            starts.
        drafted_tokens, accepted_tokens: numbers of drafts and of accepted drafts.
    """

    def __init__(self, request: Request, numbers: Iterator[int], language: Language) -> None:
        self.request = request
        self.report: CacheReport | None = None
        self.cached_tokens = 0
        self.written_tokens = 0
        self.encoded_spans: set[int] = set()
        self.recalled_spans: dict[int, str] = {}
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.sequences = [
            Sequence(next(numbers), self, index, Answer(request, language))
            for index in range(request.params.n)
        ]

    @property
    def usage(self) -> Usage:
        generated = 0
        for sequence in self.sequences:  # for every token: no function is called
            generated += len(sequence.token_ids) - sequence.num_given
        return Usage(
            len(self.request.prompt),
            generated,
            self.cached_tokens,
            self.accepted_tokens,
            self.drafted_tokens - self.accepted_tokens,
            self.written_tokens,
        )

    def rekey(self, weights: WeightsIdentity) -> None:
        """Make all keys those of other weights. Nothing was computed of it, nothing of that is
        used, or nothing more of that is published."""
        prompt = replace(self.request.prompt, keys=self.request.prompt.keys.under(weights))
        self.request = replace(self.request, prompt=prompt)
        for sequence in self.sequences:
            sequence.request, sequence.prompt = self.request, prompt
            sequence.keys = sequence.keys.under(weights)
        spans = [each for each in self.sequences if self.holds or each.num_generated]
        if not spans or self.report is None:
            self.report = None
            return
        going = (each for each in spans if each.answer.finish_reason is None)
        digest = weights.whole.hex()
        changes = (WeightChange(each.index, each.num_generated, digest) for each in going)
        self.report = replace(self.report, weight_changes=(*self.report.weight_changes, *changes))

    @property
    def holds(self) -> bool:
        """Return True if some of its KV and state is there."""
        return any(sequence.held is not None for sequence in self.sequences)

    def part(self) -> None:
        """Let go of the choices of a request that has ended.

        Group and choices refer to each other: its prompt, its media and its client's queue would
        stay until the garbage collector finds the circle.
        """
        self.sequences = []

    @property
    def finished(self) -> bool:
        return all(sequence.answer.finish_reason is not None for sequence in self.sequences)


class Sequence:
    """Token ids, keys and lengths of one choice: `num_cached <= num_computed <= num_tokens`.

    Attributes:
        info: data for executors.
        priority: lower values run first: the request's own, or the best of those that wait for it.
        prefill_target: tokens below this position go through the chunk kernel. It is the whole
            length each time the sequence starts from shared entries, so recomputed tokens count as
            prompt; with `CacheConfig.exact_only` it is the prompt's, and decode steps compute the
            answer's tokens again.
        num_given: tokens of its prompt.
        settled_blocks: number of entries of the lease's table that the executor has and that will
            not change; valid from the lease's first commit.
        snapshot_positions: cut points at which a state snapshot is wanted, with their kind.
        suspect_until: set when a step with this sequence has raised. The sequence runs alone until
            it has computed this many tokens.
        fetching: True while something is being fetched from which it can start deeper.
        patience: time spent waiting for lower cache tiers, including preprocessing.
        overtakes: while waiting, False once it did not fit into the whole budget for overtaking.
        pending: number of accepted updates that its state row does not contain yet.
        forced: tokens that its answer begins with, regardless of what is drawn.
        adapter_slot: the slot of its adapter while it runs; -1 without one.
        texts: the answer's text by pieces, if a next turn is expected.
        followers: sequences that wait for what its prefill computes.
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
        self.num_given = len(self.token_ids)
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
        self.followers: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_given

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
    def held(self) -> Lease | None:
        """Return the lease with which it runs or was suspended; None: it starts anew."""
        return self.lease or (None if self.suspended is None else self.suspended.lease)

    @property
    def replaying(self) -> bool:
        """True while forced tokens remain."""
        return bool(self.forced) and self.num_generated < len(self.forced)

    @property
    def uncertain(self) -> str:
        """Return what of its next slice follows from the results of the last one, beside the token
        itself; "" if nothing does."""
        if self.replaying:
            return "replay"
        if self.pending:
            return "drafts"
        return "routed experts" if self.info.params.return_routed_experts else self.answer.uncertain

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
        logprobs = (sampled.logprobs,) if self.request.params.logprobs is not None else ()
        return self.accept_id(sampled.token_id, logprobs, sampled.vector)

    def accept_id(
        self,
        token: int,
        logprobs: tuple[dict[int, float], ...] = (),
        vector: npt.NDArray[np.float32] | None = None,
    ) -> Delta:
        """Do as `accept` does, with the parts of a sampled token."""
        answer, group = self.answer, self.group
        self.token_ids.append(token)
        self.keys.append(token)
        text = answer.accept(token, len(self.token_ids) - self.num_given)
        if self.request.next_turn is not None:
            self.texts.append(text)
        return Delta(
            index=self.index,
            text=text,
            token_ids=(token,),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            usage=group.usage,
            cache_report=group.report,
            vector=vector,
        )
