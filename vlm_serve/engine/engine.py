"""Thread-safe interface of the engine: submit, abort, probe, stats. `loop` runs its thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vlm_serve.cache.listing import CacheUsage, ListedNode, NodeInfo, TreePage, describe
from vlm_serve.cache.tiers.store import ENTRY_BYTES
from vlm_serve.engine.core.loop import EngineLoop
from vlm_serve.engine.described import engine_rows
from vlm_serve.engine.features.adapters.store import OTHERS, ServedAdapter
from vlm_serve.engine.features.affinity_map import AffinityMap
from vlm_serve.engine.features.audits import Auditor
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.inspection import Inspector, PinInfo
from vlm_serve.engine.features.joins import Joining
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.engine.features.pause import Pause, Rest, check_mode
from vlm_serve.engine.features.replays import ReplayCounts, Replays
from vlm_serve.engine.features.shares import Shares
from vlm_serve.engine.features.sleep import PARTS, Sleep, check_parts
from vlm_serve.engine.features.tiers.loading import TierLoading
from vlm_serve.engine.features.unread import Unread
from vlm_serve.engine.features.usage import UsageByName
from vlm_serve.engine.features.weights import Tensors, WeightUpdates
from vlm_serve.engine.making import RequestMaker, with_prompts
from vlm_serve.engine.requests.outputs import CacheReport, Delta
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.requests.validation import (
    check_page,
    check_prompt,
    check_request,
    check_ttl,
)
from vlm_serve.engine.start.build import build, naming_folder
from vlm_serve.engine.start.parts import EngineParts
from vlm_serve.errors import EngineClosedError, FieldError, InvalidRequestError, NotANumberError
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.affinity import AffinityDigest
from vlm_serve.preprocess.identity.keys import WeightsIdentity
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor

_T = TypeVar("_T")


class Engine(RequestMaker):
    """Serves requests over one model. All methods may be called from any thread.

    Callbacks run on the engine's thread and must not block.

    Attributes:
        parts: its components.
        mirror: the cache's tree, for readers on other threads.
        pins: pins of prefixes.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.parts = parts
        self.config = parts.config
        self.spec = parts.spec
        self.arithmetic = parts.arithmetic
        self.weights = parts.weights
        self.memory = parts.memory
        self.step_memory = parts.steps
        self.degraded = parts.degraded
        self.preprocessor: Preprocessor = parts.preprocessor
        language = parts.language
        self.max_model_len = language.max_length
        self.grammars = GrammarCompiler(
            parts.preprocessor.tokenizer, language.vocabulary, language.stop_tokens
        )
        self.adapters = parts.adapters
        self._adapter_counts = UsageByName(OTHERS)
        self._scheduler = parts.scheduler
        self._cache = parts.cache
        self._media = parts.media
        self._features = parts.features
        fetcher = parts.tiers.fetcher if parts.tiers is not None else None
        self._hooks = parts.scheduler.hooks
        self._inspector = Inspector(parts.cache, parts.media, self._hooks, fetcher)
        self._numbers = itertools.count()
        self._make_group = partial(SequenceGroup, numbers=self._numbers, language=language)
        self.mirror = TreeMirror(parts.cache.events)
        self.pins = Pins(self, self._inspector)
        self._affinity = AffinityMap(self.mirror, has_state=parts.cache.config.has_state)
        self._tiers = TierLoading(parts.cache, parts.tiers, parts.media.tiers)
        self._auditor = Auditor(
            parts.config.cache_audit,
            parts.config.max_num_seqs,
            parts.arithmetic.promise.blamed,
        )
        self._hooks.on_published.append(self.mirror.publish)
        self._hooks.add(self._inspector, concerns=lambda request: bool(request.prompt.marks))
        self._hooks.add(self._affinity, concerns=lambda request: bool(request.affinity))
        if parts.config.cache_audit:
            self._hooks.add(self._auditor)
        if parts.tiers is not None:
            self._hooks.add(self._tiers)
        self._sleep = self._make_sleep()
        self._loop = EngineLoop(
            parts.scheduler,
            parts.executor,
            parts.media,
            parts.preprocessor,
            check=partial(check_request, model=parts.spec, max_model_len=language.max_length),
            group=self._make_group,
        )
        self._loop.start()

    @classmethod
    def from_checkpoint(cls, model: str, config: EngineConfig | None = None) -> Engine:
        """Load a checkpoint (directory, GGUF file, hub id, "demo", "demo-moe") and start it.

        Raises:
            CheckpointError: the checkpoint is incomplete or of an unsupported kind.
            ConfigError: options that do not fit the checkpoint or the memory.
        """
        with naming_folder(model):
            return cls(build(model, config or EngineConfig()))

    # -- called from any thread --------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """See `RequestMaker.begin`. Each choice gets its last delta, unless this raises."""
        digest, changes = request.prompt.adapter.whole, dict[str, Any](arrival=next(self._numbers))
        served = self.adapters.begin_use(digest) if digest else None
        if served is not None:
            on_delta = self._counted(request.on_delta, served, request.params.n)
            changes |= {"on_delta": on_delta, "adapter": served.adapter}
        group = self._make_group(dataclasses.replace(request, **changes))
        try:
            self._loop.post(lambda: self._loop.add(group))
        except EngineClosedError:
            if served is not None:
                self.adapters.end_use(served)
            raise

    def _counted(
        self, on_delta: Callable[[Delta], None], served: ServedAdapter, choices: int
    ) -> Callable[[Delta], None]:
        """Return a callback that ends the use of an adapter with the last choice."""
        left = itertools.count(choices - 1, -1)

        def receive(delta: Delta) -> None:
            if delta.finish_reason is not None and next(left) == 0:
                self._adapter_counts.add(served.name, delta.usage)
                self.adapters.end_use(served)
            if isinstance(delta.error, NotANumberError):
                error = NotANumberError.of(f"the adapter {served.name!r}")
                delta = dataclasses.replace(delta, error=error)
            on_delta(delta)

        return receive

    def affinity_digest(self) -> AffinityDigest:
        """Return the affinity keys of cached prefixes and how many tokens are cached for each. Does
        not involve the engine's thread."""
        return self._affinity.digest()

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free after the step in progress. Ignore unknown ids."""
        with contextlib.suppress(EngineClosedError):
            self._loop.post(lambda: self._loop.abort(request_id))

    def hold(self, request_id: str, held: bool) -> None:
        """Suspend a request, whose client has to read first, or have it go on. Ignore unknown ids
        and a closed engine."""

        def change() -> None:
            group, unread = self._loop.find(request_id), self._features.get(Unread)
            if group is not None and unread is not None:
                unread.hold(group, held=held)

        with contextlib.suppress(EngineClosedError):
            self._loop.post(change)

    def add(self, feature: object) -> None:
        """Call the hooks of a feature from the next step on."""
        self.call(lambda: self._hooks.add(feature))

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine's thread between two steps and return its result."""
        return self._loop.call(function)

    def check(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Recompute every invariant of the cache; raise AssertionError if one is violated.

        Args:
            wanted: returns True if the engine's thread has other work. It is called often, so that
                the check delays this work by less than a millisecond.

        Returns:
            True if the check is complete, False if `wanted` interrupted it.
        """
        return self.call(lambda: self._cache.check(wanted))

    def flush(self) -> None:
        """Drop everything that no running request holds: KV, state, vision embeddings and records
        of uploads."""
        removed = self.call(self._flush)
        if removed is not None:
            removed.result()

    def update_weights(
        self,
        source: str | Path | Tensors,
        *,
        version: str | None = None,
        abort: bool = False,
        flush: bool = False,
        below: Path | None = None,
        ready: Callable[[WeightsIdentity], object] | None = None,
    ) -> WeightsIdentity:
        """Change the model's weights, all or nothing; needs the option `allow_weight_updates`.

        They are read while requests go on. Requests in flight then start again under the new
        weights, with the tokens that they have, and their reports say so.

        Args:
            source: folder of a checkpoint with an equal config; or pairs (name, tensor), or a
                safetensors file, in the place of some of the tensors now, by their names in the
                checkpoint's files. What is joined with others, tied or an expert changes with any
                of its tensors.
            version: a name for the new weights, which `weight_version` tells.
            abort: end the requests in flight instead.
            flush: empty the cache too. Nothing in it is wrong: it serves whoever goes back.
            below: see `WeightReader.from_folder`.
            ready: see `WeightUpdates.update`.

        Returns:
            The digests of the weights: those of a cold start from such files.

        Raises:
            InvalidRequestError: updates are not allowed, another one is under way, there is no room
                for both, or the weights do not fit the model; nothing has changed then.
        """
        updates = self._features.get(WeightUpdates)
        if updates is None:
            raise InvalidRequestError("start with allow_weight_updates to change the weights")
        with self._only_update():
            identity = updates.update(source, self.call, abort=abort, below=below, ready=ready)
            self.weight_version = self.weight_version if version is None else version
            self.preprocessor.renew(identity)
        if flush:
            self.flush()
        return identity

    @property
    def rests(self) -> frozenset[Rest]:
        """See `RequestMaker.rests`."""
        pause, idle = self._features.get(Pause), self._sleep is not None and self._sleep.idle
        reasons: frozenset[Rest] = frozenset() if pause is None else pause.reasons
        return reasons | {"idle"} if idle else reasons

    def pause(self, mode: str = "abort") -> None:
        """Let no step run until `resume`; needs the option `allow_weight_updates`. New requests
        wait.

        Args:
            mode: requests in flight end ("abort"), give up their KV and wait ("retract"), keep it
                and wait ("in_place"), or are answered first, which this call waits for ("wait").
                Who keeps its KV keeps it across an update of the weights too, for itself alone.

        Raises:
            InvalidRequestError: the option is off, there is no such mode, or generation was
                continued before all answers that this call waits for.
        """
        checked, pause = check_mode(mode), self._pause
        self.call(lambda: pause.begin(checked, "paused")).result()

    def resume(self) -> None:
        """Let steps run again. Do nothing if generation is not paused. Raise as `pause` does."""
        pause = self._pause
        self.call(lambda: pause.end("paused"))

    def sleep(
        self, parts: Collection[str] = ("kv_cache",), *, mode: str = "retract"
    ) -> frozenset[str]:
        """Give memory back until `wake_up`; needs the option `allow_weight_updates`. Meanwhile
        requests are refused. What the cache holds goes to lower tiers, if there are some.

        Args:
            parts: "kv_cache", "weights", or both.
            mode: requests in flight, see `pause`. They cannot keep their KV.

        Returns:
            All that has been given back.

        Raises:
            InvalidRequestError: the option is off, this engine runs on a GPU or several ranks, an
                update is under way, or the weights could not be read again, because they came from
                memory or their files have changed.
        """
        pause, sleep = self._pause, self._sleep
        wanted, checked = check_parts(parts), check_mode(mode)
        if sleep is None:
            raise InvalidRequestError("sleep is not possible with a GPU or several ranks")
        if checked == "in_place":
            raise FieldError("mode", "cannot be in_place: the memory of KV is given back")
        with self._only_update():
            sleep.check(wanted)
            self.call(lambda: pause.begin(checked, "asleep")).result()
            self.call(lambda: sleep.give(wanted))
        return sleep.parts

    def wake_up(self, parts: Collection[str] | None = None) -> frozenset[str]:
        """Take memory again, None: all. With all of it requests go on. Weights are read from the
        folder from which they came. Do nothing if the engine is awake.

        Returns:
            What is still given back.

        Raises:
            InvalidRequestError: there are no such parts, the files have changed, or there is no
                room. The engine still sleeps then; an update of the weights wakes them too.
        """
        wanted = check_parts(PARTS if parts is None else parts)
        sleep = self._sleep if self._pause is not None else None
        if sleep is None:
            return frozenset()
        with self._only_update():
            if "weights" in wanted & sleep.parts:
                updates = self._features.get(WeightUpdates)
                assert updates is not None
                updates.read_again(self.call)
            self.call(lambda: sleep.take(wanted))
        return sleep.parts

    @property
    def _pause(self) -> Pause:
        pause = self._features.get(Pause)
        if pause is None:
            raise InvalidRequestError("start with allow_weight_updates to pause an engine")
        return pause

    def _make_sleep(self) -> Sleep | None:
        pause, parts = self._features.get(Pause), self.parts
        if parts.release is None or (pause is None and parts.config.idle_sleep is None):
            return None
        sleep = Sleep(
            parts.scheduler,
            self._tiers,
            parts.executor,
            parts.release,
            seconds=parts.config.idle_sleep,
            pause=pause,
            weights=self._features.get(WeightUpdates),
        )
        self._hooks.add(sleep)
        return sleep

    def stats(self) -> dict[str, Any]:
        """Return counters of the scheduler and the cache."""
        return with_prompts(self.call(self._stats), self.preprocessor)

    def probe(self, prompt: Prompt) -> CacheReport:
        """Return the cache report that a request with this prompt would get. Run nothing and change
        nothing.

        Raises InvalidRequestError for an empty prompt.
        """
        check_prompt(prompt)
        looking_up = self.call(lambda: self._inspector.look_up(prompt))
        deeper = looking_up.result() if looking_up is not None else None
        looking_up_media = self.call(lambda: self._inspector.look_up_embeddings(prompt, deeper))
        embeddings = looking_up_media.result() if looking_up_media is not None else None
        return self.call(lambda: self._inspector.probe(prompt, deeper, embeddings))

    def tree(self, offset: int = 0, limit: int = 100) -> TreePage:
        """Return a page of the cache's trie. Raise InvalidRequestError for an invalid page."""
        return self.page(self.mirror.listing().entries, offset, limit)

    def page(self, entries: Sequence[ListedNode], offset: int, limit: int) -> TreePage:
        """Return a page of the given nodes in their current state. Raise as `tree` does."""
        check_page(offset, limit)
        return TreePage(
            len(entries), offset, tuple(map(self.describe, entries[offset : offset + limit]))
        )

    def describe(self, entry: ListedNode) -> NodeInfo:
        """Describe a node in its current state."""
        return describe(self._cache.config, entry)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows that describe the engine in the table of the start."""
        return list(engine_rows(self.parts))

    @property
    def num_running(self) -> int:
        """Number of running sequences, without audits."""
        return sum(not sequence.request.cold for sequence in self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return sum(not sequence.request.cold for sequence in self._scheduler.waiting)

    @property
    def num_steps(self) -> int:
        return self._loop.num_steps

    @property
    def last_step_time(self) -> float:
        """End of the last step in monotonic seconds; before the first step, the start of the
        engine, and behind a pause or a sleep the end of that."""
        return self._loop.last_step_time

    @property
    def alive(self) -> bool:
        return self._loop.alive

    def wait(self) -> None:
        """Wait until the engine has ended, by `close` or by itself."""
        self._loop.join()

    def close(self) -> None:
        """Abort running requests and end the thread. Repeated calls are allowed."""
        self._loop.close()
        self.grammars.close()
        self._loop.join()

    # -- helpers -----------------------------------------------------------------------------------

    def _flush(self) -> Future[None] | None:
        self._scheduler.queues.reclaim()
        self._media.cache.flush()
        self.preprocessor.forget()
        return self._tiers.flush()

    def _held_bytes(self, usage: CacheUsage, tiers: Mapping[str, Any]) -> dict[str, int]:
        memory, drafting = self.memory, self._features.get(Drafting)
        blocks, rows = usage.blocks - usage.free_blocks, sum(usage.rows.values())
        rows -= usage.rows["free"]
        idle = (usage.touched_blocks - blocks) * memory.block_bytes
        entries = tiers.get("host_entries", 0) + tiers.get("disk_entries", 0)
        return {
            "kv": blocks * memory.block_bytes,
            "state": rows * memory.snapshot_bytes,
            "idle_pools": idle + (usage.touched_rows - rows) * memory.snapshot_bytes,
            "tree": usage.tree_bytes,
            "host_tier": tiers.get("host_bytes", 0),
            "tier_index": entries * ENTRY_BYTES,
            "drafts": 0 if drafting is None else drafting.num_bytes,
            "experts": usage.expert_bytes,
            "prompt_logprobs": usage.logprob_bytes,
            "embeddings": self._media.held_bytes,
            "adapters": self.adapters.num_bytes,
            "grammars": self.grammars.num_bytes,
        }

    def _stats(self) -> dict[str, Any]:
        joining, drafting = self._features.get(Joining), self._features.get(Drafting)
        replays, shares = self._features.get(Replays), self._features.get(Shares)
        usage, tiers = self._cache.usage, self._tiers.stats()
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "num_joined": 0 if joining is None else len(joining.joins),
            "num_preemptions": self._scheduler.num_preemptions,
            "num_unsound": self._scheduler.num_unsound,
            "steps_ahead": self._scheduler.extender.as_dict(),
            "num_steps": self.num_steps,
            "drafts": None if drafting is None else drafting.counts.as_dict(),
            "adapters": self._adapter_counts.as_dict(),
            "tenants": {} if shares is None else shares.as_dict(),
            "num_unread": len(self._scheduler.queues.held),
            "replays": (ReplayCounts() if replays is None else replays.counts).as_dict(),
            "step_times": self._loop.step_times.as_dict(),
            "num_encoded_spans": self._media.num_encoded_spans,
            "embeddings": dict(self._media.counts),
            "embedding_bytes": self._media.cache.used,
            "cache": self._cache.stats.as_dict(),
            "audit": dataclasses.asdict(self._auditor.counts),
            "usage": dataclasses.asdict(usage),
            "held_bytes": self._held_bytes(usage, tiers),
            "tiers": tiers,
        }


class Pins:
    """Pins prefixes, lists the pins and lifts them; each call waits for the end of a step.

    An owner is the key of a tenant's root.

    Args:
        engine: whose cache holds them.
        inspector: the engine's.
    """

    def __init__(self, engine: Engine, inspector: Inspector) -> None:
        self._engine = engine
        self._inspector = inspector

    def add(self, prompt: Prompt, ttl_seconds: float, owner: bytes | None = None) -> int:
        """Keep KV and state of the prompt's deepest usable prefix for `ttl_seconds`.

        Pinning it again moves the end. Return the number of tokens pinned; 0 if nothing of the
        prompt is cached, or if pins would hold too much.

        Args:
            owner: None: the prompt's root.

        Raises InvalidRequestError for an empty prompt or a time out of range.
        """
        check_prompt(prompt)
        check_ttl(ttl_seconds)
        return self._engine.call(lambda: self._inspector.pin(prompt, ttl_seconds, owner))

    def add_node(self, key: bytes, ttl_seconds: float, owner: bytes | None = None) -> int:
        """Keep a node, its ancestors and the deepest state among them for `ttl_seconds`. Return the
        number of tokens pinned; 0 for an unknown node, or as `add` does. Without an owner, the
        node's root owns the pin.

        Raises InvalidRequestError for a time out of range.
        """
        check_ttl(ttl_seconds)
        entry = self._engine.mirror.find(key)
        if entry is None:
            return 0
        return self._engine.call(lambda: self._inspector.pin_node(entry.node, ttl_seconds, owner))

    def listed(self, owner: bytes | None = None) -> tuple[PinInfo, ...]:
        """Describe an owner's pins, None: all of them, earliest expiry first."""
        return self._engine.call(lambda: self._inspector.pins(owner))

    def lift(self, owner: bytes | None = None, key: bytes | None = None) -> int:
        """Release pins of an owner, None: of all, with that key, None: any; return their number."""
        return self._engine.call(lambda: self._inspector.lift_pins(owner, key))
