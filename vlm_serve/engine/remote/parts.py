"""Parts of an engine in another process, with the methods that those of `Engine` have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.features.adapters.store import AdapterStore, ServedAdapter
from vlm_serve.engine.features.inspection import PinInfo
from vlm_serve.engine.remote.messages import GrammarName, sent_prompt
from vlm_serve.engine.remote.peer import Peer
from vlm_serve.errors import EngineClosedError
from vlm_serve.grammar.compiler import CACHE_ENTRIES
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.processing import MediaRecord
from vlm_serve.structured_outputs import StructuredOutputs


class RemoteGrammars:
    """See `GrammarCompiler`. A grammar is a name here; the one itself is where tokens are chosen.

    Args:
        peer: the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._known: OrderedDict[Any, None] = OrderedDict()

    def compile(
        self, form: StructuredOutputs, after: bytes = b"", owner: bytes = b""
    ) -> GrammarName:
        """See `GrammarCompiler.compile`."""
        name = GrammarName(form, after, owner)
        self._peer.ask("compile", *name)
        with self._lock:
            self._known[_key(name)] = None
            while len(self._known) > CACHE_ENTRIES:
                self._known.popitem(last=False)
        return name

    def find(
        self, form: StructuredOutputs, after: bytes = b"", owner: bytes = b""
    ) -> GrammarName | None:
        """See `GrammarCompiler.find`. If it has been dropped since, it is compiled again."""
        name = GrammarName(form, after, owner)
        with self._lock:
            if _key(name) not in self._known:
                return None
            self._known.move_to_end(_key(name))
        return name

    def warm(self) -> None:
        """See `GrammarCompiler.warm`."""
        self._peer.ask("warm")

    def close(self) -> None:
        """Leave it to the other process."""


def _key(name: GrammarName) -> tuple[Any, ...]:
    return name.owner, *name.form.source, name.form.json_object, name.form.strict


class RemoteAdapters(AdapterStore):
    """The names of the adapters; digests stand for their weights.

    Args:
        peer: the connection.
        served: as of the start.
    """

    def __init__(self, peer: Peer, served: list[ServedAdapter]) -> None:
        self._peer = peer
        self._by_name: dict[str, ServedAdapter] = {}
        self.take(served)
        peer.told["served"] = self.take

    def take(self, served: list[ServedAdapter]) -> None:
        """Offer these adapters and no others."""
        self._by_name = {each.name: each for each in served}

    def load(
        self, wanted: LoRA, *, taken: tuple[str, ...] = (), below: Path | None = None
    ) -> ServedAdapter:
        """See `AdapterStore.load`."""
        self._peer.ask("load", wanted, taken, below)
        return cast("ServedAdapter", self.find(wanted.name))

    def unload(self, name: str, timeout: float | None = None) -> None:
        """See `AdapterStore.unload`."""
        self._peer.ask("unload", name, timeout)


class RemotePins:
    """See `Pins`.

    Args:
        peer: the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def add(self, prompt: Prompt, ttl_seconds: float, owner: bytes | None = None) -> int:
        """See `Pins.add`."""
        return cast("int", self._peer.ask("pins.add", sent_prompt(prompt), ttl_seconds, owner))

    def add_node(self, key: bytes, ttl_seconds: float, owner: bytes | None = None) -> int:
        """See `Pins.add_node`."""
        return cast("int", self._peer.ask("pins.add_node", key, ttl_seconds, owner))

    def listed(self, owner: bytes | None = None) -> tuple[PinInfo, ...]:
        """See `Pins.listed`."""
        return cast("tuple[PinInfo, ...]", self._peer.ask("pins.listed", owner))

    def lift(self, owner: bytes | None = None, key: bytes | None = None) -> int:
        """See `Pins.lift`."""
        return cast("int", self._peer.ask("pins.lift", owner, key))


class RemoteRecords:
    """See `UploadRecords`.

    Args:
        peer: the connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def get(self, key: bytes) -> MediaRecord | None:
        """See `UploadRecords.get`."""
        with suppress(EngineClosedError):
            return cast("MediaRecord | None", self._peer.ask("records.get", key))
        return None

    def put(self, key: bytes, record: MediaRecord) -> None:
        """See `UploadRecords.put`."""
        self._peer.tell("records.put", key, record)

    def replace(self, key: bytes, record: MediaRecord) -> None:
        """See `UploadRecords.replace`."""
        self._peer.tell("records.replace", key, record)
