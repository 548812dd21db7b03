"""Requests of a pipeline: prompts that the engine answers, and their answers collected."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import VlmServeError
from vlm_serve.pipeline.inputs import returned
from vlm_serve.pipeline.output import Collector, Output, TextForm, split_delta
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import ReasoningParser, thought_behind

_T = TypeVar("_T")
FormOf = Callable[[Prompt], TextForm]
"""Returns how the answer to a prompt is split."""


def whole(prompt: Prompt) -> TextForm:
    """Return the form of an answer that is not split."""
    return TextForm()


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer.

    Attributes:
        prepare: makes the prompt, on a thread of the pool.
        form_of: returns how its answer is split.
        pooled: a vector is wanted, not an answer.
    """

    prepare: Callable[[], Prompt]
    params: SamplingParams
    form_of: FormOf = whole
    pooled: bool = False


class Requests:
    """Submits prompts to an engine.

    Args:
        engine: answers them.
        reasoning: how the reasoning of answers to conversations is split off.
        pool: threads that prepare prompts.

    Attributes:
        most: jobs of one call that are open at a time. The engine's batch is full with half of
            them, and what is prepared ahead takes memory.
    """

    def __init__(self, engine: Engine, reasoning: ReasoningParser, pool: ThreadPoolExecutor):
        self._engine = engine
        self._reasoning = reasoning
        self._pool = pool
        self.most = 2 * engine.config.max_num_seqs

    def form_of(self, prompt: Prompt, form: TextForm) -> TextForm:
        """Return how the answer to a conversation's prompt is split.

        Args:
            form: how, but for its thought.
        """
        thought = thought_behind(
            prompt.text,
            self._reasoning,
            continued=form.continued,
            calls=form.tools is not None,
        )
        return TextForm(thought, form.continued, form.tools, form.tool_form)

    def answers(self, jobs: Iterable[Job | Exception]) -> Iterator[tuple[int, Output | Exception]]:
        """Yield the index of each job with its answer or exception, as they end.

        Jobs are read and submitted in their order, `most` at a time. Whoever leaves the loop early,
        or interrupts it, aborts what is open.
        """
        events: queue.SimpleQueue[int] = queue.SimpleQueue()
        waiting: deque[tuple[int, Job, Future[Prompt]]] = deque()
        running: dict[int, tuple[str, Collector]] = {}
        numbered = enumerate(jobs)
        left = True
        try:
            while left or waiting or running:
                while left and len(waiting) + len(running) < self.most:
                    index, job = next(numbered, (-1, None))
                    if job is None:
                        left = False
                    elif isinstance(job, Exception):
                        yield index, job
                    else:
                        future = self._pool.submit(job.prepare)
                        waiting.append((index, job, future))
                        future.add_done_callback(lambda _: events.put(-1))
                if not waiting and not running:
                    continue
                ended = events.get()
                if ended >= 0:
                    yield ended, running.pop(ended)[1].result()
                while waiting and waiting[0][2].done():
                    index, job, future = waiting.popleft()
                    try:
                        ids = partial(events.put, index)
                        running[index] = self._start(future.result(), job, ids)
                    except Exception as error:
                        yield index, error
        finally:
            for *_, future in waiting:
                future.cancel()
            for request_id, _ in running.values():
                self._engine.abort(request_id)

    def _start(
        self, prompt: Prompt, job: Job, ended: Callable[[], object]
    ) -> tuple[str, Collector]:
        """Submit a prepared job; return its id, and what collects its answer."""
        prompt, form = self._cut(prompt, job)
        collector = Collector(prompt, job.params, form, ended)
        return self._submit(prompt, job, collector.push, form), collector

    def stream(self, job: Job) -> Iterator[Delta]:
        """Yield the deltas of an answer, split. Leaving the loop early aborts the request."""
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id, splitter = self._begin(job, deltas.put)
        try:
            while splitter.unfinished:
                yield splitter.split(deltas.get())
        finally:
            if splitter.unfinished:
                self._engine.abort(request_id)

    async def answer_async(self, job: Job) -> Output:
        """Return the answer to a job without blocking the event loop. Cancelling aborts it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        end = partial(loop.call_soon_threadsafe, ended.set)
        beginning = self._pool.submit(lambda: self._start(job.prepare(), job, end))
        async with self._submitted(beginning) as (_, collector):
            await ended.wait()
        return returned(collector.result())

    async def stream_async(self, job: Job) -> AsyncIterator[Delta]:
        """Do as `stream` does, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def receive(delta: Delta) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        beginning = self._pool.submit(self._begin, job, receive)
        async with self._submitted(beginning) as (_, splitter):
            while splitter.unfinished:
                yield splitter.split(await deltas.get())

    @asynccontextmanager
    async def _submitted(self, beginning: Future[tuple[str, _T]]) -> AsyncIterator[tuple[str, _T]]:
        """Wait for a request to be submitted, and abort it if the block is left by an exception.

        Args:
            beginning: prepares and submits it; its result begins with the request's id.
        """
        try:
            submitted = await asyncio.wrap_future(beginning)
            yield submitted
        except BaseException:
            # A thread that has begun to submit cannot be stopped, and does so a little later.
            beginning.add_done_callback(self._abandon)
            raise

    def _abandon(self, beginning: Future[tuple[str, Any]]) -> None:
        if not beginning.cancelled() and beginning.exception() is None:
            self._engine.abort(beginning.result()[0])

    def _begin(self, job: Job, on_delta: Callable[[Delta], None]) -> tuple[str, _Splitter]:
        """Prepare and submit a job whose deltas are wanted; return its id, and what splits them."""
        prompt, form = self._cut(job.prepare(), job)
        return self._submit(prompt, job, on_delta, form), _Splitter(form, job.params.n)

    def _cut(self, prompt: Prompt, job: Job) -> tuple[Prompt, TextForm]:
        """Return the tokens to keep of a prompt, and how its answer is split."""
        kept = prompt.last_tokens(job.params.kept_prompt_tokens(self._engine.max_model_len))
        return kept, job.form_of(kept)

    def _submit(
        self, prompt: Prompt, job: Job, on_delta: Callable[[Delta], None], form: TextForm
    ) -> str:
        engine, params, grammar = self._engine, job.params, None
        if params.structured_outputs is not None:
            splits = self._reasoning != "none"
            after = engine.before_grammar(prompt, form.thought, splits=splits)
            grammar = engine.grammars.compile(
                params.structured_outputs, after, prompt.keys.owners.prompt
            )
        return engine.submit(
            prompt,
            params,
            on_delta,
            grammar=grammar,
            thought=form.thought,
            pooled=job.pooled,
            next_turn=form.next_turn(prompt),
        )


class _Splitter:
    """Splits the deltas of one request.

    Attributes:
        unfinished: choices that have not ended.
    """

    def __init__(self, form: TextForm, choices: int) -> None:
        self.unfinished = choices
        plain = replace(form, tools=None)
        self._parsers = [plain.parser() for _ in range(choices)]

    def split(self, delta: Delta) -> Delta:
        """Return the next delta, split. Raises its error."""
        self.unfinished -= delta.finish_reason is not None
        error: VlmServeError | None = delta.error
        if error is not None:
            raise error
        return split_delta(delta, self._parsers[delta.index])
