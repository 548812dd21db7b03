"""`vlm-serve serve`: load a model, print a summary, and serve until stopped."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from vlm_serve.engine.drafting import max_drafts
from vlm_serve.engine.drafts.start import why_off
from vlm_serve.engine.drafts.suffix import ANSWER_BYTES
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.memory import LOGPROB_CACHE_BYTES
from vlm_serve.engine.ranks.start import slot_bytes
from vlm_serve.engine.step_sizes import CapturedRows
from vlm_serve.engine.tower_graphs import patch_sizes
from vlm_serve.models.weight_sizes import prompt_price
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size
from vlm_serve.server.answers.pieces import form_of
from vlm_serve.server.answers.reasoning import reasoning_form
from vlm_serve.server.bounds import total
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import is_loopback
from vlm_serve.server.http.draining import (
    SWITCH_SECONDS,
    format_table,
    ignore_user_signals,
    print_notice,
)
from vlm_serve.server.http.listening import close_listener, listen, tls_context, url_of
from vlm_serve.server.http.tenants import read_tenant_keys
from vlm_serve.server.run import make_server, stop_with_engine
from vlm_serve.system.log_output import start_logging

_log = logging.getLogger(__name__)

COLLECTIONS_BEFORE_A_FULL_ONE = 100
"""Threshold of the garbage collector's oldest generation; Python's default is 10."""
OPEN_TO_ALL = (
    "everybody who can reach this address can use the page, and see and empty the cache: "
    "set --api-key, listen on loopback, or use --no-page"
)


def serve(model: str, engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve a model until a signal arrives or the engine ends; return the exit status: 0 or 1.

    Raises:
        ConfigError, CheckpointError: the server cannot start; nothing listens.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    start_logging(config.log_level)
    ignore_user_signals()
    # asyncio would warn of every chunk for a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    read_tenant_keys(config.tenant_keys)  # fail before the model is loaded
    tls = tls_context(config) is not None
    bound = listen(config)  # fail before the model is loaded
    _log.info("loading %s", model)
    try:
        engine = Engine.from_checkpoint(model, engine_config)
    except BaseException:
        close_listener(bound)
        raise
    names = config.served_model_name or (model,)
    if is_open_to_all(config):
        _log.warning("%s", OPEN_TO_ALL)
    for sentence in absent_folders(engine_config, config):
        _log.warning("%s", sentence)
    try:
        rows = list(startup_rows(engine, config, names, url_of(bound, tls=tls)))
        announce = partial(print_notice, format_table(rows))
        server = make_server(engine, config, names, announce, _leave_at_once)
        server.service.grammars.warm_up()
        freeze_startup_objects()
        ended = stop_with_engine(server, engine)
        server.run(sockets=[bound])
    finally:
        close_listener(bound)
        engine.close()
    return 1 if ended.is_set() else 0


def is_open_to_all(config: ServerConfig) -> bool:
    """Return True if the page, and so the cache, is open to anybody with access to the address."""
    has_keys = bool(config.api_key) or config.tenant_keys is not None
    local = config.uds is not None or is_loopback(config.host)
    return config.page and not has_keys and not local


def absent_folders(engine_config: EngineConfig, config: ServerConfig) -> list[str]:
    """Return a sentence for each absent folder of clients' files."""
    folders = {
        "allowed_local_media_path": engine_config.allowed_local_media_path,
        "allowed_lora_path": config.allowed_lora_path,
    }
    return [
        f"{name}: there is no folder {folder} now, so requests for its files are refused"
        for name, folder in folders.items()
        if folder is not None and not Path(folder).is_dir()
    ]


