"""Identity of prefixes: cut points, block keys and tail keys (docs/architecture.md#identity).

Keys depend only on their inputs: the same prompt has the same keys in every process and on every
machine. All integers are little-endian and of fixed width.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
from blake3 import blake3

KEY_BYTES = 32

_OWNER_DOMAIN = b"vlm-serve owner key 1"
_ROOT_DOMAIN = b"vlm-serve root key 2"
_EMBEDDING_DOMAIN = b"vlm-serve vision embedding 2"
_MEDIUM = b"vlm-serve medium 1"
_MEDIUM_DIGITS = 32
_COUNT = struct.Struct("<I")
_SPAN = struct.Struct("<BqI")
_MODALITY_TAGS = {"image": 1, "video": 2}


class SpanIdentity(Protocol):
    """The properties of a media span that enter keys; `MediaSpan` implements it."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def modality(self) -> str: ...
    @property
    def content_hash(self) -> bytes: ...
    @property
    def patch(self) -> int:
        """Index of the temporal patch in its video; not part of the identity."""
        ...


def tagged(name: str, value: bytes | str | int) -> bytes:
    """Encode one field of a hash input: its name and value, each prefixed with its length."""
    if isinstance(value, int):
        value = str(value)
    raw = value.encode() if isinstance(value, str) else value
    tag = name.encode()
    return _COUNT.pack(len(tag)) + tag + struct.pack("<Q", len(raw)) + raw


def hasher_of(domain: bytes, **fields: bytes | str | int) -> blake3:
    """Return a hasher of named fields in the given order. Their names enter the digest, too."""
    named = {"domain": domain, **fields}
    return blake3(b"".join(tagged(name, value) for name, value in named.items()))


def medium_hash(hashes: Sequence[bytes]) -> str:
    """Return the hash of a whole medium, 32 hexadecimal digits: of one span the first of its own.

    Args:
        hashes: content hashes of its spans, in order, at least one.
    """
    whole = hashes[0] if len(hashes) == 1 else hasher_of(_MEDIUM, spans=b"".join(hashes)).digest()
    return whole.hex()[:_MEDIUM_DIGITS]


class AdapterIdentity(NamedTuple):
    """Digests of an adapter of the weights, in hexadecimal; "" for none.

    Attributes:
        whole: of everything that decides bits.
        vision: of its part in the vision tower, "" if it leaves the tower alone.
    """

    whole: str = ""
    vision: str = ""


NO_ADAPTER = AdapterIdentity()


class KeyScope(NamedTuple):
    """What a prompt's keys are confined to: a tenant's salt, and an adapter of the weights."""

    cache_salt: str = ""
    adapter: AdapterIdentity = NO_ADAPTER

    @property
    def options(self) -> dict[str, Any]:
        """The options of `Preprocessor.prepare` and its relatives."""
        salt = {"cache_salt": self.cache_salt}
        return {**salt, "adapter": self.adapter} if self.adapter.whole else salt


class WeightsIdentity(NamedTuple):
    """Digests of a model's weights and config, 32 bytes each.

    Attributes:
        whole: of all tensors.
        vision: of the vision tower's alone.
    """

    whole: bytes
    vision: bytes


class Owners(NamedTuple):
    """Keys of what a prompt's root keys depend on beside the weights, which may change while
    prompts with these keys are about.

    Attributes:
        prompt: of its KV and state.
        vision: of its media's embeddings.
    """

    prompt: bytes
    vision: bytes


class Roots(NamedTuple):
    """Root keys of a prompt.

    Attributes:
        prompt: of its KV and state.
        vision: of its media's embeddings.
        owners: the keys without the weights, from which they are made.
    """

    prompt: bytes
    vision: bytes
    owners: Owners

    @classmethod
    def of(cls, owners: Owners, weights: WeightsIdentity) -> Roots:
        """Return the root keys under some weights."""
        prompt, vision = (
            hasher_of(_ROOT_DOMAIN, owner=owner, weights=digest).digest()
            for owner, digest in zip(owners, weights, strict=True)
        )
        return cls(prompt, vision, owners)


