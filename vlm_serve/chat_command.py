"""`vlm-serve chat`: one question about some media, answered on standard output as it is made."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_serve.config import EngineConfig
from vlm_serve.errors import ConfigError
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
) -> int:
    """Prints the answer; returns the exit status. Raises VlmServeError for bad input.

    Kernels are used if they have been compiled: one answer is not worth the seconds that takes.
    """
    if config.compiled_kernels is None and not built():
        config = dataclasses.replace(config, compiled_kernels=False)
    content: list[dict[str, Any]] = [_part("image", source) for source in images]
    content += [_part("video", source) for source in videos]
    content.append({"type": "text", "text": question})
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    last = None
    with Pipeline(model, config) as pipe:
        for delta in pipe.stream([{"role": "user", "content": content}], params):
            print(delta.text, end="", flush=True)
            last = delta
    print()
    if report and last is not None and last.cache_report is not None:
        for name, value in dataclasses.asdict(last.cache_report).items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0


def _part(kind: str, source: str) -> dict[str, Any]:
    """Who runs the command may read any file, and is told which one cannot be read; a URL goes the
    way of all URLs."""
    if "://" not in source and not source.startswith("data:"):
        try:
            Path(source).open("rb").close()
        except OSError as error:
            raise ConfigError(f"--{kind} {source}: {error.strerror}", param=kind) from None
    return {"type": kind, kind: source if "://" in source else Path(source)}
