"""The tier shared by many servers: Redis, Valkey or another server of their protocol.

Nothing here deletes another server's entries. Names are derived from the deployment's epoch, so a
flush creates a new epoch, and every look-up reads it. Commands are pipelined, in batches of limited
size.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from redis._parsers import _AsyncRESP2Parser
from redis.exceptions import InvalidResponse, RedisError

from vlm_serve.cache.tiers.entry import EntryId, Kind, Sealed
from vlm_serve.cache.tiers.shared_format import (
    MAX_MANIFEST_BYTES,
    Keyring,
    Manifest,
    chunks,
    most_inside,
    new_epoch,
)
from vlm_serve.cache.tiers.store import in_batches

if TYPE_CHECKING:
    from redis.asyncio import Redis

CLAIM_SECONDS = 30
"""Time for which a claim keeps other servers from writing an entry."""
WRITE_REST_SECONDS = 30.0
"""Pause in writing after the store has refused an entry: most likely it is full."""
FRESH_SECONDS = 60.0
"""Time for which an entry that was seen is assumed to exist when it is due for writing."""
DOUBT_SECONDS = 60.0
"""Time for which a bad entry is not read again, unless it has been replaced."""
EPOCH_SECONDS = 30 * 24 * 3600
_REMEMBERED = 1 << 14

SizeOf = Callable[[Kind, int], int | None]
"""Bytes of this engine's entries by kind and number of tokens; None if that does not determine
them."""
MAX_OTHER_BYTES = 256 << 20
"""Most bytes of an entry whose size the model's layout does not determine."""
READ_BYTES = 64 << 20
"""Approximate bytes of one pipeline's replies."""
WRITE_BYTES = 1 << 20
"""Approximate bytes of one pipeline's chunks."""


_LINE = 512
_SMALL_REPLY = 64 << 10
"""Most bytes of a reply without a range, and of what a new connection is told."""
_LEFT: ContextVar[list[int]] = ContextVar("left")
"""Bytes that the replies of this task's pipeline may still have."""


class BoundedParser(_AsyncRESP2Parser):
    """Reads replies that are no longer than what was asked for. Lists nobody has asked for."""

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        left = _LEFT.get([_SMALL_REPLY])
        length = int(line[1:]) if line[:1] == b"$" else 0
        left[0] -= len(line) + length
        if line[:1] not in (b"+", b"-", b":", b"$") or length < -1 or left[0] < 0:
            raise InvalidResponse("it replies with more than it was asked for")
        return line


