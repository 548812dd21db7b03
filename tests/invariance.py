"""The same requests under many circumstances: each token and log-probability must stay as it is.

A request is first answered alone, on an empty cache. Then it is answered in random company, behind
cache hits, in steps of another size, preempted, and in steps that fail. `Disturbed` preempts and
strikes; what a struck step has written is made NaN.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from exactness import _picture, _words
from guesses import draft_freely
from parity import executor_of
from parity_cases import random_ids, user
from prepared_prompts import answer_prepared
from together import together

from vlm_serve.engine.core.executor import StepError
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

MOST_AT_ONCE = 6
WAYS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "small steps": {"max_num_batched_tokens": 40},
    "little memory": {"cache_memory": "600KiB", "host_cache_memory": "64MiB", "max_num_seqs": 3},
    "drafts": {"speculative": "suffix"},
}
"""Engines with equal answers, by their differences."""


@dataclass(frozen=True)
class Ask:
    """A request: token ids, or the parts of a user's message."""

    content: tuple[int, ...] | tuple[Any, ...]
    params: SamplingParams

    def prompt(self, engine: Engine) -> Prompt:
        prepare = engine.preprocessor
        if all(isinstance(each, int) for each in self.content):
            return prepare.prepare_tokens(self.content)
        return prepare.prepare([user(*self.content)])


Start = Callable[[EngineConfig], AbstractContextManager[Pipeline]]
Answer = tuple[Any, ...]
"""Tokens and log-probabilities of each choice, and those of the prompt."""


@dataclass(frozen=True)
class Result:
    """Of how many requests the answer was equal, of how many its first token with what came before,
    and what happened meanwhile."""

    name: str
    equal: int
    first: int
    total: int
    counts: Counter[str]


