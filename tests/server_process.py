"""`vlm-serve serve` as a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

COMMAND = (sys.executable, "-m", "vlm_serve.cli")
_URL = re.compile(r"URL +(http://[^/]+)/v1")


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens.

    Attributes:
        url: without the path.
        table: what it has said while it started.
    """

    process: subprocess.Popen[str]
    url: str
    table: str


@contextmanager
def server_process(
    *arguments: str,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    log: IO[str] | int = subprocess.DEVNULL,
    folder: Path | None = None,
    command: str = "serve",
    start: Sequence[str] = COMMAND,
    cwd: Path | None = None,
) -> Iterator[ServerProcess]:
    """Serves until the end, when the process is killed.

    Args:
        arguments: of the command, the model among them.
        port: to listen on; 0 takes any free one.
        environment: variables besides this process's own.
        log: where its standard error goes.
        folder: the checkout that serves, if it is not this one.
        command: `serve` or `deploy`.
        start: what stands before the command.
        cwd: the folder that it is started in; None: the checkout's, or else this process's own.
    """
    path = {"PYTHONPATH": str(folder)} if folder is not None else {}
    process = subprocess.Popen(
        [*start, command, *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **path, **(environment or {})},
        cwd=cwd or folder,
    )
    try:
        assert process.stdout is not None
        table = ""
        while (found := _URL.search(table)) is None:
            line = process.stdout.readline()
            assert line, f"the server ended early: {table}"
            table += line
        yield ServerProcess(process, found.group(1), table)
    finally:
        process.kill()
        process.communicate()
