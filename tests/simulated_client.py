"""A caller of the simulation, who knows the answer that must come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from symbolic import (
    END_OF_TURN,
    NOTHING,
    chain,
    continued,
    expert_rows,
    extended,
    logprob_rows,
    mixed,
    next_token,
)

from vlm_serve.engine.requests.outputs import Delta, PromptLogprobs
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.preprocess.identity.prompt import Prompt


class Spell(NamedTuple):
    """Weights that compute an answer from some token on.

    Attributes:
        token: of the answer.
        kept: so many tokens of prompt and answer stay as they were computed before.
        weights: compute what is behind these.
    """

    token: int
    kept: int
    weights: bytes


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
    spells: dict[int, list[Spell]] = field(default_factory=dict)

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
        digests = self._digests(delta.index, token_ids)
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
        if any(spell.kept for spell in self._spells(0)):
            return  # the row between two weights is that of neither
        digests = self._digests(0, [*prompt.token_ids])
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
            spells = self._spells(sequence.index)
            request = self.group.request
            forced = dict(enumerate(request.forced)).get(sequence.index, ())
            expected = cold_answer(request, sequence.info.seed, len(received), spells, forced)
            assert received == expected, "a hit changed the answer"
            if self.finished[sequence.index] == "length":
                assert len(received) == self.group.request.params.max_tokens
            if self.finished[sequence.index] == "stop":
                assert received[-1] == END_OF_TURN

    def under(self, weights: bytes, kept: Mapping[int, int] = MappingProxyType({})) -> None:
        """Note that these weights compute from now on; `kept`: of some sequences (by number) they
        keep what others have computed of so many tokens."""
        for sequence in self.group.sequences:
            if sequence.answer.finish_reason is None:
                token = sequence.num_generated
                self._epochs(sequence.index)[token] = weights
                spell = Spell(token, kept.get(sequence.number, 0), weights)
                self._spells(sequence.index).append(spell)

    def restart(self, sequence: Sequence) -> None:
        """Note that a choice has lost what was kept of it."""
        spells = self._spells(sequence.index)
        spells.append(Spell(sequence.num_generated, 0, spells[-1].weights))

    def fork(self, parent: Sequence, choice: Sequence) -> None:
        """Note that a choice goes on from its parent's prompt."""
        self.spells[choice.index] = [*self._spells(parent.index)]

    def keeps(self, choice: int) -> int:
        """Tokens of a choice that others computed than those that go on."""
        return self._spells(choice)[-1].kept

    def _spells(self, choice: int) -> list[Spell]:
        return self.spells.setdefault(choice, [Spell(0, 0, self.weights)])

    def _digests(self, choice: int, token_ids: list[int]) -> list[bytes]:
        """Return the digest of each prefix, computed by the weights of the spells of a choice."""
        prompt, digests = self.group.request.prompt, list[bytes]()
        for spell in self._spells(choice):
            if spell.token <= len(token_ids) - len(prompt):
                digests = _under(spell, digests, prompt, token_ids)
        return digests

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
    spells: Iterable[Spell] = (Spell(0, 0, NOTHING),),
    forced: Tokens[int] = (),
) -> list[int]:
    """What a model says that has computed nothing before.

    Args:
        spells: which weights it has, and when.
        forced: what it has to say at first.
    """
    prompt, answer, digests = request.prompt, list[int](), list[bytes]()
    spell = Spell(0, 0, NOTHING)
    for at in range(count):
        if answer:
            between = 0 < spell.kept == len(prompt) + at - 1
            before = mixed(digests[-1], spell.weights) if between else digests[-1]
            digests.append(extended(before, answer[-1]))
        for each in spells:
            if each.token == at:
                spell = each
                digests = _under(spell, digests, prompt, [*prompt.token_ids, *answer])
        answer.append(forced[at] if at < len(forced) else next_token(digests[-1], seed))
    return answer


def _under(spell: Spell, digests: list[bytes], prompt: Prompt, token_ids: list[int]) -> list[bytes]:
    if not spell.kept:
        return chain(prompt.positions, token_ids, spell.weights)
    return continued(digests[: spell.kept + 1], prompt.positions, token_ids, spell.weights)
