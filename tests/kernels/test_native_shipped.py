"""Libraries of a wheel: the best that fits is loaded without a compiler, and what is wrong is not.

Each test compiles small libraries into a folder of its own, and has a cache of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vlm_serve.engine.steps.step_paths import find_backend
from vlm_serve.errors import ConfigError
from vlm_serve.kernels import native_build, native_library, native_processor, native_self_test
from vlm_serve.kernels import native_shipped as module
from vlm_serve.kernels.native_build import APART, BuildError, recipe
from vlm_serve.kernels.native_library import (
    COMPILED_HERE,
    build_own,
    built,
    foreseen,
    load,
    shipped,
)
from vlm_serve.kernels.native_processor import architecture, flags, flags_of
from vlm_serve.kernels.native_shipped import Shipped, write_index
from vlm_serve.options.config import EngineConfig

SOURCE = """#include <cstdint>
extern "C" int answer() { return %d; }
extern "C" int64_t vlm_self_test(uint64_t* digests) {
    digests[0] = %d;
    digests[1] = digests[2] = digests[3] = 0;
    return 0;
}
"""
FROM_SOURCE = 42
"""The answer of a library that is compiled at the first start."""
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("compiler")
Ship = Callable[..., Shipped]


def forget() -> None:
    """As a process that has not asked for the library yet."""
    native_library._load.cache_clear()
    native_library._shipped.cache_clear()
    native_library._functions.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The wheel's folder, still empty, beside small sources."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE % (FROM_SOURCE, 7))
    wheel = tmp_path / "shipped"
    wheel.mkdir()
    monkeypatch.setattr(native_self_test, "FLOAT32", f"{7:016x}")
    monkeypatch.setattr(native_library, "FLOAT32", f"{7:016x}")
    monkeypatch.setattr(native_build, "SOURCES", (sources,))
    monkeypatch.setattr(module, "FOLDER", wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (APART, COMPILED_HERE):
        monkeypatch.setenv(name, "")
    for name in ("CXX", *module.ORDERING):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield wheel
    forget()


@pytest.fixture
def ship(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int, tuple[str, ...]], Shipped]:
    """Adds a library to the wheel, behind those that are there: its answer, its digest, the
    instructions that it says it needs."""
    libraries: list[Shipped] = []

    def add(answer: int, digest: int = 7, needs: tuple[str, ...] = ()) -> Shipped:
        sources = tmp_path / f"sources of {answer}"
        sources.mkdir()
        (sources / "answer.cpp").write_text(SOURCE % (answer, digest))
        library = Shipped(f"kernels-{answer}.so", f"arch{answer}", architecture(), needs)
        how, deadline = recipe(), time.monotonic() + 60
        with monkeypatch.context() as patch:
            patch.setattr(native_build, "SOURCES", (sources,))
            native_build.compile_to(library.path, how, set(), deadline)
        libraries.append(library)
        write_index(folder, libraries)
        return library

    return add


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the compiler away, once the wheel is made."""
    return lambda: monkeypatch.setenv("CXX", "/nowhere/g++")


