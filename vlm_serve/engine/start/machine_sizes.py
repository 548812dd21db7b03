"""Sizes that follow from a GPU: how many sequences run, how many tokens a step has, and how long it
is to take.

docs/operations.md#a-first-gpu-server
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlm_serve.engine.numerics.arithmetic import Types
from vlm_serve.engine.steps.memory import GPU_SHARE, live_bytes
from vlm_serve.models.cache_layout import CacheLayout
from vlm_serve.options.config import SEQUENCE_CHOICES, EngineConfig, Fallback
from vlm_serve.options.declared import format_size

STEP_TOKENS, LARGE_STEP_TOKENS = 2048, 8192
ROOM_FOR_LARGE_STEPS = 16 << 30
"""Bytes beside the weights from which steps are large: their activations take up to two GiB."""
STEPS_SHARE = 0.9
"""What steps leave of the memory beside the weights, before they are measured."""
TOKENS_EACH = 1024
"""Tokens for each sequence that the cache holds at least."""
SAMPLED_BYTES = 12
"""Of a sequence and token of the vocabulary: logits, where they are kept, counts of penalties."""
CPU_TARGET = 25.0
PROMPT_FACTOR, LEAST_TARGET, MOST_TARGET = 4, 25.0, 200.0
"""On a GPU a step beside prompts is to take so many times a step without, in these bounds, in
milliseconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """Needs of a number of sequences, in bytes.

    Attributes:
        sequences: the number.
        live: states of running sequences, and updates of drafts.
        sampling: logits and what sampling takes.
        cache: what is left for KV blocks and snapshots; estimated.
        tokens: of KV, if snapshots have half of that, or one a block if that is less.
    """

    sequences: int
    live: int
    sampling: int
    cache: int
    tokens: int

    @property
    def fits(self) -> bool:
        """True if the cache has as much as what runs takes, and enough for each sequence."""
        return self.cache >= self.live + self.sampling and (
            self.tokens >= self.sequences * TOKENS_EACH
        )

    def __str__(self) -> str:
        left = format_size(self.cache) if self.cache > 0 else "nothing"
        text = f"live states {format_size(self.live)}, " if self.live else ""
        return f"{text}sampling {format_size(self.sampling)}, about {left} of cache"


@dataclass(frozen=True, slots=True)
class MachineSizes:
    """The sizes of an engine on a GPU.

    Attributes:
        sizes: the number of sequences, and the next lower and higher ones, ascending.
        times: (sequences, seconds) of measured decode steps; empty if none were measured.
    """

    sizes: tuple[Size, ...]
    times: tuple[tuple[int, float], ...] = ()

    def rows(self, config: EngineConfig) -> list[tuple[str, str]]:
        """Return a table: what is chosen, and what the next choices would take."""
        rows = []
        for size in self.sizes:
            name = "sequences" if size.sequences == config.max_num_seqs else "  or"
            rows.append((name, f"{size.sequences}: {size}{self._time(size.sequences)}"))
        target = config.step_time_target
        aimed = f", {target:g} ms beside prompts at best" if target else ""
        rows.append(("step", f"at most {config.max_num_batched_tokens} tokens{aimed}"))
        return rows

    def _time(self, sequences: int) -> str:
        found = [(count, seconds) for count, seconds in self.times if count <= sequences]
        if not found or found[-1][0] < sequences:
            return ""
        count, seconds = found[-1]
        return f"; {seconds * 1000:.1f} ms a step, {count / seconds:.0f} tokens a second"


def size_of(
    sequences: int,
    config: EngineConfig,
    layout: CacheLayout,
    types: Types,
    vocabulary: int,
    memory: int,
) -> Size:
    """Return what a number of sequences takes of the memory beside the weights."""
    assert config.block_size is not None
    live = live_bytes(layout, config, types, sequences)
    sampling = SAMPLED_BYTES * vocabulary * sequences
    cache = max(0, int((STEPS_SHARE * memory - live - sampling) * GPU_SHARE))
    block = layout.num_bytes("block", types.pools, config.block_size)
    row = layout.num_bytes("row", types.pools) if config.enable_prefix_caching else 0
    tokens = cache // max(1, block + min(block, row)) * config.block_size
    return Size(sequences, live, sampling, cache, tokens)


def with_machine(
    config: EngineConfig, layout: CacheLayout, types: Types, vocabulary: int, memory: int
) -> tuple[EngineConfig, MachineSizes]:
    """Choose what the options leave open on a GPU.

    Args:
        config: options, with a block size; numbers that are no `Fallback` stay.
        layout, types: of the pools.
        vocabulary: tokens of the model.
        memory: bytes that the GPU has beside the weights.
    """
    found = [size_of(each, config, layout, types, vocabulary, memory) for each in SEQUENCE_CHOICES]
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if isinstance(tokens, Fallback):
        tokens = LARGE_STEP_TOKENS if memory >= ROOM_FOR_LARGE_STEPS else STEP_TOKENS
    if isinstance(sequences, Fallback):
        most = tokens - config.block_size if config.block_size else tokens
        fitting = [each.sequences for each in found if each.fits and each.sequences <= most]
        sequences = max([int(sequences), *fitting])
    elif sequences not in SEQUENCE_CHOICES:
        found.append(size_of(sequences, config, layout, types, vocabulary, memory))
        found.sort(key=lambda each: each.sequences)
    place = [each.sequences for each in found].index(sequences)
    near = tuple(found[max(0, place - 1) : place + 2])
    chosen = replace(config, max_num_seqs=int(sequences), max_num_batched_tokens=int(tokens))
    return chosen, MachineSizes(near)


def with_step_target(config: EngineConfig, times: Sequence[tuple[int, float]]) -> EngineConfig:
    """Choose the target of a step's duration, if the option leaves it open.

    Args:
        config: options.
        times: (sequences, seconds) of measured decode steps; empty on a CPU.
    """
    if config.step_time_target is not None:
        return config
    target = CPU_TARGET
    if times:
        measured = 1000 * max(seconds for _, seconds in times)
        target = float(round(min(MOST_TARGET, max(LEAST_TARGET, PROMPT_FACTOR * measured))))
    return replace(config, step_time_target=target)