def freeze_startup_objects() -> None:
    """Exempt the objects that exist at startup from garbage collection.

    These are half a million objects of libraries and the model. A full collection of them stops
    every thread for 0.2 s, repeatedly while requests come and go. Collecting newer objects,
    mostly the cache's nodes, takes 20 to 70 ms. It is done ten times less often than by default,
    and when the server is quiet (`trimming`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_BEFORE_A_FULL_ONE)


def _leave_at_once() -> None:
    """Exit the process at once.

    Tiers survive that as they survive a crash, and child processes end with their pipes.
    """
    _log.warning("stopped by a second signal")
    logging.shutdown()
    os._exit(0)


def startup_rows(
    engine: Engine, config: ServerConfig, names: tuple[str, ...], url: str
) -> Iterable[tuple[str, str]]:
    """Yield the rows of the table printed at startup."""
    options, memory = engine.config, engine.memory
    yield "model", ", ".join(names)
    yield "context", f"{engine.max_model_len} tokens"
    yield "device", options.device
    if options.tensor_parallel_size > 1:
        yield "ranks", _ranks(engine)
    yield "weights", str(engine.weights)
    if engine.spec.quantization is not None:
        yield "quantised", str(engine.spec.quantization)
    yield from engine.arithmetic.rows()
    if options.device == "cpu":
        made = "torch and compiled" if options.compiled_kernels else "torch"
        yield "kernels", f"{made}, {options.threads} threads"
    else:
        yield "kernels", "Triton"
        yield "decode", _decode(engine)
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
    if engine.step_memory is not None:
        yield "steps", f"{format_size(engine.step_memory.total)} on top: {engine.step_memory}"
    yield "logprobs", f"of prompts, up to {format_size(LOGPROB_CACHE_BYTES)} on top"
    if engine.adapters.all():
        compiled = bool(options.compiled_kernels)
        yield "adapters", engine.adapters.described(options.max_loras, compiled=compiled)
    yield "drafts", _drafts(engine)
    yield "sequences", str(options.max_num_seqs)
    yield "step", f"at most {options.max_num_batched_tokens} tokens"
    if options.enable_prefix_caching:
        yield "granularity", f"{options.block_size} tokens; exactly at the ends of media and turns"
    else:
        yield "granularity", "prefix caching is off"
    yield "requests", f"at most {format_size(total(config, engine.max_model_len))} on top"
    parser = config.tool_call_parser
    form = form_of(parser, engine.preprocessor.tool_form)
    yield "tool calls", parser if parser == "none" else form
    yield "reasoning", reasoning_form(config.reasoning_parser, engine.preprocessor.template_traits)
    if config.response_store is not None:
        assert isinstance(config.response_store, int)
        kept = f"{format_size(config.response_store)} per API key"
        yield "stored responses", f"{kept}, {config.response_store_ttl:g} s, on top"
    if config.batch_store is not None:
        assert isinstance(config.batch_store, int)
        yield "files and batches", f"{format_size(config.batch_store)} on disk per API key"
    yield "API keys", str(len(config.api_key)) if config.api_key else "none: everybody may ask"
    yield "URL", f"{url}/v1"


def _ranks(engine: Engine) -> str:
    """Describe the ranks and their exchange buffers."""
    options = engine.config
    text = f"{options.tensor_parallel_size}, each with what follows"
    if not options.compiled_kernels:
        return text
    exchange = 2 * slot_bytes(engine.spec, options)
    return f"{text}; up to {format_size(exchange)} more for what it tells the others"


def _drafts(engine: Engine) -> str:
    """Describe speculative decoding."""
    options, memory = engine.config, engine.memory
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
        text += f"; prompts cost {prompt_price(engine.spec):.1%} more"
    return text


def _decode(engine: Engine) -> str:
    """Describe the CUDA graphs of steps and pictures."""
    options, memory = engine.config, engine.memory
    if not options.cuda_graphs:
        return "without CUDA graphs"
    most = CapturedRows.of(options)
    text = f"CUDA graphs for up to {most.sequences} sequences"
    if most.drafts:
        text += f" ({most.drafts} with drafts)"
    text += f" and {most.prompt} prompt tokens"
    if patches := patch_sizes(engine.spec, options):
        text += f", pictures of up to {patches[-1]} patches"
    if memory.snapshot_bytes:
        text += f", a scratch state of {format_size(memory.snapshot_bytes)} on top"
    return text
