"""An executor that computes identities instead of numbers, and so notices every wrong reuse.

Where the real executor would leave keys and values of a token, this one leaves a digest of the
whole prefix up to that token (ids, media content, tenant); where the real one would leave a
recurrent state, it leaves the digest of all tokens it has seen; the experts of a token follow from
the digest of the prefix that ends with it. Before it computes a slice it demands that every block,
row and embedding the plan tells it to read holds exactly what the prefix needs.

It knows of a sequence what any executor does: the positions in a symbolic prompt are numbers that
say to which root, medium and place in that medium a token belongs (`_place`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.cache.logprobs import row_type
from vlm_serve.cache.records import LogprobRows
from vlm_serve.engine.core.executor import RowsAfter, StepError
from vlm_serve.engine.requests.plan import (
    SampledToken,
    SampleTask,
    SequenceInfo,
    Slice,
    StepOutput,
    StepPlan,
)
from vlm_serve.preprocess.identity.keys import (
    NO_ADAPTER,
    AdapterIdentity,
    PromptKeys,
    WeightsIdentity,
    medium_hash,
)
from vlm_serve.preprocess.identity.prompt import MediaSpan, Prompt
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.system.stopping import Stop

NOTHING = b""
END_OF_TURN = 1
VOCABULARY = 50
_PLACE = struct.Struct("<9q")
MOE_LAYERS, TOP_K = 3, 2
DECODED = b"decoded"
"""Precedes what decode steps leave, where their arithmetic is not that of prefills."""


class InjectedFailure(RuntimeError):
    """What a step raises when the simulation tells it to."""


@dataclass(eq=False)
class SymbolicMedia:
    """A medium of which only the content matters."""

    modality: Modality
    grid: tuple[int, int, int]
    decoded: bool
    hashes: tuple[bytes, ...]
    ready: bool = True
    num_bytes: int = 0
    cut_short: bool = False
    patch_size: int = 16

    @property
    def name(self) -> str:
        return medium_hash(self.hashes)

    def load(self, stop: Stop, patches: Collection[int] | None = None) -> None:
        self.ready = True

    def has(self, patch: int) -> bool:
        return self.ready

    def patches(self, patch: int) -> torch.Tensor:
        return torch.tensor(list(self.hashes[patch]))

    def coded(self, patch: int) -> None:
        """Say that a symbol has no pixels."""


def make_prompt(
    segments: Iterable[tuple[int, ...] | SymbolicMedia],
    *,
    block_size: int,
    salt: str = "",
    adapter: AdapterIdentity = NO_ADAPTER,
    tokens_per_patch: int = 6,
    marks: Collection[int] = (),
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
                        start, end, segment.modality, content_hash, (1, 2, 2), len(media), patch, 2
                    )
                )
                token_ids.append(4)
            media.append(segment)
            media_ends.append(spans[-1].end)
        else:
            token_ids += segment
    root = root_of(salt, adapter.whole)
    keys = PromptKeys(
        key_root(salt, adapter.whole),
        token_ids,
        block_size=block_size,
        spans=spans,
        end_of_turn_ids=(END_OF_TURN,),
        vision_root=key_root(salt, adapter.vision),
        marks=[at for at in marks if not any(span.start < at < span.end for span in spans)],
    )
    places = [_place(root)] * len(token_ids)
    for span in spans:
        for position in range(span.start, span.end):
            places[position] = _place(root, span.content_hash, position - span.start)
    return Prompt(
        token_ids=tuple(token_ids),
        positions=torch.tensor(places).T,
        rope_delta=0,
        keys=keys,
        spans=tuple(spans),
        media=tuple(media),
        media_ends=tuple(media_ends),
        message_ends=tuple(i + 1 for i, token in enumerate(token_ids) if token == END_OF_TURN),
        stable_end=max(0, len(token_ids) - 2),
        adapter=adapter,
    )


def root_of(salt: str, adapter: str) -> bytes:
    """The beginning of all keys of a tenant's prompts with an adapter."""
    return hashlib.sha256(b"root" + salt.encode() + bytes.fromhex(adapter)).digest()


