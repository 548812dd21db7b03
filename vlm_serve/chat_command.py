"""`vlm-serve chat`: answers one question about media, streamed to standard output."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_serve.config import EngineConfig
from vlm_serve.errors import ConfigError, MediaError, MediaFetchError
from vlm_serve.kernels.native_library import built
from vlm_serve.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams


def chat(
    model: str,
    config: EngineConfig,
    *,
    question: str,
    images: Sequence[str],
    videos: Sequence[str],
    max_tokens: int,
    temperature: float | None,
    report: bool,
    lora: str | None = None,
) -> int:
    """Print the answer; return the exit status. Raises VlmServeError for bad input.

    Compiled kernels are used only if they exist: a single answer is not worth compiling them.
    """
    if config.compiled_kernels is None and config.native_kernels == "auto" and not built():
        config = dataclasses.replace(config, compiled_kernels=False)
    content: list[dict[str, Any]] = [_part("image", source) for source in images]
    content += [_part("video", source) for source in videos]
    content.append({"type": "text", "text": question})
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    last = None
    with Pipeline(model, config, lora=lora) as pipe:
        try:
            for delta in pipe.stream([{"role": "user", "content": content}], params):
                print(delta.text, end="", flush=True)
                last = delta
        except (MediaError, MediaFetchError) as error:
            raise _named(error, [*images, *videos]) from None
    print()
    if report and last is not None and last.cache_report is not None:
        for name, value in dataclasses.asdict(last.cache_report).items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0


def _named(error: MediaError | MediaFetchError, sources: Sequence[str]) -> MediaError:
    """Return an error about a medium, behind the name of its argument."""
    place = re.match(r"messages\[0\]\.content\[(\d+)\]", error.param or "")
    source = sources[int(place[1])] if place else "media"
    return MediaError(f"{source[:100]}: {error.message}", param=error.param, code=error.code)


def _part(kind: str, source: str) -> dict[str, Any]:
    """Build a message part: the command may read any local file; a URL is fetched as usual.

    Raises ConfigError for an unreadable file.
    """
    if "://" not in source and not source.startswith("data:"):
        try:
            Path(source).open("rb").close()
        except OSError as error:
            raise ConfigError(f"--{kind} {source}: {error.strerror}", param=kind) from None
    return {"type": kind, kind: source if "://" in source else Path(source)}
