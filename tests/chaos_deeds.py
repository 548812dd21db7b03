"""What chaos does to a server: each deed for a moment, and then it is undone.

A deed is a context manager: it breaks something, says what with `World.note`, and mends it on its
way out. It draws from a generator of its own, so that what it finds at the time, such as the number
of files, changes no other deed. docs/chaos.md tells how to add one.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from chaos_world import Setup, World
from redis.exceptions import RedisError
from redis_server import StoreServer

Act = Callable[[World, random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class Deed:
    """A deed.

    Attributes:
        possible: whether a server of this configuration has its object.
        fatal: the server may stop serving for good.
    """

    name: str
    act: Act
    possible: Callable[[Setup], bool] = lambda _: True
    fatal: bool = False


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _killed(kind: str) -> Act:
    @contextmanager
    def act(world: World, chance: random.Random) -> Iterator[None]:
        found = sorted(world.pids(kind))
        chosen = [chance.choice(found)] if found else []
        world.note(f"{chosen or 'none runs'}")
        _send(chosen, signal.SIGKILL)
        yield

    return act


def _stopped(kind: str) -> Act:
    @contextmanager
    def act(world: World, chance: random.Random) -> Iterator[None]:
        found = sorted(world.pids(kind))
        world.note(f"{found or 'none runs'}")
        _send(found, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(found, signal.SIGCONT)

    return act


@contextmanager
def _signalled(world: World, chance: random.Random) -> Iterator[None]:
    _send([world.pid], signal.SIGUSR2)
    yield


@contextmanager
def _disk_full(world: World, chance: random.Random) -> Iterator[None]:
    """No file of the server's grows beyond a page, as on a full disk."""
    before = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.prlimit(world.pid, resource.RLIMIT_FSIZE, before)


def _damage(world: World, path: Path, chance: random.Random) -> None:
    """Cut a file, fill it with something else, or put another thing in its place."""
    way = chance.choice(("cut", "empty", "flip", "text", "remove", "folder", "link"))
    world.note(f"{path.name}: {way}")
    size = path.stat().st_size
    if way == "cut":
        os.truncate(path, chance.randrange(size + 1))
    elif way == "empty":
        os.truncate(path, 0)
    elif way == "flip":
        with path.open("r+b") as file:
            for _ in range(64):
                file.seek(chance.randrange(max(1, size)))
                file.write(bytes([chance.randrange(256)]))
    elif way == "text":
        path.write_text("This is something else. " * 100)
    else:
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "link":
            path.symlink_to(path.with_name("nowhere"))