key_root = root_of
"""The root of keys; a test puts a wrong one here."""


def _place(root: bytes, content: bytes = bytes(32), offset: int = 0) -> tuple[int, ...]:
    """The "positions" of a token: 32 bytes each for root and medium (zeros: text), and an offset
    in that."""
    return _PLACE.unpack(root + content + offset.to_bytes(8, "little"))


def _contents(positions: torch.Tensor) -> list[tuple[bytes, int]]:
    """(content hash, offset) of every token of a prompt; b"": text."""
    packed = [_PLACE.pack(*place) for place in positions.T.tolist()]
    return [
        (place[32:64] if any(place[32:64]) else b"", int.from_bytes(place[64:], "little"))
        for place in packed
    ]


def chain(
    positions: torch.Tensor, token_ids: Iterable[int], weights: bytes = NOTHING
) -> list[bytes]:
    """Digest of every prefix of the token ids: entry n covers n tokens.

    Args:
        positions: of a symbolic prompt.
        token_ids: of prompt and answer.
        weights: name those that compute.
    """
    contents = _contents(positions)
    root = _PLACE.pack(*positions[:, 0].tolist())[:32]
    digests = [hashlib.blake2b(root + weights, digest_size=12).digest()]
    places = itertools.chain(contents, itertools.repeat((b"", 0)))
    for token, place in zip(token_ids, places, strict=False):
        digests.append(extended(digests[-1], token, *place))
    return digests


def continued(
    kept: Sequence[bytes], positions: torch.Tensor, token_ids: Sequence[int], weights: bytes
) -> list[bytes]:
    """Digest of every prefix of the token ids, the first ones of which were computed before.

    Args:
        kept: digests of the first prefixes.
        positions: of a symbolic prompt.
        token_ids: of prompt and answer.
        weights: name those that compute behind the kept prefixes.
    """
    first = len(kept) - 1
    contents = _contents(positions)
    digests = list(kept)
    before = mixed(kept[-1], weights)
    for position in range(first, len(token_ids)):
        place = contents[position] if position < len(contents) else (b"", 0)
        digests.append(extended(before, token_ids[position], *place))
        before = digests[-1]
    return digests


def mixed(prefix: bytes, weights: bytes) -> bytes:
    """Return the digest of a prefix read by other weights than those that computed it."""
    return hashlib.blake2b(prefix + weights, digest_size=12).digest()


def extended(prefix: bytes, token: int, content: bytes = b"", offset: int = 0) -> bytes:
    """Digest of a prefix with one more token."""
    message = prefix + token.to_bytes(4, "little") + offset.to_bytes(4, "little") + content
    return hashlib.blake2b(message, digest_size=12).digest()


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


def logprob_rows(digests: Sequence[bytes], start: int, end: int, top: int) -> LogprobRows:
    """The log-probabilities of tokens `[start, end)` of a chain: what is likely follows from the
    prefix, the token's own from the token too."""
    rows = np.empty(end - start, row_type(top))
    for row, position in zip(rows, range(start, end), strict=True):
        before, after = digests[position], digests[position + 1]
        row["rank"], row["logprob"] = 1 + after[0], -float(after[1])
        row["ids"] = (before[0] + np.arange(top)) % VOCABULARY
        row["logprobs"] = -np.arange(top) - before[1]
    return rows


def _rows_after(slices: tuple[Slice, ...], strike: int) -> RowsAfter:
    """What is in the rows of drafted slices when the one at `strike`, -1 for none, was not run."""
    drafted = [index for index, item in enumerate(slices) if item.kind == "verify"]
    if strike < 0 or strike > max(drafted, default=-1):
        return "folded"
    return "mixed" if strike > min(drafted) else "whole"


