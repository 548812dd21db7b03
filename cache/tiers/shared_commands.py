"""Commands to the shared store: pipelined, in batches of limited size."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from vlm_serve.cache.tiers.entry import EntryId, Kind
from vlm_serve.cache.tiers.shared_format import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    Manifest,
    lies_in_manifest,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_OTHER_BYTES = 256 << 20
"""Most bytes of an entry whose size the model's layout does not determine."""
READ_BYTES = 64 << 20
"""Approximate bytes of one pipeline's replies."""


async def run(client: Redis, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the replies of one pipeline, error replies included. Raises OSError."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
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
    return MAX_RECORD_BYTES if lies_in_manifest(entry_id) else MAX_OTHER_BYTES


def manifest_of(entry_id: EntryId, name: bytes) -> tuple[Any, ...]:
    """Return the command that reads a manifest, with one byte more than its limit, so that an
    oversized one shows."""
    payload = MAX_RECORD_BYTES if lies_in_manifest(entry_id) else 0
    return ("GETRANGE", name, 0, MAX_MANIFEST_BYTES + payload)


def joined(pieces: list[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def batches(manifests: Mapping[EntryId, Manifest]) -> Iterator[dict[EntryId, Manifest]]:
    """Yield manifests in batches with about READ_BYTES of payload."""
    batch, size = dict[EntryId, Manifest](), 0
    for entry_id, manifest in manifests.items():
        batch[entry_id] = manifest
        size += manifest.outline.num_bytes
        if size >= READ_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def one_by_one(commands: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield SET commands in batches of about a full chunk's size, so that a full store refuses
    early."""
    batch, size = list[tuple[Any, ...]](), 0
    for command in commands:
        batch.append(command)
        size += len(command[2])
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
