"""Starts a Ray cluster for one deployment on this machine, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from vlm_serve.deploy import loopback, ray_processes
from vlm_serve.deploy.ray_folder import LONGEST, RayFolder
from vlm_serve.deploy.ray_log import RayLog
from vlm_serve.errors import ConfigError, EngineError
from vlm_serve.system.child import search_path
from vlm_serve.system.children import adopt_orphans, end_descendants

_log = logging.getLogger(__name__)

SPARE_STORE_BYTES = 128 << 20
BODIES_IN_STORE = 8
"""Ray's object store holds this many of the largest bodies; beyond that it spills to disk."""
_END_SECONDS, _AT_ONCE_SECONDS = 10.0, 2.0


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
        end_on_signals(self.leave_at_once)
        try:
            self._folder = RayFolder(LONGEST)
        except OSError as error:
            raise EngineError(f"there is no usable folder for Ray's sockets: {error}") from None
        adopt_orphans()
        ray_processes.leave_out_needless()
        ray_processes.bind_agents()
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
            end_on_signals(self.leave_at_once)
            RayLog().install()
            self._folder.check()
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

        at_once_on_signals(self.leave_at_once)
        with contextlib.suppress(Exception):
            ray.shutdown()
        self._clean_up(_END_SECONDS)

    def leave_at_once(self) -> NoReturn:
        """End this process and its descendants at once; nothing is left of them."""
        _log.warning("stopped by a second signal")
        self._clean_up(_AT_ONCE_SECONDS)
        logging.shutdown()
        os._exit(0)

    def _clean_up(self, seconds: float) -> None:
        end_descendants(seconds)
        if self._folder is not None:
            self._folder.remove()


def environment() -> dict[str, str]:
    """Return environment variables for this process and its children, set before importing Ray."""
    return {
        **loopback.ENVIRONMENT,
        **ray_processes.ENVIRONMENT,
        **search_path(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # Ray's default (15) would let the gateway starve the replicas
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def end_on_signals(leave_at_once: Callable[[], object]) -> None:
    """Install handlers: the first signal that ends raises SystemExit, a second leaves at once.

    Importing and starting Ray replaces them with its own.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        at_once_on_signals(leave_at_once)
        raise SystemExit(0)

    for each in _FIRST_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, leave)


def at_once_on_signals(leave_at_once: Callable[[], object]) -> None:
    """Install handlers with a call of a function without return."""
    for each in _SIGNALS:
        signal.signal(each, lambda number, frame: leave_at_once())
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_FIRST_SIGNALS = (*_SIGNALS, signal.SIGHUP)
"""A closed terminal may send several SIGHUPs, so a second one means nothing."""
