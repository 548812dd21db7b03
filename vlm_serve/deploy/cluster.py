"""Starts a Ray cluster for one deployment on this machine, and ends it.

Ray has no options for which processes it starts, and for ending its agents with their raylet. So
functions of its own are replaced before it starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from vlm_serve.deploy.bound_agent import bound_command
from vlm_serve.errors import ConfigError, EngineError
from vlm_serve.system import child
from vlm_serve.system.child import search_path
from vlm_serve.system.children import adopt_orphans, end_descendants
from vlm_serve.system.extras import install_command
from vlm_serve.system.private_files import TemporaryFolder, check_path, is_own

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
                f"deploy needs the extra `ray`: {install_command('ray')}", param="replicas"
            ) from None
        end_on_signals(self.leave_at_once)
        try:
            self._folder = RayFolder(LONGEST)
        except OSError as error:
            raise EngineError(f"there is no usable folder for Ray's sockets: {error}") from None
        adopt_orphans()
        leave_out_needless()
        bind_agents()
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
        # With "0" Ray's node address is 127.0.0.1, as on systems whose firewall prompts for each
        # port.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
        # Otherwise the agent's metrics answer without the token, on a port of their own.
        "RAY_enable_metrics_collection": "0",
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

    for number in _FIRST_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def at_once_on_signals(leave_at_once: Callable[[], object]) -> None:
    """Install handlers with a call of a function without return."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: leave_at_once())
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_FIRST_SIGNALS = (*_SIGNALS, signal.SIGHUP)
"""A closed terminal may send several SIGHUPs, so a second one means nothing."""


PREFIX = "vlm-serve-ray-"
_SOCKET_BYTES = 107
"""Longest path of a UNIX socket."""
_BELOW = "/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""Ray's longest socket path: its session is named after the time and the process."""
LONGEST = _SOCKET_BYTES - len(_BELOW)


class RayFolder(TemporaryFolder):
    """A new temporary folder. No other deployment removes it while this process lives.

    Ray makes its own folder accessible to all users. Therefore it lies inside a private folder.

    Args:
        longest: most characters of the path; None: unlimited.

    Attributes:
        path: of the private folder.
    """

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(PREFIX, longest)

    @property
    def ray(self) -> str:
        """The folder for Ray to create."""
        return os.path.join(self.path, "r")

    def check(self) -> None:
        """Raise EngineError if, now that Ray runs, others can enter the folder or exchange it."""
        path = Path(self.path)
        try:
            check_path(path)
            status = path.lstat()
        except OSError as error:
            raise EngineError(f"the folder of Ray's sockets is not safe: {error}") from None
        if not is_own(status) or stat.S_IMODE(status.st_mode) != 0o700:
            raise EngineError(f"other users can enter {path}, the folder of Ray's sockets")

    def start(self) -> str:
        """Make a folder with nothing but this package, and return its path.

        Ray's processes import from their working directory.
        """
        path = Path(self.path, "start")
        path.mkdir(0o700)
        (path / child.PACKAGE).symlink_to(child.PACKAGE_FOLDER)
        return str(path)


_ray_log = logging.getLogger("ray.processes")
_TIME = r"\d{4}-\d\d-\d\d [\d:,]+"
_RECORD = re.compile(rf"(?:{_TIME} )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""The beginning of a record, a replica's or Serve's; other lines continue the one before."""
_NEEDLESS = re.compile(r"Exception when trying to get \w+ stats")
_RAYS_OWN = "ray_print_logs"


class RayLog:
    """Receives the lines of Ray's processes, and logs the useful ones.

    Ray itself prints them, and waits for whoever reads that output. Serve's controller reports a
    dead replica several times: with a traceback for each call that it had open, then in one
    sentence.
    """

    def __init__(self) -> None:
        self._levels: dict[object, int | None] = {}

    def install(self) -> None:
        """Take the place of Ray's own printing. Ray must run."""
        lines: Any = import_module("ray._private.ray_logging").global_worker_stdstream_dispatcher
        lines.remove_handler(_RAYS_OWN)
        lines.add_handler(_RAYS_OWN, self.receive)

    def receive(self, batch: Mapping[str, Any]) -> None:
        """Log the lines of one process.

        Args:
            batch: of Ray's log monitor: `lines`, the process's `pid`, and perhaps `actor_name`.
        """
        pid, name = batch.get("pid"), batch.get("actor_name") or "worker"
        for line in batch.get("lines", ()):
            level = self._level(pid, line)
            if level is not None:
                _ray_log.log(level, "(%s pid=%s) %s", name, pid, line)

    def _level(self, pid: object, line: str) -> int | None:
        """Return the level of the record that a line is part of; None: it is not logged.

        A batch may end within a record.
        """
        begun = _RECORD.match(line)
        if begun is not None:
            needless = _NEEDLESS.search(line) is not None
            self._levels[pid] = None if needless else logging.getLevelNamesMapping()[begun[1]]
        return self._levels.get(pid, logging.WARNING)


_AGENTS = ("dashboard_agent", "runtime_env_agent")


def leave_out_needless() -> None:
    """Have Ray start neither its monitor nor its API server.

    The first asks clouds for machines and the second shows the dashboard. Here both would do
    nothing but answer with their metrics, on two ports and without the token.
    """
    node: Any = import_module("ray._private.node").Node
    for name in ("start_monitor", "start_api_server"):
        assert hasattr(node, name), name
        setattr(node, name, lambda *_, **__: None)


def bind_agents() -> None:
    """Have Ray start its agents by `bound_agent`. Ray itself binds what the driver starts."""
    services: Any = import_module("ray._private.services")
    build = services._build_python_executable_command_memory_profileable

    def with_agents_bound(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in _AGENTS:
            return bound_command()
        return list(build(component, *arguments, **options))

    services._build_python_executable_command_memory_profileable = with_agents_bound
