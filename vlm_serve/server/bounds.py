"""The upper bound of the memory held for clients (docs/limits.md)."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_serve.grammar.worker import MAX_MESSAGE_BYTES, MEMORY_BYTES
from vlm_serve.preprocess.media.decoders import (
    LIGHT_DECODE_BYTES,
    LIGHT_FILE_BYTES,
    PROCESS_BYTES,
    default_slots,
)
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import max_cost
from vlm_serve.server.http.connections import READ_BYTES
from vlm_serve.server.http.request_memory import VALUE_BYTES, WIDEST_BODY_FACTOR
from vlm_serve.server.workers import large_threads

CONNECTION_BYTES = 4 * READ_BYTES
"""Memory of a connection: unread bytes of a request, unsent bytes of an answer, and objects."""
PROMPT_TOKEN_BYTES = 3 * 2 * 32 * 32
"""Memory of a token while its prompt is made: in a video it is two frames of 32 x 32 pixels."""


def parts(
    config: ServerConfig, max_model_len: int, *, apart: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield the name and the upper bound in bytes of each part.

    Args:
        apart: the engine has a process of its own.
    """
    body = config.max_body_bytes
    values = min(body, max_cost(max_model_len))
    yield "bodies and prompts", config.max_request_bytes
    if apart:
        yield "the engine's copies of prompts", config.max_request_bytes
    media = MediaLimits()
    largest = max(media.max_image_bytes, media.max_video_bytes)
    favoured = max(body * WIDEST_BODY_FACTOR + values * VALUE_BYTES, largest)
    yield "the body or medium that is favoured", favoured
    yield "connections", config.max_connections * CONNECTION_BYTES
    threads = config.preprocess_threads + large_threads(config.preprocess_threads)
    prompts = threads * max_model_len * PROMPT_TOKEN_BYTES
    yield "prompts that are being made", prompts
    # A decoder copies a medium's bytes into its own shared memory.
    yield "the decoders' copies of media", media.max_fetched_bytes
    light, heavy = default_slots()
    yield "light decoders", light * (LIGHT_DECODE_BYTES + 2 * LIGHT_FILE_BYTES + PROCESS_BYTES)
    decoder_bytes = media.max_decode_bytes + 2 * media.max_image_bytes + PROCESS_BYTES
    yield "heavy decoders", heavy * decoder_bytes
    # Up to six copies of the process's reply exist: bytes, text, values, grammar.
    yield "compiling a grammar", MEMORY_BYTES + 6 * MAX_MESSAGE_BYTES


def total(config: ServerConfig, max_model_len: int, *, apart: bool = False) -> int:
    """Return the sum of all parts in bytes."""
    return sum(size for _, size in parts(config, max_model_len, apart=apart))
