"""Requests for tests of the cache: tokens, media, keys, and a digest of every prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlm_serve.cache.logprobs import row_type
from vlm_serve.cache.records import LogprobRows, Rows
from vlm_serve.preprocess.identity.keys import PromptKeys

END_OF_TURN = 1
PAD = 3


@dataclass(frozen=True)
class Span:
    start: int
    end: int
    content_hash: bytes
    modality: Literal["image", "video"] = "image"
    patch: int = 0


@dataclass(frozen=True)
class Image:
    """A medium of `size` placeholder tokens, or a video's temporal patch."""

    name: str
    size: int
    patch: int = 0


Segment = Sequence[int] | Image


class Text:
    """Tokens, media and keys of a request, with the digest of every prefix.

    Args:
        segments: token ids and images in order.
        block_size: of the keys.
        salt: tenant.
        marks: cut points that the request brings; those inside a medium are left out.
    """

    def __init__(
        self,
        *segments: Segment,
        block_size: int = 4,
        salt: str = "",
        marks: Collection[int] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.spans: list[Span] = []
        for segment in segments:
            start = len(self.token_ids)
            if isinstance(segment, Image):
                self.token_ids += [PAD] * segment.size
                content = hashlib.sha256(segment.name.encode()).digest()
                end = len(self.token_ids)
                self.spans.append(Span(start, end, content, patch=segment.patch))
            else:
                self.token_ids += segment
        self.root = hashlib.sha256(salt.encode()).digest()
        self.keys = PromptKeys(
            self.root,
            self.token_ids,
            block_size=block_size,
            spans=self.spans,
            end_of_turn_ids=(END_OF_TURN,),
            marks=[at for at in marks if not any(s.start < at < s.end for s in self.spans)],
        )
        self.digests = [self.root]
        self._digest_new_tokens()

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.keys.extend([token])
        self._digest_new_tokens()

    def fork(self) -> Text:
        copy = object.__new__(Text)
        copy.token_ids, copy.spans = list(self.token_ids), self.spans
        copy.root, copy.keys, copy.digests = self.root, self.keys.fork(), list(self.digests)
        return copy

    def _digest_new_tokens(self) -> None:
        for position in range(len(self.digests) - 1, len(self.token_ids)):
            inside = [span for span in self.spans if span.start <= position < span.end]
            content = inside[0].content_hash if inside else b""
            token = self.token_ids[position].to_bytes(4, "little")
            self.digests.append(hashlib.sha256(self.digests[-1] + token + content).digest())

    def cuts(self, start: int, end: int) -> list[int]:
        """Cut points in `(start, end]` outside spans, found the slow way."""
        return [
            cut
            for cut in self.keys.cuts
            if start < cut <= end and not any(s.start < cut < s.end for s in self.spans)
        ]

    def experts(self, start: int, end: int) -> Rows:
        """Expert rows `[end - start, 1, 2]` that name their prefixes."""
        prefixes = self.digests[start + 1 : end + 1]
        return np.stack([np.frombuffer(digest[:4], np.uint16) for digest in prefixes])[:, None, :]

    def logprobs(self, start: int, end: int, top: int) -> LogprobRows:
        """Rows of tokens `[start, end)`: the likely ones name the prefix, all else the token."""
        rows = np.empty(end - start, row_type(top))
        for row, position in zip(rows, range(start, end), strict=True):
            before, after = self.digests[position], self.digests[position + 1]
            row["rank"], row["logprob"] = after[0], -float(after[1])
            row["ids"] = np.frombuffer(before, np.uint16)[:top]
            row["logprobs"] = -np.arange(top) - before[31]
        return rows