def _sampled(prefix: bytes, seed: int, task: SampleTask) -> SampledToken:
    drawn = next_token(prefix, seed)
    if task.forced is None or task.forced == drawn:
        return SampledToken(drawn, {})
    return SampledToken(task.forced, {}, drawn)


def seen(pixels: bytes, tower: str, weights: bytes = NOTHING) -> bytes:
    """The embedding of a medium: with an adapter of the tower (its digest), another one; and with
    other weights of the tower."""
    of = bytes.fromhex(tower) + weights
    return hashlib.sha256(pixels + of).digest() if of else pixels


class _Known:
    """What has reached an executor of a sequence: tokens as digests of their prefixes."""

    def __init__(self, info: SequenceInfo, weights: bytes) -> None:
        self.info = info
        self.tokens = list(info.token_ids)
        self.digests: list[bytes] = []
        self.old: dict[int, bytes] = {}
        self.before: list[bytes] = []
        self.under(weights)
        self.root = _PLACE.pack(*info.positions[:, 0].tolist())[:32]
        self.certain = len(info.token_ids)
        self.table: list[int] = []
        self.spans = self._spans()

    def under(self, weights: bytes, kept: int = 0) -> None:
        """Have other weights compute what has come so far behind so many tokens."""
        self.weights, self.kept = weights, kept
        self.old = {at: each for at, each in self.old.items() if at < kept}
        self.before = (self.before or self.digests) if kept else []
        if kept:
            known = self.digests[: kept + 1]
            self.digests = continued(known, self.info.positions, self.tokens, weights)
        else:
            self.digests = chain(self.info.positions, self.tokens, weights)

    def follow(self, other: _Known) -> None:
        """Go on from the prompt of another choice of the same request."""
        self.weights, self.kept = other.weights, other.kept
        self.old, self.before = dict(other.old), other.before
        self.digests = other.digests[: len(self.tokens) + 1]

    def take(self, item: Slice) -> None:
        """Takes over what is new in a slice; what has come before must not change, unless it was
        drafted."""
        if item.kind == "verify":
            self.certain = min(self.certain, item.start + 1)
        del self.digests[self.certain + 1 :], self.tokens[self.certain :]
        assert item.first_block <= len(self.table), "a table with a hole"
        self.table[item.first_block :] = item.blocks
        first = max(item.start, len(self.info.token_ids))
        assert len(item.token_ids) == max(0, item.end - first)
        assert first < len(self.digests), "generated tokens are missing"
        for position, token in enumerate(item.token_ids, first):
            before = self.digests[position]
            if self.kept and position == self.kept:
                before = mixed(before, self.weights)
            digest = extended(before, token)
            if position + 1 == len(self.digests):
                self.digests.append(digest)
                self.tokens.append(token)
            assert self.digests[position + 1] == digest, "a generated token changed"
        drafted = item.kind == "verify"
        self.certain = max(self.certain, item.start + 1 if drafted else item.end)

    def _spans(self) -> dict[tuple[int, int], bytes]:
        """Tokens [start, end) of each medium in the prompt -> its content."""
        found: dict[tuple[int, int], bytes] = {}
        start = 0
        for end, (content, offset) in enumerate(_contents(self.info.positions), 1):
            start = end - 1 if offset == 0 else start
            if content:
                found.pop((start, end - 1), None)
                found[start, end] = content
        return found


