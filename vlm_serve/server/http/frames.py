"""Events of a stream that differ in a few values only: all else of them is made once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from vlm_serve.server.http.streaming import event, to_json

GAP = secrets.token_hex(16)
"""Stands where a frame's values go: no client can write it anywhere else."""


class Frames:
    """The prepared events of one stream.

    Args:
        named: each event's name is its body's `type`.
    """

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        self._known: dict[Hashable, str] = {}

    def fill(self, shape: Hashable, make: Callable[[], Mapping[str, Any]], *values: str) -> bytes:
        """Return an event with values in its gaps.

        Args:
            shape: events of the same shape differ in their values only.
            make: makes the first such event, with `GAP` in place of each value.
            values: the values as JSON, in the order of the gaps.
        """
        frame = self._known.get(shape)
        if frame is None:
            body = make()
            text = event(body, body["type"] if self._named else None).decode()
            frame = self._known[shape] = text.replace("%", "%%").replace(to_json(GAP), "%s")
        return (frame % values).encode()