def test_the_first_that_fits_is_loaded_without_a_compiler(
    ship: Ship, no_compiler: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    ship(1, needs=("instruction_of_tomorrow",))
    second = ship(2, needs=tuple(sorted(flags())[:3]))
    ship(3)
    no_compiler()
    assert built() and foreseen().float32 == native_self_test.FLOAT32
    assert load().answer() == 2
    assert shipped() == second
    assert not caplog.text


def test_a_source_tree_carries_none_and_compiles(folder: Path) -> None:
    assert not built() and shipped() is None
    assert load().answer() == FROM_SOURCE


def test_where_none_fits_it_is_compiled(ship: Ship, no_compiler: Callable[[], None]) -> None:
    ship(1, needs=("instruction_of_tomorrow",))
    assert load().answer() == FROM_SOURCE
    forget()
    no_compiler()
    with pytest.raises(BuildError, match="g\\+\\+ was not found"):
        load()


def test_another_architecture_does_not_fit(ship: Ship, folder: Path) -> None:
    library = ship(1)
    foreign = Shipped(library.file, library.arch, "abacus", ())
    write_index(folder, [foreign])
    assert module.fitting() == []


@pytest.mark.parametrize("data", [b"", b"no library", b"\x7fELF" + bytes(5000)])
def test_a_damaged_one_is_not_loaded(
    ship: Ship, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = ship(1)
    ship(2)
    first.path.write_bytes(data)
    assert load().answer() == 2
    assert f"{first.path} is not used: it is damaged" in caplog.text


def test_a_missing_one_is_passed_over(ship: Ship, caplog: pytest.LogCaptureFixture) -> None:
    ship(1).path.unlink()
    ship(2)
    assert load().answer() == 2 and "No such file" in caplog.text


def test_one_with_other_arithmetic_is_not_used(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    ship(1, digest=8)
    ship(2)
    assert load().answer() == 2
    assert "failed its self-test" in caplog.text


def test_libraries_of_other_sources_are_not_used(
    ship: Ship, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Structs are read from the sources, so a library must have those."""
    ship(1)
    (tmp_path / "sources" / "answer.cpp").write_text(SOURCE % (43, 7))
    assert load().answer() == 43
    assert "they are of other sources" in caplog.text


def test_a_broken_index_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / module.INDEX).write_text("{")
    assert load().answer() == FROM_SOURCE
    assert "the package's compiled kernels are not used" in caplog.text


@pytest.mark.parametrize("name", module.ORDERING)
def test_who_asks_for_another_build_gets_it(
    ship: Ship, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(1)
    monkeypatch.setenv(name, "0" if name.endswith("SANITIZE") else "native")
    wanted = 1 if name.endswith("SANITIZE") else FROM_SOURCE
    assert load().answer() == wanted


def test_tiles_that_the_system_refuses_are_not_used(
    ship: Ship, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ship(1, needs=("amx_tile",))
    ship(2)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : amx_tile\n")
    monkeypatch.setattr(native_processor, "_CPUINFO", cpuinfo)
    for refused, answer in ((True, 2), (False, 1)):
        monkeypatch.setattr(module, "tile_registers_refused", lambda refused=refused: refused)
        forget()
        assert load().answer() == answer


def test_the_option_compiles_all_the_same(ship: Ship) -> None:
    ship(1)
    backend = find_backend(EngineConfig(native_kernels="build"), CPU)
    assert backend.compiled and load().answer() == FROM_SOURCE
    assert find_backend(EngineConfig(), CPU).compiled, "auto takes what is loaded"
    assert load().answer() == FROM_SOURCE


def test_processes_that_this_one_starts_compile_too(ship: Ship) -> None:
    ship(1)
    build_own()
    forget()  # As they begin, with this environment.
    assert load().answer() == FROM_SOURCE


def test_one_process_has_one_library(ship: Ship) -> None:
    ship(1)
    assert find_backend(EngineConfig(), CPU).compiled and load().answer() == 1
    with pytest.raises(ConfigError, match="^native_kernels: this process already computes"):
        find_backend(EngineConfig(native_kernels="build"), CPU)


def test_the_doctor_names_the_library(ship: Ship, no_compiler: Callable[[], None]) -> None:
    from vlm_serve.commands.doctor import examine

    library = ship(1)
    no_compiler()
    found = examine()
    assert found["kernels"] == f"of the installed wheel, for arch1: {library.path}"
    assert found["compiler"].startswith("none usable")


@pytest.mark.parametrize(
    ("macros", "expected"),
    [
        ({"__AVX2__", "__AVX512BF16__", "__LZCNT__"}, {"avx2", "avx512_bf16", "abm"}),
        (
            {"__ARM_NEON", "__ARM_FEATURE_ATOMICS", "__ARM_FEATURE_DOTPROD"},
            {"asimd", "atomics", "asimddp"},
        ),
    ],
)
def test_macros_name_instructions(macros: set[str], expected: set[str]) -> None:
    assert flags_of(macros) == expected


def test_instructions_of_an_arm_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nFeatures\t: fp asimd atomics asimddp\nCPU part : 0xd0c\n")
    monkeypatch.setattr(native_processor, "_CPUINFO", cpuinfo)
    assert flags() == {"fp", "asimd", "atomics", "asimddp"}