class SymbolicExecutor:
    """Executes step plans on digests.

    Args:
        num_blocks, num_rows, block_size: sizes of the pools.
        rng: decides where injected failures strike within a step.
        has_state: the model has recurrent layers.
        num_updates: entries for what drafts do to states.
        exact_only: demand that prefill has computed what a prompt reads of itself, and decode steps
            what an answer does.

    Attributes:
        adapters: contents of the slots of adapters.
        owners: the adapter of each root; roots without one are left out.
        weights, tower: name those that compute; nothing if they never change.
    """

    def __init__(
        self,
        num_blocks: int,
        num_rows: int,
        block_size: int,
        rng: random.Random,
        *,
        has_state: bool = True,
        num_updates: int = 0,
        exact_only: bool = False,
    ) -> None:
        self._exact_only = exact_only
        self.updates = [(NOTHING, NOTHING)] * num_updates
        self.drafts_accepted = 0
        self.kv = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.rows = [NOTHING] * num_rows
        self.embeddings: dict[int, bytes] = {}
        self.adapters: dict[int, AdapterIdentity] = {}
        self.owners: dict[bytes, AdapterIdentity] = {}
        self.weights = self.tower = NOTHING
        self.block_size = block_size
        self.has_state = has_state
        self.fail_next = False
        self.poisonous: set[int] = set()
        self.strike: int | None = None
        self.struck = -1
        self.tokens_computed = 0
        self.rows_computed = 0
        self._rng = rng
        self._known: dict[int, _Known] = {}

    def poison(self, blocks: Iterable[int] = (), rows: Iterable[int] = ()) -> None:
        """What was freed holds nothing any more."""
        for block in blocks:
            self.kv[block] = [NOTHING] * self.block_size
        for row in rows:
            self.rows[row] = NOTHING

    def read_kv(self, block: int, num_tokens: int) -> list[bytes]:
        """What tiers read and write between steps: the digests of a block, or of a row."""
        return self.kv[block][:num_tokens]

    def read_state(self, row: int) -> bytes:
        return self.rows[row]

    def write_kv(self, block: int, digests: list[bytes]) -> None:
        self.kv[block][: len(digests)] = digests

    def write_state(self, row: int, digest: bytes) -> None:
        self.rows[row] = digest

    def embedding(self, slot: int) -> bytes | None:
        return self.embeddings.get(slot)

    def hold(self, slot: int, adapter: AdapterIdentity | None) -> None:
        """Puts an adapter into a slot, or takes it away."""
        if adapter is None:
            self.adapters.pop(slot, None)
        else:
            self.adapters[slot] = adapter

    def change(self, weights: WeightsIdentity, kept: Mapping[int, int]) -> None:
        """Computes with other weights from now on. Some sequences keep what the old ones have
        computed of so many tokens."""
        self.weights, self.tower = weights
        for number, known in self._known.items():
            known.under(self.weights, kept.get(number, 0))

    def restart(self, sequence: int) -> None:
        """Computes everything of a sequence with the weights of now."""
        self._known[sequence].under(self.weights)

    def fork(self, sequence: int, parent: int) -> None:
        """Has a choice go on from what its parent has of the prompt."""
        self._known[sequence].follow(self._known[parent])

    def release(self) -> None:
        """Gives all memory back: it holds nothing any more."""
        self.poison(range(len(self.kv)), range(len(self.rows)))
        self.updates = [(NOTHING, NOTHING)] * len(self.updates)
        self.embeddings.clear()

    def register(self, info: SequenceInfo) -> None:
        self._known[info.sequence] = _Known(info, self.weights)

    def forget(self, sequence: int) -> None:
        del self._known[sequence]

    def run(self, plan: StepPlan) -> StepOutput:
        for slot in plan.dropped_slots:
            self.embeddings.pop(slot, None)
        for source, destination, first, count in plan.partial_folds:
            self.rows[destination] = self.rows[source]
            self._fold(destination, first, count)
        for row, first, count in plan.folds:
            self._fold(row, first, count)
        for source, destination in plan.row_copies:
            self.rows[destination] = self.rows[source]
        for source, destination, count in plan.copies:
            self.kv[destination][:count] = self.kv[source][:count]
        for recalled in plan.recalled:
            rows = {bytes(row) for row in recalled.rows.tolist()}
            (self.embeddings[recalled.slot],) = rows
        for encode in plan.encodes:
            tower = self.adapters.get(encode.adapter, NO_ADAPTER).vision
            self.embeddings[encode.slot] = seen(bytes(encode.pixels.tolist()), tower, self.tower)
        if self.fail_next and self.strike is None:
            self.strike = self._rng.randrange(len(plan.slices) + 1)
        strike = -1 if self.strike is None else self.strike
        self.strike = None
        poisoned = any(item.sequence in self.poisonous for item in plan.slices)
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        writes: set[tuple[int, int]] = set()
        rows_written: set[int] = set()
        drafts: dict[int, tuple[int, ...]] = {}
        for index, item in enumerate(plan.slices):
            if index == strike:
                break
            known = self._known[item.sequence]
            known.take(item)
            self._compute(item, known, writes, rows_written)
            if item.kind == "verify":
                sampled[item.sequence] = self._verify(item, known)
                drafts |= self._drafts(item, known, sampled[item.sequence])
                continue
            for task in item.samples:
                assert task.position == item.end - len(known.info.token_ids)
                seed = self._known[task.sequence].info.seed
                sampled[task.sequence] = (_sampled(known.digests[item.end], seed, task),)
            drafts |= self._drafts(item, known, sampled.get(item.sequence, ()))
        if self.fail_next or poisoned:
            self.fail_next = False
            self.struck = strike
            for item in plan.slices:
                # Nobody has learned which drafts were accepted; other weights accept others.
                if item.kind == "verify":
                    known = self._known[item.sequence]
                    known.certain = min(known.certain, item.start + 1)
            raise StepError(InjectedFailure(), _rows_after(plan.slices, strike))
        self.tokens_computed += plan.num_tokens
        return StepOutput(sampled, self._experts(plan), self._logprobs(plan), drafts)

    def _logprobs(self, plan: StepPlan) -> dict[int, LogprobRows]:
        reports = {}
        for item in plan.slices:
            if item.reported_end > item.reported_start:
                assert item.start <= item.reported_start and item.reported_end <= item.end
                known = self._known[item.sequence]
                top = known.info.params.prompt_logprobs
                assert top is not None, "rows that nobody wants"
                reports[item.sequence] = logprob_rows(
                    known.digests, item.reported_start + 1, item.reported_end + 1, top
                )
                self.rows_computed += len(reports[item.sequence])
        return reports

    def _fold(self, row: int, first: int, count: int) -> None:
        for before, after in self.updates[first : first + count]:
            assert self.rows[row] == before, "an update of another state"
            self.rows[row] = after

    def _verify(self, item: Slice, known: _Known) -> tuple[SampledToken, ...]:
        """Tokens up to the first one that is not its draft."""
        sampled: tuple[SampledToken, ...] = ()
        for end, task in enumerate(item.samples, item.start + 1):
            assert task.sequence == item.sequence
            assert task.position == end - len(known.info.token_ids)
            sampled += (_sampled(known.digests[end], known.info.seed, task),)
            if sampled[-1].token_id != task.draft:
                break
        known.certain = item.start + len(sampled)
        self.drafts_accepted += len(sampled) - 1
        return sampled

    def _drafts(
        self, item: Slice, known: _Known, sampled: tuple[SampledToken, ...]
    ) -> dict[int, tuple[int, ...]]:
        """As many as are wanted, some of them wrong; there must be blocks for them."""
        if not item.drafts:
            return {}
        assert len(known.table) * self.block_size >= item.end + item.drafts
        last = item.start + len(sampled) if item.kind == "verify" else item.end
        digest, found = extended(known.digests[last], sampled[-1].token_id), list[int]()
        for _ in range(item.drafts):
            found.append(next_token(digest, known.info.seed) ^ (digest[0] % 4 == 0))
            digest = extended(digest, found[-1])
        return {item.sequence: tuple(found)}

    def _experts(self, plan: StepPlan) -> dict[int, npt.NDArray[np.uint8]]:
        """As the real executor: nobody's rows, or those of the whole step."""
        known = {item: self._known[item.sequence] for item in plan.slices}
        if not any(each.info.params.return_routed_experts for each in known.values()):
            return {}
        return {
            item.sequence: expert_rows(each.digests, item.start, item.end)
            for item, each in known.items()
        }

    def _compute(
        self,
        item: Slice,
        known: _Known,
        writes: set[tuple[int, int]],
        rows_written: set[int],
    ) -> None:
        digests, table, size = known.digests, known.table, self.block_size
        adapter = self.owners.get(known.root, NO_ADAPTER)
        assert self.adapters.get(item.adapter, NO_ADAPTER) == adapter, "another adapter"
        prefill = item.kind == "prefill"
        present = max(item.start, min(item.write_start, item.end))
        for position in self._positions_to_check(present, prefill):
            found = self.kv[table[position // size]][position % size]
            if known.kept and item.start <= position < item.write_start:
                # KV reaches deeper than the state, from which on tokens are computed again.
                known.old[position] = known.before[position + 1]
            due = known.old.get(position, self._due(known, position + 1))
            assert found == due, f"wrong KV at {position} of {item}"
        drafted = item.kind == "verify"
        assert len(item.samples) == item.end - item.start or not drafted
        assert (item.updates >= 0) == (drafted and self.has_state)
        if self.has_state and drafted:
            assert item.src_row == item.dst_row and not item.snapshots
            self._fold(item.dst_row, item.updates, item.pending)
        if self.has_state:
            state = digests[0] if item.src_row < 0 else self.rows[item.src_row]
            assert state == self._due(known, item.start), f"wrong state before {item}"
        if prefill:
            self._check_embeddings(item, known)
        for position in range(max(item.start, item.write_start), item.end):
            place = (table[position // size], position % size)
            assert place not in writes, "two sequences write one slot"
            writes.add(place)
            self.kv[place[0]][place[1]] = self._made(item, digests[position + 1])
        if self.has_state and drafted:
            assert item.dst_row not in rows_written, "two writers of one row"
            rows_written.add(item.dst_row)
            for entry, position in enumerate(range(item.start, item.end), item.updates):
                self.updates[entry] = (digests[position], digests[position + 1])
        elif self.has_state:
            targets = [(item.end, item.dst_row), *item.snapshots]
            for position, row in targets:
                assert item.start < position <= item.end
                assert position in item.chunk_ends or not prefill or row == item.dst_row
                assert row not in rows_written, "two writers of one row"
                rows_written.add(row)
                self.rows[row] = self._made(item, digests[position])

    def _due(self, known: _Known, end: int) -> bytes:
        """What the first `end` tokens of a sequence must have left."""
        decoded = self._exact_only and end > len(known.info.token_ids)
        return DECODED * decoded + known.digests[end]

    def _made(self, item: Slice, digest: bytes) -> bytes:
        return DECODED * (self._exact_only and item.kind != "prefill") + digest

    def _positions_to_check(self, present: int, prefill: bool) -> Iterable[int]:
        """Every key a prefill reads; of a decode step, which reads the same again, a few."""
        if prefill or present <= 8:
            return range(present)
        return [present - 1, *(self._rng.randrange(present) for _ in range(6))]

    def _check_embeddings(self, item: Slice, known: _Known) -> None:
        needed = {
            (max(item.start, start), min(item.end, end)): (start, content)
            for (start, end), content in known.spans.items()
            if start < item.end and end > item.start
        }
        assert {(first, last) for first, last, _, _ in item.embeddings} == set(needed)
        for first, last, slot, row in item.embeddings:
            start, content = needed[first, last]
            assert row == first - start
            own = seen(content, self.owners.get(known.root, NO_ADAPTER).vision, self.tower)
            assert self.embeddings[slot] == own, "another medium's embedding"
