"""Fork server for compiling grammars: one too slow or too large can be killed without harm.

It speaks JSON over the socket that is its standard input. A tokenizer takes seconds to load, so
this process loads it once and forks a child per grammar. A child starts at once, and its end frees
all of its memory, after a grammar was built from a request's form, and tried.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.ebnf import exact, read
from vlm_serve.grammar.lark import Lark, constant, either
from vlm_serve.grammar.lengths import Lengths
from vlm_serve.grammar.library import UNSATISFIABLE, Library, sentence
from vlm_serve.grammar.references import refuse
from vlm_serve.grammar.rewriting import children, rewrite
from vlm_serve.grammar.tags import Tags, regex
from vlm_serve.system.child import end_with
from vlm_serve.system.children import CRASHES
from vlm_serve.system.host_memory import release_freed_memory

MEMORY_BYTES = 1 << 29
"""Memory limit of compiling, in addition to that of this process."""
_TOO_LARGE = f"needs more than {MEMORY_BYTES >> 20} MiB of memory"
MAX_MESSAGE_BYTES = 8 << 20
"""Limit of a grammar in llguidance's form."""
NICENESS = 10
"""Niceness of compiling: every open answer needs the model, few need a new grammar."""
_LOCATING = 200
"""Subschemas compiled to find the one that fails."""
Built = tuple[str, int]
"""A grammar, and the bytes of memory that it takes."""


def send(connection: Connection, value: Any) -> None:
    """Write one message."""
    connection.send_bytes(json.dumps(value).encode())


def main() -> None:
    """Serve until the input ends. The first message contains the tokenizer."""
    connection = Connection(sys.stdin.fileno())
    texts, ends = json.loads(connection.recv_bytes())["tokenizer"]
    library = Library([text.encode("latin-1") for text in texts], ends)
    del texts
    _limit_memory()
    gc.collect()
    gc.freeze()  # a collection would copy pages shared with the children
    send(connection, {"ready": True})
    with suppress(EOFError):
        while True:
            task = json.loads(connection.recv_bytes())
            answer = _answered(partial(_answer, library, task), task["seconds"])
            connection.send_bytes(answer)
            # Messages of megabytes would leave tens of free megabytes at the end of the heap.
            del task, answer
            release_freed_memory()


def _answered(work: Callable[[], bytes], seconds: float) -> bytes:
    """Run the work in a forked process, in another one if that crashes; return its result.

    Without a result: the limit that both reached, or `ended` if a process was killed from outside.
    """
    begun = time.monotonic()
    answer = _forked(work, seconds, seconds)
    if isinstance(answer, int) and answer in CRASHES:
        answer = _forked(work, seconds, max(0.0, seconds - (time.monotonic() - begun)))
    if not isinstance(answer, int):
        return answer
    if answer == signal.SIGXCPU:
        return _limited(f"took longer than {seconds:g} s")
    if answer == signal.SIGSEGV:
        return _limited("needs more than the stack: it nests too deeply")
    return _limited(_TOO_LARGE) if answer in CRASHES or not answer else b'{"ended": true}'


def _forked(work: Callable[[], bytes], seconds: float, left: float) -> bytes | int:
    """Run the work in a forked process and return its result.

    Without a result: the refusal for its time limit, or the signal that has ended it, 0 for none.

    Args:
        seconds: the time limit.
        left: what is left of it.
    """
    ours, theirs = Pipe(duplex=False)
    server = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            end_with(server)
            ours.close()  # Else a child whose parent is gone would wait for itself to read.
            os.nice(NICENESS)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(left) + 1, math.ceil(left) + 2))
            theirs.send_bytes(work())
        finally:
            os._exit(0)
    theirs.close()
    try:
        if ours.poll(left):
            return ours.recv_bytes()
        return _limited(f"took longer than {seconds:g} s")
    except (OSError, EOFError):
        pass
    finally:
        ours.close()
        os.kill(process, signal.SIGKILL)  # Changes nothing about a process that has ended.
        status = os.waitpid(process, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _limited(limit: str) -> bytes:
    return _refusal(f"compiling the grammar {limit}", code="grammar_limit")


def _refusal(message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return the answer about a form that is refused, with the arguments of its error."""
    error = {"message": message, "param": param or "structured_outputs", "code": code}
    return json.dumps({"refused": error}).encode()


def _answer(library: Library, task: dict[str, Any]) -> bytes:
    try:
        message = json.dumps(_built(library, task)).encode()
    except InvalidRequestError as error:
        return _refusal(error.message, param=error.param)
    except MemoryError:
        return _limited(_TOO_LARGE)
    except Exception as error:  # the library may raise anything for a client's text
        fault = str(error).partition("\n")[0][:300] or "is not valid"
        return _refusal(f"the grammar cannot be compiled: {fault}")
    if len(message) > MAX_MESSAGE_BYTES:
        return _limited(f"makes more than {MAX_MESSAGE_BYTES >> 20} MiB of it")
    return message


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
