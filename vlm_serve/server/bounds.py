"""The most that clients can make a server hold, as it follows from its options (docs/limits.md)."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_serve.grammar.worker import MAX_MESSAGE_BYTES, MEMORY_BYTES
from vlm_serve.preprocess.decoders import (
    LIGHT_DECODE_BYTES,
    LIGHT_FILE_BYTES,
    PROCESS_BYTES,
    default_places,
)
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.connection import READ_BYTES
from vlm_serve.server.http.json_body import max_cost
from vlm_serve.server.http.request_memory import VALUE_BYTES, WIDEST_BODY_FACTOR
from vlm_serve.server.service import large_threads

CONNECTION_BYTES = 4 * READ_BYTES
"""What it has sent of a request that is not read yet, what waits to be sent, and its objects."""
PROMPT_TOKEN_BYTES = 3 * 2 * 32 * 32
"""Of a prompt that is being made: a token of a video stands for two frames of 32 x 32 pixels."""


def parts(config: ServerConfig, max_model_len: int) -> Iterator[tuple[str, int]]:
    """What is held for whom, and the most of it in bytes."""
    body = config.max_body_bytes
    values = min(body, max_cost(max_model_len))
    yield "bodies and prompts", config.max_request_bytes
    media = MediaLimits()
    largest = max(media.max_image_bytes, media.max_video_bytes)
    favoured = max(body * WIDEST_BODY_FACTOR + values * VALUE_BYTES, largest)
    yield "the body or medium that is favoured", favoured
    yield "connections", config.max_connections * CONNECTION_BYTES
    threads = config.preprocess_threads + large_threads(config.preprocess_threads)
    prompts = threads * max_model_len * PROMPT_TOKEN_BYTES
    yield "prompts that are being made", prompts
    # A decoder has a medium's bytes in shared memory of its own.
    yield "the decoders' copies of media", media.max_fetched_bytes
    light, heavy = default_places()
    yield "light decoders", light * (LIGHT_DECODE_BYTES + 2 * LIGHT_FILE_BYTES + PROCESS_BYTES)
    each = media.max_decode_bytes + 2 * media.max_image_bytes + PROCESS_BYTES
    yield "heavy decoders", heavy * each
    # What the process says is there up to six times on its way: bytes, text, values, grammar.
    yield "compiling a grammar", MEMORY_BYTES + 6 * MAX_MESSAGE_BYTES


def total(config: ServerConfig, max_model_len: int) -> int:
    """Bytes of all of them together."""
    return sum(size for _, size in parts(config, max_model_len))
