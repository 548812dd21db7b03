"""The model of `quantised.py`, the bytes that a decoded token reads of it, and its servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from checkpoint_spec import BENCHMARK_SPEC, CheckpointSpec
from make_checkpoint import make_checkpoint

from common.engine_cases import Side
from common.engine_gguf import convert, quantise
from common.engine_peers import Completions, LlamaCpp, find_llama, llama, ours
from common.limits import Limits
from common.machine import ROOT
from vlm_serve.kernels.linear.quantising import group_of, num_bytes

SPEC = replace(
    BENCHMARK_SPEC,
    hidden_size=2048,
    num_layers=20,
    intermediate_size=6144,
    vocab_size=16384,
    gdn_key_heads=16,
    gdn_value_heads=16,
    attention_heads=8,
    head_dim=256,
    dtype="bfloat16",
)
"""1.17B weights of the language model, beside the benchmarks' small tower."""

PEERS = {"bfloat16": ("BF16",), "int8": ("Q8_0",), "int6": ("Q6_K",), "int4": ("Q4_0", "Q4_K_M")}
"""Each of our formats, and what llama.cpp has of that width."""
FILES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
"""Types of GGUF files that both sides read as they are."""


def _bytes(kind: str, columns: int, depth: int) -> int:
    """Of a weight, with its scales."""
    if kind == "bfloat16":
        return 2 * columns * depth
    bits = int(kind.removeprefix("int"))
    group = group_of(bits, depth)
    assert group is not None
    return num_bytes(columns, depth, bits, group)


def bytes_per_token(spec: CheckpointSpec, kind: str, context: int) -> int:
    """What decoding one token reads, and writes of the state: projections, head, states and pages.

    Args:
        spec: a dense model of the Qwen3.5 family.
        kind: "bfloat16", "int8", "int6" or "int4", whose head has 6 bits.
        context: tokens before it.
    """
    attending = spec.num_layers // spec.full_attention_interval
    recurrent = spec.num_layers - attending
    values = spec.gdn_value_heads * spec.gdn_value_dim
    mixed = 2 * spec.gdn_key_heads * spec.gdn_key_dim + 2 * values
    queries, keys = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    weights = (
        recurrent * (_bytes(kind, mixed, hidden) + _bytes(kind, hidden, values))
        + attending * (_bytes(kind, 2 * (queries + keys), hidden) + _bytes(kind, hidden, queries))
        + spec.num_layers * (_bytes(kind, 2 * inner, hidden) + _bytes(kind, hidden, inner))
    )
    small = _bytes("bfloat16", 2 * recurrent * spec.gdn_value_heads, hidden)  # a and b
    head = _bytes("int6" if kind == "int4" else kind, spec.vocab_size, hidden)
    state = recurrent * values * spec.gdn_key_dim * 4
    pages = attending * 2 * keys * 2 * context
    return weights + small + head + 2 * state + pages


class PlainRead:
    """Reads as many bytes as a decoded token does, and does nothing else.

    Args:
        size: bytes a token.
        threads: that read.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._size, self._limits = size, Limits(threads, size)

    def complete(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for so many tokens of one prompt."""
        begin = time.perf_counter()
        for _ in range(count):
            self._limits.read(self._size)
        return time.perf_counter() - begin


class Computing:
    """A server whose time is that of its processors: what others leave it does not count.

    Args:
        side: a server with one thread, since one that waits for others may compute meanwhile.
    """

    def __init__(self, side: Completions | LlamaCpp) -> None:
        self._side = side

    def complete(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for so many tokens."""
        begin = self._side.server.processor_seconds()
        self._side.complete(prompts, count)
        return self._side.server.processor_seconds() - begin


class Models:
    """The checkpoint, and what llama.cpp's tools make of it, in a folder; what is there is used.

    Args:
        folder: for all of the files.
        source: llama.cpp's source tree, or None for LLAMA_SOURCE.
        spec: of the model.
    """

    def __init__(self, folder: Path, source: str | None, spec: CheckpointSpec = SPEC) -> None:
        self._folder, self._source = folder, source
        self.checkpoint = folder / "checkpoint"
        if not self.checkpoint.is_dir():
            print("writing the checkpoint", flush=True)
            make_checkpoint(folder / "checkpoint.part", spec).replace(self.checkpoint)

    @contextmanager
    def own(self, kind: str, threads: int, batched_tokens: int) -> Iterator[Side]:
        """Our server. Raises Unavailable."""
        switches = [] if kind == "bfloat16" else ["--quantization", kind]
        with ours(
            ROOT,
            self.checkpoint,
            "bfloat16",
            *switches,
            threads=threads,
            batched_tokens=batched_tokens,
        ) as server:
            yield Completions(server, kind)

    @contextmanager
    def own_file(self, kind: str, threads: int, batched_tokens: int) -> Iterator[Completions]:
        """Our server on llama.cpp's file. Raises Unavailable, ConversionError."""
        tree, _ = find_llama(self._source)
        model = self._file(tree, kind)
        switches = ("--mmproj", "none")
        with ours(
            ROOT, model, "bfloat16", *switches, threads=threads, batched_tokens=batched_tokens
        ) as server:
            yield Completions(server, kind)

    @contextmanager
    def peer(self, kind: str, threads: int, length: int, *, tower: bool) -> Iterator[LlamaCpp]:
        """llama.cpp's. Raises Unavailable, ConversionError."""
        tree, binary = find_llama(self._source)
        model = self._file(tree, kind)
        eyes = self._converted(tree, tower=True) if tower else None
        # In memory of its own: pages of a file are the first that a busy machine takes back.
        own = {"--load-mode": "none"}
        with llama(binary, model, length=length, threads=threads, tower=eyes, more=own) as started:
            yield started

    def prepare(self, kind: str) -> None:
        """Converts what `peer` with a tower needs. Raises Unavailable, ConversionError."""
        tree, _ = find_llama(self._source)
        self._converted(tree, tower=True)
        self._file(tree, kind)

    def _converted(self, tree: Path, *, tower: bool = False) -> Path:
        file = self._folder / f"{'tower-' if tower else ''}bfloat16.gguf"
        if not file.is_file():
            print(f"converting to {file.name}", flush=True)
            convert(tree, self.checkpoint, "bfloat16", self._folder, tower=tower)
        return file

    def _file(self, tree: Path, kind: str) -> Path:
        plain = self._converted(tree)
        if kind == "BF16":
            return plain
        file = self._folder / f"{kind}.gguf"
        if not file.is_file():
            print(f"llama-quantize to {kind}", flush=True)
            quantise(tree, plain, kind)
        return file
