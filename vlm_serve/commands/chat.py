"""`vlm-serve chat`: answers one question about media, streamed to standard output."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import ConfigError, MediaError, MediaFetchError
from vlm_serve.kernels.native_library import built
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
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
    reasoning_parser: str = "auto",
    show_reasoning: bool | None = None,
) -> int:
    """Print the answer; return the exit status. Raises VlmServeError for bad input.

    The thought goes to standard error, so that standard output has the answer alone. None for
    `show_reasoning` shows it if both are terminals.

    Compiled kernels are used only if they exist: a single answer is not worth compiling them.
    """
    if config.compiled_kernels is None and config.native_kernels == "auto" and not built():
        config = dataclasses.replace(config, compiled_kernels=False)
    content: list[dict[str, Any]] = [_part("image", source) for source in images]
    content += [_part("video", source) for source in videos]
    content.append({"type": "text", "text": question})
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    printer = _Printer(shown=_both_terminals() if show_reasoning is None else show_reasoning)
    last = None
    with Pipeline(model, config, lora=lora, reasoning_parser=reasoning_parser) as pipe:
        try:
            for delta in pipe.stream([{"role": "user", "content": content}], params):
                printer.print(delta)
                last = delta
        except (MediaError, MediaFetchError) as error:
            raise _named(error, [*images, *videos]) from None
    printer.end(last)
    if report and last is not None and last.cache_report is not None:
        for name, value in dataclasses.asdict(last.cache_report).items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0


class _Printer:
    """Prints an answer while it is generated.

    Args:
        shown: the thought is printed too, dim on a terminal.
    """

    def __init__(self, *, shown: bool) -> None:
        dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._begin, self._end = ("\x1b[2m", "\x1b[22m") if dim else ("", "")
        self._shown = shown
        self._thought = self._answered = False

    def print(self, delta: Delta) -> None:
        """Print an increment."""
        if delta.reasoning:
            self._thought = True
            self._note(f"{self._begin}{delta.reasoning}{self._end}")
        if delta.text:
            if self._thought and not self._answered:
                self._note("\n\n")
            self._answered = True
            print(delta.text, end="", flush=True)

    def _note(self, text: str) -> None:
        if self._shown:
            print(text, end="", file=sys.stderr, flush=True)

    def end(self, last: Delta | None) -> None:
        """End the line, and say so if the tokens were used up before the answer began."""
        if self._thought and not self._answered:
            self._note("\n")
        print()
        if last is None or last.finish_reason != "length" or self._answered:
            return
        used = f"{last.usage.completion_tokens} tokens"
        ended = f"the thought took all {used}" if self._thought else f"{used} gave no text"
        note = f"vlm-serve: there is no answer: {ended}; allow more with --max-tokens"
        print(note, file=sys.stderr)


def _both_terminals() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


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
