"""Building, keeping, loading and calling compiled kernels, with the real compiler and false ones.

Each test builds small sources of its own into a cache of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_code import wait_for_compiled_code
from process_tree import runs

from vlm_serve.kernels import (
    native_build,
    native_kept,
    native_layout,
    native_library,
    native_processor,
    native_self_test,
)
from vlm_serve.kernels.metadata import KVLayer, PrefillMeta
from vlm_serve.kernels.native_build import BuildError, recipe
from vlm_serve.kernels.native_library import FUNCTIONS, built, call, load
from vlm_serve.kernels.paged_attention.compiled import attention
from vlm_serve.system import private_files

REAL_SOURCES = native_build.SOURCES[0]
HALVE = """#include "guard.h"
extern "C" int64_t vlm_halve(int64_t* first, int64_t result) {
    return vlm::guarded([=] {
        if (result == 1) throw std::bad_alloc();
        if (result == 2) throw 2;
        *first /= 2;
    });
}
"""
SELF_TEST = """#include <cstdint>
extern "C" int64_t vlm_self_test(uint64_t* digests) {
    digests[0] = 7;
    digests[1] = 0;
    return 0;
}
"""


def answer(number: int) -> str:
    return f'extern "C" int answer() {{ return {number}; }}\n'


def forget() -> None:
    """As a process that has not asked for the library yet."""
    native_library._load.cache_clear()
    native_library._functions.clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of small sources, and a cache of their own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for source in REAL_SOURCES.glob("*.h"):
        shutil.copy(source, folder)
    (folder / "answer.cpp").write_text(answer(42))
    (folder / "self_test.cpp").write_text(SELF_TEST)
    monkeypatch.setattr(native_self_test, "FLOAT32", f"{7:016x}")
    monkeypatch.setattr(native_build, "SOURCES", (folder,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "VLM_SERVE_NATIVE_ARCH"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield folder
    forget()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has a shell script take the compiler's place."""

    def script(text: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return path

    return script


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "vlm-serve" / "native").iterdir())


def test_builds_once(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not built()
    assert load().answer() == 42
    assert built()
    (library,) = kept(tmp_path)
    before = library.stat().st_ino
    forget()
    monkeypatch.setattr(native_build, "build", None)
    assert load().answer() == 42
    assert [library] == kept(tmp_path) and library.stat().st_ino == before


def test_a_changed_source_is_built_anew(sources: Path, tmp_path: Path) -> None:
    assert load().answer() == 42
    (sources / "answer.cpp").write_text(answer(43))
    forget()
    assert load().answer() == 43
    assert len(kept(tmp_path)) == 2


def test_what_nobody_used_for_a_week_goes(sources: Path, tmp_path: Path) -> None:
    load()
    (first,) = kept(tmp_path)
    scratch = first.with_name("interrupted")
    scratch.mkdir()
    (scratch / "part.o").touch()
    week = native_kept.KEPT_FOR_S
    for path, age in ((first, week - 60), (scratch, week + 60)):
        os.utime(path, (time.time() - age, time.time() - age))
    (sources / "answer.cpp").write_text(answer(43))
    forget()
    load()
    assert first in kept(tmp_path) and scratch not in kept(tmp_path)
    os.utime(first, (0, 0))
    forget()
    load()
    assert len(kept(tmp_path)) == 1
    (second,) = kept(tmp_path)
    os.utime(second, (0, 0))
    forget()
    load()
    assert time.time() - second.stat().st_mtime < 60, "a library in use is marked as such"


def test_shares_the_threads_of_torch(sources: Path, tmp_path: Path) -> None:
    """A second libgomp in the process would bring a second pool of threads."""
    (sources / "count.cpp").write_text(
        "#include <omp.h>\n"
        'extern "C" int count(int n) {\n'
        "    int seen = 0;\n"
        "#pragma omp parallel num_threads(n)\n"
        "#pragma omp atomic\n"
        "    ++seen;\n"
        "    return seen;\n"
        "}\n"
    )
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from vlm_serve.kernels import native_build, native_library, native_self_test\n"
        "native_self_test.FLOAT32 = '%016x' % 7\n"
        "native_build.SOURCES = (Path(sys.argv[1]),)\n"
        "assert native_library.load().count(3) == 3\n"
        "maps = Path('/proc/self/maps').read_text().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(sources)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("= 7", "= 8", "failed its self-test: digest 0000000000000008, expected 0000000000000007"),
        ("return 0", "return 1", "self-test did not complete"),
        ("vlm_self_test", "vlm_other", "undefined symbol: vlm_self_test"),
    ],
)
def test_a_library_that_computes_otherwise(sources: Path, old: str, new: str, problem: str) -> None:
    (sources / "self_test.cpp").write_text(SELF_TEST.replace(old, new))
    for _ in range(2):
        with pytest.raises(BuildError, match=problem):
            load()


