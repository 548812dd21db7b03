"""The engine: one thread that turns plan -> run -> commit, and the doors other threads knock on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vlm_serve.cache.listing import TreePage
from vlm_serve.config import EngineConfig
from vlm_serve.engine.auditing import Auditor
from vlm_serve.engine.build import EngineParts, build
from vlm_serve.engine.constraints import LogitRules
from vlm_serve.engine.inspection import Inspector
from vlm_serve.engine.media_loading import MediaLoading
from vlm_serve.engine.outputs import CacheReport, Delta
from vlm_serve.engine.plan import StepPlan
from vlm_serve.engine.scheduler import Event
from vlm_serve.engine.sequence import Request, Sequence
from vlm_serve.engine.step_times import StepTimes
from vlm_serve.engine.tier_loading import TierLoading
from vlm_serve.engine.validation import check_page, check_prompt, check_request, check_ttl
from vlm_serve.errors import EngineClosedError, EngineError, VlmServeError
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import Grammar
from vlm_serve.host_threads import release_worker_threads
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Engine:
    """Serves requests over one model. All methods may be called from any thread.

    Callbacks run on the engine's thread and must not block.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.model_config = parts.model_config
        self.memory = parts.memory
        self.preprocessor: Preprocessor = parts.preprocessor
        self.max_model_len = parts.max_model_len
        parts.preprocessor.tokenizer.max_tokens = parts.max_model_len
        self.generation_config = parts.generation_config
        self.num_steps = 0
        self.last_step_time = time.monotonic()
        self._stop_tokens = parts.stop_tokens
        self._vocabulary = parts.model_config.text.vocab_size
        self.grammars = GrammarCompiler(
            parts.preprocessor.tokenizer, self._vocabulary, parts.stop_tokens
        )
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._cache = parts.cache
        self._auditor = Auditor(parts.config.cache_audit)
        self._inspector = Inspector(parts.cache, parts.scheduler.media, parts.fetcher)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._stopping = False
        self._lock = threading.Lock()
        self._step_times = StepTimes()
        self._step_began = time.perf_counter()
        self._tiers = TierLoading(parts.tiers, parts.fetcher, self._post)
        self._media_loader = MediaLoading(parts.scheduler.media, self._post, self._fail_request)
        self._thread = threading.Thread(target=self._loop, name="vlm-serve-engine", daemon=True)
        release_worker_threads()
        self._thread.start()

    @classmethod
    def from_checkpoint(cls, model: str, config: EngineConfig | None = None) -> Engine:
        """Loads a checkpoint (directory, hub id, "demo" or "demo-moe") and starts the engine.

        Raises:
            CheckpointError: the checkpoint is incomplete or of an unsupported kind.
            ConfigError: options that do not fit the checkpoint or the memory.
        """
        return cls(build(model, config or EngineConfig()))

    # -- called from any thread --------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> str:
        """Queues a request; `on_delta` receives its increments, the last one of every choice with a
        finish reason. `grammar`: of `params.structured_outputs`, if it has been compiled already;
        else it is compiled here.

        Raises:
            ContextLengthError: prompt and answer do not fit the context.
            InvalidRequestError: an empty prompt or a parameter outside the vocabulary.
            EngineClosedError: the engine no longer runs.
        """
        params = params.with_defaults(self.generation_config)
        check_request(prompt, params, self.model_config, self.max_model_len)
        rules = LogitRules.of(params, self.preprocessor.tokenizer, self._vocabulary)
        if grammar is None and params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
        request = self._with_sequences(
            Request(
                request_id=request_id or f"req-{secrets.token_hex(8)}",
                prompt=prompt,
                params=params,
                on_delta=on_delta,
                priority=priority,
                arrival=next(self._numbers),
                rules=rules,
                grammar=grammar,
                vocabulary=self._vocabulary,
            )
        )
        self._post(lambda: self._add(request))
        return request.request_id

    def abort(self, request_id: str) -> None:
        """Ends a request; its pages are free after the step in progress. Ignores unknown ids."""
        with contextlib.suppress(EngineClosedError):
            self._post(lambda: self._abort(request_id))

    def call(self, function: Callable[[], _T]) -> _T:
        """Runs a function on the engine's thread between two steps and returns its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def check(self) -> None:
        """Recomputes every invariant of the cache; raises AssertionError if one is violated."""
        self.call(self._cache.check)

    def flush(self) -> None:
        """Forgets everything that no running request holds: KV, state and vision embeddings."""
        self.call(self._flush)

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the cache (see docs)."""
        return self.call(self._stats)

    def probe(self, prompt: Prompt) -> CacheReport:
        """What a request with this prompt would find in the cache. Nothing runs, nothing changes.

        Raises InvalidRequestError for an empty prompt.
        """
        check_prompt(prompt)
        return self.call(lambda: self._inspector.probe(prompt))

    def tree(self, offset: int = 0, limit: int = 100) -> TreePage:
        """A page of the cache's trie. Raises InvalidRequestError for a page that cannot be."""
        check_page(offset, limit)
        return self.call(lambda: self._inspector.tree(offset, limit))

    def pin(self, prompt: Prompt, ttl_seconds: float) -> int:
        """Keeps KV and state of the prompt's deepest usable prefix for that many seconds.

        Pinning it again moves the end. Returns the tokens pinned: 0 if nothing of the prompt is
        cached, or if pins would hold too much.

        Raises InvalidRequestError for an empty prompt or a time that is not positive and finite.
        """
        check_prompt(prompt)
        check_ttl(ttl_seconds)
        return self.call(lambda: self._inspector.pin(prompt, ttl_seconds))

    @property
    def num_running(self) -> int:
        """Sequences of callers; an audit is nobody's."""
        return sum(not sequence.request.cold for sequence in self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return sum(not sequence.request.cold for sequence in self._scheduler.waiting)

    @property
    def alive(self) -> bool:
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """Aborts what runs and ends the thread. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inbox.put(None)
        self.grammars.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- helpers of the above ----------------------------------------------------------------------

    def _with_sequences(self, request: Request) -> Request:
        request.sequences = [
            Sequence(
                next(self._numbers),
                request,
                index,
                self.preprocessor.tokenizer,
                self._stop_tokens,
                self.max_model_len,
            )
            for index in range(request.params.n)
        ]
        return request

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise EngineClosedError("the engine is closed")
            self._inbox.put(command)

    # -- the engine's thread -----------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._handle_commands():
                if self._scheduler.has_work and self._step():
                    now = time.perf_counter()
                    self._step_times.record(now - self._step_began, self._runner.model_seconds)
                    self._step_began = now
                self._tend_audits()
        except BaseException:
            _log.exception("the engine's thread died")
            self._closed = True
        finally:
            self._end_all()

    def _handle_commands(self) -> bool:
        """Runs what other threads posted; waits when there is nothing else to do."""
        while not self._stopping:
            try:
                self._run_next_command(wait=not self._scheduler.has_work)
            except queue.Empty:
                return True
        return False

    def _run_next_command(self, wait: bool) -> None:
        if wait:
            release_worker_threads()
        command = self._inbox.get(block=wait)
        if wait:
            self._step_began = time.perf_counter()
        self._inspector.expire()
        if command is None:
            self._stopping = True
        else:
            command()

    def _step(self) -> bool:
        """One step, if one can be made; False if there was only something to wait for."""
        self._inspector.expire()
        plan = self._scheduler.plan()
        self._media_loader.start()
        self._tiers.start()
        if plan is None:
            if self._tiers.busy:
                self._run_next_command(wait=True)
            elif not self._scheduler.running:
                self._emit(self._scheduler.reject_head())
            elif self._media_loader.busy:
                self._run_next_command(wait=True)
            return False
        self._emit(self._run(plan))
        self.num_steps += 1
        self.last_step_time = time.monotonic()
        return True

    def _run(self, plan: StepPlan) -> list[Event]:
        try:
            output = self._runner.run(plan)
        except Exception as error:
            if not isinstance(error, VlmServeError):
                _log.exception("a step failed; its sequences are retried one by one")
            return self._scheduler.fail(plan, error)
        return self._scheduler.commit(plan, output)

    def _emit(self, events: list[Event]) -> None:
        for request, delta in events:
            if request.finished and self._requests.pop(request.request_id, None) is not None:
                self._auditor.consider(request)
            try:
                request.on_delta(delta)
            except Exception:
                _log.exception("a callback of request %s raised", request.request_id)

    def _tend_audits(self) -> None:
        """Audits run while there is a seat for them, and give it up to whoever waits for it."""
        scheduler, auditor = self._scheduler, self._auditor
        full = len(scheduler.running) >= self.config.max_num_seqs
        waiting = any(not sequence.request.cold for sequence in scheduler.waiting)
        running = auditor.running
        if running is not None and full and waiting:
            self._abort(running.request_id)
        elif running is None and not full and not waiting:
            task = auditor.start()
            if task is not None:
                self._add(self._with_sequences(task))

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._emit(self._scheduler.abort(request))

    def _fail_request(self, request: Request, error: VlmServeError) -> None:
        self._emit(self._scheduler.end_request(request, error))

    def _flush(self) -> None:
        self._tiers.flush(self._cache)
        self._scheduler.media.cache.flush()

    def _stats(self) -> dict[str, Any]:
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "num_preemptions": self._scheduler.roster.num_preemptions,
            "num_steps": self.num_steps,
            "step_times": self._step_times.as_dict(),
            "num_encoded_spans": self._scheduler.media.num_encoded_spans,
            "cache": self._cache.stats.as_dict(),
            "audit": dataclasses.asdict(self._auditor.counts),
            "usage": dataclasses.asdict(self._cache.usage),
            "tiers": self._tiers.stats(),
        }

    def _end_all(self) -> None:
        """Nobody is left waiting for an answer that will never come."""
        with self._lock:
            self._closed = True
        self._media_loader.close()
        self.preprocessor.close()
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    command()
        error = EngineError("the engine was closed while the request was running")
        for request in list(self._requests.values()):
            with contextlib.suppress(Exception):
                self._emit(self._scheduler.end_request(request, error))
        self._tiers.close(self._cache)
