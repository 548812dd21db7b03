"""A real store on loopback for tests: Redis, or Valkey where only that is installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from redis import Redis
from redis.exceptions import RedisError

EXECUTABLES = [
    path for name in ("redis-server", "valkey-server") if (path := shutil.which(name)) is not None
]


class StoreServer:
    """One process, started anew as often as wanted, always on the same port and without files.

    Args:
        folder: for its working directory.
        options: as on its command line.
        executable: which program it is; None: the first that is installed.
        tls: nothing but TLS; files are named in `options`, relative to the folder.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        executable: str | None = None,
        tls: bool = False,
    ) -> None:
        if not EXECUTABLES:
            pytest.skip("neither redis-server nor valkey-server is installed")
        self.port, self._folder = free_port(), folder
        ports = ["--port", "0", "--tls-port"] if tls else ["--port"]
        self._command = [
            executable or EXECUTABLES[0],
            *ports,
            str(self.port),
            "--bind",
            "127.0.0.1",
        ]
        self._command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Redis(port=self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the store did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError("the store did not start")

    def names(self) -> list[bytes]:
        """All keys."""
        return [key for key in self.client.scan_iter() if isinstance(key, bytes)]

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kills it; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        with contextlib.suppress(RedisError):
            self.client.close()


@contextmanager
def running(
    folder: Path, *options: str, executable: str | None = None, tls: bool = False
) -> Iterator[StoreServer]:
    server = StoreServer(folder, *options, executable=executable, tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()
