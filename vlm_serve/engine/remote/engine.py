"""What stands for an engine in another process: the methods of `Engine` that a server calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import torch

from vlm_serve.cache.listing import ListedNode, NodeInfo, TreePage
from vlm_serve.engine.features.pause import Rest
from vlm_serve.engine.making import RequestMaker, with_prompts
from vlm_serve.engine.remote.messages import (
    REDUCERS,
    DeltaReader,
    Lent,
    Started,
    sent,
    sent_prompt,
)
from vlm_serve.engine.remote.parts import (
    RemoteAdapters,
    RemoteGrammars,
    RemotePins,
    RemoteRecords,
)
from vlm_serve.engine.remote.peer import Peer
from vlm_serve.engine.remote.tree import RemoteMirror
from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.validation import check_page
from vlm_serve.errors import EngineClosedError, EngineError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.affinity import AffinityDigest
from vlm_serve.preprocess.identity.keys import WeightsIdentity
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.system import child, children
from vlm_serve.system.wire import ConnectionLostError, Wire

_log = logging.getLogger(__name__)
WANTED_SECONDS = 0.001
"""Interval in which a check looks whether the engine has other work."""
END_SECONDS = 120.0
"""Time that the process gets to end its step and to save its tiers."""
_STATUS_SECONDS = 10.0
"""Time to wait for the exit status: an ending process closes its connection a little earlier."""


class _Open:
    """A request that has not ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.reader = DeltaReader()
        self.left = set(range(request.params.n))

    def deltas_of_end(self, error: EngineClosedError) -> list[Delta]:
        """Return the last deltas of all choices when the engine has gone."""
        last = self.reader.last or Delta(0, usage=Usage(len(self.request.prompt)))
        reported = {"usage": last.usage, "cache_report": last.cache_report}
        return [
            Delta(index, finish_reason="error", error=error, **cast("Any", reported))
            for index in sorted(self.left)
        ]


