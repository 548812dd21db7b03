"""Freed tensors stay in the process: once warm, large tensors touch no fresh pages. They are given
back when that is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_serve.system import host_memory

PROGRAM = """
import resource, sys, threading
import torch
from vlm_serve.system.host_memory import retain_freed_memory

def touch(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    live = []
    for size in sizes:
        live = [*live[-1:], torch.ones(size * 1_000_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def main():
    touch([12, 9, 15, 10, 12])
    print(touch([10, 12, 9, 12, 15, 10]))

if sys.argv[1] == "retain":
    assert retain_freed_memory()
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


@pytest.mark.memory
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_tensors_of_a_thread_reuse_memory() -> None:
    faults = {}
    for mode in ("retain", "plain"):
        command = [sys.executable, "-c", PROGRAM, mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert 4 * faults["retain"] < faults["plain"], faults


RELEASE = """
import re
import torch
from vlm_serve.system.host_memory import release_freed_memory, retain_freed_memory

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

assert retain_freed_memory()
before = resident()
between = []
for _ in range(20):
    large = torch.ones(1_000_000)
    between.append((large, torch.ones(1000)))
between = [small for _, small in between]
del large
print(resident() - before)
assert release_freed_memory()
print(resident() - before)
assert all(bool((small == 1).all()) for small in between)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_what_is_free_between_tensors_can_be_given_back() -> None:
    command = [sys.executable, "-c", RELEASE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 70_000_000, "the tensors were not on the heap"
    assert left < 20_000_000


ADVISED = """
import torch
from vlm_serve.system.host_memory import release_freed_memory, retain_freed_memory

def advised(tensor):
    '''Whether the kernel was advised to back where it ends by large pages.'''
    last = tensor.data_ptr() + tensor.nbytes - 1
    within = False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            within = begin <= last < end
        elif within and first == "VmFlags:":
            return "hg" in line.split()
    raise LookupError("it lies nowhere")

assert retain_freed_memory()
large = torch.ones(16 << 20)
first = advised(large)
del large
assert release_freed_memory(regrow=True)
print(int(first), int(advised(torch.ones(16 << 20))))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_what_was_given_back_may_be_taken_again_in_large_pages() -> None:
    command = [sys.executable, "-c", ADVISED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before == after, "giving memory back took the advice away"


FREE = """
import torch
from vlm_serve.system.host_memory import (
    _mallinfo, allocated_bytes, free_bytes, release_freed_memory, resident_bytes,
    retain_freed_memory,
)

assert retain_freed_memory()
before, resident = free_bytes(), resident_bytes()
between = []
for _ in range(20):
    large = torch.ones(1_000_000)
    between.append((large, torch.ones(1000)))
between = [small for _, small in between]
del large
print(free_bytes() - before, resident_bytes() - resident)
print(_mallinfo().fordblks, allocated_bytes())
assert release_freed_memory()
print(free_bytes() - before, resident_bytes() - resident)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc says what it has free")
def test_free_memory_counts_while_it_has_pages() -> None:
    command = [sys.executable, "-c", FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (kept, resident), (listed, allocated), (left, after) = (
        tuple(map(int, line.split())) for line in done.stdout.splitlines()
    )
    assert kept > 70_000_000 and abs(resident - kept) < 20_000_000
    assert left < 10_000_000 and after < 20_000_000
    assert listed > 1 << 31 and allocated > 0, "the C library counts its reserve too"


def test_what_cannot_be_asked_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_libc", lambda: object())
    assert host_memory.free_bytes() is None and host_memory.allocated_bytes() == 0
    monkeypatch.setattr(host_memory, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    assert host_memory.resident_bytes() is None
