"""A runner that computes identities instead of numbers, and so notices every wrong reuse.

Where the real runner would leave keys and values of a token, this one leaves a digest of the whole
prefix up to that token (ids, media content, tenant); where the real one would leave a recurrent
state, it leaves the digest of all tokens it has seen; the experts of a token follow from the digest
of the prefix that ends with it. Before it computes a slice it demands that
every block, row and embedding the plan tells it to read holds exactly what the prefix needs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.engine.plan import Sampled, Slice, StepOutput, StepPlan
from vlm_serve.preprocess.keys import PromptKeys
from vlm_serve.preprocess.prompt import MediaSpan, Modality, Prompt

NOTHING = b""
END_OF_TURN = 1
VOCABULARY = 50
MOE_LAYERS, TOP_K = 3, 2


class InjectedFailure(RuntimeError):
    """What a step raises when the simulation tells it to."""


@dataclass
class SymbolicMedia:
    """A medium of which only the content matters."""

    modality: Modality
    grid: tuple[int, int, int]
    decoded: bool
    hashes: tuple[bytes, ...]
    ready: bool = True

    def load(self) -> None:
        self.ready = True

    def patches(self, patch: int) -> torch.Tensor:
        raise AssertionError("the symbolic runner reads no pixels")


def make_prompt(
    segments: Iterable[tuple[int, ...] | SymbolicMedia],
    *,
    block_size: int,
    salt: str = "",
    tokens_per_patch: int = 6,
) -> Prompt:
    """A prompt of text segments and media; every patch is a run of `tokens_per_patch` tokens with
    a marker token on either side."""
    token_ids: list[int] = []
    spans: list[MediaSpan] = []
    media: list[SymbolicMedia] = []
    media_ends: list[int] = []
    for segment in segments:
        if isinstance(segment, SymbolicMedia):
            for patch, content_hash in enumerate(segment.hashes):
                token_ids.append(2)
                start = len(token_ids)
                token_ids += [3] * tokens_per_patch
                end = len(token_ids)
                spans.append(
                    MediaSpan(
                        start, end, segment.modality, content_hash, (1, 2, 2), len(media), patch
                    )
                )
                token_ids.append(4)
            media.append(segment)
            media_ends.append(spans[-1].end)
        else:
            token_ids += segment
    root = hashlib.sha256(b"root" + salt.encode()).digest()
    keys = PromptKeys(
        root, token_ids, block_size=block_size, spans=spans, end_of_turn_ids=(END_OF_TURN,)
    )
    return Prompt(
        token_ids=tuple(token_ids),
        positions=torch.arange(len(token_ids)).expand(3, -1),
        rope_delta=0,
        keys=keys,
        spans=tuple(spans),
        media=tuple(media),
        media_ends=tuple(media_ends),
        message_ends=tuple(i + 1 for i, token in enumerate(token_ids) if token == END_OF_TURN),
        stable_end=max(0, len(token_ids) - 2),
    )


def chain(prompt: Prompt, token_ids: Iterable[int]) -> list[bytes]:
    """Digest of every prefix of the token ids: entry n covers n tokens."""
    digests = [hashlib.blake2b(prompt.keys.root, digest_size=12).digest()]
    inside = {
        position: (span.content_hash, position - span.start)
        for span in prompt.spans
        for position in range(span.start, span.end)
    }
    for position, token in enumerate(token_ids):
        content, offset = inside.get(position, (b"", 0))
        message = digests[-1] + token.to_bytes(4, "little") + offset.to_bytes(4, "little") + content
        digests.append(hashlib.blake2b(message, digest_size=12).digest())
    return digests


def next_token(prefix: bytes, seed: int) -> int:
    """The token the symbolic model answers to a prefix: a pure function of its identity."""
    digest = hashlib.blake2b(prefix + seed.to_bytes(8, "little", signed=True)).digest()
    value = int.from_bytes(digest[:4], "little")
    return END_OF_TURN if value % 23 == 0 else 5 + value % (VOCABULARY - 5)


def expert_rows(digests: Sequence[bytes], start: int, end: int) -> npt.NDArray[np.uint8]:
    """The routed experts of tokens `[start, end)` of a chain."""
    used = MOE_LAYERS * TOP_K
    packed = b"".join(digest[:used] for digest in digests[start + 1 : end + 1])
    return np.frombuffer(packed, dtype=np.uint8).reshape(end - start, MOE_LAYERS, TOP_K)


class SymbolicRunner:
    """Executes step plans on digests.

    Args:
        num_blocks, num_rows, block_size: sizes of the pools.
        rng: decides where injected failures strike within a step.
        has_state: the model has recurrent layers.
    """

    def __init__(
        self,
        num_blocks: int,
        num_rows: int,
        block_size: int,
        rng: random.Random,
        *,
        has_state: bool = True,
    ) -> None:
        self.kv = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.rows = [NOTHING] * num_rows
        self.embeddings: dict[int, bytes] = {}
        self.block_size = block_size
        self.has_state = has_state
        self.fail_next = False
        self.poisonous: set[int] = set()
        self.tokens_computed = 0
        self._rng = rng
        self._chains: dict[int, list[bytes]] = {}

    def poison(self, blocks: Iterable[int] = (), rows: Iterable[int] = ()) -> None:
        """What was freed holds nothing any more."""
        for block in blocks:
            self.kv[block] = [NOTHING] * self.block_size
        for row in rows:
            self.rows[row] = NOTHING

    def forget(self, sequence: int) -> None:
        self._chains.pop(sequence, None)

    def run(self, plan: StepPlan) -> StepOutput:
        for slot in plan.dropped_slots:
            self.embeddings.pop(slot, None)
        for source, destination in plan.row_copies:
            self.rows[destination] = self.rows[source]
        for source, destination, count in plan.copies:
            self.kv[destination][:count] = self.kv[source][:count]
        for encode in plan.encodes:
            assert isinstance(encode.item, SymbolicMedia)
            self.embeddings[encode.slot] = encode.item.hashes[encode.patch]
        strike = self._rng.randrange(len(plan.slices) + 1) if self.fail_next else -1
        poisoned = any(item.sequence in self.poisonous for item in plan.slices)
        sampled: dict[int, Sampled] = {}
        writes: set[tuple[int, int]] = set()
        rows_written: set[int] = set()
        for index, item in enumerate(plan.slices):
            if index == strike:
                break
            self._compute(item, writes, rows_written)
            for task in item.samples:
                digest = self._chains[item.sequence][item.end]
                sampled[task.sequence] = Sampled(next_token(digest, task.seed), {})
        if self.fail_next or poisoned:
            self.fail_next = False
            raise InjectedFailure
        self.tokens_computed += plan.num_tokens
        return StepOutput(sampled, self._experts(plan))

    def _experts(self, plan: StepPlan) -> dict[int, npt.NDArray[np.uint8]]:
        """As the real runner: nobody's rows, or those of the whole step."""
        if not any(item.experts for item in plan.slices):
            return {}
        return {
            item.sequence: expert_rows(self._chains[item.sequence], item.start, item.end)
            for item in plan.slices
        }

    def _compute(self, item: Slice, writes: set[tuple[int, int]], rows_written: set[int]) -> None:
        digests = self._chain(item)
        size, table = self.block_size, item.block_table
        present = max(item.start, min(item.write_start, item.end))
        for position in self._positions_to_check(present, item.prefill):
            found = self.kv[table[position // size]][position % size]
            assert found == digests[position + 1], f"wrong KV at {position} of {item}"
        if self.has_state:
            state = digests[0] if item.src_row < 0 else self.rows[item.src_row]
            assert state == digests[item.start], f"wrong state before {item}"
        self._check_embeddings(item)
        for position in range(max(item.start, item.write_start), item.end):
            place = (table[position // size], position % size)
            assert place not in writes, "two sequences write one slot"
            writes.add(place)
            self.kv[place[0]][place[1]] = digests[position + 1]
        if self.has_state:
            targets = [(item.end, item.dst_row), *item.snapshots]
            for position, row in targets:
                assert item.start < position <= item.end
                assert position in item.chunk_ends or not item.prefill or row == item.dst_row
                assert row not in rows_written, "two writers of one row"
                rows_written.add(row)
                self.rows[row] = digests[position]

    def _positions_to_check(self, present: int, prefill: bool) -> Iterable[int]:
        """Every key a prefill reads; of a decode step, which reads the same again, a few."""
        if prefill or present <= 8:
            return range(present)
        return [present - 1, *(self._rng.randrange(present) for _ in range(6))]

    def _check_embeddings(self, item: Slice) -> None:
        needed = {
            (max(item.start, span.start), min(item.end, span.end)): span
            for span in item.prompt.spans
            if item.prefill and span.start < item.end and span.end > item.start
        }
        assert {(first, last) for first, last, _, _ in item.embeddings} == set(needed)
        for first, last, slot, row in item.embeddings:
            span = needed[first, last]
            assert row == first - span.start
            assert self.embeddings[slot] == span.content_hash, "another medium's embedding"

    def _chain(self, item: Slice) -> list[bytes]:
        """The sequence's digests up to the end of the slice; ids seen before must not change."""
        known = self._chains.get(item.sequence)
        if known is None:
            known = chain(item.prompt, item.prompt.token_ids)
            self._chains[item.sequence] = known
        for position, token in zip(range(item.start, item.end), item.token_ids, strict=True):
            if position < len(item.prompt):
                assert token == item.prompt.token_ids[position]
                continue
            message = known[position] + token.to_bytes(4, "little") + bytes(4)
            digest = hashlib.blake2b(message, digest_size=12).digest()
            if position + 1 == len(known):
                known.append(digest)
            assert known[position + 1] == digest, "a generated token changed"
        return known
