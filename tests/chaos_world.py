"""One server of a random configuration, with everything around it within reach of chaos."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
from memory_ledger import SHARE, Ledger, read_ledger, table
from process_tree import processes_below, runs
from redis_server import EXECUTABLES, StoreServer
from server_process import ServerProcess, server_process

from vlm_serve.system.private_files import cache_path

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    *("--device", "cpu", "--cache-memory", "4MiB", "--max-model-len", "1024", "--threads", "1"),
    *("--max-num-seqs", "4", "--shutdown-timeout", "5", "--idle-check"),
)
KINDS = {
    "compiler": "vlm_serve.grammar.worker",
    "decoders": "decode_worker",
    "rank": "ranks.worker",
    "replica": "ray::ServeReplica:",
}
SECONDS = 240.0
MEMORY_SLACK = 256 << 20
"""For a server that does not say what its memory is."""
TRIM_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    """A configuration by its seed and by the installed programs.

    Attributes:
        ranks, replicas: 0 replicas: `serve`.
        tiers: names of "host", "disk" and "store".
        speculative: the option's value.
        adapter: one is served.
        responses: answers of /v1/responses are stored.
        clients: how many ask at a time.
    """

    ranks: int
    replicas: int
    tiers: tuple[str, ...]
    speculative: str
    adapter: bool
    responses: bool = False
    clients: int = 4

    def __str__(self) -> str:
        command = f"{self.replicas} replicas" if self.replicas else "serve"
        parts = [command, f"{self.ranks} ranks", f"drafts {self.speculative}", *self.tiers]
        parts += ["an adapter"] if self.adapter else []
        parts += ["stored responses"] if self.responses else []
        return ", ".join([*parts, f"{self.clients} clients"])


def random_setup(chance: random.Random, *, replicas: bool, adapter: bool = True) -> Setup:
    """Draw a configuration. What is not wanted or not installed is left out of it.

    Args:
        replicas, adapter: `deploy` is wanted; there is an adapter to serve.
    """
    ranks = chance.choice((1, 1, 2))
    several = chance.random() < 0.3 and replicas and find_spec("ray") is not None
    tiers = [each for each in ("host", "disk", "store") if chance.random() < 0.7]
    if several:
        tiers = [each for each in tiers if each != "disk"]  # A folder belongs to one process.
    if not EXECUTABLES:
        tiers = [each for each in tiers if each != "store"]
    return Setup(
        ranks=1 if several else ranks,
        replicas=2 if several else 0,
        tiers=tuple(tiers),
        speculative=chance.choice(("off", "suffix", "auto")),
        adapter=chance.random() < 0.5 and ranks == 1 and not several and adapter,
        responses=chance.random() < 0.6 and not several,
        clients=chance.choice((4, 8, 12)),
    )


class World:
    """The folders and the store of one server, and the server while it runs.

    Args:
        folder: for everything.
        adapter: folder of an adapter of PEFT's for the demo model; None: there is none.
        options: further ones of the server; they win.
    """

    def __init__(
        self, folder: Path, setup: Setup, adapter: Path | None, options: Sequence[str] = ()
    ) -> None:
        self.setup = setup
        self._options = options
        self.note: Callable[[str], None] = lambda text: None
        """Receives what a deed has found and done."""
        self.log, self.clock = folder / "log", folder / "clock"
        self.tmp, self.disk, self.cache = (folder / each for each in ("t", "disk", "cache"))
        for each in (self.tmp, self.disk, self.cache):
            each.mkdir(mode=0o700)
        self.adapter: Path | None = None
        if setup.adapter and adapter is not None:
            self.adapter = Path(shutil.copytree(adapter, folder / "adapter"))
        kept = cache_path()
        if kept is not None and (kept / "native").is_dir():  # Compiling takes a minute.
            shutil.copytree(kept / "native", self.cache / "vlm-serve" / "native")
        self.store = StoreServer(folder) if "store" in setup.tiers else None
        self.server: ServerProcess | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    @property
    def pid(self) -> int:
        assert self.server is not None
        return self.server.process.pid

    @property
    def disk_file(self) -> Path:
        return self.disk / "vlm-serve-cache.sqlite"

    def options(self) -> Iterator[str]:
        setup = self.setup
        yield from ("demo", *SMALL, "--speculative", setup.speculative)
        if setup.replicas:
            yield from ("--replicas", str(setup.replicas), "--silence-timeout", "20")
        if setup.ranks > 1:
            yield from ("--tensor-parallel-size", str(setup.ranks))
        if "host" in setup.tiers:
            yield from ("--host-cache-memory", "4MiB")
        if "disk" in setup.tiers:
            yield from ("--disk-cache-path", str(self.disk), "--disk-cache-size", "16MiB")
        if self.store is not None:
            yield from ("--shared-store", f"{self.store.url}/0", "--shared-store-timeout", "0.5")
        if self.adapter is not None:
            yield from ("--lora-modules", f"tuned={self.adapter}")
        if setup.responses:
            yield from ("--response-store", "256KiB")
        yield from self._options

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Start the server; on the way out it is killed if it still runs."""
        if self.store is not None and self.store._process is None:
            self.store.start()
        # A socket's path is short: TMPDIR is as it was for `deploy`.
        own = {} if self.setup.replicas else {"TMPDIR": str(self.tmp)}
        clock = str(ROOT / "tests" / "jumping_clock.py"), str(self.clock)
        with (
            self.log.open("a") as log,
            server_process(
                *self.options(),
                command="deploy" if self.setup.replicas else "serve",
                start=(sys.executable, "-P", *clock),
                environment={**own, "XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": str(ROOT)},
                log=log,
            ) as self.server,
        ):
            yield

    def close(self) -> None:
        if self.store is not None:
            self.store.stop()

    def pids(self, kind: str) -> list[int]:
        """Processes of one of `KINDS` or `server`."""
        if kind == "server":
            return [self.pid]
        return [pid for pid, line in processes_below(self.pid).items() if KINDS[kind] in line]

    def gives_up(self) -> Iterator[str]:
        """Yield faults of a server without one of its ranks: it says so, and ends when asked to."""
        with httpx.Client(base_url=self.url, timeout=60.0, trust_env=False) as client:
            deadline = time.monotonic() + 60
            while (status := self._status(client)) == 200 and time.monotonic() < deadline:
                time.sleep(0.05)
            if status == 200:
                yield "a server without one of its ranks calls itself well"
        yield from self.ends(statuses=range(-64, 256))

    @staticmethod
    def _status(client: httpx.Client) -> int:
        """Return the status of /health; 0: nobody answers."""
        try:
            return client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def state(self) -> State:
        """Return the things to be as before once chaos is over."""
        below = processes_below(self.pid)
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return State(
            threads=int(fields["Threads"]),
            files=len(os.listdir(f"/proc/{self.pid}/fd")),
            memory=int(fields["VmRSS"].split()[0]) << 10,
            processes=len(below),
            folders=tuple(sorted(each.name for each in self.tmp.iterdir())),
            ledger=None if self.setup.replicas else read_ledger(self.url),
        )

    def grown_memory(self, before: State) -> Iterator[str]:
        """Yield growth of memory that has no name, once the server had time to return it."""
        deadline = time.monotonic() + TRIM_SECONDS
        while faults := list(self.state().unexplained(before)):
            if time.monotonic() > deadline:
                yield from faults
                return
            time.sleep(1)

    def ends(self, statuses: Container[int] = (0,)) -> Iterator[str]:
        """End the server in order; yield faults of its end, such as another exit status."""
        assert self.server is not None
        below, process = processes_below(self.pid), self.server.process
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            yield "the server does not end"
            return
        if status not in statuses:
            yield f"the server ended with {status}"
        yield from self.left_behind(below)

    def left_behind(self, below: dict[int, str]) -> Iterator[str]:
        """Yield leftover processes, and temporary folders of an orderly end."""
        deadline = time.monotonic() + 30
        while (left := [line for pid, line in below.items() if runs(pid)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        yield from (f"left behind: {line[:100]}" for line in left)


@dataclass(frozen=True)
class State:
    """Of the server's process; processes are those below it."""

    threads: int
    files: int
    memory: int
    processes: int
    folders: tuple[str, ...]
    ledger: Ledger | None = None

    def grown(self, before: State) -> Iterator[str]:
        """Yield growth. Pools of threads and decoders may grow to their bounds."""
        for name, slack in (("threads", 40), ("files", 60), ("processes", 8)):
            now, then = getattr(self, name), getattr(before, name)
            if now > then + slack:
                yield f"{name}: {now}, before {then}"
        if extra := len(self.folders) - len(before.folders) - 2:
            yield from ([f"temporary folders: {self.folders}"] if extra > 0 else [])

    def unexplained(self, before: State) -> Iterator[str]:
        if self.ledger is not None and before.ledger is not None:
            if self.ledger.unexplained(before.ledger) * SHARE > self.ledger.resident:
                yield "\n".join(["memory without a name", *table(before.ledger, self.ledger)])
        elif self.memory > before.memory + MEMORY_SLACK:
            yield f"memory: {self.memory >> 20} MiB, before {before.memory >> 20} MiB"
