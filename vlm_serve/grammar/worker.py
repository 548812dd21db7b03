"""Fork server for compiling grammars: one too slow or too large can be killed without harm.

It speaks length-prefixed JSON over its standard streams. A tokenizer takes seconds to load, so
this process loads it once and forks a child per grammar. A child starts at once, and its end frees
all of its memory, after a grammar was built from a request's form, and tried.
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
from vlm_serve.grammar.ebnf import exact, read
from vlm_serve.grammar.lark import Lark, constant, either
from vlm_serve.grammar.lengths import Lengths
from vlm_serve.grammar.library import UNSATISFIABLE, Library, sentence
from vlm_serve.grammar.references import refuse
from vlm_serve.grammar.rewriting import children, rewrite
from vlm_serve.grammar.tags import Tags, regex
from vlm_serve.system.child import end_with
from vlm_serve.system.host_memory import release_freed_memory

MEMORY_BYTES = 1 << 29
"""Memory limit of compiling, in addition to that of this process."""
_TOO_LARGE = f"needs more than {MEMORY_BYTES >> 20} MiB of memory"
MAX_MESSAGE_BYTES = 8 << 20
"""Limit of a grammar in llguidance's form."""
NICENESS = 10
"""Niceness of compiling: every open answer needs the model, few need a new grammar."""
OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""How compiling ends by itself, without memory above all. Others, such as SIGKILL on a host without
memory, come from outside."""
_LOCATING = 200
"""Subschemas compiled to find the one that fails."""
Built = tuple[str, int]
"""A grammar, and the bytes of memory that it takes."""


def send(stream: IO[bytes], value: Any) -> None:
    """Write one message."""
    data = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def main() -> None:
    """Serve until the input ends. The first message contains the tokenizer."""
    inward, outward = sys.stdin.buffer, sys.stdout.buffer
    texts, ends = json.loads(_receive(inward)["tokenizer"])
    library = Library([text.encode("latin-1") for text in texts], ends)
    del texts
    _limit_memory()
    gc.collect()
    gc.freeze()  # a collection would copy pages shared with the children
    send(outward, {"ready": True})
    while (task := _receive(inward)) is not None:
        answer = _forked(partial(_answer, library, task), task["seconds"])
        outward.write(struct.pack("<I", len(answer)) + answer)
        outward.flush()
        # Messages of megabytes would leave tens of free megabytes at the end of the heap.
        del task, answer
        release_freed_memory()


def _forked(work: Callable[[], dict[str, Any]], seconds: float) -> bytes:
    """Run the work in a forked process and return its result as JSON, within a time limit.

    Without a result: `limit`, what was over which limit; `ended` if the process was killed from
    outside.
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
        limit = f"makes more than {MAX_MESSAGE_BYTES >> 20} MiB of it"
    elif answer.endswith(b"\n"):
        return bytes(answer)
    elif time.monotonic() >= deadline:
        limit = f"took longer than {seconds:g} s"
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) not in OWN_SIGNALS:
        return b'{"ended": true}'
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV:
        limit = "needs more than the stack: it nests too deeply"
    else:
        limit = _TOO_LARGE
    return json.dumps({"limit": limit}).encode()


def _answer(library: Library, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return _built(library, task)
    except InvalidRequestError as error:
        return {"refused": error.message, "param": error.param}
    except MemoryError:
        return {"limit": _TOO_LARGE}
    except Exception as error:  # the library may raise anything for a client's text
        return {"error": str(error).partition("\n")[0][:300] or "is not valid"}


def _built(library: Library, task: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of llguidance, the memory it takes, and the bounds left out of it."""
    kind, source = task["kind"], task["source"]
    lengths: Lengths = {}
    if kind == "json":
        grammar, size = json_grammar(json.loads(source), library, strict=task["strict"])
    elif kind == "structural_tag":
        (grammar, size), lengths = tag_grammar(json.loads(source), library)
    else:
        grammar, size = text_grammar(kind, source, library)
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


def json_grammar(schema: Any, library: Library, *, strict: bool = False) -> Built:
    """Build the grammar of a schema.

    Raises:
        InvalidRequestError: it cannot be enforced. The message names the path.
    """
    whole = rewrite(schema, strict=strict)
    if whole is False:
        raise _located(schema, UNSATISFIABLE, library)
    grammar = library.json(whole)
    error, size = library.tried(grammar)
    if error:
        raise _located(schema, error, library)
    return grammar, size


def tag_grammar(tag: Any, library: Library) -> tuple[Built, Lengths]:
    """Build the grammar of a structural tag. Return the bounds left out of it as well.

    Raises:
        InvalidRequestError: it cannot be enforced. The message names the path in a schema.
    """
    tags = Tags(library)
    grammar = library.lark(tags.grammar(tag))
    error, size = library.tried(grammar)
    if not error:
        return (grammar, size), tags.lengths
    for source in tags.sources:
        fault = _error(rewrite(source.schema), library)
        if fault:
            raise source.error(_located(source.schema, fault, library))
    if len(tags.sources) == 1:
        raise tags.sources[0].error(refuse("#", sentence(error)))
    raise InvalidRequestError(f"the grammar {sentence(error)}")


def text_grammar(kind: str, source: str, library: Library) -> Built:
    """Build the grammar of a regex, a choice or a grammar in EBNF.

    Raises:
        InvalidRequestError: it is invalid or cannot be enforced.
    """
    lark = Lark()
    if kind == "grammar":
        rule = exact(read(source), lark, library.has_text)
    elif kind == "regex":
        rule = lark.terminal(regex(source))
    else:
        rule = lark.terminal(either([constant(text) for text in json.loads(source)]))
    grammar = library.lark(lark.text(rule))
    error, size = library.tried(grammar)
    if error:
        raise InvalidRequestError(f"the grammar cannot be compiled: the {kind} {sentence(error)}")
    return grammar, size


def _error(schema: Any, library: Library) -> str:
    """Return why a rewritten schema cannot be followed from its start on; empty: it can."""
    return UNSATISFIABLE if schema is False else library.tried(library.json(schema))[0]


def _located(schema: Any, error: str, library: Library) -> InvalidRequestError:
    """Return the error about the innermost subschema that fails by itself."""
    place, left = "#", _LOCATING
    searching = True
    while searching:
        searching = False
        for child in children(schema, place):
            left -= 1
            if left < 0:
                return refuse(place, sentence(error))
            try:
                part = rewrite(schema, pointer=child)
            except InvalidRequestError:
                continue
            fault = _error(part, library)
            # A property that nothing fits may be absent.
            if fault and not (UNSATISFIABLE in fault and UNSATISFIABLE not in error):
                place, error, searching = child, fault, True
                break
    return refuse(place, sentence(error))


if __name__ == "__main__":
    main()