class SharedStore:
    """See `Store`. `put` overwrites; `claim` selects what to write.

    Args:
        client: of the server, by protocol 2; its timeout is the caller's. All its commands may be
            retried.
        keyring: of the deployment.
        size_of: expected lengths, compared before anything is read.
        time_limit: seconds that a request may spend on it in total.
        lifetime: seconds until an entry expires; use renews it.
        place: the store's address, without secrets.
    """

    name = "shared"
    private = False
    lasting = True

    def __init__(
        self,
        client: Redis,
        keyring: Keyring,
        size_of: SizeOf,
        *,
        time_limit: float,
        lifetime: int,
        place: str = "",
    ) -> None:
        self.time_limit = time_limit
        self.place = place
        client.connection_pool.connection_kwargs["parser_class"] = BoundedParser
        self._client = client
        self._keys = keyring
        self._size_of = size_of
        self._lifetime = lifetime
        self._epoch: bytes | None = None
        self._flushing = False
        self._manifests: dict[EntryId, Manifest] = {}
        self._doubted: dict[EntryId, float] = {}
        self._fresh: dict[EntryId, float] = {}
        self._writes_again = 0.0
        self._counts: Counter[str] = Counter(
            dict.fromkeys(
                ("hits", "misses", "bad", "incomplete", "written", "skipped", "refused")
                + ("read_bytes", "written_bytes"),
                0,
            )
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Look-ups: "hits", "misses", "bad" (untrusted) and "incomplete" (listed, but with a
        missing piece). Writes: "written", "skipped" (written by another server) and "refused"
        (by the store)."""
        return self._counts

    async def open(self) -> tuple[EntryId, ...]:
        (reply,) = await run(self._client, [("PING",)])
        if checked(reply) not in (b"PONG", True):
            raise OSError("it does not answer as a store")
        return ()

    # Reading

    async def contains(self, ids: Collection[EntryId]) -> set[EntryId]:
        found, now = await self._look_up(list(ids)), asyncio.get_running_loop().time()
        manifests = {i: each for i, each in found.items() if self._doubted.get(i, now) <= now}
        self._count_found(manifests, ids)
        if len(self._manifests) + len(manifests) > _REMEMBERED:
            self._manifests.clear()
        self._manifests |= manifests
        return set(manifests)

    async def get(self, ids: Collection[EntryId]) -> dict[EntryId, Sealed]:
        manifests = {
            entry_id: self._manifests.pop(entry_id)
            for entry_id in ids
            if entry_id in self._manifests
        }
        rest = [entry_id for entry_id in ids if entry_id not in manifests]
        if rest:
            looked_up = await self._look_up(rest)
            self._count_found(looked_up, rest)
            manifests |= looked_up
        sealed = {}
        sized = in_batches(manifests.items(), lambda read: read[1].outline.num_bytes, READ_BYTES)
        for batch in map(dict, sized):
            parts = [
                (entry_id, self._keys.chunk_name(manifest.digest, index), size)
                for entry_id, manifest in batch.items()
                for index, size in enumerate(manifest.chunk_sizes)
            ]
            commands = [("GETRANGE", name, 0, size - 1) for _, name, size in parts]
            replies = await run(self._client, commands) if commands else []
            pieces: dict[EntryId, list[bytes]] = {entry_id: [] for entry_id in batch}
            for (entry_id, _, size), reply in zip(parts, replies, strict=True):
                if isinstance(reply, bytes) and len(reply) == size:
                    pieces[entry_id].append(reply)
            for entry_id, manifest in batch.items():
                payload = manifest.payload or b"".join(pieces[entry_id])
                if len(payload) == manifest.outline.num_bytes:
                    sealed[entry_id] = Sealed(manifest.header, payload)
                    self._counts["read_bytes"] += len(payload)
                else:
                    self._counts["incomplete"] += 1
                    self._doubt(entry_id)
        return sealed

    async def _look_up(self, ids: Sequence[EntryId]) -> dict[EntryId, Manifest]:
        """Read the existing manifests in one pipeline, or two if the epoch has changed
        meanwhile."""
        names, replies = await self._read(ids, lambda entry_id, name: [manifest_of(entry_id, name)])
        manifests = {}
        for entry_id, name, reply in zip(ids, names, replies, strict=True):
            manifest = self._manifest(entry_id, name, reply)
            if manifest is not None:
                manifests[entry_id] = manifest
        return manifests

    def _manifest(self, entry_id: EntryId, name: bytes, reply: Any) -> Manifest | None:
        """Return a manifest with this engine's lengths. Others are counted."""
        if reply == b"":
            return None
        manifest = self._keys.unpack(name, reply) if isinstance(reply, bytes) else None
        if manifest is not None and self._fits(entry_id, manifest):
            return manifest
        self._counts["bad"] += 1
        self._doubt(entry_id)
        return None

    def _fits(self, entry_id: EntryId, manifest: Manifest) -> bool:
        num_tokens, num_bytes, _ = manifest.outline
        if len(manifest.payload) != (num_bytes if most_inside(entry_id.kind) else 0):
            return False
        expected = self._size_of(entry_id.kind, num_tokens)
        bounded = entry_id.kind in (Kind.KV, Kind.STATE) or num_bytes <= MAX_OTHER_BYTES
        return bounded and (expected is None or num_bytes == expected)

    def _count_found(self, found: Iterable[EntryId], asked: Iterable[EntryId]) -> None:
        """Count hits and misses, but not of marks, which hardly any block has."""
        hits, total = (sum(i.kind is not Kind.MARKS for i in ids) for ids in (found, asked))
        self._counts["hits"] += hits
        self._counts["misses"] += total - hits

    # Writing

    async def claim(self, ids: Collection[EntryId]) -> set[EntryId]:
        """Claim the entries that are missing and claimed by no other server, and return them.
        Existing ones that would expire soon are renewed."""
        now = asyncio.get_running_loop().time()
        if now < self._writes_again:
            return set()
        asked = [entry_id for entry_id in ids if self._fresh.get(entry_id, 0.0) <= now]
        if not asked:
            return set()
        names, replies = await self._read(
            asked, lambda entry_id, name: [manifest_of(entry_id, name), ("TTL", name)]
        )
        missing, renewed = dict[EntryId, bytes](), list[bytes]()
        for index, (entry_id, name) in enumerate(zip(asked, names, strict=True)):
            there = replies[2 * index]
            manifest = self._manifest(entry_id, name, there)
            if manifest is None or entry_id in self._doubted:
                raw_manifest = there if isinstance(there, bytes) else b"?"
                missing[entry_id] = self._keys.claim_name(name, raw_manifest)
                continue
            self._saw(entry_id, now)
            if replies[2 * index + 1] < self._lifetime // 2:
                numbers = range(sum(1 for _ in manifest.chunk_sizes))
                renewed += [self._keys.chunk_name(manifest.digest, number) for number in numbers]
                renewed.append(name)
        claims = [("SET", name, b"", "NX", "EX", CLAIM_SECONDS) for name in missing.values()]
        renewals = [("EXPIRE", name, self._lifetime) for name in renewed]
        answers = await run(self._client, [*claims, *renewals]) if claims or renewals else []
        if self._has_refused(answers):
            return set()
        claimed = {entry_id for entry_id, answer in zip(missing, answers, strict=False) if answer}
        self._counts["skipped"] += len(ids) - len(claimed)
        return claimed

    async def put(self, entries: Mapping[EntryId, Sealed]) -> dict[EntryId, Sealed | None]:
        """Write the chunks, then the manifests once all chunks exist. Entries that are too large
        are skipped."""
        now = asyncio.get_running_loop().time()
        if now < self._writes_again:
            return dict(entries)
        await self._settle()
        assert self._epoch is not None
        pieces, manifests = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        large = {
            i: content for i, content in entries.items() if len(content.payload) > most_bytes(i)
        }
        taken = {i: content for i, content in entries.items() if i not in large}
        for entry_id, sealed in taken.items():
            name, whole = self._keys.name(self._epoch, entry_id), most_inside(entry_id.kind)
            inside = bytes(sealed.payload) if whole else b""
            manifest, digest = self._keys.pack(name, sealed.header, inside)
            manifests.append(("SET", name, manifest, "EX", self._lifetime))
            for index, piece in enumerate(() if whole else chunks(sealed.payload)):
                chunk = self._keys.chunk_name(digest, index)
                pieces.append(("SET", chunk, piece, "EX", self._lifetime))
        # In batches of about a full chunk's size, so that a full store refuses early.
        for commands in in_batches(pieces, lambda command: len(command[2]), WRITE_BYTES):
            if self._has_refused(await run(self._client, commands)):
                return dict(entries)
        if manifests and self._has_refused(await run(self._client, manifests)):
            return dict(entries)
        for entry_id, sealed in taken.items():
            self._saw(entry_id, now)
            self._doubted.pop(entry_id, None)
            self._counts["written"] += 1
            self._counts["written_bytes"] += len(sealed.payload)
        return dict(large)

    def _saw(self, entry_id: EntryId, now: float) -> None:
        if len(self._fresh) >= _REMEMBERED:
            self._fresh.clear()
        self._fresh[entry_id] = now + FRESH_SECONDS

    def _has_refused(self, replies: Iterable[Any]) -> bool:
        """Return True if the store has refused an entry; writing then pauses."""
        if not any(isinstance(reply, Exception) for reply in replies):
            return False
        self._counts["refused"] += 1
        self._writes_again = asyncio.get_running_loop().time() + WRITE_REST_SECONDS
        return True

    # The rest of `Store`

    async def touch(self, ids: Collection[EntryId]) -> None:
        """Do nothing: the store tracks its own use, and `claim` renews entries that are published
        again."""

    async def discard(self, ids: Collection[EntryId]) -> None:
        """Remove nothing, because other servers may use the entries; let the next server that
        writes one of these replace it."""
        for entry_id in ids:
            self._doubt(entry_id)

    def _doubt(self, entry_id: EntryId) -> None:
        if len(self._doubted) >= _REMEMBERED:
            self._doubted.clear()
        self._doubted[entry_id] = asyncio.get_running_loop().time() + DOUBT_SECONDS
        self._fresh.pop(entry_id, None)

    async def sink(self) -> dict[EntryId, Sealed]:
        return {}

    async def clear(self) -> None:
        """Start a new epoch. If the store cannot record it now, nothing is read until it has."""
        self._begin_epoch(new_epoch())
        self._flushing = True
        async with asyncio.timeout(self.time_limit):
            await self._settle()

    async def close(self) -> None:
        await self._client.aclose()

    # Epochs

    async def _read(
        self, ids: Sequence[EntryId], commands: Callable[[EntryId, bytes], list[tuple[Any, ...]]]
    ) -> tuple[list[bytes], list[Any]]:
        """Return names in the current epoch, and the reply to each one's command."""
        while True:
            await self._settle()
            assert self._epoch is not None
            names = [self._keys.name(self._epoch, entry_id) for entry_id in ids]
            asked = [
                command for pair in zip(ids, names, strict=True) for command in commands(*pair)
            ]
            record, *replies = await run(self._client, [("GET", self._keys.epoch_name), *asked])
            epoch = self._keys.unpack_epoch(record if isinstance(record, bytes) else None)
            if epoch is None:  # the store has lost it, and probably everything else
                epoch = await self._record_epoch(self._epoch, replace=record is not None)
                self._fresh.clear()
            if epoch == self._epoch:
                return names, [checked(reply) for reply in replies]
            self._begin_epoch(epoch)

    async def _settle(self) -> None:
        """Ensure that there is an epoch and that the store has recorded the last flush."""
        if self._epoch is not None and not self._flushing:
            return
        epoch = self._epoch if self._epoch is not None else new_epoch()
        recorded = await self._record_epoch(epoch, replace=self._flushing)
        self._flushing = False
        if recorded != self._epoch:
            self._begin_epoch(recorded)

    async def _record_epoch(self, epoch: bytes, *, replace: bool) -> bytes:
        """Store an epoch if none exists or it is to be replaced, and return the resulting one. A
        full store stays without; the next server stores one."""
        name, options = self._keys.epoch_name, () if replace else ("NX",)
        record = self._keys.pack_epoch(epoch)
        told, reply = await run(
            self._client, [("SET", name, record, "EX", EPOCH_SECONDS, *options), ("GET", name)]
        )
        stored = self._keys.unpack_epoch(reply if isinstance(reply, bytes) else None)
        if stored is not None and (stored == epoch or not replace):
            return stored
        if isinstance(told, Exception) and not self._flushing:
            checked(reply)
            self._has_refused([told])
            return epoch
        if replace:
            raise OSError("the store did not take the new epoch")
        return await self._record_epoch(epoch, replace=True)

    def _begin_epoch(self, epoch: bytes) -> None:
        self._epoch = epoch
        self._manifests.clear()
        self._doubted.clear()
        self._fresh.clear()


async def run(client: Redis, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the replies of one pipeline, error replies included. Raises OSError."""
    pipeline = client.pipeline(transaction=False)
    most = _SMALL_REPLY
    for command in commands:
        pipeline.execute_command(*command)
        ranged = command[0] == "GETRANGE"
        most += _LINE + (command[3] + 1 - command[2] if ranged else _SMALL_REPLY)
    _LEFT.set([2 * most])  # The client tries once more.
    try:
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
    except RedisError as error:
        raise OSError(_without_password(client, str(error)) or type(error).__name__) from None
    except OSError:
        raise
    except Exception as error:  # the client takes whatever talks to it for a store
        raise OSError(f"no store answers so: {error}") from None
    return replies


def _without_password(client: Redis, text: str) -> str:
    """Return the store's message without the password: it may repeat commands that it has not
    understood."""
    password = client.connection_pool.connection_kwargs.get("password")
    return text.replace(password, "***") if password else text


def checked(reply: Any) -> Any:
    """Return a reply. A value of another type counts as a bad entry; any other error is the
    store's."""
    if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
        raise OSError(str(reply))
    return reply


def most_bytes(entry_id: EntryId) -> int:
    """Return the most payload bytes written for an entry."""
    if entry_id.kind in (Kind.KV, Kind.STATE):
        return sys.maxsize
    return most_inside(entry_id.kind) or MAX_OTHER_BYTES


def manifest_of(entry_id: EntryId, name: bytes) -> tuple[Any, ...]:
    """Return the command that reads a manifest, with one byte more than its limit, so that an
    oversized one shows."""
    return ("GETRANGE", name, 0, MAX_MANIFEST_BYTES + most_inside(entry_id.kind))
