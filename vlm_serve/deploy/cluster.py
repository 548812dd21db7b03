"""A cluster of Ray for one deployment on this machine, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from vlm_serve.child import search_path
from vlm_serve.deploy.folder import LONGEST, Folder
from vlm_serve.deploy.loopback import ENVIRONMENT
from vlm_serve.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)

SPARE_STORE_BYTES = 128 << 20
BODIES_IN_STORE = 8
"""Largest bodies that Ray's memory for objects has room for; beyond that it uses the disk."""
END_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Cluster:
    """A context: Ray and Serve run inside of it, and nothing that it has started after it.

    Args:
        processors: logical ones, as many as replicas need, however many there are.
        body_bytes: of the largest request.
    """

    def __init__(self, processors: int, body_bytes: int) -> None:
        self._processors = processors
        self._store_bytes = BODIES_IN_STORE * body_bytes + SPARE_STORE_BYTES
        self._folder: Folder | None = None

    def __enter__(self) -> Cluster:
        os.environ.update(environment())
        try:
            import ray
            from ray import serve
        except ImportError:
            raise ConfigError(
                "deploy needs the extra `ray`: pip install 'vlm-serve[ray]'", param="replicas"
            ) from None
        end_on_signals()
        try:
            self._folder = Folder(LONGEST)
        except OSError as error:
            raise EngineError(f"Ray has nowhere to keep its sockets: {error}") from None
        adopt_orphans()
        try:
            # All of Ray's processes import from the folder that this one is in now.
            with contextlib.chdir(self._folder.start()):
                ray.init(
                    address="local",
                    num_cpus=self._processors,
                    include_dashboard=False,
                    object_store_memory=self._store_bytes,
                    logging_level=logging.WARNING,
                    _temp_dir=self._folder.ray,
                )
            serve.start(
                proxy_location="Disabled",
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends it all; replicas have nothing more to say then."""
        import ray

        at_once_on_signals()
        with contextlib.suppress(Exception):
            ray.shutdown()
        end_descendants()
        if self._folder is not None:
            self._folder.remove()


def environment() -> dict[str, str]:
    """Of this process and all that it starts, before Ray is imported."""
    return {
        **ENVIRONMENT,
        **search_path(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray's own would let the front keep replicas waiting
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """The ids of all processes below this one."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name, in brackets, may have blanks and brackets in it.
                rest = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(rest[1])
    found: set[int] = set()
    layer = {os.getpid()}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer} - found
        found |= layer
    return found


def end_descendants(seconds: float = END_SECONDS) -> None:
    """Kills them, and waits until they are gone."""
    deadline = time.monotonic() + seconds
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def end_on_signals() -> None:
    """From now on the first SIGTERM or SIGINT ends what runs as an exception does, in order, and a
    second one at once. Ray, when it is imported, puts a handler of its own in their place."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        at_once_on_signals()
        raise SystemExit(0)

    for each in _SIGNALS:
        signal.signal(each, leave)


def at_once_on_signals() -> None:
    """From now on a signal ends this process and all below it at once."""
    for each in _SIGNALS:
        signal.signal(each, lambda number, frame: leave_at_once())


def leave_at_once() -> NoReturn:
    """Ends this process and all below it in the middle of whatever they do."""
    _log.warning("stopped by a second signal")
    logging.shutdown()
    end_descendants(1.0)
    os._exit(0)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
