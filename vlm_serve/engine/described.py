"""Describes an engine: rows of the table that a server prints at startup."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vlm_serve.engine.core.slicing import max_drafts
from vlm_serve.engine.features.drafts.suffix import ANSWER_BYTES
from vlm_serve.engine.start.draft_start import why_off
from vlm_serve.engine.start.parts import EngineParts
from vlm_serve.engine.start.weight_start import update_bytes
from vlm_serve.engine.steps.memory import LOGPROB_CACHE_BYTES
from vlm_serve.engine.steps.ranks.start import slot_bytes
from vlm_serve.engine.steps.step_sizes import CapturedRows
from vlm_serve.engine.steps.tower_graphs import patch_sizes
from vlm_serve.models.weight_sizes import prompt_price
from vlm_serve.options.declared import format_size


def engine_rows(parts: EngineParts) -> Iterator[tuple[str, str]]:
    """Yield names and texts: context, arithmetic, memory, drafts and limits."""
    options, memory = parts.config, parts.memory
    yield "context", f"{parts.language.max_length} tokens"
    yield "device", options.device
    if options.tensor_parallel_size > 1:
        yield "ranks", _ranks(parts)
    yield "weights", str(parts.weights)
    if options.allow_weight_updates:
        yield "updates", f"up to {format_size(update_bytes(options, parts.weights))} on top"
    if parts.spec.quantization is not None:
        yield "quantised", str(parts.spec.quantization)
    yield from parts.arithmetic.rows()
    if options.device == "cpu":
        backends = "torch and compiled" if options.compiled_kernels else "torch"
        yield "kernels", f"{backends}, {options.threads} threads"
    else:
        yield "kernels", "Triton"
        yield "decode", _decode(parts)
    yield "cache memory", format_size(memory.cache_memory)
    yield (
        "  KV blocks",
        f"{memory.num_blocks} of {format_size(memory.block_bytes)} ({options.kv_cache_dtype}): "
        f"{memory.tokens} tokens",
    )
    yield (
        "  snapshots",
        f"{memory.num_snapshot_rows} of {format_size(memory.snapshot_bytes)} "
        f"({options.state_dtype})",
    )
    yield "live states", f"{memory.num_live_rows}, {format_size(memory.live_state_bytes)} on top"
    if parts.steps is not None:
        yield "steps", f"{format_size(parts.steps.total)} on top: {parts.steps}"
    yield "logprobs", f"of prompts, up to {format_size(LOGPROB_CACHE_BYTES)} on top"
    if parts.adapters.all():
        compiled = bool(options.compiled_kernels)
        yield "adapters", parts.adapters.described(options.max_loras, compiled=compiled)
    yield "drafts", _drafts(parts)
    if parts.machine is not None:
        yield from parts.machine.rows(options)
    else:
        yield "sequences", str(options.max_num_seqs)
        yield "step", f"at most {options.max_num_batched_tokens} tokens"
    if options.enable_prefix_caching:
        yield "granularity", f"{options.block_size} tokens; exactly at the ends of media and turns"
    else:
        yield "granularity", "prefix caching is off"


def _ranks(parts: EngineParts) -> str:
    """Describe the ranks and their exchange buffers."""
    options = parts.config
    text = f"{options.tensor_parallel_size}, each with what follows"
    if not options.compiled_kernels:
        return text
    exchange = 2 * slot_bytes(parts.spec, options)
    return f"{text}; up to {format_size(exchange)} more for what it tells the others"


def _drafts(parts: EngineParts) -> str:
    """Describe speculative decoding."""
    options, memory = parts.config, parts.memory
    if options.speculative == "off":
        device, ranks = torch.device(options.device), options.tensor_parallel_size
        why = why_off(device, ranks, compiled=bool(options.compiled_kernels))
        return f"off; {why}" if why else "off"
    updates = format_size(memory.num_updates * memory.update_bytes)
    most = options.speculative_tokens
    alone = max_drafts(most, 1, options.max_num_seqs)
    text = (
        f"{options.speculative}, at most {most} a sequence"
        f"{f', {alone} while few run' if alone > most else ''}; "
        f"{updates} for what they change"
    )
    if "suffix" in options.speculative:
        text += f", up to {format_size(ANSWER_BYTES)} for earlier answers"
    text += " on top"
    if "mtp" in options.speculative:
        text += f"; prompts cost {prompt_price(parts.spec):.1%} more"
    return text


def _decode(parts: EngineParts) -> str:
    """Describe the CUDA graphs of steps and pictures."""
    options, memory = parts.config, parts.memory
    if not options.cuda_graphs:
        return "without CUDA graphs"
    most = CapturedRows.of(options)
    text = f"CUDA graphs for up to {most.sequences} sequences"
    if most.drafts:
        text += f" ({most.drafts} with drafts)"
    text += f" and {most.prompt} prompt tokens"
    if patches := patch_sizes(parts.spec, options):
        text += f", pictures of up to {patches[-1]} patches"
    if memory.snapshot_bytes:
        text += f", a scratch state of {format_size(memory.snapshot_bytes)} on top"
    return text