@pytest.mark.parametrize("name", ["no-such-compiler", "false"])
def test_no_compiler_that_works(sources: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CXX", name)
    problem = "compiler failed with -march=native" if name == "false" else "was not found"
    with pytest.raises(BuildError, match=problem):
        load()


def test_a_compiler_that_is_no_program(sources: Path, compiler: Callable[[str], Path]) -> None:
    compiler("exit").write_bytes(b"\x00")
    with pytest.raises(BuildError):
        load()


def test_a_compiler_that_hangs_is_killed_with_its_children(
    sources: Path,
    tmp_path: Path,
    compiler: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = tmp_path / "child"
    compiler(f'sleep 600 & echo $! > "{child}"; wait')
    monkeypatch.setattr(native_build, "TIME_LIMIT_S", 2.0)
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(BuildError, match="the compiler took more than 2 seconds"):
            load()
    assert time.monotonic() - begin < 60, "what has hung once is not tried again"
    while runs(int(child.read_text())):
        assert time.monotonic() - begin < 60
        time.sleep(0.05)


def test_tests_of_compiled_code_wait_for_a_slow_compiler_and_fail_without_its_end(
    sources: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine must not turn them into skipped ones."""
    real = recipe().compiler
    native_library._load.cache_clear()
    compiler(f'test -e "{sources}/idle" || sleep 600; exec {real} "$@"')
    with pytest.raises(pytest.fail.Exception, match="not there in time: .*more than 0.5 sec"):
        wait_for_compiled_code(0.5)
    (sources / "idle").touch()
    wait_for_compiled_code(300.0)
    assert load().answer() == 42
    forget()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match="was not found"):
        wait_for_compiled_code()


def test_the_time_limit_is_for_all_sources_together(
    sources: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    defines = "#define __AVX2__ 1\\n#define __FMA__ 1"
    compiler(f'case "$*" in *-dM*) printf "{defines}\\n";; *) sleep 600;; esac')
    for i in range(8):
        (sources / f"more{i}.cpp").touch()
    monkeypatch.setattr(native_build, "TIME_LIMIT_S", 1.0)
    begin = time.monotonic()
    with pytest.raises(BuildError, match="more than 1 seconds"):
        load()
    assert time.monotonic() - begin < 60


def test_what_the_compiler_says_is_passed_on(sources: Path) -> None:
    (sources / "answer.cpp").write_text("int answer( { }\n")
    with pytest.raises(BuildError, match=r"answer\.cpp.*error"):
        load()


def test_nowhere_to_keep_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built all the same, for this process; without a place for that there is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    monkeypatch.setenv(native_build.APART, "")
    assert load().answer() == 42
    native_library._load.cache_clear()
    monkeypatch.setenv(native_build.APART, "")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/folder")
    monkeypatch.setattr(private_files, "FALLBACKS", ())
    with pytest.raises(BuildError, match="/proc"):
        load()


def test_a_library_that_does_not_load(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(how: native_build.Recipe, target: Path) -> None:
        target.parent.mkdir(parents=True)
        target.write_bytes(b"not a library")

    monkeypatch.setattr(native_build, "build", build)
    with pytest.raises(BuildError, match=r"kernels-.*\.so"):
        load()


def test_other_processors(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {recipe().path()}
    for arch in ("x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", arch)
        paths.add(recipe().path())
    monkeypatch.setenv("VLM_SERVE_NATIVE_SANITIZE", "0" if recipe().sanitized else "1")
    paths.add(recipe().path())
    assert len(paths) == 4, "each is a library of its own"
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "abacus")
    with pytest.raises(BuildError, match=r"-march=abacus \(VLM_SERVE_NATIVE_ARCH\)") as caught:
        load()
    assert "\n" not in str(caught.value)


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about extensions of x86")


@x86
def test_instructions_that_this_processor_lacks(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "x86-64-v3")
    macros = native_build.predefined(recipe(), time.monotonic() + 60)
    flags = [flag for macro, flag in native_processor._X86_FLAGS.items() if macro in macros]
    cpuinfo.write_text(f"model name: small\nflags\t\t: {' '.join(flags)}\n")
    monkeypatch.setattr(native_processor, "_CPUINFO", cpuinfo)
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "x86-64-v4")
    with pytest.raises(BuildError, match="would use avx512bw, .*avx512f.* this processor lacks"):
        load()
    forget()
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "x86-64-v3")
    assert load().answer() == 42


@x86
@pytest.mark.parametrize(
    ("flags", "result", "tiles"),
    [
        ("avx2 amx_tile amx_bf16", 0, True),
        ("avx2 amx_tile amx_bf16", -1, False),
        ("avx2", -1, True),
    ],
)
def test_tile_registers_that_a_process_must_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, result: int, tiles: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(native_processor, "_CPUINFO", cpuinfo)
    process = SimpleNamespace(syscall=lambda *asked: result)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: process)
    how = recipe()
    assert how.tiles == tiles
    macros = native_build.predefined(replace(how, arch="sapphirerapids"), time.monotonic() + 60)
    assert ("__AMX_TILE__" in macros) == tiles
    assert "__AVX512BF16__" in macros


@x86
def test_kernels_need_fused_multiply_adds(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", "x86-64")
    with pytest.raises(BuildError, match="has no AVX2 and FMA"):
        load()


def test_calls(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "halve.cpp").write_text(HALVE)
    monkeypatch.setitem(FUNCTIONS, "vlm_halve", ("Rows", ctypes.c_int64))
    record = native_layout.struct("Rows")(tokens=5)
    call("vlm_halve", ctypes.byref(record), 0)
    assert record.tokens == 2
    with pytest.raises(MemoryError, match="vlm_halve"):
        call("vlm_halve", ctypes.byref(record), 1)
    with pytest.raises(RuntimeError, match="vlm_halve failed"):
        call("vlm_halve", ctypes.byref(record), 2)
    with pytest.raises(ctypes.ArgumentError):
        call("vlm_halve", ctypes.byref(ctypes.c_int64(1)), 0)
    with pytest.raises(TypeError):
        call("vlm_halve", ctypes.byref(record))


def test_every_function_is_declared() -> None:
    folders = native_build.SOURCES
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.cpp"))
    assert set(re.findall(r"^(?:extern \"C\" )?int64_t (vlm_\w+)", text, re.M)) == set(FUNCTIONS)
    assert set(re.findall(r"\b(vlm_\w+)\(", text)) == set(FUNCTIONS)
    for name in FUNCTIONS:
        assert getattr(load(), name)


def test_too_little_memory_is_an_exception() -> None:
    """Nothing may abort the process: here the keys of a context that no machine holds."""
    pages = torch.zeros(1, 16, 1, 16)
    meta = PrefillMeta((0, 1), (1 << 50,), ((0,),), (-1,), (0,), ((1,),))
    kv = KVLayer(pages, pages)
    with pytest.raises(MemoryError, match="vlm_attention has not enough"):
        attention(torch.zeros(1, 1, 16), kv, meta, scale=1.0)