def made_asks(
    count: int, seed: int, *, pictures: bool = False, longest: int = 160, answer: int = 12
) -> list[Ask]:
    """Random requests, many with equal beginnings.

    Args:
        pictures: some are about pictures.
        longest, answer: most tokens that they have in common, and of an answer.
    """
    rng = random.Random(seed)
    bases = [random_ids(rng.randint(longest // 4, longest), seed + i) for i in range(4)]
    scene = (_words(rng, 10), _picture(rng), _words(rng, 20), _picture(rng), _words(rng, 5))
    found = []
    content: tuple[Any, ...]
    for _ in range(count):
        if pictures and rng.random() < 0.3:
            content = (*scene[: rng.randint(2, 5)], _words(rng, 15))
        else:
            base = rng.choice(bases)
            own = random_ids(rng.randint(1, longest // 4), rng.getrandbits(30))
            content = (*base[: rng.randint(8, len(base))], *own)
        found.append(Ask(content, _params(rng, answer)))
    return found


def _params(rng: random.Random, answer: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(2, answer),
        temperature=rng.choice([0.0, 0.0, 0.8]),
        seed=rng.getrandbits(20),
        ignore_eos=True,
        logprobs=3,
        n=rng.choice([1, 1, 1, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def with_next_turns(asks: Sequence[Ask], answers: Sequence[Answer], seed: int) -> list[Ask]:
    """Requests behind the ends of answers."""
    rng = random.Random(seed)
    return [
        Ask(
            (*ask.content, *answer[0][0], *random_ids(rng.randint(1, 20), rng.getrandbits(30))),
            replace(_params(rng, 2), max_tokens=ask.params.max_tokens),
        )
        for ask, answer in zip(asks, answers, strict=True)
        if all(isinstance(each, int) for each in ask.content)
    ]


def answer_of(output: Output) -> Answer:
    choices = tuple(
        (tuple(each.token_ids), tuple(map(_items, each.logprobs or ()))) for each in output.choices
    )
    prompt = tuple((each.rank, _items(each.logprobs)) for each in output.prompt_logprobs or ())
    return (*choices, prompt)


def _first(answer: Answer) -> Answer:
    *choices, prompt = answer
    return (*((tokens[:1], rows[:1]) for tokens, rows in choices), prompt)


def _items(logprobs: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(logprobs.items())


def alone(pipe: Pipeline, asks: Iterable[Ask]) -> list[Answer]:
    """Answer each request on an empty cache, with nothing beside it."""
    found = []
    for ask in asks:
        pipe.engine.flush()
        found.append(answer_of(_run(pipe, [ask])[0]))
    return found


def _run(pipe: Pipeline, asks: Sequence[Ask]) -> list[Output]:
    prompts = [ask.prompt(pipe.engine) for ask in asks]
    with together(pipe.engine, len(asks)):
        return answer_prepared(pipe, prompts, [ask.params for ask in asks])


def in_company(
    pipe: Pipeline, asks: Sequence[Ask], expected: Sequence[Answer], name: str, rng: random.Random
) -> Result:
    """Answer the requests in random order and batches, on the cache as it is."""
    engine, counts, equal, first = pipe.engine, Counter[str](), 0, 0
    before = engine.stats()
    order = rng.sample(range(len(asks)), len(asks))
    while order:
        group = [order.pop() for _ in range(min(len(order), rng.randint(1, MOST_AT_ONCE)))]
        outputs = _run(pipe, [asks[i] for i in group])
        for i, output in zip(group, outputs, strict=True):
            answer = answer_of(output)
            equal += answer == expected[i]
            first += _first(answer) == _first(expected[i])
            counts["hits"] += output.usage.cached_tokens > 0
            counts["from a tier"] += any(
                tokens for tier, tokens in output.cache_report.tiers.items() if tier != "device"
            )
            counts["drafts"] += output.usage.accepted_prediction_tokens or 0
    counts["preempted"] += engine.stats()["num_preemptions"] - before["num_preemptions"]
    engine.check()
    return Result(name, equal, first, len(asks), counts)


def _evict(engine: Engine) -> None:
    """Move what no request holds to the lower tiers, whatever else would have been evicted."""
    engine.call(engine._scheduler.queues.cache._evictor.evict_everything)


class Disturbed:
    """Preempts sequences between the steps of an engine, and lets steps fail.

    Args:
        engine: the engine; steps run in this process.
        rng: decides when.
        preempts, strikes: shares of steps before which a sequence is preempted, half of the times
            with the loss of all that it has computed, and of steps that fail.

    Attributes:
        counts: how often each has happened.
    """

    def __init__(
        self, engine: Engine, rng: random.Random, *, preempts: float = 0.0, strikes: float = 0.0
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._scheduler, self._executor = engine._scheduler, executor_of(engine)
        self._plan, self._run = self._scheduler.plan, self._executor.run
        self._rng, self._preempts, self._strikes = rng, preempts, strikes

    @contextmanager
    def within(self) -> Iterator[None]:
        log = logging.getLogger("vlm_serve.engine.core.loop")
        with ExitStack() as stack:
            stack.enter_context(patch.object(log, "disabled", True))
            stack.enter_context(patch.object(self._scheduler, "plan", self.plan))
            stack.enter_context(patch.object(self._executor, "run", self.run))
            yield

    def plan(self) -> StepPlan | None:
        queues = self._scheduler.queues
        running = [each for each in queues.running if each.lease and each.lease.committed]
        if running and self._rng.random() < self._preempts:
            sequence = self._rng.choice(running)
            queues.preempt(sequence)
            self.counts["preempted"] += 1
            if sequence.suspended is not None and self._rng.random() < 0.5:
                queues.cache.drop(sequence.suspended)
                sequence.suspended = None
                self.counts["recomputed"] += sequence.num_generated > 0
        return self._plan()

    def run(self, plan: StepPlan) -> StepOutput:
        output = self._run(plan)
        if self._scheduler.queues.suspects or self._rng.random() >= self._strikes:
            return output
        self.counts["struck"] += 1
        rows = [item.dst_row for item in plan.slices if item.dst_row >= 0]
        self._executor.poison_freed((), rows)
        raise StepError(RuntimeError("struck"), "unknown")


def circumstances(
    pipe: Pipeline, asks: Sequence[Ask], expected: Sequence[Answer], rng: random.Random
) -> Iterator[Result]:
    """Answer the requests in batches, as hits, preempted and in steps that fail."""
    pipe.engine.flush()
    yield in_company(pipe, asks, expected, "in batches", rng)
    if pipe.engine.config.host_cache_memory:
        _evict(pipe.engine)
    yield in_company(pipe, asks, expected, "as hits", rng)
    for name, rates in (("preempted", {"preempts": 0.25}), ("struck", {"strikes": 0.15})):
        disturbed = Disturbed(pipe.engine, rng, **rates)
        if rng.random() < 0.5:
            pipe.engine.flush()
        with disturbed.within():
            result = in_company(pipe, asks, expected, name, rng)
        yield replace(result, counts=result.counts + disturbed.counts)


def compared(
    start: Start,
    config: EngineConfig,
    count: int,
    *,
    seed: int = 0,
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    **how: Any,
) -> Iterator[Result]:
    """Answer `count` requests, a third of them next turns, alone and then under all circumstances.

    Args:
        start: starts an engine.
        config: of the engine that answers them alone; the others are changed as `ways` tell.
        how: see `made_asks`.
    """
    asks = made_asks(count - count // 3, seed, **how)
    with start(config) as pipe:
        expected = alone(pipe, asks)
        turns = with_next_turns(asks, expected, seed)[: count - len(asks)]
        expected += alone(pipe, turns)
        asks += turns
    for way, changes in ways.items():
        rng = random.Random(f"{way} {seed}")
        with start(replace(config, **changes)) as pipe:
            if pipe.engine.config.speculative != "off":
                draft_freely(pipe.engine)
            for result in circumstances(pipe, asks, expected, rng):
                yield replace(result, name=f"{way}, {result.name}")
