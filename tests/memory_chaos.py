"""Chaos around one server whose caches all fill up: is its memory explained afterwards?"""

from __future__ import annotations

import base64
import io
import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from chaos_deeds import DEEDS, Deed, a_moment
from chaos_load import HANG_SECONDS, PREFIX, SCHEMA
from chaos_world import Setup, World
from memory_ledger import Ledger, read_ledger, table
from PIL import Image

from vlm_serve.server.upkeep import PAUSE_SECONDS, QUIET_SECONDS

CLIENTS = 8
SETUP = Setup(1, 0, ("host", "disk"), "suffix", adapter=False, responses=True, clients=CLIENTS)
OPTIONS = (
    *("--cache-memory", "64MiB", "--max-model-len", "4096", "--max-num-seqs", "8"),
    *("--host-cache-memory", "32MiB", "--disk-cache-size", "64MiB", "--response-store", "4MiB"),
    *("--max-loras", "2", "--cache-audit", "0.05"),
)
WARM_UP = 5
"""Requests of each kind before the idle server is looked at."""
_numbers = itertools.count()

Body = tuple[str, dict[str, Any]]


def picture(chance: random.Random) -> Body:
    few = Image.frombytes("RGB", (8, 6), chance.randbytes(8 * 6 * 3))
    file = io.BytesIO()
    few.resize(chance.choice(((64, 48), (128, 96), (320, 240), (640, 480)))).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return chat([image, {"type": "text", "text": "What is this?"}])


def chat(content: Any, **fields: Any) -> Body:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24}
    return "/v1/chat/completions", body | fields


def regex(chance: random.Random) -> Body:
    number = next(_numbers)
    form = {"regex": f"(yes|no|{'a' * (number % 50)}(k{number}){{0}})"}
    return chat(f"{number}?", structured_outputs=form)


def schema(chance: random.Random) -> Body:
    text = {"type": "string", "maxLength": chance.randrange(5, 200)}
    form = SCHEMA | {"properties": {**SCHEMA["properties"], f"p{next(_numbers)}": text}}  # type: ignore[dict-item]
    named = {"type": "json_schema", "json_schema": {"name": "f", "schema": form}}
    return chat("Fill it in.", response_format=named)


def likelihoods(chance: random.Random) -> Body:
    prompt = f"{PREFIX}{chance.randrange(40)} words " * chance.randrange(1, 12)
    return "/v1/completions", {
        **{"prompt": prompt, "max_tokens": 24, "logprobs": 5},
        "echo": chance.random() < 0.3,
    }


def adapter(chance: random.Random) -> Body:
    return chat(f"{PREFIX}and {next(_numbers)}?", model=f"tuned{chance.randrange(3)}")


def stored(chance: random.Random) -> Body:
    fields = {"max_output_tokens": 16, "store": True}
    return "/v1/responses", {"input": f"{PREFIX}{next(_numbers)}?", **fields}


def several(chance: random.Random) -> Body:
    text = f"{next(_numbers)} " * chance.randrange(1, 400)
    return chat(text, n=2, temperature=0.7, seed=chance.randrange(1000))


def again(chance: random.Random) -> Body:
    return chat(f"{PREFIX}{chance.randrange(6)} circles?", temperature=0)


KINDS = (picture, regex, schema, likelihoods, adapter, stored, several, again)


@dataclass
class Load:
    """Clients whose requests are all different, so that everything that may grow does.

    Attributes:
        answered: how many got an answer.
        errors: what the others got.
    """

    url: str
    seed: int
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def warm_up(self) -> None:
        """Ask `WARM_UP` requests of each kind, one after the other."""
        with self._client() as client:
            for number, kind in enumerate(KINDS * WARM_UP):
                self._ask(client, kind(random.Random(f"{self.seed} warm {number}")), stream=False)

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._run, args=(each,)) for each in range(CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped.set()
        for thread in threads:
            thread.join()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=HANG_SECONDS, trust_env=False)

    def _run(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        with self._client() as client:
            while not self._stopped.is_set():
                path, body = chance.choice(KINDS)(chance)
                if chance.random() < 0.1:
                    self._leave(client, path, body)
                else:
                    self._ask(client, (path, body), stream=chance.random() < 0.4)

    def _ask(self, client: httpx.Client, request: Body, *, stream: bool) -> None:
        path, body = request
        try:
            reply = client.post(path, json=body | ({"stream": True} if stream else {}))
            what = "" if reply.status_code == 200 else str(reply.status_code)
        except httpx.TransportError as error:
            what = type(error).__name__
        with self._lock:
            self.answered += not what
            if what:
                self.errors[what] += 1

    def _leave(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        """Begin to read a stream, and go."""
        try:
            with client.stream("POST", path, json=body | {"stream": True}) as reply:
                next(reply.iter_raw(), None)
        except httpx.TransportError:
            pass


@dataclass
class Outcome:
    """Of one run.

    Attributes:
        idle: the server's memory after its warm-up.
        after: the same after chaos.
        deeds: how often each was done.
    """

    idle: Ledger
    after: Ledger
    load: Load
    deeds: Counter[str]


def run(
    seed: int,
    adapters: Sequence[Path],
    enough: Callable[[Load], bool],
    say: Callable[[str], None] = lambda _: None,
) -> Outcome | None:
    """Run until the load is enough, and then a pause in which the server returns what it can.

    Args:
        adapters: folders of three adapters for the demo model, for two slots.
        enough: asked after every deed.
        say: receives the deeds, and a table each minute.

    Returns:
        None: this system does not say how much memory a process has.
    """
    chance, deeds = random.Random(seed), Counter[str]()
    possible = [deed for deed in DEEDS if deed.possible(SETUP) and not deed.fatal]
    named = ",".join(f"tuned{number}={path}" for number, path in enumerate(adapters))
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        options = (*OPTIONS, "--lora-modules", named)
        world = World(Path(folder), SETUP, None, options)
        with world.serving():
            load = Load(world.url, seed)
            load.warm_up()
            idle = _quiet(world)
            if idle is None:
                return None
            threads = load.start()
            shown = time.monotonic()
            try:
                while not enough(load):
                    _do(chance.choice(possible), world, chance, deeds, say)
                    now = read_ledger(world.url)
                    if now is not None and time.monotonic() - shown > 60:
                        shown = time.monotonic()
                        _show(idle, now, say)
            finally:
                load.stop(threads)
            after = _quiet(world)
            assert after is not None
            return Outcome(idle, after, load, deeds)


def _do(
    deed: Deed,
    world: World,
    chance: random.Random,
    deeds: Counter[str],
    say: Callable[[str], None],
) -> None:
    say(f"  {deed.name}")
    deeds[deed.name] += 1
    with deed.act(world, chance):
        time.sleep(a_moment(chance))
    time.sleep(a_moment(chance))


def _show(idle: Ledger, now: Ledger, say: Callable[[str], None]) -> None:
    for line in table(idle, now):
        say(line)


def _quiet(world: World) -> Ledger | None:
    """Return the memory once the server has been quiet for long enough to trim it."""
    time.sleep(QUIET_SECONDS + 2 * PAUSE_SECONDS)
    return read_ledger(world.url)
