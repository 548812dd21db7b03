"""Compiles grammars in a process of its own, so that one that takes too long or too much memory can
be ended without harm. Speaks length-prefixed JSON over its standard streams."""

from __future__ import annotations

import json
import resource
import struct
import sys
from pathlib import Path
from typing import IO, Any

MEMORY_BYTES = 1 << 29
"""What compiling may add to the memory of the process."""
MAX_MESSAGE_BYTES = 256 << 20


def send(stream: IO[bytes], value: Any) -> None:
    """Writes one message."""
    data = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def main() -> None:
    """Serves until its input ends. The first message holds the tokenizer."""
    import xgrammar

    inward, outward = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(_receive(inward)["tokenizer"])
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    _limit_memory()
    send(outward, {"ready": True})
    while (task := _receive(inward)) is not None:
        try:
            send(outward, {"compiled": _compile(compiler, task)})
        except Exception as error:  # whatever the compiler makes of a text that somebody sent
            send(outward, {"error": _words(error)})


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(struct.unpack("<I", head)[0]))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _compile(compiler: Any, task: dict[str, Any]) -> str:
    # White space between the tokens of JSON is fixed: small models would never leave it.
    kind, source = task["kind"], task["source"]
    if kind == "json":
        compiled = compiler.compile_json_schema(
            source, any_whitespace=False, strict_mode=task["strict"]
        )
    elif kind == "regex":
        compiled = compiler.compile_regex(source)
    elif kind == "grammar":
        compiled = compiler.compile_grammar(source)
    else:
        compiled = compiler.compile_structural_tag(source)
    text: str = compiled.serialize_json()
    return text


def _words(error: Exception) -> str:
    """The compiler's own sentence, without the place in its sources."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else "is not valid"
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return f"it needs more than {MEMORY_BYTES >> 20} MiB to compile"
    if "/project/" in text or ".cc:" in text:
        text = text.split(".cc:", 1)[-1].split(": ", 1)[-1]
    return text[:300]


if __name__ == "__main__":
    main()
