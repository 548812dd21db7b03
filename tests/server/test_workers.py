"""The table of threads and processes, and the pools made of it."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from serving import RunningServer

from vlm_serve.server.workers import Workers, worker_table

ROOT = Path(__file__).resolve().parents[2]
NAMES = {group.name for group in worker_table(4)}


def test_every_named_thread_of_the_product_is_in_the_table() -> None:
    pattern = re.compile(r'(?:thread_name_prefix|\bname)="(vlm-serve-[\w-]+)"')
    found = set()
    for folder in ("cache", "kernels", "preprocess", "vlm_serve/engine", "vlm_serve/server"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(pattern.findall(path.read_text(encoding="utf-8")))
    assert len(found) > 3
    assert found <= NAMES


def test_processes_of_the_table_are_modules() -> None:
    modules = [group.name for group in worker_table(4) if group.kind == "process"]
    assert all((ROOT / (name.replace(".", "/") + ".py")).is_file() for name in modules)


def test_threads_of_a_server_are_in_the_table(fake: RunningServer) -> None:
    before = {"MainThread", threading.current_thread().name}
    assert fake.chat("x" * 1000).status_code == 200
    names = {each.name for each in threading.enumerate()} - before
    pools = {name for name in names if name.startswith(("prepare", "large", "waiting", "json"))}
    assert pools
    assert all(name.rsplit("_", 1)[0] in NAMES for name in pools)


@pytest.mark.parametrize("threads", [1, 4, 9])
def test_pools_have_the_size_that_the_table_gives(threads: int) -> None:
    sizes = {group.name: group.number for group in worker_table(threads) if group.kind == "pool"}
    assert sizes["prepare"] == threads
    assert sizes["large"] == max(1, threads // 2)
    workers = Workers(threads)
    try:
        assert asyncio.run(workers.prepare(lambda: threading.current_thread().name)) == "prepare_0"
        assert asyncio.run(workers.parse(lambda: threading.current_thread().name)) == "json_0"
        assert asyncio.run(workers.wait(lambda: threading.current_thread().name)) == "waiting_0"
    finally:
        workers.shutdown()
