"""Fork server for compiling grammars: one too slow or too large can be killed without harm.

It speaks length-prefixed JSON over its standard streams. The compiler takes seconds to load, so
this process loads it once and forks a child per grammar. A child starts at once, and its end frees
all of its memory.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.building import json_grammar, tag_grammar
from vlm_serve.grammar.lengths import Lengths
from vlm_serve.grammar.library import Library
from vlm_serve.grammar.schema import check_tag
from vlm_serve.grammar.tags import OtherTagError
from vlm_serve.system.child import end_with
from vlm_serve.system.host_memory import release_freed_memory

MEMORY_BYTES = 1 << 29
"""Memory limit of compiling, in addition to that of this process."""
MAX_MESSAGE_BYTES = 64 << 20
NICENESS = 10
"""Niceness of compiling: every open answer needs the model, few need a new grammar."""
OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""How compiling ends by itself, without memory above all. Others, such as SIGKILL on a host without
memory, come from outside."""


def send(stream: IO[bytes], value: Any) -> None:
    """Write one message."""
    data = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def main() -> None:
    """Serve until the input ends. The first message contains the tokenizer."""
    import xgrammar

    inward, outward = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(_receive(inward)["tokenizer"])
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    library = Library(tokenizer.decoded_vocab, tokenizer.stop_token_ids)
    _limit_memory()
    gc.collect()
    gc.freeze()  # a collection would copy pages shared with the children
    send(outward, {"ready": True})
    while (task := _receive(inward)) is not None:
        answer = _forked(partial(_answer, compiler, library, task), task["seconds"])
        outward.write(struct.pack("<I", len(answer)) + answer)
        outward.flush()
        # Messages of megabytes would leave tens of free megabytes at the end of the heap.
        del task, answer
        release_freed_memory()


def _forked(work: Callable[[], dict[str, Any]], seconds: float) -> bytes:
    """Run the work in a forked process and return its result as JSON, within a time limit.

    Without a result: `late` if the limit was passed, or else if the work took too much memory;
    `ended` if the process was killed from outside.
    """
    ours, theirs = os.pipe()
    server = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            end_with(server)
            # Else a child whose parent is gone would wait for itself to read its answer.
            os.close(ours)
            os.nice(NICENESS)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds) + 1,) * 2)
            out = open(theirs, "wb")  # noqa: SIM115  # Its end is that of the process.
            out.write(json.dumps(work()).encode() + b"\n")
            out.flush()
        finally:
            os._exit(0)
    os.close(theirs)
    answer, deadline = bytearray(), time.monotonic() + seconds
    with open(ours, "rb", buffering=0) as read:
        while (left := deadline - time.monotonic()) > 0 and select.select([ours], [], [], left)[0]:
            piece = read.read(1 << 20)
            if not piece or len(answer) > MAX_MESSAGE_BYTES:
                break
            answer += piece
    os.kill(process, signal.SIGKILL)  # Changes nothing about a process that has ended.
    status = os.waitpid(process, 0)[1]
    if len(answer) > MAX_MESSAGE_BYTES:
        return b'{"late": false}'
    if answer.endswith(b"\n"):
        return bytes(answer)
    if time.monotonic() >= deadline:
        return b'{"late": true}'
    own = os.WIFEXITED(status) or os.WTERMSIG(status) in OWN_SIGNALS
    return b'{"late": false}' if own else b'{"ended": true}'


def _answer(compiler: Any, library: Library, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return _built(compiler, library, task)
    except InvalidRequestError as error:
        return {"refused": error.message, "param": error.param}
    except Exception as error:  # the compiler may raise anything for a client's text
        return {"error": _words(error)}


def _built(compiler: Any, library: Library, task: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of llguidance and the memory it takes, or one that xgrammar compiled."""
    kind, source = task["kind"], task["source"]
    try:
        if kind == "json":
            grammar, size = json_grammar(json.loads(source), library, strict=task["strict"])
            lengths: Lengths = {}
        elif kind == "structural_tag":
            (grammar, size), lengths = tag_grammar(json.loads(source), library)
        else:
            raise OtherTagError
    except OtherTagError:
        return {"compiled": _compile(compiler, kind, source)}
    return {"grammar": grammar, "size": size, "lengths": lengths}


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(struct.unpack("<I", head)[0]))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _compile(compiler: Any, kind: str, source: str) -> str:
    if kind == "regex":
        compiled = compiler.compile_regex(source)
    elif kind == "grammar":
        compiled = compiler.compile_grammar(source)
    else:
        tag = json.loads(source)
        check_tag(tag)
        compiled = compiler.compile_structural_tag(source)
    text: str = compiled.serialize_json()
    return text


def _words(error: Exception) -> str:
    """Return the compiler's message, without its source location."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else "is not valid"
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return f"it needs more than {MEMORY_BYTES >> 20} MiB to compile"
    if "/project/" in text or ".cc:" in text:
        text = text.split(".cc:", 1)[-1].split(": ", 1)[-1]
    return text[:300]


if __name__ == "__main__":
    main()
