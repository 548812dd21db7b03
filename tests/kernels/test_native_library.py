"""Building, keeping and loading compiled kernels, with the real compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlm_serve.kernels import native_library
from vlm_serve.kernels.metadata import KVLayer, PrefillMeta
from vlm_serve.kernels.native_library import BuildError, built, load
from vlm_serve.kernels.paged_attention.compiled import attention_prefill


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of small sources, and a cache of their own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(native_library, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    native_library._load.cache_clear()
    yield folder
    native_library._load.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "vlm-serve" / "native").iterdir())


def test_builds_once(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not built()
    assert load().answer() == 42
    assert built()
    (library,) = kept(tmp_path)
    before = library.stat().st_mtime_ns
    native_library._load.cache_clear()
    monkeypatch.setattr(native_library, "_build", None)
    assert load().answer() == 42
    assert [library] == kept(tmp_path) and library.stat().st_mtime_ns == before


def test_a_changed_source_is_built_anew(sources: Path, tmp_path: Path) -> None:
    assert load().answer() == 42
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    native_library._load.cache_clear()
    assert load().answer() == 43
    assert len(kept(tmp_path)) == 2


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
        "from vlm_serve.kernels import native_library as native\n"
        "native.SOURCES = Path(sys.argv[1])\n"
        "assert native.load().count(3) == 3\n"
        "maps = Path('/proc/self/maps').read_text().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(sources)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_compiler_that_works(
    sources: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError, match="not found" if compiler != "false" else "compiler failed"):
        load()


def test_what_the_compiler_says_is_passed_on(sources: Path) -> None:
    (sources / "answer.cpp").write_text("int answer( { }\n")
    with pytest.raises(BuildError, match=r"answer\.cpp.*error"):
        load()


def test_nowhere_to_keep_it(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    with pytest.raises(BuildError):
        load()


def test_a_library_that_does_not_load(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(compiler: str, sources: list[Path], target: Path) -> None:
        target.write_bytes(b"not a library")

    monkeypatch.setattr(native_library, "_build", build)
    with pytest.raises(BuildError, match=r"kernels-.*\.so"):
        load()


def test_too_little_memory_is_an_exception() -> None:
    """Nothing may abort the process: here the keys of a context that no machine holds."""
    pages = torch.zeros(1, 16, 1, 16)
    meta = PrefillMeta((0, 1), (1 << 50,), ((0,),), (-1,), (0,), ((1,),))
    with pytest.raises(MemoryError, match="vlm_attention_prefill"):
        attention_prefill(
            torch.zeros(1, 1, 16), KVLayer(pages, pages), meta, scale=1.0, deterministic=True
        )
