"""Media of clients, held in memory so that later requests can name them instead of sending them.

A name is a `uuid` that came with the medium, or a hash that an answer told. It is looked up among
those of the same API key and salt alone, so another client's name is an unknown one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from vlm_serve.errors import MediaNotHeldError, UnsupportedFieldError
from vlm_serve.preprocess.reading.conversation import MediaName, MediaPart, StoredUpload
from vlm_serve.server.http.auth import Owner

HELD_SECONDS = 3600.0
"""Time after its last use for which a name is known."""
ALL_KEYS = 4
"""The media of all keys together may be so many times as large as those of one."""
RECORD_BYTES = 600
"""Memory of a medium beside its source, and of a name."""
Name = tuple[str, str, str]
"""Salt, modality, and the text of a `MediaName`."""


class HeldMedium:
    """The source of a medium. It counts until nothing uses it any longer, whether named or not.

    Args:
        source: see `MediaPart`.
        num_bytes: memory that it counts for.
        on_freed: called at the end, on any thread.
    """

    __slots__ = ("_on_freed", "num_bytes", "source")

    def __init__(self, source: Any, num_bytes: int, on_freed: Callable[[int], None]) -> None:
        self.source = source
        self.num_bytes = num_bytes
        self._on_freed = on_freed

    def __del__(self) -> None:
        self._on_freed(self.num_bytes)


@dataclass(slots=True)
class _Account:
    """Media of one API key.

    Attributes:
        names: with the time of the last use, the least recently used first.
        num_bytes: of all media that are alive, and their names.
        freed: bytes of media that have ended since. They may end anywhere, also under the lock.
    """

    names: OrderedDict[Name, tuple[HeldMedium, float]] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    freed: deque[int] = field(default_factory=deque)

    def settle(self, oldest: float = float("-inf")) -> None:
        """Drop the names that were last used before a time, and count what has ended."""
        while self.names and next(iter(self.names.values()))[1] < oldest:
            self.drop()
        while self.freed:
            self.num_bytes -= self.freed.popleft()

    def drop(self) -> None:
        """Drop the least recently used name."""
        self.names.popitem(last=False)
        self.num_bytes -= RECORD_BYTES
        self.settle()


class HeldMedia:
    """Media by name. Thread-safe.

    Args:
        max_bytes: limit for each API key, of all keys `ALL_KEYS` times as much. What open requests
            use counts, too.
        clock: returns the time in seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._accounts: dict[bytes, _Account] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of all keys' media."""
        with self._lock:
            return self._settled()

    def find(self, owner: Owner, modality: str, name: MediaName) -> HeldMedium | None:
        """Return an owner's medium; None: there is none of that name and kind."""
        key = owner.salt, modality, str(name)
        with self._lock:
            self._settled()
            account = self._accounts.get(owner.key)
            medium, _ = (account and account.names.get(key)) or (None, 0.0)
            if account and medium:
                account.names[key] = medium, self._clock()
                account.names.move_to_end(key)
            return medium

    def put(self, owner: Owner, name: MediaName, part: MediaPart) -> MediaPart:
        """Hold the source of a part under a name, and return the part, which counts for it.

        The least recently used names of the key are dropped for it, then those of the keys with the
        most. It is not held if there is no room even so.
        """
        source = part.joined().source
        known = self.find(owner, part.modality, name)
        if known is not None and known.source == source:
            return replace(part.joined(), held=known)
        with self._lock:
            self._settled()
            account = self._accounts.setdefault(owner.key, _Account())
            held = part.held if isinstance(part.held, HeldMedium) else None
            parts = source if isinstance(source, list) else [source]
            memory = RECORD_BYTES + sum(map(sys.getsizeof, parts))
            size = RECORD_BYTES + (0 if held else memory)
            if not self._make_room(account, size):
                return part
            if held is None:
                held = HeldMedium(source, memory, account.freed.append)
            key = owner.salt, part.modality, str(name)
            account.num_bytes += size - RECORD_BYTES * (account.names.pop(key, None) is not None)
            account.names[key] = held, self._clock()
            return replace(part, source=source, head="", held=held)

    def clear(self) -> None:
        """Drop all names."""
        with self._lock:
            for account in self._accounts.values():
                while account.names:
                    account.drop()

    def _settled(self) -> int:
        for account in self._accounts.values():
            account.settle(self._clock() - HELD_SECONDS)
        return sum(map(attrgetter("num_bytes"), self._accounts.values()))

    def _make_room(self, account: _Account, size: int) -> bool:
        """Drop names until so many further bytes fit; return False if they do not."""
        if size > self.max_bytes:
            return False
        while account.num_bytes + size > self.max_bytes and account.names:
            account.drop()
        while self._settled() + size > ALL_KEYS * self.max_bytes:
            named = [each for each in self._accounts.values() if each.names]
            if not named:
                return False
            max(named, key=attrgetter("num_bytes")).drop()
        return account.num_bytes + size <= self.max_bytes


StoredMedia = Callable[[Owner, str], StoredUpload | None]
"""Returns the file of an owner and id, on any thread; None: there is none."""


@dataclass(frozen=True, slots=True)
class ClientMedia:
    """The media that one request may name; see `Uploads`.

    Attributes:
        held: None: nothing is held.
        stored: None: the server keeps no media on disk.
        owner: whose held ones they are.
        keeper: whose stored ones they are; no salt that a client chose is part of it.
        tells: the answer tells hashes, which become names.
    """

    held: HeldMedia | None
    stored: StoredMedia | None
    owner: Owner
    keeper: Owner
    tells: bool = False

    def resolved(self, part: MediaPart) -> MediaPart:
        """See `Uploads.resolved`."""
        name = part.source
        if isinstance(name, MediaName):
            part = self._file(part, name) if name.kind == "file_id" else self._named(part, name)
        if self.held is None:
            return part
        if part.uuid:
            part = self.held.put(self.owner, MediaName("uuid", part.uuid), part)
        if self.tells and not part.document:
            part = replace(part, on_loaded=partial(self._learn, part))
        return part

    def _file(self, part: MediaPart, name: MediaName) -> MediaPart:
        found = None if self.stored is None else self.stored(self.keeper, name.text)
        if found is None:
            raise MediaNotHeldError(name, part.param, status=404)
        return replace(part, source=found)

    def _named(self, part: MediaPart, name: MediaName) -> MediaPart:
        if self.held is None:
            raise UnsupportedFieldError(
                f"{part.param}: media by {name.kind} need a server with --media-store",
                param=part.param,
                code="unsupported_field",
            )
        found = self.held.find(self.owner, part.modality, name)
        if found is None:
            raise MediaNotHeldError(name, part.param)
        return replace(part, source=found.source, held=found)

    def _learn(self, part: MediaPart, digest: str) -> None:
        assert self.held is not None
        self.held.put(self.owner, MediaName("hash", digest), part)
