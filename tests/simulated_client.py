"""A caller of the simulation, who knows the answer that must come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from symbolic import END_OF_TURN, NOTHING, chain, expert_rows, extended, logprob_rows, next_token

from vlm_serve.engine.requests.outputs import Delta, PromptLogprobs
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.preprocess.identity.prompt import Prompt


@dataclass
class Client:
    """One caller: collects deltas and knows the answer that must come."""

    group: SequenceGroup
    asked: Prompt
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    poisonous: bool = False
    complete_experts: bool = False
    expert_gaps: int = 0
    weights: bytes = NOTHING
    epochs: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def push(self, delta: Delta) -> None:
        assert delta.index not in self.finished, "a delta after the last one"
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.finished[delta.index] = delta.finish_reason
        assert (delta.error is not None) == (delta.finish_reason == "error")
        answered = delta.finish_reason in ("stop", "length")
        wanted = self.group.request.params.return_routed_experts
        assert (delta.routed_experts is not None) == (answered and wanted)
        if delta.routed_experts is not None:
            self._verify_experts(delta, delta.routed_experts)
        first = len(self.tokens[delta.index]) == len(delta.token_ids) == 1
        wanted = self.group.request.params.prompt_logprobs is not None
        assert (delta.prompt_logprobs is not None) == (first and wanted)
        if delta.prompt_logprobs is not None:
            self._verify_logprobs(delta.prompt_logprobs)

    def _verify_experts(self, delta: Delta, rows: npt.NDArray[Any]) -> None:
        """Every row outside of the gaps is that of the prefix; gaps lie in what was cached."""
        request = self.group.request
        prompt = request.prompt
        token_ids = [*prompt.token_ids, *self.tokens[delta.index]]
        start = request.params.routed_experts_prompt_start
        weights = [*self._epochs(delta.index).values()][-1]
        digests = chain(prompt.positions, token_ids, weights)
        expected = expert_rows(digests, start, len(token_ids) - 1).copy()
        for first, last in delta.routed_experts_gaps:
            assert not self.complete_experts, "a gap although only complete rows may be reused"
            assert start <= first < last < len(token_ids)
            expected[first - start : last - start] = 0
            self.expert_gaps += 1
        assert np.array_equal(rows, expected), "rows of another prefix"

    def _verify_logprobs(self, reports: tuple[PromptLogprobs, ...]) -> None:
        """Each is what the model says cold to the same prefix."""
        prompt, params = self.group.request.prompt, self.group.request.params
        weights = self._epochs(0)[0]
        digests = chain(prompt.positions, prompt.token_ids, weights)
        first = max(1, params.prompt_logprobs_start)
        rows = logprob_rows(digests, first, len(prompt), params.prompt_logprobs or 0)
        assert len(reports) == len(rows)
        for token, report, row in zip(prompt.token_ids[first:], reports, rows, strict=True):
            others = dict(zip(row["ids"].tolist(), row["logprobs"].tolist(), strict=True))
            assert report.rank == row["rank"]
            assert report.logprobs == {token: float(row["logprob"])} | others

    def verify(self) -> None:
        """What was received is a prefix of (or, if it ended by itself, exactly) the cold answer.
        The report accounts for the whole prompt."""
        self._verify_report()
        self._verify_weights()
        for sequence in self.group.sequences:
            received = self.tokens.get(sequence.index, [])
            epochs = self._epochs(sequence.index)
            expected = cold_answer(self.group.request, sequence.info.seed, len(received), epochs)
            assert received == expected, "a hit changed the answer"
            if self.finished[sequence.index] == "length":
                assert len(received) == self.group.request.params.max_tokens
            if self.finished[sequence.index] == "stop":
                assert received[-1] == END_OF_TURN

    def under(self, weights: bytes) -> None:
        """Note that these weights compute from now on."""
        for sequence in self.group.sequences:
            if sequence.answer.finish_reason is None:
                self._epochs(sequence.index)[sequence.num_generated] = weights

    def _epochs(self, choice: int) -> dict[int, bytes]:
        """Weights of a choice, each with the token from which on they compute."""
        return self.epochs.setdefault(choice, {0: self.weights})

    def _verify_weights(self) -> None:
        """The report tells the same."""
        report = self.group.report
        for choice, tokens in self.tokens.items():
            if report is None or not report.weights or not tokens:
                continue
            changes = [each for each in report.weight_changes if each.choice == choice]
            told = {0: report.weights} | {each.token: each.weights for each in changes}
            due = {at: weights.hex() for at, weights in self._epochs(choice).items()}
            assert told == due, "the report names other weights"

    def _verify_report(self) -> None:
        report, prompt = self.group.report, self.group.request.prompt
        if report is None:
            return
        position, reused = 0, 0
        for segment in report.segments:
            assert position == segment.start < segment.end, "a gap in the report"
            position = segment.end
            reused += segment.end - segment.start if segment.source != "computed" else 0
        assert position == len(prompt) and reused == report.boundary == sum(report.tiers.values())
        assert (report.boundary_key is None) == (report.boundary == 0)
        sources = [media.source for media in report.media]
        if any(self.tokens.values()):
            assert len(sources) == len(prompt.spans)
            for span, source in zip(prompt.spans, sources, strict=True):
                was_there = span.end <= report.boundary
                made = ("encoded", "host")
                assert source in (("reused", *made) if was_there else ("cached", *made))
            assert report.media_encoded <= sources.count("encoded")


def cold_answer(
    request: Request,
    seed: int,
    count: int,
    epochs: Mapping[int, bytes] = MappingProxyType({0: NOTHING}),
) -> list[int]:
    """What a model says that has computed nothing before.

    Args:
        epochs: from which token on it has which weights.
    """
    prompt, answer = request.prompt, list[int]()
    for at in range(count):
        if at in epochs:
            digest = chain(prompt.positions, [*prompt.token_ids, *answer], epochs[at])[-1]
        token = next_token(digest, seed)
        answer.append(token)
        digest = extended(digest, token)
    return answer