def _restore(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif path.is_symlink():
        path.unlink()


@contextmanager
def _disk_tier(world: World, chance: random.Random) -> Iterator[None]:
    listed = sorted(world.disk.iterdir())
    names = [each for each in listed if each.is_file() and not each.is_symlink()]
    for path in names[:1] if chance.random() < 0.5 else names:
        with contextlib.suppress(FileNotFoundError):
            _damage(world, path, chance)
    try:
        yield
    finally:
        for path in names:
            _restore(path)


@contextmanager
def _adapter(world: World, chance: random.Random) -> Iterator[None]:
    """The adapter is in memory: what becomes of its files means nothing to a server that runs."""
    assert world.adapter is not None
    kept = world.adapter.with_name("adapter-kept")
    shutil.copytree(world.adapter, kept)
    try:
        _damage(world, chance.choice(sorted(world.adapter.iterdir())), chance)
        yield
    finally:
        shutil.rmtree(world.adapter)
        kept.rename(world.adapter)


@contextmanager
def _temporary(world: World, chance: random.Random) -> Iterator[None]:
    """Others' junk comes, and contents of the server's own folders go."""
    (world.tmp / f"junk-{chance.randrange(10**6)}").write_bytes(b"x" * 1000)
    for path in [each for each in sorted(world.tmp.rglob("*")) if each.is_file()]:
        if chance.random() < 0.5:
            path.unlink(missing_ok=True)
    yield
    for path in world.tmp.glob("junk-*"):
        path.unlink(missing_ok=True)


@contextmanager
def _libraries(world: World, chance: random.Random) -> Iterator[None]:
    """Replaced, not cut: nobody can cut the file behind a mapping without killing its process."""
    for path in (world.cache / "vlm-serve" / "native").glob("*.so"):
        other = path.with_name("other")
        other.write_bytes(path.read_bytes()[: chance.randrange(1000)])
        other.chmod(0o600)
        kept = path.with_name("kept")
        path.rename(kept)
        other.rename(path)
        kept.rename(path)
    yield


def _store(broken: Callable[[StoreServer], None], mended: Callable[[StoreServer], None]) -> Act:
    @contextmanager
    def act(world: World, chance: random.Random) -> Iterator[None]:
        assert world.store is not None
        broken(world.store)
        try:
            yield
        finally:
            mended(world.store)

    return act


@contextmanager
def _damaged_store(world: World, chance: random.Random) -> Iterator[None]:
    assert world.store is not None
    with contextlib.suppress(RedisError):
        for name in sorted(world.store.names()):
            if chance.random() < 0.5:
                held = world.store.client.get(name)
                if isinstance(held, bytes):
                    world.store.client.set(name, held[: chance.randrange(len(held) + 1)] + b"?")
    yield


@contextmanager
def _full_of_responses(world: World, chance: random.Random) -> Iterator[None]:
    """Stored answers of others push out the earlier ones, also those about to be continued."""
    with httpx.Client(base_url=world.url, timeout=10.0, trust_env=False) as client:
        items = [{"role": "user", "content": "x"}] * 100
        body = {"input": items, "max_output_tokens": 1, "store": True}
        with contextlib.suppress(httpx.TransportError):  # The server may be stopped meanwhile.
            for _ in range(12):
                client.post("/v1/responses", json=body)
    yield


@contextmanager
def _clock(world: World, chance: random.Random) -> Iterator[None]:
    """The wall clock alone; only expiries and dates may depend on it."""
    seconds = chance.choice((-86_400, -60, 60, 3_600, 86_400, 40 * 86_400))
    world.note(f"by {seconds} s")
    world.clock.write_text(str(seconds))
    try:
        yield
    finally:
        world.clock.unlink()


RANK_KILLED = "a rank is killed"
STORE = {"the store is frozen", "the store is killed", "entries of the store are damaged"}
"""Deeds of which one rules out another at the same time."""


def together(first: Deed, second: Deed) -> bool:
    """Return True if both may go on at a time."""
    return not {first.name, second.name} <= STORE and not (first.fatal or second.fatal)


def _has(tier: str) -> Callable[[Setup], bool]:
    return lambda setup: tier in setup.tiers


def _alone(setup: Setup) -> bool:
    return not setup.replicas


DEEDS = (
    Deed("a grammar compiler is killed", _killed("compiler"), _alone),
    Deed("a grammar compiler is stopped", _stopped("compiler"), _alone),
    Deed("a decoder is killed", _killed("decoders"), _alone),
    Deed("the decoders are stopped", _stopped("decoders"), _alone),
    Deed("the server is stopped", _stopped("server")),
    Deed("a rank is stopped", _stopped("rank"), lambda setup: setup.ranks > 1),
    Deed("a signal without a meaning", _signalled),
    Deed("the disk is full", _disk_full, _alone),
    Deed("files of the disk tier are damaged", _disk_tier, _has("disk")),
    Deed("files of the adapter are damaged", _adapter, lambda setup: setup.adapter),
    Deed("temporary files come and go", _temporary, _alone),
    Deed("kernel libraries are replaced", _libraries),
    Deed("the store is frozen", _store(StoreServer.freeze, StoreServer.thaw), _has("store")),
    Deed("the store is killed", _store(StoreServer.stop, StoreServer.start), _has("store")),
    Deed("entries of the store are damaged", _damaged_store, _has("store")),
    Deed("stored responses are pushed out", _full_of_responses, lambda setup: setup.responses),
    Deed("the clock jumps", _clock),
    Deed("a replica is killed", _killed("replica"), lambda setup: setup.replicas > 1),
    Deed("the replicas are stopped", _stopped("replica"), lambda setup: setup.replicas > 1),
    Deed(RANK_KILLED, _killed("rank"), lambda setup: setup.ranks > 1, fatal=True),
    Deed("the server is killed", _killed("server"), fatal=True),
)


def a_moment(chance: random.Random) -> float:
    """Draw seconds between two deeds."""
    return chance.uniform(0.1, 1.5)
