"""`vlm-serve chat`: answers one question about media, or holds a conversation.

It talks to a model in this process, or to a running server.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_serve.commands.chat_media import named, part_of
from vlm_serve.commands.chat_models import ChatModel, LocalModel, ServedModel
from vlm_serve.commands.chat_printer import Printer
from vlm_serve.commands.conversation import Conversation
from vlm_serve.errors import ConfigError, VlmServeError
from vlm_serve.options.config import EngineConfig

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?", re.ASCII)
_PATHS = ("./", "../", "/", "~", "ollama:")


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of a `chat`, and how it is answered.

    Attributes:
        question: None: the lines of a conversation, or all of standard input if it is no terminal.
        images, videos: files and URLs.
        max_tokens: longest answer; None: as the context allows.
        report: print what the cache did.
        show_reasoning: print thoughts; None: if both outputs are terminals.
    """

    question: str | None = None
    images: Sequence[str] = ()
    videos: Sequence[str] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    report: bool = False
    show_reasoning: bool | None = None


def is_model(word: str) -> bool:
    """Return True if the only word of a command line names a model, not a question: it is built in,
    exists, or has the form of a hub id or a path."""
    if word in ("demo", "demo-moe") or word.startswith(_PATHS) or word.endswith(".gguf"):
        return True
    return _HUB_ID.fullmatch(word) is not None or (" " not in word and Path(word).exists())


def chat(
    model: str,
    config: EngineConfig,
    asked: Asked,
    *,
    lora: str | None = None,
    reasoning_parser: str = "auto",
) -> int:
    """Answer with a model in this process; return the exit status. Raises VlmServeError."""
    read = asked_of(asked)
    # Late, since they import torch, which a server's client does not need.
    from vlm_serve.kernels.native_library import built
    from vlm_serve.pipeline.pipeline import Pipeline

    if config.compiled_kernels is None and config.native_kernels == "auto" and not built():
        # A short conversation is not worth compiling them.
        config = dataclasses.replace(config, compiled_kernels=False)
    with Pipeline(model, config, reasoning_parser=reasoning_parser) as pipe:
        pipe.engine.adapters.identity_of(lora)
        local = LocalModel(pipe, model, _params(asked))
        local.name = lora or model
        return _talk(local, asked, *read)


def chat_with_server(
    base_url: str, api_key: str | None, asked: Asked, model: str | None = None
) -> int:
    """Answer with a running server; return the exit status. Raises VlmServeError."""
    served = ServedModel(base_url, api_key, _params(asked))
    if model is not None and model not in served.names and asked.question is None:
        asked = dataclasses.replace(asked, question=model)
    elif model is not None:
        served.choose(model)
    return _talk(served, asked, *asked_of(asked))


def _params(asked: Asked) -> Mapping[str, Any]:
    return {"max_tokens": asked.max_tokens, "temperature": asked.temperature}


def asked_of(asked: Asked) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the question, None for a conversation, and the parts of its media.

    Raises ConfigError for a question without text and an unreadable file.
    """
    parts = [part_of("image", source) for source in asked.images]
    parts += [part_of("video", source) for source in asked.videos]
    question = asked.question
    if question == "-" or (question is None and not sys.stdin.isatty()):
        question = sys.stdin.read().strip()
    if question is not None and not question.strip():
        raise ConfigError("the question is empty", param="question")
    return question, parts


def _talk(model: ChatModel, asked: Asked, question: str | None, parts: list[dict[str, Any]]) -> int:
    both = sys.stdout.isatty() and sys.stderr.isatty()
    shown = both if asked.show_reasoning is None else asked.show_reasoning
    if question is None:
        Conversation(model, parts, shown=shown).run()
        return 0
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    printer = Printer(shown=shown)
    try:
        for delta in model.stream(messages):
            printer.print(delta)
    except VlmServeError as error:
        raise named(error, messages) from None
    printer.end()
    last = printer.last
    if asked.report and last is not None and last.cache_report is not None:
        for name, value in dataclasses.asdict(last.cache_report).items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0