class RemoteEngine(RequestMaker):
    """An engine in a process of its own. All methods may be called from any thread.

    Callbacks run on the receiving thread and must not block. When the process ends, however it
    does, the engine has ended, and the process ends with this one.

    Args:
        model, config: see `Engine.from_checkpoint`, which raises the same errors.

    Raises:
        EngineError: the process ended before the engine had started.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        super().__init__()
        self._process, wire = _process()
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        try:
            wire.send(model, config, level, sys.getswitchinterval())
            (started,) = wire.receive()
            if not isinstance(started, Started):
                raise started
        except BaseException as error:
            self._process.kill()
            how = children.how_ended(self._process)
            wire.close()
            if isinstance(error, ConnectionLostError):
                why = f"the engine's process {how} before it had started"
                raise EngineError(why) from None
            raise
        self._started: Started = started
        torch.set_num_threads(started.config.threads or torch.get_num_threads())
        self.pid = self._process.pid
        self.config, self.spec, self.arithmetic = started.config, started.spec, started.arithmetic
        self.memory, self.degraded = started.memory, started.degraded
        self.max_model_len = started.max_model_len
        self.preprocessor = started.make_preprocessor()
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._stepped: dict[Callable[[], None], None] = {}
        self._running = self._waiting = self._sent = self._arrived = self.num_steps = 0
        self.last_step_time, self._alive, self._closing = time.monotonic(), True, False
        self._rests: frozenset[Rest] = frozenset()
        self._lent = Lent()
        self._peer = peer = Peer(wire)
        peer.told |= {"delta": self._take_delta, "state": self._take_state, **self._lent.told}
        peer.asked |= self._lent.asked
        self.mirror = RemoteMirror(peer)
        peer.told |= self.mirror.told
        self.adapters = RemoteAdapters(peer, started.served)
        self.grammars = cast("Any", RemoteGrammars(peer))
        self.pins = RemotePins(peer)
        if started.has_vision:
            self.preprocessor.know_embeddings(self._embedded)
        if started.has_tiers:
            self.preprocessor.keep_records(RemoteRecords(peer))
        name = "vlm-serve-receive"
        self._receiver = threading.Thread(target=self._receive, name=name, daemon=True)
        self._receiver.start()

    def begin(self, request: Request) -> None:
        """See `RequestMaker.begin`."""
        number = next(self._numbers)
        lent = request.next_turn is not None or request.prompt.corrected is not None
        with self._lock:
            if not self._alive or self._closing:
                raise EngineClosedError("the engine is closed")
            self._open[number] = _Open(request)
            self._sent += 1
            if lent:
                self._lent.lend(number, request)
        plain, turn = sent(request)
        self._peer.tell("begin", number, plain, turn, lent)

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._peer.tell("abort", request_id)

    def hold(self, request_id: str, held: bool) -> None:
        """See `Engine.hold`."""
        self._peer.tell("hold", request_id, held)

    def affinity_digest(self) -> AffinityDigest:
        """See `Engine.affinity_digest`."""
        return cast("AffinityDigest", self._peer.ask("affinity_digest"))

    def check(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """See `Engine.check`."""
        checking = self._peer.begin_to_ask("check")
        while not futures.wait([checking], WANTED_SECONDS).done:
            if wanted():
                self._peer.tell("interrupt")  # again if it came before the check did
        return cast("bool", checking.result())

    def flush(self) -> None:
        """See `Engine.flush`."""
        self._peer.ask("flush")
        self.preprocessor.forget()

    def update_weights(
        self, source: str | Path, *, version: str | None = None, **options: Any
    ) -> WeightsIdentity:
        """See `Engine.update_weights`; from a folder or a file."""
        with self._only_update():
            identity: WeightsIdentity = self._peer.ask("update_weights", source, version, options)
            self.weight_version = self.weight_version if version is None else version
            self.preprocessor.renew(identity)
        return identity

    @property
    def rests(self) -> frozenset[Rest]:
        """See `RequestMaker.rests`."""
        return self._rests

    def pause(self, mode: str = "abort") -> None:
        """See `Engine.pause`."""
        self._peer.ask("pause", mode)

    def resume(self) -> None:
        """See `Engine.resume`."""
        self._peer.ask("resume")

    def sleep(
        self, parts: Collection[str] = ("kv_cache",), *, mode: str = "retract"
    ) -> frozenset[str]:
        """See `Engine.sleep`."""
        return cast("frozenset[str]", self._peer.ask("sleep", tuple(parts), mode))

    def wake_up(self, parts: Collection[str] | None = None) -> frozenset[str]:
        """See `Engine.wake_up`."""
        return cast("frozenset[str]", self._peer.ask("wake_up", parts))

    def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return with_prompts(self._peer.ask("stats"), self.preprocessor)

    def probe(self, prompt: Prompt) -> CacheReport:
        """See `Engine.probe`."""
        return cast("CacheReport", self._peer.ask("probe", sent_prompt(prompt)))

    def page(self, entries: Sequence[ListedNode], offset: int, limit: int) -> TreePage:
        """See `Engine.page`."""
        check_page(offset, limit)
        shown = entries[offset : offset + limit]
        self.mirror.refresh(shown)
        return TreePage(len(entries), offset, tuple(map(self.describe, shown)))

    def describe(self, entry: ListedNode) -> NodeInfo:
        """Describe a node as it was told last."""
        return cast("NodeInfo", cast("Any", entry.node).info)

    def rows(self) -> list[tuple[str, str]]:
        """See `Engine.rows`."""
        return [("engine", f"in a process of its own, {self.pid}"), *self._started.rows]

    @property
    def num_running(self) -> int:
        """See `Engine.num_running`."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences and of requests that are on their way."""
        return self._waiting + self._sent - self._arrived

    @property
    def alive(self) -> bool:
        """See `Engine.alive`."""
        return self._alive and not self._closing

    def wait(self) -> None:
        """See `Engine.wait`."""
        self._receiver.join()

    def close(self) -> None:
        """See `Engine.close`."""
        self._closing = True
        self._peer.tell("close")
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("the engine's process did not end within %g s", END_SECONDS)
            self._process.kill()
        self.wait()

    # -- the receiving thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        self._peer.receive(self._on_batch)
        how = "has closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = children.how_ended(self._process, _STATUS_SECONDS)
        why = "the engine was closed while the request was running"
        if not self._closing and self._alive:
            why = f"the engine's process {how}"
            _log.critical("the engine ends: %s", why)
        with self._lock:
            self._alive = False
            ended, self._open = self._open, {}
        self._running, self._waiting, self._arrived = 0, 0, self._sent
        self._lent.clear()
        error = EngineClosedError(why, code="engine_stopped")
        for each in ended.values():
            for delta in each.deltas_of_end(error):
                self._hand_over(each.request, delta)
        self._on_batch()
        self._peer.close()
        self.preprocessor.close()

    def _on_batch(self) -> None:
        stepped, self._stepped = self._stepped, {}
        for told in stepped:
            told()

    def _take_delta(self, number: int, *packed: Any) -> None:
        found = self._open[number]
        delta = found.reader.read(*packed)
        if delta.finish_reason is not None:
            found.left.discard(delta.index)
            if not found.left:
                del self._open[number]
        self._hand_over(found.request, delta)

    def _hand_over(self, request: Request, delta: Delta) -> None:
        try:
            request.on_delta(delta)
        except Exception:
            _log.exception("a callback of request %s raised", request.request_id)
        if request.on_step is not None:
            self._stepped[request.on_step] = None

    def _take_state(
        self,
        running: int,
        waiting: int,
        steps: int,
        last_step: float,
        alive: bool,
        rests: frozenset[Rest],
        arrived: int,
    ) -> None:
        self._rests = rests
        self._running, self._waiting, self.num_steps = running, waiting, steps
        self.last_step_time, self._alive, self._arrived = last_step, alive, arrived

    def _embedded(self, key: bytes) -> bool:
        with contextlib.suppress(EngineClosedError):
            return cast("bool", self._peer.ask("embedded", key))
        return False


def _process() -> tuple[subprocess.Popen[bytes], Wire]:
    """Start the process. Raise EngineError if that is not possible."""
    ours, theirs = socket.socketpair()
    try:
        process = children.start(
            "vlm_serve.engine.remote.worker",
            str(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=child.environment(),
            start_new_session=True,  # Ctrl-C is for this process, which ends the engine in order
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"the engine's process cannot be started: {error.strerror}") from None
    finally:
        theirs.close()
    return process, Wire(ours.detach(), REDUCERS)
