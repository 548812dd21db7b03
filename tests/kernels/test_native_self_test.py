"""The self-test of the compiled library: the same float32 bits whatever it is compiled for."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlm_serve.kernels import native_build, native_kept, native_self_test
from vlm_serve.kernels.native_build import BuildError, recipe
from vlm_serve.kernels.native_library import foreseen, load
from vlm_serve.kernels.native_self_test import SelfTestDigests, run

NEEDED = (
    "amx_bytes",
    "amx_float8",
    "amx_products",
    "attention",
    "grouped",
    "integers",
    "operand",
    "product",
    "self_test",
    "tables",
)


def test_repeats() -> None:
    library = load()
    first = run(library)
    for _ in range(5):
        assert run(library) == first
    assert first.float32 == native_self_test.FLOAT32


def test_takes_no_time() -> None:
    library, took = load(), []
    for _ in range(6):
        begin = time.thread_time()  # its own: others may have the processor meanwhile
        run(library)
        took.append(time.thread_time() - begin)
    assert min(took) < 0.05


@pytest.mark.processors
@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
def test_other_registers_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str
) -> None:
    load()  # the kept libraries are those of every run of the tests, so that each is built once
    monkeypatch.setenv("VLM_SERVE_NATIVE_ARCH", arch)
    try:
        path = native_kept.kept(recipe())
    except BuildError as error:
        pytest.skip(str(error))
    expected = SelfTestDigests(native_self_test.FLOAT32, None, integer_dots=True)
    assert run(ctypes.CDLL(str(path))) == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert foreseen() == expected  # where it has not been built


@pytest.mark.processors
def test_another_compiler_gives_the_same_bits() -> None:
    clang = shutil.which("clang++")
    if not clang or recipe().compiler == clang:
        pytest.skip("there is no second compiler: Debian's clang, with libomp-dev")
    command = [sys.executable, "-m", "vlm_serve.kernels.native_self_test"]
    # Clang need not know a processor that is younger than it is.
    arch = "x86-64-v3" if platform.machine() == "x86_64" else "native"
    own = {"CXX": clang, "VLM_SERVE_NATIVE_ARCH": arch, "VLM_SERVE_NATIVE_SANITIZE": "0"}
    environment = os.environ | own
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f'FLOAT32 = "{native_self_test.FLOAT32}"', done.stderr


@pytest.mark.processors
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.0000001201e-1f", "5.0000007e-1f"),
        ("change.scales[column + c] * results[c]", "change.scales[column + c] * results[c] * ONE"),
    ],
    ids=["exponential", "low_rank"],
)
def test_a_changed_function_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """A unit in the last places of one constant, in a small library."""
    sources = tmp_path / "sources"
    root = native_build.SOURCES[0]
    for source in root.rglob("*.*"):
        if source.suffix == ".h" or source.stem in NEEDED:
            text = source.read_text().replace(old, new.replace("ONE", "1.0000001f"))
            copy = sources / source.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    monkeypatch.setattr(native_build, "SOURCES", (sources,))
    flags = ("-O1" if flag == "-O3" else flag for flag in native_build.FLAGS)
    monkeypatch.setattr(native_build, "FLAGS", tuple(flags))
    library = tmp_path / "library.so"
    native_build.build(recipe(), library)
    with pytest.raises(BuildError, match="failed its self-test"):
        native_self_test.check(ctypes.CDLL(str(library)))
