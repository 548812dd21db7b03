"""Requests of a pipeline: prompts that the engine answers, and their answers collected."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.outputs import Delta
from vlm_serve.pipeline.many import attempted, returned
from vlm_serve.pipeline.output import Collector, Output, TextForm, split_delta
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.reasoning import ReasoningParser, before_grammar, thought_behind

FormOf = Callable[[Prompt], TextForm]
"""Returns how the answer to a prompt is split."""


class Requests:
    """Submits prompts to an engine.

    Args:
        engine: answers them.
        reasoning: how the reasoning of answers to conversations is split off.
    """

    def __init__(self, engine: Engine, reasoning: ReasoningParser) -> None:
        self._engine = engine
        self._reasoning = reasoning

    def form_of(self, prompt: Prompt, *, continued: bool = False) -> TextForm:
        """Return how the answer to a conversation's prompt is split.

        Args:
            continued: it continues the last message.
        """
        thought = thought_behind(prompt.text, self._reasoning, continued=continued)
        return TextForm(thought, continued)

    def run(
        self,
        prompts: Iterable[Prompt | Exception],
        params: Sequence[SamplingParams],
        *,
        pooled: bool = False,
        form_of: FormOf = lambda _: TextForm(),
    ) -> list[Output | Exception]:
        """Return the answer to each prompt, or its exception, which may stand in its place.

        Anything but an Exception, such as Ctrl-C, aborts all requests.
        """
        ids: list[str] = []

        def start(prompt: Prompt | Exception, params: SamplingParams) -> Collector:
            prompt, form = self._cut(returned(prompt), params, form_of)
            collector = Collector(prompt, params, form)
            ids.append(self._submit(prompt, params, collector.push, form, pooled=pooled))
            return collector

        try:
            pairs = zip(prompts, params, strict=True)
            waiting = [attempted(start, prompt, each) for prompt, each in pairs]
            return [each.result() if isinstance(each, Collector) else each for each in waiting]
        except BaseException:
            for request_id in ids:
                self._engine.abort(request_id)
            raise

    def stream(self, prompt: Prompt, params: SamplingParams, form_of: FormOf) -> Iterator[Delta]:
        """Yield the deltas of an answer, split. Leaving the loop early aborts the request."""
        prompt, form = self._cut(prompt, params, form_of)
        parsers = [form.parser() for _ in range(params.n)]
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id = self._submit(prompt, params, deltas.put, form)
        unfinished = params.n
        try:
            while unfinished:
                delta = deltas.get()
                if delta.finish_reason is not None:
                    unfinished -= 1
                if delta.error is not None:
                    raise delta.error
                yield split_delta(delta, parsers[delta.index])
        finally:
            if unfinished:
                self._engine.abort(request_id)

    def _cut(
        self, prompt: Prompt, params: SamplingParams, form_of: FormOf
    ) -> tuple[Prompt, TextForm]:
        """Return the tokens to keep of a prompt, and how its answer is split."""
        kept = prompt.last_tokens(params.kept_prompt_tokens(self._engine.max_model_len))
        return kept, form_of(kept)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        form: TextForm,
        *,
        pooled: bool = False,
    ) -> str:
        engine, grammar = self._engine, None
        if params.structured_outputs is not None:
            text = partial(engine.text_of, prompt)
            after = before_grammar(form.thought, self._reasoning, text)
            grammar = engine.grammars.compile(params.structured_outputs, after, prompt.keys.root)
        return engine.submit(
            prompt,
            params,
            on_delta,
            grammar=grammar,
            thought=form.thought,
            pooled=pooled,
            next_turn=form.next_turn(prompt),
        )
