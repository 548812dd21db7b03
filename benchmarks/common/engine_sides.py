"""Start the sides of `engine_cpu.py`, and report in one line which cannot take part and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from common.engine_cases import Side, transformers
from common.engine_child import child
from common.engine_gguf import ConversionError, convert, has_state
from common.engine_peers import Completions, LlamaCpp, find_llama, find_vllm, llama, ours, vllm
from common.engine_server import Server, Unavailable
from common.machine import ROOT

OURS, BEFORE = "vlm-serve", "vlm-serve before"
TRANSFORMERS, VLLM, LLAMA = "transformers", "vLLM", "llama.cpp"

T = TypeVar("T")


class Peers:
    """The sides of one dtype, started when their turn comes.

    vLLM is started here: it takes a minute. Models with a recurrent state it only runs in bfloat16.

    Args:
        checkpoint: directory in Hugging Face's format.
        dtype: of the weights.
        folder: where converted checkpoints go.
        arguments: of `engine_cpu.py`.
        stack: ends vLLM.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        folder: Path,
        arguments: argparse.Namespace,
        stack: ExitStack,
    ) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._folder, self._arguments = folder, arguments
        self._length = arguments.prompt_tokens + arguments.decode_tokens + 64
        self._vllm = _enter(stack, VLLM, self._start_vllm) if arguments.peers else None

    def text_sides(self, stack: ExitStack) -> dict[str, Side]:
        """Everyone for prompts of token ids, in the order of the table."""
        sides: dict[str, Side] = {}
        for name, folder in self._own_folders().items():
            sides[name] = stack.enter_context(
                child(
                    folder,
                    self._checkpoint,
                    self._dtype,
                    self._arguments.threads,
                    self._arguments.batched_tokens,
                )
            )
        if self._arguments.peers:
            sides[TRANSFORMERS] = transformers(self._checkpoint, self._dtype)
        if self._vllm is not None:
            sides[VLLM] = self._vllm
        started = self._enter_llama(stack, tower=False)
        if started is not None:
            sides[LLAMA] = started
        return sides

    def media_sides(self, stack: ExitStack) -> dict[str, Server]:
        """Everyone for chats with pictures; nobody, if the checkpoint takes none."""
        if '"vision_config"' not in (self._checkpoint / "config.json").read_text():
            print("photographs skipped: the checkpoint has no vision tower", flush=True)
            return {}
        sides = {}
        for name, folder in self._own_folders().items():
            try:
                sides[name] = stack.enter_context(self._serve(folder))
            except Unavailable as error:
                # An earlier server need not know the switches of today's.
                if name == OURS:
                    raise
                print(f"photographs: {name} skipped: {error}", flush=True)
        if self._vllm is not None:
            sides[VLLM] = self._vllm.server
        started = self._enter_llama(stack, tower=True)
        if started is not None:
            sides[LLAMA] = started.server
        return sides

    def _own_folders(self) -> dict[str, Path]:
        before = self._arguments.before
        return {OURS: ROOT} | ({} if before is None else {BEFORE: before})

    def _serve(self, folder: Path, *switches: str) -> AbstractContextManager[Server]:
        return ours(
            folder,
            self._checkpoint,
            self._dtype,
            *switches,
            threads=self._arguments.threads,
            batched_tokens=self._arguments.batched_tokens,
        )

    @contextmanager
    def _start_vllm(self) -> Iterator[Completions]:
        with vllm(
            find_vllm(self._arguments.vllm_python),
            self._checkpoint,
            "bfloat16" if has_state(self._checkpoint) else self._dtype,
            length=self._length,
            threads=self._arguments.threads,
            batched_tokens=self._arguments.batched_tokens,
            block=self._arguments.vllm_block_size,
        ) as started:
            yield started

    def _enter_llama(self, stack: ExitStack, *, tower: bool) -> LlamaCpp | None:
        if not self._arguments.peers:
            return None
        return _enter(stack, LLAMA, lambda: self._start_llama(tower))

    @contextmanager
    def _start_llama(self, tower: bool) -> Iterator[LlamaCpp]:
        source, binary = find_llama(self._arguments.llama_source)
        parts = [
            convert(source, self._checkpoint, self._dtype, self._folder, tower=part)
            for part in ((False, True) if tower else (False,))
        ]
        with llama(
            binary,
            parts[0],
            length=self._length,
            threads=self._arguments.threads,
            tower=parts[1] if tower else None,
        ) as started:
            yield started


def _enter(stack: ExitStack, name: str, start: Callable[[], AbstractContextManager[T]]) -> T | None:
    """What starts, to be ended with the stack; None, and a line, for a peer that cannot."""
    try:
        return stack.enter_context(start())
    except (Unavailable, ConversionError) as reason:
        print(f"{name} skipped: {reason}", flush=True)
        return None
