"""Thread-safe interface of an engine's pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from vlm_serve.engine.inspection import Inspector, PinInfo
from vlm_serve.engine.mirror import TreeMirror
from vlm_serve.engine.validation import check_prompt, check_ttl
from vlm_serve.preprocess.prompt import Prompt

T = TypeVar("T")


class Call(Protocol):
    """Runs a function on the engine's thread and returns its result."""

    def __call__(self, function: Callable[[], T], /) -> T: ...


class Pins:
    """Pins prefixes, lists the pins and lifts them; each call waits for the end of a step.

    An owner is the key of a tenant's root.

    Args:
        call: the engine's.
        inspector: the engine's.
        mirror: the cache's tree.
    """

    def __init__(self, call: Call, inspector: Inspector, mirror: TreeMirror) -> None:
        self._call = call
        self._inspector = inspector
        self._mirror = mirror

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
        return self._call(lambda: self._inspector.pin(prompt, ttl_seconds, owner))

    def add_node(self, key: bytes, ttl_seconds: float, owner: bytes | None = None) -> int:
        """Keep a node, its ancestors and the deepest state among them for `ttl_seconds`. Return the
        number of tokens pinned; 0 for an unknown node, or as `add` does. Without an owner, the
        node's root owns the pin.

        Raises InvalidRequestError for a time out of range.
        """
        check_ttl(ttl_seconds)
        entry = self._mirror.find(key)
        if entry is None:
            return 0
        return self._call(lambda: self._inspector.pin_node(entry.node, ttl_seconds, owner))

    def listed(self, owner: bytes | None = None) -> tuple[PinInfo, ...]:
        """Describe an owner's pins, None: all of them, earliest expiry first."""
        return self._call(lambda: self._inspector.pins(owner))

    def lift(self, owner: bytes | None = None, key: bytes | None = None) -> int:
        """Release pins of an owner, None: of all, with that key, None: any; return their number."""
        return self._call(lambda: self._inspector.lift_pins(owner, key))
