"""The format of entries in a shared store: names, manifests, chunks.

An entry is a manifest and a payload in chunks. The manifest is the entry's header, masked, behind a
keyed checksum of the header and of the manifest's own name. The header holds the payload's length
and checksum. Without the key, a client can neither write a trusted entry nor tell its subject.
Names are keyed digests of everything in an id, of the model, and of the deployment's epoch. The
record of an upload has no chunks: it lies in the manifest, masked too, because owners of the same
file could recognise it. So does a record of marks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from vlm_serve.cache.tiers.entry import (
    MAX_HEADER_BYTES,
    Content,
    EntryId,
    Kind,
    Origin,
    Outline,
    outline,
)

PREFIX = b"vlm-serve:"
CHUNK_BYTES = 8 << 20
DIGEST_BYTES = 32
EPOCH_BYTES = 16
MAX_MANIFEST_BYTES = DIGEST_BYTES + MAX_HEADER_BYTES
MAX_RECORD_BYTES = 64 << 10
"""Most bytes of an upload's record: that of a video with about 1 600 spans."""
MAX_MARKS_BYTES = 64
"""Most bytes of a record of marks: a bit for each token of a block."""
_CONTEXT = "vlm-serve 2026 shared store, version 1"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A verified manifest.

    Attributes:
        header: of the sealed entry.
        outline: the header's claims about the content.
        digest: keyed checksum; chunks are named after it.
        payload: if it lies in the manifest; else empty.
    """

    header: bytes
    outline: Outline
    digest: bytes
    payload: bytes = b""

    @property
    def chunk_sizes(self) -> Iterator[int]:
        """Bytes of each chunk, in order."""
        size = self.outline.num_bytes - len(self.payload)
        for start in range(0, size, CHUNK_BYTES):
            yield min(CHUNK_BYTES, size - start)


class Keyring:
    """Names and checksums of one deployment: servers with one model, one arithmetic and one key.

    Args:
        secret: the shared key; empty: everybody can write trusted entries.
        origin: of their entries.
    """

    def __init__(self, secret: bytes, origin: Origin) -> None:
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()
        self._whose = b"%b %d %d " % (origin.model, origin.rank, origin.world)
        self.epoch_name = PREFIX + self._digest(b"epoch ", self._whose).hex().encode()

    def name(self, epoch: bytes, entry_id: EntryId) -> bytes:
        """Return the name of an entry's manifest."""
        kind, key, rank, world = entry_id
        digest = self._digest(
            b"entry ", epoch, self._whose, b"%d %d %d " % (kind, rank, world), key
        )
        return PREFIX + digest.hex().encode()

    def claim_name(self, name: bytes, manifest: bytes = b"") -> bytes:
        """Return the name of the claim on an entry, in place of the manifest that was found
        there."""
        return PREFIX + self._digest(b"claim ", name, manifest).hex().encode()

    def chunk_name(self, digest: bytes, index: int) -> bytes:
        """Return the name of a chunk. It depends on the content, so chunks of two writers with
        different bits never mix."""
        return PREFIX + self._digest(b"chunk ", digest, b"%d" % index).hex().encode()

    def pack(self, name: bytes, header: bytes, payload: bytes = b"") -> tuple[bytes, bytes]:
        """Return the manifest of a sealed entry, and its digest.

        Args:
            payload: stored in the manifest instead of in chunks.
        """
        digest = self._digest(b"manifest ", name, header, payload)
        return digest + self._mask(name, digest, header + payload), digest

    def unpack(self, name: bytes, data: bytes) -> Manifest | None:
        """Return the manifest in a value; None if it is not to be trusted."""
        if not DIGEST_BYTES < len(data) <= MAX_MANIFEST_BYTES + MAX_RECORD_BYTES:
            return None
        digest = data[:DIGEST_BYTES]
        content = self._mask(name, digest, data[DIGEST_BYTES:])
        if not hmac.compare_digest(digest, self._digest(b"manifest ", name, content)):
            return None
        described = outline(content)
        if described is None:
            return None
        size = described.header_bytes
        return Manifest(content[:size], described, digest, content[size:])

    def pack_epoch(self, epoch: bytes) -> bytes:
        return epoch + self._digest(b"epoch is ", self._whose, epoch)

    def unpack_epoch(self, data: bytes | None) -> bytes | None:
        """Return the epoch; None if there is none or it is not to be trusted."""
        if data is None or len(data) != EPOCH_BYTES + DIGEST_BYTES:
            return None
        epoch = data[:EPOCH_BYTES]
        return epoch if hmac.compare_digest(data, self.pack_epoch(epoch)) else None

    def _digest(self, *parts: bytes) -> bytes:
        return blake3(b"".join(parts), key=self._key).digest()

    def _mask(self, name: bytes, digest: bytes, data: bytes) -> bytes:
        """XOR the data with a key stream; a second application restores it."""
        stream = blake3(b"mask " + name + digest, key=self._key).digest(length=len(data))
        mixed = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(data), "little")


def most_inside(kind: Kind) -> int:
    """Return the most payload bytes inside a manifest; 0 for content that lies in chunks."""
    return {Kind.UPLOAD: MAX_RECORD_BYTES, Kind.MARKS: MAX_MARKS_BYTES}.get(kind, 0)


def new_epoch() -> bytes:
    return secrets.token_bytes(EPOCH_BYTES)


def chunks(payload: Content) -> Iterator[memoryview]:
    """Yield a payload in pieces of CHUNK_BYTES, without copying it."""
    view = memoryview(payload)
    for start in range(0, len(payload), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
