"""Starts a Ray cluster for one deployment on this machine, and ends it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vlm_serve.child import search_path
from vlm_serve.deploy.loopback import ENVIRONMENT
from vlm_serve.deploy.ray_folder import LONGEST, RayFolder
from vlm_serve.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)

SPARE_STORE_BYTES = 128 << 20
BODIES_IN_STORE = 8
"""Ray's object store holds this many of the largest bodies; beyond that it spills to disk."""
END_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Cluster:
    """Context manager that runs Ray and Serve, and ends all their processes on exit.

    Args:
        processors: number of logical CPUs that Ray may assign. The replicas need that many, and the
            machine may have fewer.
        body_bytes: size of the largest request body.
    """

    def __init__(self, processors: int, body_bytes: int) -> None:
        self._processors = processors
        self._store_bytes = BODIES_IN_STORE * body_bytes + SPARE_STORE_BYTES
        self._folder: RayFolder | None = None

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
            self._folder = RayFolder(LONGEST)
        except OSError as error:
            raise EngineError(f"there is no usable folder for Ray's sockets: {error}") from None
        adopt_orphans()
        try:
            # Ray's processes import from the current working directory.
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

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End Ray and every descendant process. The replicas must be done by then."""
        import ray

        at_once_on_signals()
        with contextlib.suppress(Exception):
            ray.shutdown()
        end_descendants()
        if self._folder is not None:
            self._folder.remove()


def environment() -> dict[str, str]:
    """Return environment variables for this process and its children, set before importing Ray."""
    return {
        **ENVIRONMENT,
        **search_path(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray's default (15) would let the gateway starve the replicas
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """Return the ids of all descendant processes."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The process name is in brackets, and may contain blanks and brackets.
                rest = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(rest[1])
    found: set[int] = set()
    layer = {os.getpid()}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer} - found
        found |= layer
    return found


def end_descendants(seconds: float = END_SECONDS) -> None:
    """Kill all descendant processes, and wait until they are gone or the time is up."""
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
    """Install handlers for SIGTERM and SIGINT: the first signal raises SystemExit, a second kills.

    Importing Ray replaces them with its own.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        at_once_on_signals()
        raise SystemExit(0)

    for each in _SIGNALS:
        signal.signal(each, leave)


def at_once_on_signals() -> None:
    """Install handlers to kill this process and its descendants at once."""
    for each in _SIGNALS:
        signal.signal(each, lambda number, frame: leave_at_once())


def leave_at_once() -> NoReturn:
    """Kill this process and its descendants at once."""
    _log.warning("stopped by a second signal")
    logging.shutdown()
    end_descendants(1.0)
    os._exit(0)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