@dataclass(frozen=True, kw_only=True)
class RootFields:
    """Everything that cached tensors depend on besides tokens, media and weights.

    Attributes:
        weight_dtype, compute_dtype: types of weights and of activations, such as "float32".
        memory: names and types of what layers keep, such as "conv float32, kv float32".
        vision_dtype: type of the vision tower.
        block_size: tokens per block.
        chunk_size: tokens per chunk of a prefill.
        processor_fingerprint: names the media processors and their configs; `Preprocessor` fills it
            in.
        adapter: digest of an adapter of the weights, never its name; "" for none.
        cache_salt: the tenant's salt, "" for the common pool.
        numerics: names the arithmetic; equal names guarantee equal bits.
    """

    weight_dtype: str
    compute_dtype: str
    memory: str
    vision_dtype: str
    block_size: int
    chunk_size: int
    processor_fingerprint: bytes = b""
    adapter: str = ""
    cache_salt: str = ""
    numerics: str = ""

    def key(self) -> bytes:
        """Return the 32-byte key of all prompts with these fields, see `Owners`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return hasher_of(_OWNER_DOMAIN, **values).digest()


def embedding_key(root: bytes, content_hash: bytes, merge_size: int) -> bytes:
    """Return the key of a span's vision embeddings.

    It is the same at every position of every prompt of a root.

    Args:
        merge_size: patches per side that become one token; the same pixels can become more or fewer
            tokens.
    """
    hasher = hasher_of(_EMBEDDING_DOMAIN, root=root, content=content_hash, merge_size=merge_size)
    return hasher.digest()


class Mark(NamedTuple):
    """A position up to which a client wants its prompt cached, and for how many seconds."""

    position: int
    seconds: float


class PromptKeys:
    """Cut points and chained BLAKE3 keys of a token sequence that may still grow.

    Args:
        root: 32-byte key of everything outside of the tokens (`RootFields.key`).
        token_ids: the sequence, placeholders expanded; each below 2**32.
        block_size: tokens per block.
        spans: media spans, sorted by start and disjoint.
        end_of_turn_ids: tokens followed by a cut point.
        vision_root: see below; None: the root.
        owners: see below; None: of roots that depend on nothing else.
        known: keys of another sequence under the same root that begins alike; its keys are taken.
        shared: number of tokens, and of spans before them, that both have; no span lies across.
        marks: further cut points that the request brings, each outside of spans.

    Attributes:
        vision_root: root of the keys of its media's embeddings.
        owners: keys of what both roots depend on beside the weights.
        block_size: tokens per block.
        block_keys: one 32-byte key per full block.
        cuts: all cut points (multiples of the block size, span ends, positions after an end-of-turn
            token, marks) in ascending order, 0 excluded, up to the current length.
        tails: cut point -> 32-byte key, for cut points inside a block, in ascending order.
        marks: of this request, in ascending order.
        brought: the cut points that do not follow from the tokens: marks, of this request or of an
            earlier one with the same tokens before it.
        span_bounds: (start, end) of every media span.
        span_kinds, span_hashes: modality and content hash of every media span.
        span_continues: True if a span continues the video of the span before it.
    """

    __slots__ = (
        "_end_of_turn_ids",
        "_length",
        "_open_spans",
        "_packed",
        "_partial",
        "_span_ends",
        "_span_starts",
        "block_keys",
        "block_size",
        "brought",
        "cuts",
        "marks",
        "owners",
        "root",
        "span_bounds",
        "span_continues",
        "span_hashes",
        "span_kinds",
        "tails",
        "vision_root",
    )

    def __init__(
        self,
        root: bytes,
        token_ids: Sequence[int],
        *,
        block_size: int,
        spans: Sequence[SpanIdentity] = (),
        end_of_turn_ids: Collection[int] = (),
        vision_root: bytes | None = None,
        owners: Owners | None = None,
        known: PromptKeys | None = None,
        shared: int = 0,
        marks: Collection[int] = (),
    ) -> None:
        assert len(root) == KEY_BYTES and block_size > 0
        self.root = root
        self.vision_root = root if vision_root is None else vision_root
        self.owners = owners or Owners(root, self.vision_root)
        self.block_size = block_size
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self.span_bounds = tuple((span.start, span.end) for span in spans)
        self.span_continues = tuple(span.patch > 0 for span in spans)
        self.span_kinds = tuple(span.modality for span in spans)
        self.span_hashes = tuple(span.content_hash for span in spans)
        self._span_starts = [start for start, _ in self.span_bounds]
        self._span_ends = [end for _, end in self.span_bounds]
        self._length = len(token_ids)
        edges = [edge for bounds in self.span_bounds for edge in bounds]
        assert edges == sorted(edges) and (not edges or edges[-1] <= self._length)
        assert all(start < end for start, end in self.span_bounds)
        self.block_keys = list[bytes]()
        self.cuts = list[int]()
        self.tails = dict[int, bytes]()
        self.brought = frozenset[int]()
        self._packed = bytearray()
        if known is not None:
            self._take(known, shared // block_size)
        at = len(self.block_keys) * block_size
        ids = array("I", token_ids[at:])
        assert ids.itemsize == 4
        cuts = self._find_cuts(ids, at)
        self.cuts += cuts
        if sys.byteorder == "big":
            ids.byteswap()
        self._packed += ids.tobytes()
        self._hash_prompt(bytes(self._packed), spans, cuts)
        self.marks = tuple[int, ...]()
        self.mark(marks)

    def _take(self, known: PromptKeys, blocks: int) -> None:
        """Take everything about the first blocks from the keys of another sequence."""
        assert (known.root, known.block_size) == (self.root, self.block_size)
        end = blocks * self.block_size
        self.block_keys += known.block_keys[:blocks]
        cuts = known.cuts[: bisect_right(known.cuts, end)]
        # They are in the order of their cuts.
        self.tails.update(takewhile(lambda tail: tail[0] <= end, known.tails.items()))
        for mark in known.brought & self.tails.keys():
            cuts.remove(mark)
            del self.tails[mark]
        self.cuts += cuts
        self._packed += memoryview(known._packed)[: end * 4]

    def _find_cuts(self, ids: array[int], at: int) -> list[int]:
        """Return the cut points behind a block's end, from the ids there on."""
        cuts = set(range(at + self.block_size, self._length + 1, self.block_size))
        cuts.update(self._span_ends[bisect_right(self._span_ends, at) :])
        tokens = np.frombuffer(ids, dtype=np.uint32)
        for end_of_turn in self._end_of_turn_ids:
            cuts.update((np.flatnonzero(tokens == end_of_turn) + at + 1).tolist())
        return sorted(cuts)

    def _hash_prompt(
        self, packed: bytes, spans: Sequence[SpanIdentity], cuts: Sequence[int]
    ) -> None:
        """Add the keys of the blocks behind the known ones, and of their cut points."""
        size = self.block_size
        keys = self.block_keys
        at = len(keys) * size
        overlaps = _overlaps(spans[bisect_right(self._span_ends, at) :], size)
        count = _COUNT.pack(size)
        parent = keys[-1] if keys else self.root
        for block in range(len(keys), self._length // size):
            at = block * size * 4
            data = parent + count + packed[at : at + size * 4]
            if overlaps and block in overlaps:
                data += overlaps[block]
            parent = blake3(data).digest()
            keys.append(parent)
        for cut in cuts:
            if cut % size:
                self.tails[cut] = self.tail(cut)
        at = self._length // size * size
        self._partial = packed[at * 4 :]
        self._open_spans = self._pack_within(at, self._length)

    def _pack_within(self, start: int, end: int) -> bytes:
        """Pack the spans that overlap `[start, end)`, relative to its start."""
        first, last = bisect_right(self._span_ends, start), bisect_left(self._span_starts, end)
        spans = zip(self.span_kinds, self.span_bounds, self.span_hashes, strict=True)
        return b"".join(_pack_span(*span, start) for span in islice(spans, first, last))

    def tail(self, cut: int) -> bytes:
        """Return the key of the tail that would end at any position inside a block."""
        known = self.tails.get(cut)
        if known is not None:
            return known
        block = cut // self.block_size
        at = block * self.block_size
        return self._key(block, self.packed(at, cut), self._pack_within(at, cut))

    def mark(self, marks: Iterable[int]) -> None:
        """Set the request's own marks, which are cut points from now on."""
        self.marks = tuple(sorted(set(marks)))
        self.bring(self.marks)

    def bring(self, marks: Iterable[int]) -> None:
        """Add cut points that do not follow from the tokens. Readers on other threads keep the
        lists that they have."""
        inside = sorted({mark for mark in marks if mark % self.block_size} - self.tails.keys())
        assert all(0 < mark <= self._length and not self.inside_span(mark) for mark in inside)
        if inside:
            tails = self.tails | {mark: self.tail(mark) for mark in inside}
            self.tails = dict(sorted(tails.items()))
            self.cuts = sorted([*self.cuts, *inside])
            self.brought = self.brought | frozenset(inside)

    def bring_from(self, other: PromptKeys) -> None:
        """Add the marks of another sequence before which both are the same."""
        marks = (mark for mark in other.brought if mark <= self._length)
        self.bring([mark for mark in marks if self.tail(mark) == other.tails[mark]])

    def _key(self, block: int, packed: bytes, bound: bytes) -> bytes:
        parent = self.block_keys[block - 1] if block else self.root
        return blake3(parent + _COUNT.pack(len(packed) // 4) + packed + bound).digest()

    def __len__(self) -> int:
        """Return the number of tokens covered."""
        return self._length

    def of_text(self, token_ids: Sequence[int]) -> PromptKeys:
        """Return the keys of another sequence, without media, under the same root."""
        return PromptKeys(
            self.root,
            token_ids,
            block_size=self.block_size,
            end_of_turn_ids=self._end_of_turn_ids,
            vision_root=self.vision_root,
            owners=self.owners,
        )

    def fork(self, root: bytes | None = None) -> PromptKeys:
        """Return an independent copy to extend; the original stays as it is.

        A copy with another `root` shares no embedding with the prompt, but keeps its block keys.
        """
        copy = object.__new__(PromptKeys)
        for name in PromptKeys.__slots__:
            setattr(copy, name, getattr(self, name))
        if root is not None:
            copy.root = copy.vision_root = root
            copy.owners = Owners(root, root)
        copy.block_keys = self.block_keys.copy()
        copy.cuts = self.cuts.copy()
        copy.tails = self.tails.copy()
        copy._packed = self._packed.copy()
        return copy

    def under(self, weights: WeightsIdentity) -> PromptKeys:
        """Return the keys of the same tokens under other weights, as an independent copy."""
        copy, size = self.fork(), self.block_size
        copy.root, copy.vision_root, _ = Roots.of(self.owners, weights)
        copy.block_keys, copy.tails = [], {}
        for block in range(self._length // size):
            at, end = block * size, (block + 1) * size
            key = copy._key(block, self.packed(at, end), self._pack_within(at, end))
            copy.block_keys.append(key)
        copy.tails = {cut: copy.tail(cut) for cut in self.tails}
        return copy

    def packed(self, start: int, end: int) -> bytes:
        """Return the ids of tokens `[start, end)`, four little-endian bytes each."""
        return bytes(self._packed[start * 4 : end * 4])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append text tokens, such as generated ones."""
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a text token."""
        packed = _COUNT.pack(token)
        self._packed += packed
        self._partial += packed
        self._length += 1
        full = self._length % self.block_size == 0
        if full or token in self._end_of_turn_ids:
            key = self._key((self._length - 1) // self.block_size, self._partial, self._open_spans)
            self.cuts.append(self._length)
            if full:
                self.block_keys.append(key)
                self._partial = b""
                self._open_spans = b""
            else:
                self.tails[self._length] = key

    def _span_around(self, position: int) -> tuple[int, int] | None:
        index = bisect_left(self._span_starts, position) - 1
        if index < 0 or self._span_ends[index] <= position:
            return None
        return self.span_bounds[index]

    def inside_span(self, position: int) -> bool:
        """Return True if `start < position < end` for a media span."""
        return self._span_around(position) is not None

    def span_ends_within(self, start: int, end: int) -> bool:
        """Return True if a media span ends in `(start, end]`."""
        return bisect_right(self._span_ends, start) < bisect_right(self._span_ends, end)

    def last_cut(self, limit: int) -> int:
        """Return the deepest cut point <= limit that is not strictly inside a span, else 0."""
        while True:
            index = bisect_right(self.cuts, limit)
            if index == 0:
                return 0
            cut = self.cuts[index - 1]
            around = self._span_around(cut)
            if around is None:
                return cut
            limit = around[0]


def _pack_span(kind: str, bounds: tuple[int, int], content_hash: bytes, at: int) -> bytes:
    """Pack a span relative to the block that starts at token `at`."""
    assert len(content_hash) == KEY_BYTES
    start, end = bounds
    return _SPAN.pack(_MODALITY_TAGS[kind], at - start, end - start) + content_hash


def _overlaps(spans: Sequence[SpanIdentity], block_size: int) -> dict[int, bytes]:
    """Map each block index to the packed spans that overlap the block, in order."""
    overlaps: dict[int, bytes] = {}
    for span in spans:
        for block in range(span.start // block_size, (span.end - 1) // block_size + 1):
            bounds = span.start, span.end
            packed = _pack_span(span.modality, bounds, span.content_hash, block * block_size)
            overlaps[block] = overlaps.get(block, b"") + packed
    return overlaps
