"""What crosses between an engine's process and the one that asks it, as plain data."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch

from vlm_serve.engine.numerics.arithmetic import Arithmetic
from vlm_serve.engine.remote.peer import Peer
from vlm_serve.engine.requests.outputs import Delta, FinishReason, Usage
from vlm_serve.engine.requests.request import NextTurn, Request
from vlm_serve.engine.steps.memory import MemoryPlan
from vlm_serve.models import ModelSpec
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.loading import LoadedMedia
from vlm_serve.preprocess.media.processing import Processed
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.structured_outputs import StructuredOutputs
from vlm_serve.system.stopping import Stop

_log = logging.getLogger(__name__)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.contiguous().numpy(),)


REDUCERS = {torch.Tensor: _reduced}
"""Tensors on the CPU travel as arrays, and large ones in shared memory."""


@dataclass(frozen=True)
class Started:
    """An engine that has started, for the asking process; see `Engine` and `EngineParts`.

    Attributes:
        served: names of the adapters, as `RemoteAdapters` has them.
        has_vision, has_tiers: where embeddings and records of uploads may be asked for.
    """

    config: EngineConfig
    spec: ModelSpec
    arithmetic: Arithmetic
    memory: MemoryPlan
    degraded: str | None
    max_model_len: int
    make_preprocessor: Callable[[], Preprocessor]
    rows: list[tuple[str, str]]
    served: list[Any]
    has_vision: bool
    has_tiers: bool


class GrammarName(NamedTuple):
    """Names a grammar that the engine's process has compiled."""

    form: StructuredOutputs
    after: bytes
    owner: bytes


# -- deltas ----------------------------------------------------------------------------------------

_RARE = (
    "logprobs",
    "finish_reason",
    "stop_reason",
    "routed_experts",
    "routed_experts_gaps",
    "prompt_logprobs",
    "vector",
    "error",
    "reasoning",
    "progress",
)
_rare_of = attrgetter(*_RARE)
_ABSENT = tuple(each.default for name in _RARE for each in fields(Delta) if each.name == name)
_usage_of = attrgetter(*(each.name for each in fields(Usage)))


class DeltaPacker:
    """Packs the deltas of one request. Most are a text, tokens and counts. The report of the cache
    comes with each and seldom differs from the one before."""

    def __init__(self) -> None:
        self._report: Any = None

    def packed(self, delta: Delta) -> tuple[Any, ...]:
        """Return a delta as `DeltaReader.read` takes it."""
        report: Any = False if delta.cache_report is self._report else delta.cache_report
        self._report = delta.cache_report
        # A finish reason ends the comparison before arrays are compared.
        rare = _rare_of(delta)
        told = None if delta.finish_reason is None and rare == _ABSENT else rare
        usage = _usage_of(delta.usage)
        return delta.index, delta.text, delta.token_ids, usage, delta.time, report, told


class DeltaReader:
    """Reads what `DeltaPacker` has packed.

    Attributes:
        last: the latest delta; None before the first.
    """

    def __init__(self) -> None:
        self.last: Delta | None = None

    def read(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        usage: tuple[int, ...],
        time: float,
        report: Any,
        rare: tuple[Any, ...] | None,
    ) -> Delta:
        """Return the delta."""
        if report is False:
            report = None if self.last is None else self.last.cache_report
        others = {} if rare is None else dict(zip(_RARE, rare, strict=True))
        given: dict[str, Any] = {"usage": Usage(*usage), "cache_report": report, "time": time}
        self.last = Delta(index, text, token_ids, **given, **others)
        return self.last


# -- requests --------------------------------------------------------------------------------------


def nobody(delta: Delta) -> None:
    """Take a delta in the place of a caller in another process."""


def sent_prompt(prompt: Prompt) -> Prompt:
    """Return what another process can have of a prompt."""
    return replace(prompt, next_turn=None, corrected=None, text="")


def sent(request: Request) -> tuple[Request, str | None]:
    """Return what another process can have of a request, and the kind of its next turn."""
    kind = None if request.next_turn is None else request.next_turn.kind
    prompt, given = sent_prompt(request.prompt), {"on_step": None, "next_turn": None}
    return replace(request, prompt=prompt, on_delta=nobody, **cast("Any", given)), kind


class Origin:
    """What the engine's process can ask of a request in the one that it came from: pixels, a
    corrected prompt, and what a next turn shares. The other side keeps the request until this is
    garbage.

    Args:
        peer: the connection.
        number: the request's.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self._number = peer, number
        self._loads = 0
        weakref.finalize(self, peer.tell, "release", number).atexit = False

    def adopt(self, prompt: Prompt) -> Prompt:
        """Return the prompt, whose media are decoded over there if need be."""
        media = cast("Sequence[LoadedMedia]", prompt.media)
        for index, item in enumerate(media):
            item.decode_by(partial(self._pixels, index))
        unsure = not all(item.ready for item in media)
        return replace(prompt, corrected=self._corrected if unsure else None)

    def _pixels(self, index: int, stop: Stop, patches: Collection[int] | None) -> Processed:
        self._loads += 1
        load = self._number, index, self._loads
        with stop.calling(partial(self._peer.tell, "stop", load)):
            return cast("Processed", self._peer.ask("pixels", load, patches))

    def _corrected(self) -> Prompt:
        return self.adopt(self._peer.ask("corrected", self._number))

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        """See `NextTurn.shared`."""
        asked = "next_turn", self._number, text, tuple(token_ids), reason
        return cast("int", self._peer.ask(*asked))


@dataclass(frozen=True, slots=True)
class RemoteTurn:
    """A `NextTurn` in the other process."""

    kind: str
    origin: Origin

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        """See `NextTurn`."""
        return self.origin.shared(text, token_ids, reason)


class Lent:
    """The requests of which the other process may still ask something."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._stops: dict[tuple[int, int, int], Stop] = {}
        self.told: dict[str, Callable[..., None]] = {"release": self._release, "stop": self._stop}
        self.asked: dict[str, Callable[..., Any]] = {
            "pixels": self._pixels,
            "corrected": self._corrected,
            "next_turn": self._next_turn,
        }

    def __len__(self) -> int:
        return len(self._requests)

    def lend(self, number: int, request: Request) -> None:
        """Keep a request until it is released."""
        self._requests[number] = request

    def clear(self) -> None:
        """Release all: the other process is gone."""
        self._requests.clear()
        for stop in list(self._stops.values()):
            stop.set()

    def _release(self, number: int) -> None:
        self._requests.pop(number, None)
        for load in [load for load in list(self._stops) if load[0] == number]:
            del self._stops[load]

    def _stop(self, load: tuple[int, int, int]) -> None:
        self._stops.setdefault(load, Stop()).set()

    def _pixels(self, load: tuple[int, int, int], patches: Collection[int] | None) -> Processed:
        number, index, _ = load
        item = cast("LoadedMedia", self._requests[number].prompt.media[index])
        return item.pixels(self._stops.setdefault(load, Stop()), patches)

    def _corrected(self, number: int) -> Prompt:
        request = self._requests[number]
        assert request.prompt.corrected is not None
        prompt = request.prompt.corrected()
        self._requests[number] = replace(request, prompt=prompt)
        return sent_prompt(prompt)

    def _next_turn(self, number: int, *answer: Any) -> int:
        turn: NextTurn | None = self._requests[number].next_turn
        assert turn is not None
        return turn.shared(*answer)
