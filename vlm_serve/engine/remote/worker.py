"""The process of an engine: it does what the process says that has started it.

It ends with that process. Signals of a terminal, or of a whole group of processes, are for the
other one alone, which ends this one in order.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from vlm_serve.engine.core.media_tiers import UploadTiers
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.remote.messages import (
    REDUCERS,
    DeltaPacker,
    GrammarName,
    Origin,
    RemoteTurn,
    Started,
)
from vlm_serve.engine.remote.peer import Peer, portable
from vlm_serve.engine.remote.tree import TreeTeller
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.engine.start.build import device_of
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.identity.keys import WeightsIdentity
from vlm_serve.system.collector import freeze_startup_objects
from vlm_serve.system.host_memory import release_freed_memory, retain_freed_memory
from vlm_serve.system.log_output import start_logging
from vlm_serve.system.wire import ConnectionLostError, Wire

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


class Worker:
    """Does for another process what that asks of an engine. It is also a feature of the engine.

    Args:
        engine: the engine.
        wire: the connection.
    """

    def __init__(self, engine: Engine, wire: Wire) -> None:
        self._engine, self._begun, self._told_step = engine, 0, False
        self._interrupted = False
        self._changing = threading.Lock()
        self._compiling: set[str] = set()
        self._peer = peer = Peer(wire, self._state)
        tree = TreeTeller(engine.parts.cache, engine.mirror, peer)
        peer.told |= {"begin": self._begin, "abort": self._abort, "hold": engine.hold}
        peer.told |= {"follow": tree.follow, "use": tree.tell_use, "close": self._close}
        peer.told["interrupt"] = self._interrupt
        for name in ("stats", "flush", "probe", "affinity_digest"):
            peer.asked[name] = getattr(engine, name)
        for name in ("add", "add_node", "listed", "lift"):
            peer.asked[f"pins.{name}"] = getattr(engine.pins, name)
        peer.asked |= {"check": self._check, "compile": self._compile, "nodes": tree.nodes}
        peer.asked |= {"warm": engine.grammars.warm, "load": self._load, "unload": self._unload}
        peer.asked["update_weights"] = self._update
        for name in ("pause", "resume", "wake_up"):
            peer.asked[name] = partial(self._telling, getattr(engine, name))
        peer.asked["sleep"] = partial(self._telling, self._sleep)
        peer.asked["embedded"] = engine.parts.media.cache.__contains__
        if engine.parts.tiers is not None:
            records = UploadTiers(engine.parts.tiers.stack)
            peer.asked["records.get"] = records.get
            peer.told |= {"records.put": records.put, "records.replace": records.replace}
        engine.add(tree)
        engine.add(self)

    def run(self) -> None:
        """Serve until the engine ends."""
        threading.Thread(target=self._receive, name="vlm-serve-receive", daemon=True).start()
        self._engine.wait()
        self._peer.close()

    def _receive(self) -> None:
        self._peer.receive(on_quiet=_tidy)
        _leave()  # nobody asks any more

    def _state(self) -> tuple[Any, ...]:
        engine = self._engine
        counts = engine.num_running, engine.num_waiting, engine.num_steps
        return "state", *counts, engine.last_step_time, engine.alive, engine.rests, self._begun

    # -- a feature of the engine -------------------------------------------------------------------

    def on_idle(self) -> None:
        """Tell of a step without deltas, and once more when there is no work left."""
        if not self._told_step or not (self._engine.num_running or self._engine.num_waiting):
            self._peer.flush()
        self._told_step = False

    def on_waiting(self, sequence: Sequence) -> None:
        """Tell of a request that comes while no step is to run."""
        if self._engine.rests:
            self._peer.flush()

    def _on_step(self) -> None:
        self._told_step = True
        self._peer.flush()

    # -- requests ----------------------------------------------------------------------------------

    def _begin(self, number: int, request: Request, turn: str | None, lent: bool) -> None:
        """Begin a request.

        Args:
            number: of its deltas.
            turn: kind of its next turn; None: that begins with prompt and answer.
            lent: the other process can be asked for pixels and the next turn.
        """
        add, packed = self._peer.add, DeltaPacker().packed
        request = replace(
            request,
            on_delta=lambda delta: add("delta", number, *packed(delta)),
            on_step=self._on_step,
        )
        if lent:
            origin = Origin(self._peer, number)
            next_turn = None if turn is None else RemoteTurn(turn, origin)
            request = replace(request, prompt=origin.adopt(request.prompt), next_turn=next_turn)
        self._begun += 1
        name = cast("GrammarName | None", request.grammar)
        if name is None:
            self._begin_with(request)
            return
        grammar = self._engine.grammars.find(*name)
        if grammar is not None:
            self._begin_with(replace(request, grammar=grammar))
            return
        with self._changing:
            self._compiling.add(request.request_id)
        self._peer.later(self._begin_compiled, request, name)  # the cache has dropped it

    def _begin_compiled(self, request: Request, name: GrammarName) -> None:
        try:
            grammar = self._engine.grammars.compile(*name)
        except VlmServeError as error:
            _end(request, error)
            return
        with self._changing:
            if request.request_id in self._compiling:
                self._compiling.remove(request.request_id)
                self._begin_with(replace(request, grammar=grammar))
            else:
                _end(request, None)

    def _begin_with(self, request: Request) -> None:
        try:
            self._engine.begin(request)
        except VlmServeError as error:
            _end(request, error)

    def _abort(self, request_id: str) -> None:
        with self._changing:
            self._compiling.discard(request_id)
        self._engine.abort(request_id)

    # -- answers -----------------------------------------------------------------------------------

    def _check(self) -> bool:
        """Check the cache until that is interrupted."""
        self._interrupted = False
        return self._engine.check(lambda: self._interrupted)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _compile(self, *name: Any) -> None:
        self._engine.grammars.compile(*name)

    def _load(self, wanted: LoRA, taken: tuple[str, ...], below: Path | None) -> None:
        self._engine.adapters.load(wanted, taken=taken, below=below)
        self._tell_served()

    def _update(self, source: str | Path, version: str | None, options: Any) -> WeightsIdentity:
        return self._telling(
            partial(self._engine.update_weights, source, version=version, **options)
        )

    def _sleep(self, parts: Collection[str], mode: str) -> frozenset[str]:
        return self._engine.sleep(parts, mode=mode)

    def _telling(self, change: Callable[..., T], *arguments: Any) -> T:
        """Make a change of the engine, of which the other side knows before it has the result."""
        result = change(*arguments)
        self._peer.add(*self._state())
        return result

    def _unload(self, name: str, timeout: float | None) -> None:
        self._engine.adapters.unload(name, timeout)
        self._tell_served()

    def _tell_served(self) -> None:
        with self._changing:
            self._peer.tell("served", served_names(self._engine))

    def _close(self) -> None:
        threading.Thread(target=self._engine.close, daemon=True).start()


def served_names(engine: Engine) -> list[Any]:
    """Return the served adapters, with digests in the place of weights."""
    return [
        replace(
            served,
            adapter=cast(
                "Any",
                SimpleNamespace(
                    digest=served.adapter.digest, vision_digest=served.adapter.vision_digest
                ),
            ),
        )
        for served in engine.adapters.all()
    ]


def _end(request: Request, error: VlmServeError | None) -> None:
    """End a request that has not begun; None: it was aborted."""
    reason: Any = "abort" if error is None else "error"
    for index in range(request.params.n):
        request.on_delta(Delta(index, finish_reason=reason, error=error))
    if request.on_step is not None:
        request.on_step()


def _tidy() -> None:
    """Return memory to the system; see `server/upkeep.py`."""
    gc.collect()
    release_freed_memory()


def _leave() -> None:
    logging.shutdown()
    os._exit(0)


def main(descriptor: int) -> None:
    """Start the engine that the first message asks for, and serve."""
    for number in _SIGNALS:  # a handler, unlike SIG_IGN, is not inherited by children
        signal.signal(number, lambda number, frame: None)
    wire = Wire(descriptor, REDUCERS)
    model, config, level, switch_seconds = wire.receive()
    sys.setswitchinterval(switch_seconds)
    start_logging(level)
    try:
        if device_of(config.device).type == "cpu":
            retain_freed_memory()
        engine = Engine.from_checkpoint(model, config)
    except Exception as error:
        wire.send(portable(error))
        return
    freeze_startup_objects()
    parts = engine.parts
    worker = Worker(engine, wire)
    wire.send(
        Started(
            engine.config,
            engine.spec,
            engine.arithmetic,
            engine.memory,
            engine.degraded,
            engine.max_model_len,
            parts.make_preprocessor,
            engine.rows(),
            served_names(engine),
            has_vision=engine.spec.vision is not None,
            has_tiers=parts.tiers is not None,
        )
    )
    worker.run()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionLostError):  # the other process is gone
        main(int(sys.argv[1]))
    _leave()
