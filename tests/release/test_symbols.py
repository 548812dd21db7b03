"""Symbols that the library of a wheel may take from others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import symbols
import torch
from symbols import NEWEST, TORCHS, defined, find_problems, needed, undefined

from vlm_serve.kernels.native_build import recipe
from vlm_serve.kernels.native_kept import kept

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils"),
]
TORCHS_OPENMP = Path(torch.__file__).parent / "lib" / "libgomp.so.1"


def compiled(folder: Path, text: str, *flags: str) -> Path:
    source, library = folder / "some.cpp", folder / "libsome.so"
    source.write_text(text)
    command = [recipe().compiler, "-shared", "-fPIC", str(source), "-o", str(library), *flags]
    subprocess.run(command, check=True)
    return library


def test_the_library_needs_what_the_platform_promises() -> None:
    library = kept(recipe())
    assert find_problems(library) == []
    versions = {version.partition("_")[0] for version in undefined(library).values()}
    assert {"GLIBC", "GLIBCXX"} <= versions <= {*NEWEST, ""}
    assert "libstdc++.so.6" in needed(library)


def test_its_functions_of_openmp_are_in_the_installed_torch() -> None:
    if not TORCHS_OPENMP.exists():
        pytest.skip("this torch takes OpenMP from elsewhere")
    taken = {name for name in undefined(kept(recipe())) if symbols.OPENMP.fullmatch(name)}
    assert taken and taken <= TORCHS <= defined(TORCHS_OPENMP)


def test_what_a_newer_system_has_is_noticed(tmp_path: Path) -> None:
    text = '#include <cstdlib>\nextern "C" unsigned some() { return arc4random(); }\n'
    try:
        library = compiled(tmp_path, text)
    except subprocess.CalledProcessError:
        pytest.skip("this glibc is older than 2.36")
    assert find_problems(library) == ["arc4random is of GLIBC_2.36, newer than the platform's"]


def test_a_library_that_the_platform_lacks_is_noticed(tmp_path: Path) -> None:
    text = "#include <omp.h>\nint some() { return omp_get_thread_num(); }\n"
    library = compiled(tmp_path, text, "-fopenmp")
    (first, *_) = find_problems(library)
    assert first == "it needs libgomp.so.1, which the platform may lack"


def test_an_unknown_function_of_openmp_is_noticed(tmp_path: Path) -> None:
    text = 'extern "C" void GOMP_of_tomorrow();\nvoid some() { GOMP_of_tomorrow(); }\n'
    library = compiled(tmp_path, text)
    assert find_problems(library) == ["GOMP_of_tomorrow is not known to be in torch's OpenMP"]
