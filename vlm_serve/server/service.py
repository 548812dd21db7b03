"""What all routes share: the engine, the thread pool for preparation, and who may come in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vlm_serve.engine.outputs import Delta
from vlm_serve.errors import EngineClosedError, ModelNotFoundError, OverloadedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.preprocess.affinity import AffinityKey
from vlm_serve.preprocess.loaded_media import LoadedMedia
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.preprocess.rendering import Rendering
from vlm_serve.preprocess.stopping import Stop
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import ToolForm, form_of
from vlm_serve.server.cache_feed import CacheFeed
from vlm_serve.server.cache_status import status_of
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt_part import AttemptPart
from vlm_serve.server.http.errors import DrainingError
from vlm_serve.server.http.fetched_memory import FetchedMemory, tell
from vlm_serve.server.http.request_memory import RequestMemory, current_share
from vlm_serve.server.mailbox import Mailbox
from vlm_serve.server.metrics import Metrics
from vlm_serve.server.recent import Recent
from vlm_serve.server.response_store import ResponseStore
from vlm_serve.server.trimming import Trimmer
from vlm_serve.server.work import Work
from vlm_serve.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine
    from vlm_serve.server.tracing import RequestTracer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

IDLE_CHECK_DELAY_SECONDS = 0.2
MAX_QUEUED_GRAMMARS = 16
LARGE_REQUEST_BYTES = 1 << 16
"""What a request holds beyond which it is prepared on other threads than short questions."""
_WAITING_THREADS = 16

Preparation = Prompt | Rendering | Callable[[Stop], Prompt]
"""A prompt; or a rendering whose media are to be loaded; or work that loads media itself, until it
is stopped."""


def large_threads(preprocess_threads: int) -> int:
    """Threads that prepare large requests, beside those for small ones."""
    return max(1, preprocess_threads // 2)


class Service(Work):
    """State of one server. Everything here runs on the event loop unless it says otherwise.

    Args:
        engine: what answers.
        config: the server's options.
        model_names: names under which requests may ask for the model; the first is its own.

    Attributes:
        responses: what /v1/responses has stored, None if it stores nothing.
        tracer: makes a span of every request, None if traces are off.
        busy_since: monotonic time at which the engine last got work while it had none.
        memory: what requests may take of it.
        trimmer: gives back to the system what they have taken.
        recent_first_tokens, recent_tokens: seconds until a first token, and between two tokens.
        num_generated_tokens: so far, of all requests.
        cache_feed: tells what the cache does.
        open_tokens: of the prompts of open requests.
    """

    def __init__(self, engine: Engine, config: ServerConfig, model_names: tuple[str, ...]) -> None:
        assert model_names
        self.engine = engine
        super().__init__(config)
        self.model_names = model_names
        self.created = int(time.time())
        self.open_tokens = 0
        self.busy_since = time.monotonic()
        self.check_failed = False
        self.trimmer = Trimmer()
        self.memory = RequestMemory(config.max_request_bytes, self.trimmer.freed)
        self.metrics = Metrics(model_names[0], engine, self.memory)
        size = config.response_store
        assert not isinstance(size, str)
        self.responses = None if size is None else ResponseStore(size, config.response_store_ttl)
        most = config.preprocess_threads
        self.recent_first_tokens, self.recent_tokens = Recent(), Recent()
        self.num_generated_tokens = 0
        self.cache_feed = CacheFeed(engine, partial(status_of, self))
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="prepare")
        self._pool_for_large = ThreadPoolExecutor(large_threads(most), thread_name_prefix="large")
        self._waiting = ThreadPoolExecutor(_WAITING_THREADS, thread_name_prefix="waiting")
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="json")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._queued_grammars = 0
        self.tracer: RequestTracer | None = None
        self._mailbox: Mailbox | None = None
        self._idle_check: asyncio.Task[None] | None = None
        self._idle_since = 0.0
        self._asking: asyncio.Future[dict[str, Any]] | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self.engine.preprocessor.tokenizer
        return tokenizer

    @property
    def tool_form(self) -> ToolForm:
        """How calls are written: as the configuration says, or else the chat template."""
        return form_of(self.config.tool_call_parser, self.engine.preprocessor.tool_form)

    @property
    def mailbox(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        return self._mailbox

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError for one that is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise self.unknown_model(name)
        return name

    def unknown_model(self, name: str) -> ModelNotFoundError:
        """Return what a client is told who asks for a name that is not served."""
        return ModelNotFoundError(
            f"the model {name[:128]!r} does not exist; this server has "
            + ", ".join(self.model_names),
            param="model",
            code="model_not_found",
        )

    @contextlib.contextmanager
    def admitted(self, *, resumed: bool = False) -> Iterator[None]:
        """Counts one request in and out.

        Args:
            resumed: its answer has begun elsewhere. There it had its place in the queue, which it
                keeps: no more of them come than another replica had.

        Raises DrainingError, OverloadedError or EngineClosedError at once: nothing waits here.
        """
        self._refuse_if_closed()
        if not resumed:
            self._refuse_if_full()
        try:
            with self.counted():
                yield
        finally:
            if not self.num_open:
                self._became_idle()

    def _refuse_if_closed(self) -> None:
        if self.draining:
            raise DrainingError("the server is shutting down", code="shutting_down")
        if not self.engine.alive:
            raise EngineClosedError("the engine has stopped", code="engine_stopped")

    def _refuse_if_full(self) -> None:
        limit = self.engine.config.max_num_seqs + self.config.max_queued_requests
        if self.num_open >= limit:
            raise OverloadedError(f"{limit} requests are open already", code="queue_full")
        if self.open_tokens >= self.config.max_queued_tokens:
            raise OverloadedError(
                f"{self.config.max_queued_tokens} prompt tokens are open already",
                code="queue_full",
            )

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        priority: int,
        grammar: Grammar | None = None,
        affinity: tuple[AffinityKey, ...] = (),
        part: AttemptPart | None = None,
    ) -> str:
        """Hands a prompt to the engine and returns the engine's id for it. Raises as it does."""
        if not self.engine.num_running + self.engine.num_waiting:
            self.busy_since = time.monotonic()
        options: dict[str, Any] = {"priority": priority, "affinity": affinity}
        if grammar is not None:
            options["grammar"] = grammar
        if part is not None:
            params = part.seeded(params)
            # Experts that nobody has recorded would be a gap on one replica and none on another.
            options |= {"forced": part.forced, "complete_experts": True}
        return self.engine.submit(prompt, params, on_delta, **options)

    def warm_up(self) -> None:
        """Starts the grammar compiler in the background: the first request that needs it would
        wait for seconds. Requests that come meanwhile wait for the rest of them only."""
        self._compiling.submit(self._start_compiler)

    def _start_compiler(self) -> None:
        try:
            self.engine.grammars.warm()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("the grammar compiler did not start; the next grammar tries again")

    async def compile(self, form: StructuredOutputs, after: bytes) -> Grammar:
        """The grammar of a form. New ones are compiled one at a time, on a thread of their own.

        Raises InvalidRequestError for a form that cannot be enforced, OverloadedError if too many
        wait already.
        """
        grammars = self.engine.grammars
        found = grammars.find(form, after)
        if found is not None:
            return found
        if self._queued_grammars >= MAX_QUEUED_GRAMMARS:
            raise OverloadedError(
                f"{MAX_QUEUED_GRAMMARS} grammars wait to be compiled already", code="queue_full"
            )
        self._queued_grammars += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._compiling, grammars.compile, form, after
            )
        finally:
            self._queued_grammars -= 1

    async def in_pool(self, work: Callable[[], _T]) -> _T:
        """Runs blocking work on one of the preparation threads. Not interruptible, but bounded in
        number: whoever stops waiting leaves it to finish unseen, if it has begun at all. Until then
        it is part of what the request holds of the memory. Requests that hold much have threads of
        their own, so that a short question never waits for long ones."""
        share = current_share()
        large = share is not None and share.size > LARGE_REQUEST_BYTES
        return await self._in(self._pool_for_large if large else self._pool, work)

    async def parsing(self, work: Callable[[], _T]) -> _T:
        """Runs work that holds the interpreter's lock for long. One at a time: several would take
        turns, and everyone else would wait for all of them."""
        return await self._in(self._parsing, work)

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        """Until the work has ended, or will never begin, it is part of what its request holds."""
        pending = [work]  # the pool's queue keeps what it has not begun, cancelled or not
        future = pool.submit(lambda: pending.pop()())
        share = current_share()
        if share is not None:
            share.used_by_another()
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda _: tell(loop, share.leave))
        try:
            return await asyncio.wrap_future(future)
        finally:
            pending.clear()

    async def prepared(self, work: Callable[[], Preparation], stop: Stop | None = None) -> Prompt:
        """The prompt that some work makes on a preparation thread. While media are fetched and
        decoded no such thread is held; who stops waiting ends that wherever it is.

        Raises what preparation raises.
        """
        stop = stop or Stop()
        preprocessor = self.engine.preprocessor

        def begun() -> tuple[Preparation, list[Future[LoadedMedia]]]:
            """Media begin to load here: what begins threads may have to wait for them."""
            made = work()
            if isinstance(made, Rendering):
                return made, preprocessor.start_loading(made, stop)
            return made, []

        try:
            with stop.timed("render"):
                rendering, loading = await self.in_pool(begun)
            if isinstance(rendering, Prompt):
                return rendering
            with stop.timed("media"):
                if not isinstance(rendering, Rendering):
                    return await self._in(self._waiting, partial(rendering, stop))
                media = await asyncio.gather(*map(asyncio.wrap_future, loading))
        finally:
            stop.set()
        with stop.timed("finish"):
            return await self.in_pool(partial(preprocessor.finish, rendering, media))

    def _became_idle(self) -> None:
        self._idle_since = time.monotonic()
        if self.config.idle_check and self._idle_check is None and self.engine.alive:
            self._idle_check = asyncio.ensure_future(self._check_when_idle())

    async def _check_when_idle(self) -> None:
        """Once no request has been open for a while. One that comes meanwhile ends it, and does
        not wait for it: then it begins again when that has ended."""
        checked = False
        try:
            while not checked:
                while (left := self._idle_since + IDLE_CHECK_DELAY_SECONDS - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                if self.num_open or not self.engine.alive:
                    return
                checked = await asyncio.to_thread(self.engine.check, lambda: self.num_open > 0)
        except EngineClosedError:
            return
        except AssertionError:
            self.check_failed = True
            self.metrics.check_failures.inc()
            _log.exception("the idle engine violates an invariant of its cache")
        finally:
            self._idle_check = None

    async def refresh_engine_stats(self, timeout: float) -> None:
        """Brings the engine's own counters into the metrics. An engine in a long step is not waited
        for beyond the timeout, nor asked again before it has answered."""
        asking = self._asking
        if asking is None or asking.done():
            asking = asyncio.ensure_future(asyncio.to_thread(self.engine.stats))
            self._asking = asking
        await asyncio.wait({asking}, timeout=timeout)
        if asking.done() and asking.exception() is None:
            self.metrics.engine_stats.update(asking.result())

    def end_streams(self) -> None:
        """Ends the streams that would go on for ever."""
        self.cache_feed.close()

    def count_fetched(self) -> None:
        """From now on, media that are fetched count into `memory`. On the event loop."""
        seconds = self.engine.config.media_fetch_timeout
        fetched = FetchedMemory(self.memory, asyncio.get_running_loop(), seconds)
        self.engine.preprocessor.count_fetched(fetched.holding)

    async def close(self) -> None:
        """Ends the background work and the engine."""
        self.draining = True
        self.trimmer.close()
        self.engine.preprocessor.count_fetched(None)
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool_for_large.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._parsing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.engine.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
