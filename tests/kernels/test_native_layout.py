"""The structs and constants that Python reads from the C++ sources are those of the compiler."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from vlm_serve.kernels import native_build, native_layout
from vlm_serve.kernels.native_build import SOURCES, includes, recipe
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import FUNCTIONS

OPERATIONS = (
    *("Norm", "Rotations", "Product", "Gated", "DeltaNet", "Heads", "Attend", "Sigmoid"),
    *("Keep", "Experts", "Features", "Hidden", "Reduce"),
    *("LayerNorm", "Turn", "SeeAll", "Narrow", "Squares", "ShortConv"),
    *("Scan", "GateNorm"),
)
STRUCTS = {
    *(kind for kinds in FUNCTIONS.values() for kind in kinds if isinstance(kind, str)),
    *("Weight", "Packed", "View", "Op", *OPERATIONS),
}


@pytest.mark.usefixtures("compiler")
def test_the_compiler_lays_them_out_alike(tmp_path: Path) -> None:
    units = [path.relative_to(SOURCES[0]) for path in sorted(SOURCES[0].rglob("*.cpp"))]
    lines = [f'#include "{source.as_posix()}"' for source in units]
    lines += ['#include "program.h"', "#include <cstdio>", "int main() {"]
    expected = []
    for name in sorted(STRUCTS):
        kind = struct(name)
        expected.append(f"{name} {ctypes.sizeof(kind)}")
        lines.append(f'std::printf("{name} %zu\\n", sizeof(vlm::{name}));')
        for field, *_ in kind._fields_:
            place = getattr(kind, field)
            expected.append(f"{field} {place.offset} {place.size}")
            lines.append(
                f'std::printf("{field} %zu %zu\\n", offsetof(vlm::{name}, {field}), '
                f"sizeof(vlm::{name}::{field}));"
            )
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    how = recipe()
    flags = [flag for flag in how.flags if not flag.startswith("-O")]
    command = [how.compiler, *flags, *includes(), str(source), "-o", str(program)]
    subprocess.run([*command, "-O0", "-Wno-invalid-offsetof"], check=True, timeout=300)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of their own to read from; what others have read stays."""
    monkeypatch.setattr(native_layout, "SOURCES", (tmp_path,))
    for name in ("_sources", "struct", "constant"):
        monkeypatch.setattr(native_layout, name, cache(getattr(native_layout, name).__wrapped__))
    return tmp_path


def test_what_is_read(sources: Path) -> None:
    (sources / "a.h").write_text(
        "enum Kind : int64_t { SMALL = 3, LARGE = 40 };\n"
        "constexpr int64_t TWICE = 7;\n"
        "struct Inner {\n    int64_t a, b;  // two; of them\n};\n"
        "struct Outer {\n"
        "    const float *x, *y;\n"
        "    Inner inner;\n"
        "    const Inner* others;\n"
        "    double eps;\n"
        "    bool has() const { return inner.a > 0; }\n"
        "};\n"
    )
    fields = {field[0]: field[1] for field in native_layout.struct("Outer")._fields_}
    address = ctypes.c_void_p
    assert list(fields) == ["x", "y", "inner", "others", "eps"]
    assert [fields[name] for name in ("x", "y", "others")] == [address] * 3
    assert fields["inner"] is native_layout.struct("Inner") and fields["eps"] is ctypes.c_double
    assert native_layout.struct("Outer")(inner=(1, 2)).inner.b == 2
    assert [native_layout.constant(name) for name in ("SMALL", "LARGE", "TWICE")] == [3, 40, 7]


@pytest.mark.parametrize("text", ["", "constexpr int A = 1;\nconstexpr int A = 2;"])
def test_constants_that_are_not_one_number(sources: Path, text: str) -> None:
    (sources / "a.h").write_text(text)
    with pytest.raises(KeyError, match="A"):
        native_layout.constant("A")


@pytest.mark.parametrize("text", ["", "struct A {\n    float x;\n};"])
def test_structs_that_python_cannot_fill(sources: Path, text: str) -> None:
    (sources / "a.h").write_text(text)
    with pytest.raises(KeyError):
        native_layout.struct("A")


def test_every_operation_has_its_number() -> None:
    text = (native_build.SOURCES[1] / "program.h").read_text()
    kinds = re.findall(r"^    ([A-Z_]+) = (\d+),\s+// (\w+)$", text, re.MULTILINE)
    assert [name for _, _, name in kinds] == list(OPERATIONS)
    assert [int(number) for _, number, _ in kinds] == list(range(len(OPERATIONS)))
    assert [constant(name) for name, _, _ in kinds] == list(range(len(OPERATIONS)))
